// SPDX-License-Identifier: Apache-2.0

#include "core/io/union_root.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kCompared = size_t{4} << 20;  // bytes of each file at a time

Error Differ(const std::string& a, const std::string& b, std::string_view how) {
  return Error{ErrorCode::kInvalid,
               StrCat(a, " and ", b, " ", how, ": they cannot be files of one save")};
}

Status CheckSameBytes(const File& a, const File& b) {
  if (a.size() != b.size()) return Fail(Differ(a.name(), b.name(), "differ in size"));
  std::vector<std::byte> ours(std::min<uint64_t>(a.size(), kCompared)), theirs(ours.size());
  for (uint64_t at = 0; at < a.size(); at += kCompared) {
    const size_t count = std::min<uint64_t>(a.size() - at, kCompared);
    CKPT_RETURN_IF_ERROR(a.ReadAt(at, std::span(ours).first(count)));
    CKPT_RETURN_IF_ERROR(b.ReadAt(at, std::span(theirs).first(count)));
    if (std::memcmp(ours.data(), theirs.data(), count) != 0) {
      return Fail(Differ(a.name(), b.name(), "differ"));
    }
  }
  return {};
}

}  // namespace

UnionRoot::UnionRoot(std::vector<UnionPart> parts)
    : Root(parts.front().root->name(), parts.front().root->local()), parts_(std::move(parts)) {}

std::vector<std::pair<const UnionPart*, std::string>> UnionRoot::PlacesOf(
    std::string_view path) const {
  const std::string& top = parts_.front().directory;
  const bool inside =
      top.empty() || path == top || (path.starts_with(top) && path.substr(top.size())[0] == '/');
  if (!inside) return {{&parts_.front(), std::string(path)}};
  std::string_view rest = path.substr(top.size());
  if (rest.starts_with('/')) rest.remove_prefix(1);
  std::vector<std::pair<const UnionPart*, std::string>> out;
  for (const UnionPart& part : parts_) out.emplace_back(&part, JoinPath(part.directory, rest));
  return out;
}

Result<std::vector<UnionRoot::Where>> UnionRoot::Find(std::string_view path) const {
  std::vector<Where> out;
  for (auto& [part, inner] : PlacesOf(path)) {
    auto found = part->root->Stat(inner);
    if (!found && found.error().code == ErrorCode::kNotFound) continue;
    if (!found) return Fail(std::move(found).error());
    out.push_back({part, std::move(inner), *std::move(found)});
    if (out.back().stat.kind != out.front().stat.kind) {
      return Fail(Differ(out.front().part->root->PathOf(out.front().path),
                         out.back().part->root->PathOf(out.back().path),
                         "are a file and a directory"));
    }
  }
  if (!out.empty()) return out;
  return Fail(ErrorCode::kNotFound, StrCat(Root::PathOf(path), ": no such file or directory"));
}

Result<std::vector<RootEntry>> UnionRoot::List(std::string_view path) const {
  CKPT_ASSIGN_OR_RETURN(const auto found, Find(path));
  std::map<std::string, RootEntry> all;
  for (const Where& where : found) {
    CKPT_ASSIGN_OR_RETURN(std::vector<RootEntry> entries, where.part->root->List(where.path));
    for (RootEntry& entry : entries) {
      const auto [known, added] = all.try_emplace(entry.name, entry);
      if (added || known->second.kind == entry.kind) continue;
      CKPT_RETURN_IF_ERROR(Find(JoinPath(path, entry.name)));
    }
  }
  std::vector<RootEntry> out;
  for (auto& [name, entry] : all) out.push_back(std::move(entry));
  return out;
}

Result<EntryStat> UnionRoot::Stat(std::string_view path) const {
  CKPT_ASSIGN_OR_RETURN(const auto found, Find(path));
  EntryStat stat = found.front().stat;
  for (const Where& where : found) {
    if (stat.kind != EntryKind::kDirectory) break;
    stat.stamp.mtime_ns = std::max(stat.stamp.mtime_ns, where.stat.stamp.mtime_ns);
  }
  return stat;
}

Status UnionRoot::CheckEqual(std::string_view path, const File& first,
                             const std::vector<Where>& found) const {
  {
    const MutexLock lock(mutex_);
    if (equal_.contains(path)) return {};
  }
  for (size_t i = 1; i < found.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(const auto other, found[i].part->root->Open(found[i].path));
    CKPT_RETURN_IF_ERROR(CheckSameBytes(first, *other));
  }
  const MutexLock lock(mutex_);
  equal_.emplace(path);
  return {};
}

Result<std::shared_ptr<const File>> UnionRoot::Open(std::string_view path) const {
  CKPT_ASSIGN_OR_RETURN(const auto found, Find(path));
  CKPT_ASSIGN_OR_RETURN(auto first, found.front().part->root->Open(found.front().path));
  if (found.size() > 1 && found.front().stat.kind == EntryKind::kFile) {
    CKPT_RETURN_IF_ERROR(CheckEqual(path, *first, found));
  }
  return first;
}

std::string UnionRoot::PathOf(std::string_view path) const {
  const auto found = Find(path);
  if (!found) return Root::PathOf(path);
  return found->front().part->root->PathOf(found->front().path);
}

}  // namespace ckptfs
