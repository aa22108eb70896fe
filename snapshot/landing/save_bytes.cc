// SPDX-License-Identifier: Apache-2.0

#include "snapshot/landing/save_bytes.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/io/file_stamp.h"

namespace ckptfs {

// The place where one file is now.
struct SaveBytes::Place {
  Place(FileIdentity what, std::shared_ptr<const File> where, Moves does, bool disk)
      : identity(what), moves(does), file(std::move(where)), on_disk(disk) {}
  const FileIdentity identity;  // does not move
  const Moves moves;
  Mutex mutex;
  std::shared_ptr<const File> file GUARDED_BY(mutex);
  bool on_disk GUARDED_BY(mutex);
};

class SaveBytes::MovingFile final : public File {
 public:
  MovingFile(std::string name, std::shared_ptr<Place> place,
             std::shared_ptr<const std::atomic<bool>> ending)
      : File(std::move(name), place->identity.stamp.size),
        place_(std::move(place)),
        ending_(std::move(ending)) {}

  Result<FileIdentity> Identity() const override { return place_->identity; }

  Status ReadAt(std::span<const ReadRequest> requests) const override {
    std::shared_ptr<const File> file;
    {
      MutexLock lock(place_->mutex);
      if (place_->on_disk && *ending_) {
        return Fail(ErrorCode::kIo, StrCat(name(), " stays in the spool: the daemon is ending"));
      }
      file = place_->file;
    }
    return file->ReadAt(requests);
  }

  // A save that may move maps only a file on a disk: an arena's bytes could not move there, and
  // would keep the arena.
  Result<std::shared_ptr<const Mapping>> Map() const override {
    std::shared_ptr<const File> file;
    {
      MutexLock lock(place_->mutex);
      if (place_->on_disk || place_->moves == Moves::kNever) file = place_->file;
    }
    return file ? file->Map() : nullptr;
  }
  int descriptor() const override { return -1; }

 private:
  const std::shared_ptr<Place> place_;
  const std::shared_ptr<const std::atomic<bool>> ending_;
};

namespace {

// Returns a time later than those before it in this process, though the clock may be set back.
int64_t NextSaveTime() {
  static std::atomic<int64_t> last = 0;
  int64_t before = last.load();
  int64_t next = 0;
  do {
    next = std::max(NowNs(), before + 1);
  } while (!last.compare_exchange_weak(before, next));
  return next;
}

}  // namespace

SaveBytes::SaveBytes(AttemptName name, uint64_t step, uint32_t world, Moves moves)
    : Root(StrCat("snapshot ", name.run, "/", step), false),
      part_{std::move(name), step, world, NextSaveTime(), {}},
      moves_(moves),
      memory_(std::make_unique<MemoryRoot>(this->name())) {}

std::shared_ptr<SaveBytes> SaveBytes::Of(ReceivedPart part, Moves moves) {
  auto save = std::make_shared<SaveBytes>(std::move(part.name), part.step, part.world, moves);
  for (auto& [rank, file] : part.files) CKPT_CHECK(save->Add(rank, file));
  return save;
}

Status SaveBytes::Add(uint32_t rank, ReceivedFile& file) {
  const std::string path = part_.PathOf(rank);
  CKPT_RETURN_IF_ERROR(memory_->Add(path, std::move(file.rope), std::move(file.lease),
                                    OwnerAndMode{0600, geteuid(), getegid(), false}));
  CKPT_ASSIGN_OR_RETURN(auto bytes, memory_->Open(path));
  CKPT_ASSIGN_OR_RETURN(const FileIdentity identity, bytes->Identity());
  places_[path] = std::make_shared<Place>(identity, std::move(bytes), moves_, false);
  part_.ranks.push_back({rank, file.bytes, file.chunks});
  again_ = again_ || file.again;
  if (file.shelve) shelve_.push_back(std::exchange(file.shelve, nullptr));
  return {};
}

Result<std::shared_ptr<SaveBytes>> SaveBytes::OnDisk(PreparedPart part, const Root& disk) {
  auto save = std::make_shared<SaveBytes>(part.name, part.step, part.world);
  save->part_ = std::move(part);
  save->left_ = true;
  save->memory_.reset();
  for (const PreparedRank& rank : save->part_.ranks) {
    const std::string path = save->part_.PathOf(rank.rank);
    CKPT_ASSIGN_OR_RETURN(auto file, disk.Open(path));
    CKPT_ASSIGN_OR_RETURN(const FileIdentity identity, file->Identity());
    save->places_[path] = std::make_shared<Place>(identity, std::move(file), Moves::kMay, true);
  }
  save->on_disk_ = true;
  return save;
}

Status SaveBytes::MoveTo(const Root& disk) {
  std::map<std::string, std::shared_ptr<const File>> files;
  for (const auto& [path, place] : places_) {
    CKPT_ASSIGN_OR_RETURN(files[path], disk.Open(path));
  }
  for (const auto& shelve : shelve_) shelve(part_.Directory());
  memory_.reset();
  for (const auto& [path, place] : places_) {
    MutexLock lock(place->mutex);  // the last file of the arena goes after it
    place->on_disk = true;
    place->file.swap(files[path]);
  }
  files.clear();  // the arena has its room back before anybody is told
  on_disk_ = true;
  return {};
}

Result<SaveBytes::Places::const_iterator> SaveBytes::Find(std::string_view path) const {
  CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  const auto found = places_.find(path);
  if (found != places_.end()) return found;
  return Fail(ErrorCode::kNotFound, StrCat(PathOf(path), ": no such file"));
}

Result<std::vector<RootEntry>> SaveBytes::List(std::string_view path) const {
  std::vector<RootEntry> entries;
  for (const auto& [file, place] : places_) {
    if (ParentPath(file) == path) entries.push_back({LastComponent(file), EntryKind::kFile});
  }
  if (!entries.empty()) return entries;
  return Fail(ErrorCode::kNotFound, StrCat(PathOf(path), ": no such directory"));
}

Result<EntryStat> SaveBytes::Stat(std::string_view path) const {
  CKPT_ASSIGN_OR_RETURN(const auto found, Find(path));
  const FileIdentity& identity = found->second->identity;
  return EntryStat{EntryKind::kFile, identity.stamp, identity.access};
}

Result<std::shared_ptr<const File>> SaveBytes::Open(std::string_view path) const {
  CKPT_ASSIGN_OR_RETURN(const auto found, Find(path));
  return std::make_shared<const MovingFile>(PathOf(path), found->second, ending_);
}

}  // namespace ckptfs
