// SPDX-License-Identifier: Apache-2.0

#include "core/peer/peer_root.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/io/file_stamp.h"

namespace ckptfs {

static_assert(kMaxPeerPayload % kChunkBytes == 0);

namespace {

// Reads whole chunks and gives out what was asked for of them.
class PeerFile final : public File {
 public:
  PeerFile(std::string name, std::shared_ptr<const HeldFile> held, FileIdentity identity)
      : File(std::move(name), held->rank().bytes), held_(std::move(held)), identity_(identity) {}

  Result<FileIdentity> Identity() const override { return identity_; }

  Status ReadAt(std::span<const ReadRequest> requests) const override {
    CKPT_RETURN_IF_ERROR(CheckRanges(requests));
    for (const ReadRequest& request : requests) {
      CKPT_RETURN_IF_ERROR(Read(request.offset, request.out));
    }
    return {};
  }
  Result<std::shared_ptr<const Mapping>> Map() const override { return nullptr; }
  int descriptor() const override { return -1; }

 private:
  Status Read(uint64_t offset, std::span<std::byte> out) const {
    std::vector<std::byte> room;
    while (!out.empty()) {
      const uint64_t begin = offset - offset % kChunkBytes;
      const uint64_t end = std::min<uint64_t>(begin + kMaxPeerPayload, size());
      const uint64_t wanted = std::min<uint64_t>(out.size(), end - offset);
      const uint64_t until = std::min<uint64_t>(
          (offset + wanted + kChunkBytes - 1) / kChunkBytes * kChunkBytes, size());
      room.resize(until - begin);
      const Status fetched = held_->Fetch(begin, room);
      if (!fetched) return Fail(Error(fetched.error()).WithContext(name()));
      std::copy_n(room.begin() + static_cast<ptrdiff_t>(offset - begin), wanted, out.begin());
      offset += wanted;
      out = out.subspan(wanted);
    }
    return {};
  }

  const std::shared_ptr<const HeldFile> held_;
  const FileIdentity identity_;
};

FileIdentity IdentityOf(const PreparedPart& part, const PreparedRank& rank) {
  FileIdentity identity;
  identity.stamp = {rank.bytes, part.mtime_ns, part.mtime_ns, rank.rank + uint64_t{1}};
  identity.access = {0600, geteuid(), getegid(), false};
  return identity;
}

// Returns the record of what any place holds, if it is the one of which all gave the digests.
std::optional<UnitRecord> RecordOf(const MemoryAttempt& attempt, uint32_t rank,
                                   const PeerRoot::Places& places) {
  const HeldRank& held = attempt.ranks.at(rank);
  const auto fits = [&](const UnitRecord& record, uint32_t slot) {
    const PreparedPart& part = record.part;
    const PreparedRank& one = record.rank();
    const bool whole = part.name == attempt.name && part.step == attempt.step &&
                       part.world == attempt.world && one.rank == rank && one.bytes == held.bytes &&
                       DigestOfChunks(one.chunks) == held.chunks;
    if (slot == 0) return whole;
    return whole && record.shape == held.shape &&
           DigestOfChunks(record.parity_chunks) == held.parity_chunks;
  };
  std::optional<UnitRecord> found;
  const auto look = [&](uint32_t slot, const std::vector<Digest>& nodes) {
    const auto mine = places.shelf->Find(attempt.Directory(), rank, slot);
    if (mine && fits(mine->record(), slot)) found = mine->record();
    for (size_t i = 0; !found && i < nodes.size(); ++i) {
      (void)places.pool->Ask(nodes[i], [&](PeerClient& client) -> Status {
        CKPT_ASSIGN_OR_RETURN(UnitRecord record, client.Describe(attempt.Directory(), rank, slot));
        if (fits(record, slot)) found = std::move(record);
        return {};
      });
    }
    return found.has_value();
  };
  // A unit's record says how to read the others, too.
  for (const auto& [unit, nodes] : held.units)
    if (look(held.shape.SlotOf(unit), nodes)) return found;
  look(0, held.nodes);
  return found;
}

}  // namespace

PeerRoot::PeerRoot(PreparedPart part)
    : Root(StrCat("memory ", part.name.run, "/", part.step), false), part_(std::move(part)) {}

Status PeerRoot::Add(const MemoryAttempt& attempt, uint32_t rank, const Places& places,
                     const HeldFile::Places& of_file) {
  auto record = RecordOf(attempt, rank, places);
  if (!record) {
    return Fail(ErrorCode::kDataLoss,
                StrCat(PathOf(part_.PathOf(rank)), ": no node has its record"));
  }
  part_.ranks.push_back(record->rank());
  auto file = std::make_shared<HeldFile>(*std::move(record), attempt.ranks.at(rank), of_file);
  std::string path = file->path();
  files_[std::move(path)] = std::move(file);
  return {};
}

Result<std::shared_ptr<PeerRoot>> PeerRoot::Open(const MemoryAttempt& attempt, Places places) {
  CKPT_CHECK(attempt.whole());
  std::shared_ptr<PeerRoot> root(
      new PeerRoot({attempt.name, attempt.step, attempt.world, attempt.mtime_ns, {}}));
  HeldFile::Places of_file{
      places.shelf, {}, places.store, std::make_shared<StripeRows>(), places.log};
  of_file.ask = [pool = places.pool](const Digest& node, const auto& ask) {
    return pool->Ask(node, ask);
  };
  for (uint32_t rank = 0; rank < attempt.world; ++rank) {
    CKPT_RETURN_IF_ERROR(root->Add(attempt, rank, places, of_file));
  }
  return root;
}

void PeerRoot::Update(const MemoryAttempt& attempt) {
  for (const auto& [path, file] : files_) {
    const auto held = attempt.ranks.find(file->rank().rank);
    if (held != attempt.ranks.end()) file->Update(held->second);
  }
}

Result<std::vector<RootEntry>> PeerRoot::List(std::string_view path) const {
  std::vector<RootEntry> entries;
  for (const auto& [file, held] : files_) {
    if (ParentPath(file) == path) entries.push_back({LastComponent(file), EntryKind::kFile});
  }
  if (!entries.empty()) return entries;
  return Fail(ErrorCode::kNotFound, StrCat(PathOf(path), ": no such directory"));
}

Result<EntryStat> PeerRoot::Stat(std::string_view path) const {
  const auto found = files_.find(path);
  if (found == files_.end())
    return Fail(ErrorCode::kNotFound, StrCat(PathOf(path), ": no such file"));
  const FileIdentity identity = IdentityOf(part_, found->second->rank());
  return EntryStat{EntryKind::kFile, identity.stamp, identity.access};
}

Result<std::shared_ptr<const File>> PeerRoot::Open(std::string_view path) const {
  CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  const auto found = files_.find(path);
  if (found == files_.end())
    return Fail(ErrorCode::kNotFound, StrCat(PathOf(path), ": no such file"));
  return std::make_shared<const PeerFile>(PathOf(path), found->second,
                                          IdentityOf(part_, found->second->rank()));
}

}  // namespace ckptfs
