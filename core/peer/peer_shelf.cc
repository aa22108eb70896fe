// SPDX-License-Identifier: Apache-2.0

#include "core/peer/peer_shelf.h"

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"

namespace ckptfs {

ShelfFile::~ShelfFile() { *used_ -= rank().bytes; }

namespace {

constexpr size_t kMaxEntries = 8192;  // a list of them fits into a frame

}  // namespace

Result<std::unique_ptr<ShelfFile>> PeerShelf::Begin(PreparedPart part) {
  const PreparedRank& rank = part.ranks.front();
  if (const FilePtr there = Find(part.Directory(), rank.rank)) {
    return Fail(ErrorCode::kExists, there->rank() == rank ? "it is held" : "another file is held");
  }
  const uint64_t bytes = rank.bytes;
  if (bytes == 0) return Refuse("a rank's file of 0 bytes");
  {
    MutexLock lock(mutex_);
    if (entries_.size() >= kMaxEntries)
      return Fail(ErrorCode::kExhausted, StrCat(kMaxEntries, " files are held already"));
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
  return std::unique_ptr<ShelfFile>(new ShelfFile(std::move(part), *std::move(memory), used_));
}

Status PeerShelf::Shelve(std::unique_ptr<ShelfFile> file) {
  CKPT_RETURN_IF_ERROR(file->memory_.Seal());
  ChunkDigester digester;
  digester.Add(file->bytes());
  if (std::move(digester).Finish() != file->rank().chunks) {
    return Fail(ErrorCode::kDataLoss,
                StrCat("rank ", file->rank().rank, " of ", file->part().name.run, "/",
                       file->part().step, " is not what its record says"));
  }
  const Name name(file->part().Directory(), file->rank().rank);
  MutexLock lock(mutex_);
  const auto [place, added] = entries_.try_emplace(name);
  if (!added) return Fail(ErrorCode::kExists, "it is held");
  place->second.file = std::move(file);
  return {};
}

PeerShelf::FilePtr PeerShelf::Find(std::string_view directory, uint32_t rank) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find({std::string(directory), rank});
  return found == entries_.end() ? nullptr : found->second.file;
}

bool PeerShelf::Protect(std::string_view directory, uint32_t rank) {
  MutexLock lock(mutex_);
  const auto found = entries_.find({std::string(directory), rank});
  if (found == entries_.end()) return false;
  found->second.state = ShelvedState::kProtected;
  return true;
}

bool PeerShelf::Remove(std::string_view directory, uint32_t rank) {
  Entry gone;  // its memory goes outside of the lock
  MutexLock lock(mutex_);
  const auto found = entries_.find({std::string(directory), rank});
  if (found == entries_.end()) return false;
  gone = std::move(found->second);
  entries_.erase(found);
  return true;
}

std::vector<ShelvedPart> PeerShelf::List() const {
  MutexLock lock(mutex_);
  std::vector<ShelvedPart> parts;
  for (const auto& [name, entry] : entries_) {
    parts.push_back(ShelvedOf(entry.file->part(), entry.file->rank(), entry.state));
  }
  return parts;
}

}  // namespace ckptfs
