// SPDX-License-Identifier: Apache-2.0

#include "core/peer/peer_shelf.h"

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"

namespace ckptfs {

ShelfFile::~ShelfFile() { *used_ -= bytes().size(); }

Result<std::unique_ptr<ShelfFile>> PeerShelf::Begin(UnitRecord record) {
  const auto there = Find(record.part.Directory(), record.rank().rank, record.slot());
  if (there) {
    const bool same = there->record().IsOf(record);
    return Fail(ErrorCode::kExists, same ? "it is held" : "another file is held");
  }
  const uint64_t bytes = record.bytes();
  if (bytes == 0) return Refuse("a rank's file of 0 bytes");
  {
    MutexLock lock(mutex_);
    if (entries_.size() >= most_files_)
      return Fail(ErrorCode::kExhausted, StrCat(most_files_, " files are held already"));
  }
  const uint64_t before = used_->fetch_add(bytes);
  if (before + bytes > budget_ || before + bytes < before) {
    *used_ -= bytes;
    return Fail(ErrorCode::kExhausted, StrCat(bytes, " bytes do not fit into --peer-memory: ",
                                              before, " of ", budget_, " are used"));
  }
  auto memory = SealedMemory::Make(bytes, "ckptfs peer");
  if (!memory) {
    *used_ -= bytes;
    return Fail(std::move(memory).error());
  }
  return std::unique_ptr<ShelfFile>(new ShelfFile(std::move(record), *std::move(memory), used_));
}

Status PeerShelf::Shelve(std::unique_ptr<ShelfFile> file) {
  CKPT_RETURN_IF_ERROR(file->memory_.Seal());
  ChunkDigester digester;
  digester.Add(file->bytes());
  if (std::move(digester).Finish() != file->record().chunks()) {
    return Fail(ErrorCode::kDataLoss,
                StrCat("rank ", file->rank().rank, " of ", file->part().name.run, "/",
                       file->part().step, " is not what its record says"));
  }
  const Name name(file->part().Directory(), file->rank().rank, file->record().slot());
  MutexLock lock(mutex_);
  const auto [place, added] = entries_.try_emplace(name);
  if (!added) return Fail(ErrorCode::kExists, "it is held");
  place->second.file = std::move(file);
  return {};
}

PeerShelf::FilePtr PeerShelf::Find(std::string_view directory, uint32_t rank, uint32_t slot) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find({std::string(directory), rank, slot});
  return found == entries_.end() ? nullptr : found->second.file;
}

bool PeerShelf::Protect(std::string_view directory, uint32_t rank, uint32_t slot) {
  MutexLock lock(mutex_);
  const auto found = entries_.find({std::string(directory), rank, slot});
  if (found == entries_.end()) return false;
  found->second.state = ShelvedState::kProtected;
  return true;
}

bool PeerShelf::Remove(std::string_view directory, uint32_t rank, uint32_t slot) {
  Entry gone;  // its memory goes outside of the lock
  MutexLock lock(mutex_);
  const auto found = entries_.find({std::string(directory), rank, slot});
  if (found == entries_.end()) return false;
  gone = std::move(found->second);
  entries_.erase(found);
  return true;
}

std::vector<ShelvedPart> PeerShelf::List() const {
  MutexLock lock(mutex_);
  std::vector<ShelvedPart> parts;
  for (const auto& [name, entry] : entries_) {
    parts.push_back(ShelvedOf(entry.file->record(), entry.state));
  }
  return parts;
}

}  // namespace ckptfs
