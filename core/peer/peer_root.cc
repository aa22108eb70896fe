// SPDX-License-Identifier: Apache-2.0

#include "core/peer/peer_root.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/io/file_stamp.h"

namespace ckptfs {

static_assert(kMaxPeerPayload % kChunkBytes == 0);

// One rank's file: its record, and the places that are asked in turn.
struct PeerRoot::RankPlaces {
  std::string directory;
  std::string path;  // below the store's blobs
  PreparedRank rank;
  Places places;
  PeerShelf::FilePtr mine;  // null: it is not on the own shelf
  mutable Mutex mutex;
  std::vector<Digest> nodes GUARDED_BY(mutex);            // that hold it
  mutable std::set<std::string> wrong GUARDED_BY(mutex);  // places that gave wrong bytes

  std::vector<Digest> Holders() const {
    MutexLock lock(mutex);
    return nodes;
  }
  // Fills `out` with whole chunks from `offset` on, all of them verified.
  Status Fetch(uint64_t offset, std::span<std::byte> out) const;

 private:
  using Ask = std::function<Status(std::span<std::byte> out)>;
  // True if the place gave the right bytes; else `why` says what it did.
  bool Try(const std::string& place, const Ask& ask, uint64_t offset, std::span<std::byte> out,
           std::string& why) const;
  // The first chunk whose digest is not that of the record.
  std::optional<uint64_t> WrongChunkOf(uint64_t offset, std::span<const std::byte> bytes) const;
};

std::optional<uint64_t> PeerRoot::RankPlaces::WrongChunkOf(uint64_t offset,
                                                           std::span<const std::byte> bytes) const {
  uint64_t chunk = offset / kChunkBytes;
  for (; !bytes.empty(); ++chunk) {
    const auto piece = bytes.first(std::min<size_t>(kChunkBytes, bytes.size()));
    ChunkDigester digester;
    digester.Add(piece);
    if (std::move(digester).Finish().front() != rank.chunks[chunk]) return chunk;
    bytes = bytes.subspan(piece.size());
  }
  return std::nullopt;
}

bool PeerRoot::RankPlaces::Try(const std::string& place, const Ask& ask, uint64_t offset,
                               std::span<std::byte> out, std::string& why) const {
  {
    MutexLock lock(mutex);
    if (wrong.contains(place)) {
      why += StrCat("; ", place, " gave wrong bytes");
      return false;
    }
  }
  const Status asked = ask(out);
  if (!asked) {
    why += StrCat("; ", place, ": ", asked.error().message);
    return false;
  }
  const auto chunk = WrongChunkOf(offset, out);
  if (!chunk) return true;
  why += StrCat("; ", place, " gave wrong bytes");
  MutexLock lock(mutex);
  if (wrong.insert(place).second && places.log) {
    places.log(StrCat(path, ": chunk ", *chunk, " of ", place,
                      " is not what its record says; it is not used"));
  }
  return false;
}

Status PeerRoot::RankPlaces::Fetch(uint64_t offset, std::span<std::byte> out) const {
  std::string why;
  const Ask from_shelf = [&](std::span<std::byte> to) -> Status {
    std::copy_n(mine->bytes().begin() + static_cast<ptrdiff_t>(offset), to.size(), to.begin());
    return {};
  };
  if (mine && Try("this node", from_shelf, offset, out, why)) return {};
  for (const Digest& node : Holders()) {
    const Ask from_peer = [&](std::span<std::byte> to) {
      return places.pool->Ask(
          node, [&](PeerClient& client) { return client.Get(directory, rank.rank, offset, to); });
    };
    if (Try(StrCat("node ", node.Hex()), from_peer, offset, out, why)) return {};
  }
  const Ask from_store = [&](std::span<std::byte> to) -> Status {
    CKPT_ASSIGN_OR_RETURN(const auto file, places.store->Open(path));
    return file->ReadAt(offset, to);
  };
  if (places.store && Try("the store", from_store, offset, out, why)) return {};
  return Fail(ErrorCode::kDataLoss, StrCat("no place has the right bytes", why));
}

namespace {

// Reads whole chunks and gives out what was asked for of them.
class PeerFile final : public File {
 public:
  PeerFile(std::string name, std::shared_ptr<const PeerRoot::RankPlaces> where, uint64_t bytes,
           FileIdentity identity, std::function<Status(uint64_t, std::span<std::byte>)> fetch)
      : File(std::move(name), bytes),
        where_(std::move(where)),
        identity_(identity),
        fetch_(std::move(fetch)) {}

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
      const Status fetched = fetch_(begin, room);
      if (!fetched) return Fail(Error(fetched.error()).WithContext(name()));
      std::copy_n(room.begin() + static_cast<ptrdiff_t>(offset - begin), wanted, out.begin());
      offset += wanted;
      out = out.subspan(wanted);
    }
    return {};
  }

  const std::shared_ptr<const PeerRoot::RankPlaces> where_;
  const FileIdentity identity_;
  const std::function<Status(uint64_t, std::span<std::byte>)> fetch_;
};

FileIdentity IdentityOf(const PreparedPart& part, const PreparedRank& rank) {
  FileIdentity identity;
  identity.stamp = {rank.bytes, part.mtime_ns, part.mtime_ns, rank.rank + uint64_t{1}};
  identity.access = {0600, geteuid(), getegid(), false};
  return identity;
}

}  // namespace

PeerRoot::PeerRoot(PreparedPart part)
    : Root(StrCat("memory ", part.name.run, "/", part.step), false), part_(std::move(part)) {}

Status PeerRoot::Add(const MemoryAttempt& attempt, uint32_t rank, const Places& places) {
  const HeldRank& held = attempt.ranks.at(rank);
  auto where = std::make_shared<RankPlaces>();
  where->directory = part_.Directory();
  where->path = part_.PathOf(rank);
  where->places = places;
  where->mine = places.shelf->Find(where->directory, rank);
  {
    MutexLock lock(where->mutex);
    where->nodes = held.nodes;
  }
  where->places.shelf = nullptr;  // it was asked
  // The record of any place, if it is the one of which all gave the digest.
  std::optional<PreparedPart> found;
  const auto fits = [&](const PreparedPart& part) {
    const PreparedRank& one = part.ranks.front();
    return part.name == attempt.name && part.step == attempt.step && part.world == attempt.world &&
           one.rank == rank && one.bytes == held.bytes && DigestOfChunks(one.chunks) == held.chunks;
  };
  if (where->mine && fits(where->mine->part())) found = where->mine->part();
  for (size_t i = 0; !found && i < held.nodes.size(); ++i) {
    (void)places.pool->Ask(held.nodes[i], [&](PeerClient& client) -> Status {
      CKPT_ASSIGN_OR_RETURN(PreparedPart part, client.Describe(where->directory, rank));
      if (fits(part)) found = std::move(part);
      return {};
    });
  }
  if (!found) {
    return Fail(ErrorCode::kDataLoss, StrCat(PathOf(where->path), ": no node has its record"));
  }
  where->rank = found->ranks.front();
  part_.ranks.push_back(where->rank);
  files_[where->path] = std::move(where);
  return {};
}

Result<std::shared_ptr<PeerRoot>> PeerRoot::Open(const MemoryAttempt& attempt, Places places) {
  CKPT_CHECK(attempt.whole());
  std::shared_ptr<PeerRoot> root(
      new PeerRoot({attempt.name, attempt.step, attempt.world, attempt.mtime_ns, {}}));
  for (uint32_t rank = 0; rank < attempt.world; ++rank) {
    CKPT_RETURN_IF_ERROR(root->Add(attempt, rank, places));
  }
  return root;
}

void PeerRoot::Update(const MemoryAttempt& attempt) {
  for (const auto& [path, where] : files_) {
    const auto held = attempt.ranks.find(where->rank.rank);
    if (held == attempt.ranks.end()) continue;
    MutexLock lock(where->mutex);
    where->nodes = held->second.nodes;
  }
}

Result<std::vector<RootEntry>> PeerRoot::List(std::string_view path) const {
  std::vector<RootEntry> entries;
  for (const auto& [file, where] : files_) {
    if (ParentPath(file) == path) entries.push_back({LastComponent(file), EntryKind::kFile});
  }
  if (!entries.empty()) return entries;
  return Fail(ErrorCode::kNotFound, StrCat(PathOf(path), ": no such directory"));
}

Result<EntryStat> PeerRoot::Stat(std::string_view path) const {
  const auto found = files_.find(path);
  if (found == files_.end())
    return Fail(ErrorCode::kNotFound, StrCat(PathOf(path), ": no such file"));
  const FileIdentity identity = IdentityOf(part_, found->second->rank);
  return EntryStat{EntryKind::kFile, identity.stamp, identity.access};
}

Result<std::shared_ptr<const File>> PeerRoot::Open(std::string_view path) const {
  CKPT_RETURN_IF_ERROR(CheckPlainPath(path));
  const auto found = files_.find(path);
  if (found == files_.end())
    return Fail(ErrorCode::kNotFound, StrCat(PathOf(path), ": no such file"));
  const std::shared_ptr<const RankPlaces> where = found->second;
  return std::make_shared<const PeerFile>(
      PathOf(path), where, where->rank.bytes, IdentityOf(part_, where->rank),
      [where](uint64_t offset, std::span<std::byte> out) { return where->Fetch(offset, out); });
}

}  // namespace ckptfs
