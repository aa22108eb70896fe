// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/source_files.h"

#include <algorithm>
#include <set>

#include "core/base/strings.h"
#include "core/model/side_blob.h"

namespace ckptfs {
namespace {

bool LegalComponent(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.size() <= 255;
}

bool LegalPath(std::string_view path) {
  while (true) {
    const size_t slash = path.find('/');
    if (!LegalComponent(path.substr(0, slash))) return false;
    if (slash == std::string_view::npos) return true;
    path.remove_prefix(slash + 1);
  }
}

// Adds the directories above `path`; false if one of them is a file already.
bool AddDirectories(SourceIndex& index, std::string_view path) {
  for (size_t slash = path.find('/'); slash != std::string_view::npos;
       slash = path.find('/', slash + 1)) {
    const std::string directory(path.substr(0, slash));
    const size_t above = directory.rfind('/');
    const bool top = above == std::string::npos;
    SourceDirectory& parent = index[top ? std::string() : directory.substr(0, above)];
    const auto [entry, added] = parent.try_emplace(top ? directory : directory.substr(above + 1),
                                                   SourceEntry{true, BlobIndex{}, {}});
    if (!added && !entry->second.directory) return false;
    index.try_emplace(directory);
  }
  return true;
}

// Adds a file, unless its path and another's exclude each other.
void AddFile(SourceIndex& index, const std::string& path, const SourceEntry& entry) {
  if (!LegalPath(path) || !AddDirectories(index, path)) return;
  const size_t slash = path.rfind('/');
  const bool top = slash == std::string::npos;
  index[top ? std::string() : path.substr(0, slash)].try_emplace(
      top ? path : path.substr(slash + 1), entry);
}

// True if no two files have one path: of one root, or of several that were adopted as one.
bool HasOwnPaths(const StepModel& model) {
  std::set<std::string_view> paths;
  return std::ranges::all_of(
      model.blobs, [&](const Blob& blob) { return blob.side || paths.insert(blob.path).second; });
}

}  // namespace

SourceIndex IndexSources(const StepModel& model) {
  SourceIndex index;
  index.try_emplace(std::string());
  const bool one_root = HasOwnPaths(model);
  for (size_t i = 0; i < model.blobs.size(); ++i) {
    const Blob& blob = model.blobs[i];
    if (blob.side || !LegalPath(blob.path)) continue;
    const std::string path = one_root ? blob.path : StrCat("root", blob.root, "/", blob.path);
    AddFile(index, path, SourceEntry{false, BlobIndex{static_cast<uint32_t>(i)}, {}});
  }
  for (uint32_t i = 0; i < model.texts.size(); ++i) {
    const std::string& path = model.texts[i].path;
    AddFile(index, one_root ? path : StrCat("root0/", path), SourceEntry{false, BlobIndex{}, i});
  }
  return index;
}

Result<Plan> PlanSourceFile(const StepModel& model, BlobIndex blob) {
  PlanBuilder builder;
  builder.BlobRange(blob, 0, model.blob(blob).stamp.size);
  return std::move(builder).Finish();
}

}  // namespace ckptfs
