// SPDX-License-Identifier: Apache-2.0

#include "core/peer/held_file.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"

namespace ckptfs {
namespace {

// The first chunk whose digest is another one.
std::optional<size_t> WrongChunkOf(std::span<const std::byte> bytes,
                                   std::span<const Digest> digests) {
  for (size_t chunk = 0; chunk < digests.size(); ++chunk) {
    const auto piece = bytes.subspan(chunk * kChunkBytes);
    if (DigestOf(piece.first(std::min<size_t>(kChunkBytes, piece.size()))) != digests[chunk])
      return chunk;
  }
  return std::nullopt;
}

Status CopyFrom(const ShelfFile& file, uint64_t offset, std::span<std::byte> out) {
  std::copy_n(file.bytes().begin() + static_cast<ptrdiff_t>(offset), out.size(), out.begin());
  return {};
}

std::string NodeText(const Digest& node) { return StrCat("node ", node.Hex()); }

}  // namespace

HeldFile::HeldFile(UnitRecord record, const HeldRank& held, Places places)
    : record_(std::move(record)),
      directory_(record_.part.Directory()),
      path_(record_.part.PathOf(rank().rank)),
      places_{nullptr, std::move(places.ask), std::move(places.store), std::move(places.rows),
              std::move(places.log)},
      code_(record_.shape.cuts() ? std::optional<StripeCode>(record_.shape) : std::nullopt) {
  mine_ = places.shelf->Find(directory_, rank().rank);
  if (mine_ && mine_->rank() != rank()) mine_ = nullptr;
  for (uint32_t unit = 0; code_ && unit < record_.shape.units(); ++unit) {
    UnitRecord other = record_;
    other.unit = unit;
    auto file = places.shelf->Find(directory_, rank().rank, other.slot());
    if (file && file->record().IsOf(other)) my_units_[unit] = std::move(file);
  }
  Update(held);
}

void HeldFile::Update(const HeldRank& held) {
  Held now{held.nodes, {}};
  if (code_ && held.shape == record_.shape) now.units = held.units;
  MutexLock lock(mutex_);
  held_ = std::move(now);
}

HeldFile::Held HeldFile::held() const {
  MutexLock lock(mutex_);
  return held_;
}

HeldFile::Wanted HeldFile::WantedOf(uint64_t offset, size_t bytes) const {
  const uint64_t first = offset / kChunkBytes;
  return {first, std::span(rank().chunks).subspan(first, ChunkCount(bytes, kChunkBytes))};
}

bool HeldFile::Try(const std::string& place, const Read& read, const Wanted& wanted,
                   std::span<std::byte> out, std::string& why) const {
  {
    MutexLock lock(mutex_);
    if (wrong_.contains(place)) {
      why += StrCat("; ", place, " gave wrong bytes");
      return false;
    }
  }
  const Status done = read(out);
  if (!done) {
    why += StrCat("; ", place, ": ", done.error().message);
    return false;
  }
  const auto chunk = WrongChunkOf(out, wanted.digests);
  if (!chunk) return true;
  why += StrCat("; ", place, " gave wrong bytes");
  MutexLock lock(mutex_);
  if (wrong_.insert(place).second && places_.log) {
    places_.log(StrCat(path_, ": chunk ", wanted.first + *chunk, " of ", place,
                       " is not what its record says; it is not used"));
  }
  return false;
}

Status HeldFile::Fetch(uint64_t offset, std::span<std::byte> out) const {
  const Held now = held();
  std::string why;
  if (FetchWhole(now, offset, out, why) || FetchRows(now, offset, out, why)) return {};
  const Read from_store = [&](std::span<std::byte> to) -> Status {
    CKPT_ASSIGN_OR_RETURN(const auto file, places_.store->Open(path_));
    return file->ReadAt(offset, to);
  };
  const Wanted wanted = WantedOf(offset, out.size());
  if (places_.store && Try("the store", from_store, wanted, out, why)) return {};
  return Fail(ErrorCode::kDataLoss, StrCat("no place has the right bytes", why));
}

bool HeldFile::FetchWhole(const Held& held, uint64_t offset, std::span<std::byte> out,
                          std::string& why) const {
  const Wanted wanted = WantedOf(offset, out.size());
  const Read from_shelf = [&](std::span<std::byte> to) { return CopyFrom(*mine_, offset, to); };
  if (mine_ && Try("this node", from_shelf, wanted, out, why)) return true;
  return std::any_of(held.nodes.begin(), held.nodes.end(), [&](const Digest& node) {
    const Read from_peer = [&](std::span<std::byte> to) {
      return places_.ask(node, [&](PeerClient& client) {
        return client.Get(directory_, rank().rank, 0, offset, to);
      });
    };
    return Try(NodeText(node), from_peer, wanted, out, why);
  });
}

// Chunk by chunk from who holds its unit; whole rows where a unit is not held.
bool HeldFile::FetchRows(const Held& held, uint64_t offset, std::span<std::byte> out,
                         std::string& why) const {
  if (!code_) return false;
  const uint32_t data = record_.shape.data;
  for (uint64_t chunk = offset / kChunkBytes; !out.empty(); ++chunk) {
    const auto piece = out.first(std::min<size_t>(kChunkBytes, out.size()));
    out = out.subspan(piece.size());
    const auto unit = static_cast<uint32_t>(chunk % data);
    const uint64_t row = chunk / data;
    auto kept = places_.rows->Find({rank().rank, row});
    if (!kept && ReadUnit(held, unit, row, piece, why)) continue;
    if (!kept) {
      auto made = RowOf(held, row, why);
      if (!made) return false;
      kept = *std::move(made);
    }
    std::copy_n((*kept)->begin() + static_cast<ptrdiff_t>(unit * kChunkBytes), piece.size(),
                piece.begin());
  }
  return true;
}

bool HeldFile::ReadUnit(const Held& held, uint32_t unit, uint64_t row, std::span<std::byte> out,
                        std::string& why) const {
  const Digest digest = record_.ChunkOf(unit, row);
  const Wanted wanted{row, std::span(&digest, 1)};
  const uint64_t offset = row * kChunkBytes;
  const auto of = [&](const std::string& place) { return StrCat("unit ", unit, " of ", place); };
  const auto mine = my_units_.find(unit);
  if (mine != my_units_.end()) {
    const Read from_shelf = [&](std::span<std::byte> to) {
      return CopyFrom(*mine->second, offset, to);
    };
    if (Try(of("this node"), from_shelf, wanted, out, why)) return true;
  }
  const auto found = held.units.find(unit);
  if (found == held.units.end()) {
    why += StrCat("; no node holds unit ", unit);
    return false;
  }
  return std::any_of(found->second.begin(), found->second.end(), [&](const Digest& node) {
    const Read from_peer = [&](std::span<std::byte> to) {
      return places_.ask(node, [&](PeerClient& client) {
        return client.Get(directory_, rank().rank, record_.shape.SlotOf(unit), offset, to);
      });
    };
    return Try(of(NodeText(node)), from_peer, wanted, out, why);
  });
}

Result<StripeRow> HeldFile::RowOf(const Held& held, uint64_t row, std::string& why) const {
  auto made = places_.rows->Get({rank().rank, row}, [&]() { return MakeRow(held, row); });
  if (!made) why += StrCat("; ", made.error().message);
  return made;
}

Result<StripeRow> HeldFile::MakeRow(const Held& held, uint64_t row) const {
  const StripeShape& shape = record_.shape;
  uint64_t bytes = 0;
  for (uint32_t unit = 0; unit < shape.data; ++unit)
    bytes += shape.ChunkBytesOf(unit, row, rank().bytes);
  auto made = std::make_shared<std::vector<std::byte>>(bytes);
  std::set<uint32_t> missing;
  std::string why;
  for (uint32_t unit = 0; unit < shape.data; ++unit) {
    const uint64_t length = shape.ChunkBytesOf(unit, row, rank().bytes);
    if (length == 0) break;
    const auto piece = std::span(*made).subspan(unit * kChunkBytes, length);
    if (!ReadUnit(held, unit, row, piece, why)) missing.insert(unit);
  }
  if (!missing.empty()) {
    CKPT_RETURN_IF_ERROR(RestoreInto(held, row, std::move(missing), *made, std::move(why)));
  }
  return StripeRow(std::move(made));
}

Status HeldFile::RestoreInto(const Held& held, uint64_t row, std::set<uint32_t> missing,
                             std::vector<std::byte>& bytes, std::string why) const {
  const StripeShape& shape = record_.shape;
  const uint64_t longest = shape.ChunkBytesOf(0, row, rank().bytes);
  std::map<uint32_t, std::span<const std::byte>> known;
  const auto piece_of = [&](uint32_t unit) {
    const uint64_t length = shape.ChunkBytesOf(unit, row, rank().bytes);
    return std::span(bytes).subspan(std::min(unit * kChunkBytes, bytes.size()), length);
  };
  for (uint32_t unit = 0; unit < shape.data; ++unit)
    if (!missing.contains(unit)) known[unit] = piece_of(unit);
  std::vector<std::vector<std::byte>> parity;
  parity.reserve(shape.parity);
  for (uint32_t unit = shape.data; unit < shape.units() && known.size() < shape.data; ++unit) {
    parity.emplace_back(longest);
    if (ReadUnit(held, unit, row, parity.back(), why)) known[unit] = parity.back();
  }
  if (known.size() < shape.data) {
    return Fail(ErrorCode::kDataLoss,
                StrCat("row ", row, ": ", known.size(), " of ", shape.units(),
                       " units can be read, ", shape.data, " are needed", why));
  }
  std::vector<std::byte> restored(longest);
  for (const uint32_t unit : missing) {
    CKPT_RETURN_IF_ERROR(code_->Restore(known, unit, restored));
    const auto to = piece_of(unit);
    std::copy_n(restored.begin(), to.size(), to.begin());
    const Digest digest = record_.ChunkOf(unit, row);
    if (WrongChunkOf(to, std::span(&digest, 1))) {
      return Fail(ErrorCode::kDataLoss,
                  StrCat("row ", row, ": unit ", unit, " is not what its record says"));
    }
  }
  return {};
}

Status HeldFile::FetchUnit(uint32_t unit, uint64_t row, std::span<std::byte> out) const {
  CKPT_CHECK(code_);
  const StripeShape& shape = record_.shape;
  std::string why;
  CKPT_ASSIGN_OR_RETURN(const StripeRow bytes, RowOf(held(), row, why));
  const auto chunk = [&](uint32_t i) {
    const uint64_t length = shape.ChunkBytesOf(i, row, rank().bytes);
    return std::span(*bytes).subspan(std::min(i * kChunkBytes, bytes->size()), length);
  };
  if (unit < shape.data) {
    std::copy_n(chunk(unit).begin(), out.size(), out.begin());
    return {};
  }
  std::fill(out.begin(), out.end(), std::byte{0});
  for (uint32_t i = 0; i < shape.data; ++i) code_->Fold(i, chunk(i), unit - shape.data, out);
  const Digest digest = record_.ChunkOf(unit, row);
  if (!WrongChunkOf(out, std::span(&digest, 1))) return {};
  return Fail(ErrorCode::kDataLoss,
              StrCat(path_, ": row ", row, " does not give unit ", unit, " of its record"));
}

}  // namespace ckptfs
