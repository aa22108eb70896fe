// SPDX-License-Identifier: Apache-2.0

#include "core/view/view_tree.h"

#include <algorithm>

#include "core/base/strings.h"
#include "core/io/root.h"

namespace ckptfs {
namespace {

ViewEntry FileAt(const std::string& path, uint64_t size, Reading reading) {
  return ViewEntry::File(LastComponent(path), size, reading);
}

}  // namespace

void ViewTree::Add(const std::string& path, File file) {
  const std::string below = path + "/";
  auto end = files_.lower_bound(below);
  while (end != files_.end() && end->first.starts_with(below)) end = files_.erase(end);
  files_.insert_or_assign(path, std::move(file));
}

void ViewTree::AddText(const std::string& path, Text text) {
  held_ += text->size();
  Add(path, {FileAt(path, text->size(), Reading::kRandom), std::move(text)});
}

void ViewTree::AddBlob(const std::string& path, BlobIndex blob, Reading reading) {
  Add(path, {FileAt(path, shown_->step().blob(blob).stamp.size, reading), blob});
}

void ViewTree::AddMade(const std::string& path, uint64_t size, Reading reading, PlanMaker make,
                       uint64_t held) {
  held_ += held;
  Add(path, {FileAt(path, size, reading), std::move(make)});
}

Status ViewTree::AddPart(const std::string& path, std::shared_ptr<const View> view,
                         const std::string& inner) {
  CKPT_ASSIGN_OR_RETURN(ViewEntry entry, view->Find(inner));
  entry.name = LastComponent(path);
  if (std::ranges::find(parts_, view) == parts_.end()) parts_.push_back(view);
  Add(path, {std::move(entry), Part{std::move(view), inner}});
  return {};
}

bool ViewTree::HasFolder(std::string_view path) const {
  const std::string below = StrCat(path, "/");
  const auto behind = files_.lower_bound(below);
  return behind != files_.end() && behind->first.starts_with(below);
}

std::optional<std::pair<const View*, std::string>> ViewTree::InPart(std::string_view path) const {
  for (size_t end = path.size(); end != path.npos && end > 0; end = path.rfind('/', end - 1)) {
    const auto file = files_.find(path.substr(0, end));
    if (file == files_.end()) continue;
    const Part* part = std::get_if<Part>(&file->second.body);
    if (part == nullptr) return std::nullopt;
    return std::pair(part->view.get(), StrCat(part->inner, path.substr(end)));
  }
  return std::nullopt;
}

Result<std::vector<ViewEntry>> ViewTree::List(std::string_view directory) const {
  if (const auto inside = InPart(directory)) return inside->first->List(inside->second);
  if (!directory.empty() && !HasFolder(directory)) return NotInView(directory);
  const std::string folder = directory.empty() ? "" : StrCat(directory, "/");
  std::vector<ViewEntry> entries;
  for (auto file = files_.lower_bound(folder);
       file != files_.end() && file->first.starts_with(folder); ++file) {
    const std::string_view rest = std::string_view(file->first).substr(folder.size());
    const size_t slash = rest.find('/');
    if (slash == std::string_view::npos) {
      entries.push_back(file->second.entry);
    } else if (entries.empty() || entries.back().name != rest.substr(0, slash)) {
      entries.push_back(ViewEntry::Folder(rest.substr(0, slash)));
    }
  }
  return entries;
}

Result<ViewEntry> ViewTree::Find(std::string_view path) const {
  if (const auto file = files_.find(path); file != files_.end()) return file->second.entry;
  if (const auto inside = InPart(path)) return inside->first->Find(inside->second);
  if (path.empty() || !HasFolder(path)) return NotInView(path);
  return ViewEntry::Folder(path.substr(path.rfind('/') + 1));
}

Result<Plan> ViewTree::MakePlan(std::string_view path) const {
  if (const auto inside = InPart(path)) return inside->first->MakePlan(inside->second);
  const auto found = files_.find(path);
  if (found == files_.end()) return NotInView(path);
  const File& file = found->second;
  if (const auto* make = std::get_if<PlanMaker>(&file.body)) return (*make)();
  PlanBuilder plan;
  if (const auto* blob = std::get_if<BlobIndex>(&file.body)) {
    plan.BlobRange(*blob, 0, file.entry.size);
  } else {
    plan.Literal(std::get<Text>(file.body));
  }
  return std::move(plan).Finish();
}

std::vector<std::string> ViewTree::LeftOut() const {
  std::vector<std::string> lines = left_out_;
  for (const auto& part : parts_) {
    for (std::string& line : part->LeftOut()) lines.push_back(std::move(line));
  }
  return lines;
}

uint64_t ViewTree::MemoryBytes() const {
  constexpr uint64_t kNode = sizeof(std::string) + sizeof(File) + 4 * sizeof(void*);
  uint64_t bytes = sizeof(*this) + held_;
  for (const std::string& line : left_out_) bytes += sizeof(line) + line.capacity();
  for (const auto& part : parts_) bytes += part->MemoryBytes();
  for (const auto& [path, file] : files_) {
    bytes += kNode + path.capacity() + file.entry.name.capacity();
  }
  return bytes;
}

}  // namespace ckptfs
