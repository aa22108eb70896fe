// SPDX-License-Identifier: Apache-2.0

#include "core/io/memory_root.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/base/strings.h"
#include "core/io/file_stamp.h"

namespace ckptfs {

struct MemoryRoot::Rope {
  std::vector<std::span<const std::byte>> spans;  // none of them empty
  std::vector<uint64_t> ends;                     // of each span, in the file
  std::shared_ptr<const void> owner;
  FileIdentity identity;
};

namespace {

using Rope = MemoryRoot::Rope;

std::shared_ptr<const Rope> MakeRope(std::vector<std::span<const std::byte>> spans,
                                     std::shared_ptr<const void> owner,
                                     const OwnerAndMode& access) {
  static std::atomic<uint64_t> serial{0};
  auto rope = std::make_shared<Rope>();
  std::erase_if(spans, [](const auto& span) { return span.empty(); });
  FileStamp& stamp = rope->identity.stamp;
  for (const auto& span : spans) rope->ends.push_back(stamp.size += span.size());
  stamp.mtime_ns = stamp.ctime_ns = NowNs();
  stamp.inode = ++serial;
  rope->spans = std::move(spans);
  rope->owner = std::move(owner);
  rope->identity.access = access;
  return rope;
}

// Makes a file of bytes that the rope owns; only the writer's user may read it.
std::shared_ptr<const Rope> RopeOf(std::string bytes) {
  auto owned = std::make_shared<const std::string>(std::move(bytes));
  return MakeRope({std::as_bytes(std::span(*owned))}, owned,
                  OwnerAndMode{0600, geteuid(), getegid(), false});
}

class RopeMapping final : public Mapping {
 public:
  explicit RopeMapping(std::shared_ptr<const Rope> rope)
      : Mapping(rope->spans.empty() ? std::span<const std::byte>() : rope->spans.front()),
        rope_(std::move(rope)) {}

 private:
  const std::shared_ptr<const Rope> rope_;
};

class MemoryFile final : public File {
 public:
  MemoryFile(std::shared_ptr<const Rope> rope, std::string name)
      : File(std::move(name), rope->identity.stamp.size), rope_(std::move(rope)) {}

  Result<FileIdentity> Identity() const override { return rope_->identity; }

  Status ReadAt(std::span<const ReadRequest> requests) const override {
    CKPT_RETURN_IF_ERROR(CheckRanges(requests));
    for (const ReadRequest& request : requests) Copy(request.offset, request.out);
    return {};
  }

  Result<std::shared_ptr<const Mapping>> Map() const override {
    if (rope_->spans.size() > 1) return nullptr;
    return std::make_shared<const RopeMapping>(rope_);
  }

  int descriptor() const override { return -1; }

 private:
  void Copy(uint64_t offset, std::span<std::byte> out) const {
    const auto first = std::upper_bound(rope_->ends.begin(), rope_->ends.end(), offset);
    for (auto i = static_cast<size_t>(first - rope_->ends.begin()); !out.empty(); ++i) {
      const std::span<const std::byte> span = rope_->spans[i];
      const uint64_t within = offset - (rope_->ends[i] - span.size());
      const size_t n = std::min<uint64_t>(out.size(), span.size() - within);
      std::memcpy(out.data(), span.data() + within, n);
      out = out.subspan(n);
      offset += n;
    }
  }

  const std::shared_ptr<const Rope> rope_;
};

Error Missing(const Root& root, std::string_view path) {
  return Error{ErrorCode::kNotFound, StrCat(root.PathOf(path), ": no such file")};
}

}  // namespace

class MemoryRoot::Writer final : public StorageWriter {
 public:
  Writer(MemoryRoot& root, std::string path) : root_(root), path_(std::move(path)) {}

  Status Reserve(uint64_t /*bytes*/) override { return {}; }

  Status WriteAt(uint64_t offset, std::span<const std::byte> bytes) override {
    MutexLock lock(mutex_);
    bytes_.resize(std::max<size_t>(bytes_.size(), offset + bytes.size()));
    if (!bytes.empty()) std::memcpy(bytes_.data() + offset, bytes.data(), bytes.size());
    return {};
  }

  Status Close() override {
    MutexLock lock(mutex_);
    return root_.Put(path_, RopeOf(std::move(bytes_)), true);
  }

 private:
  MemoryRoot& root_;
  const std::string path_;
  Mutex mutex_;
  std::string bytes_ GUARDED_BY(mutex_);
};

bool MemoryRoot::HasFolder(std::string_view path) const {
  const std::string folder = StrCat(path, "/");
  const auto inside = files_.lower_bound(folder);
  return inside != files_.end() && inside->first.starts_with(folder);
}

Status MemoryRoot::Put(std::string_view path, std::shared_ptr<const Rope> rope, bool replace) {
  MutexLock lock(mutex_);
  const auto [place, inserted] = files_.try_emplace(std::string(path), rope);
  if (!inserted && !replace) return Fail(ErrorCode::kExists, StrCat(PathOf(path), " exists"));
  std::swap(place->second, rope);  // the old file ends outside the lock
  return {};
}

Status MemoryRoot::Add(std::string_view path, std::vector<std::span<const std::byte>> rope,
                       std::shared_ptr<const void> owner, const OwnerAndMode& access) {
  CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  return Put(path, MakeRope(std::move(rope), std::move(owner), access), false);
}

Result<std::vector<RootEntry>> MemoryRoot::List(std::string_view path) const {
  if (!path.empty()) CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  const std::string folder = path.empty() ? "" : StrCat(path, "/");
  std::vector<RootEntry> entries;
  MutexLock lock(mutex_);
  for (auto at = files_.lower_bound(folder); at != files_.end() && at->first.starts_with(folder);
       ++at) {
    const std::string_view rest = std::string_view(at->first).substr(folder.size());
    const std::string_view name = rest.substr(0, rest.find('/'));
    if (!entries.empty() && entries.back().name == name) continue;
    entries.push_back(
        {std::string(name), name.size() == rest.size() ? EntryKind::kFile : EntryKind::kDirectory});
  }
  if (entries.empty() && !path.empty()) return Fail(Missing(*this, path));
  std::sort(entries.begin(), entries.end(),
            [](const RootEntry& a, const RootEntry& b) { return a.name < b.name; });
  return entries;
}

Result<EntryStat> MemoryRoot::Stat(std::string_view path) const {
  if (path.empty()) return EntryStat{EntryKind::kDirectory};
  CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  MutexLock lock(mutex_);
  const auto file = files_.find(path);
  if (file != files_.end()) {
    const FileIdentity& identity = file->second->identity;
    return EntryStat{EntryKind::kFile, identity.stamp, identity.access};
  }
  if (!HasFolder(path)) return Fail(Missing(*this, path));
  return EntryStat{EntryKind::kDirectory};
}

Result<std::shared_ptr<const File>> MemoryRoot::Open(std::string_view path) const {
  CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  MutexLock lock(mutex_);
  const auto file = files_.find(path);
  if (file != files_.end()) {
    return std::make_shared<const MemoryFile>(file->second, PathOf(path));
  }
  if (!HasFolder(path)) return Fail(Missing(*this, path));
  return Fail(ErrorCode::kInvalid, StrCat(PathOf(path), " is not a regular file"));
}

Result<std::unique_ptr<StorageWriter>> MemoryRoot::Create(std::string_view path) {
  CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  return std::make_unique<Writer>(*this, std::string(path));
}

Status MemoryRoot::PublishIfAbsent(std::string_view path, std::span<const std::byte> bytes) {
  CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  return Put(path, RopeOf({reinterpret_cast<const char*>(bytes.data()), bytes.size()}), false);
}

Status MemoryRoot::Remove(std::string_view path) {
  CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  std::shared_ptr<const Rope> removed;  // its owner may end outside the lock
  MutexLock lock(mutex_);
  const auto file = files_.find(path);
  if (file == files_.end()) return Fail(Missing(*this, path));
  removed = std::move(file->second);
  files_.erase(file);
  return {};
}

}  // namespace ckptfs
