// SPDX-License-Identifier: Apache-2.0

#include "core/peer/spread_file.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/blob/chunk_digests.h"

namespace ckptfs {
namespace {

constexpr uint32_t kOwnUnit = 0;

}  // namespace

SpreadFile::SpreadFile(PeerShelf& shelf, PeerShelf::FilePtr whole)
    : shelf_(shelf), whole_(std::move(whole)), record_(whole_->record()) {}

void SpreadFile::Cut(const StripeShape& shape) {
  CKPT_CHECK(whole_);
  shape_ = shape;
  holders_.clear();
  code_.reset();
  record_ = whole_->record();
  if (!shape.cuts()) return;
  record_.shape = shape;
  code_.emplace(shape);
  std::vector<std::byte> room(kChunkBytes);
  for (uint32_t unit = shape.data; unit < shape.units(); ++unit) {
    for (uint64_t row = 0; row < shape.RowsOf(record_.rank().bytes); ++row) {
      const uint64_t length = shape.ChunkBytesOf(unit, row, record_.rank().bytes);
      const auto chunk = std::span(room).first(length);
      ChunkOf(unit, row, chunk);
      record_.parity_chunks.push_back(DigestOf(chunk));
    }
  }
}

UnitRecord SpreadFile::RecordOf(uint32_t unit) const {
  UnitRecord record = record_;
  if (shape_->cuts()) record.unit = unit;
  return record;
}

std::set<uint32_t> SpreadFile::Missing(const std::set<Digest>& nodes) const {
  std::set<uint32_t> missing;
  for (uint32_t unit = kOwnUnit + 1; unit < shape_->units(); ++unit)
    if (shape_->UnitBytes(unit, record_.rank().bytes) != 0) missing.insert(unit);
  for (const auto& [node, unit] : holders_)
    if (nodes.contains(node)) missing.erase(unit);
  return missing;
}

std::span<const std::byte> SpreadFile::FileChunk(uint32_t unit, uint64_t row) const {
  const uint64_t length = shape_->ChunkBytesOf(unit, row, record_.rank().bytes);
  if (length == 0) return {};
  return whole_->bytes().subspan((row * shape_->data + unit) * kChunkBytes, length);
}

void SpreadFile::ChunkOf(uint32_t unit, uint64_t row, std::span<std::byte> out) const {
  if (unit < shape_->data) {
    const auto chunk = FileChunk(unit, row);
    std::copy(chunk.begin(), chunk.end(), out.begin());
    return;
  }
  std::fill(out.begin(), out.end(), std::byte{0});
  for (uint32_t i = 0; i < shape_->data; ++i)
    code_->Fold(i, FileChunk(i, row), unit - shape_->data, out);
}

PeerClient::Source SpreadFile::SourceOf(uint32_t unit, const HeldFile::AskNode& ask,
                                        std::vector<std::byte>& room) const {
  using Chunk = Result<std::span<const std::byte>>;
  if (!shape_->cuts()) {
    return [this](uint64_t at) -> Chunk {
      const auto rest = whole_->bytes().subspan(at);
      return rest.first(std::min<size_t>(rest.size(), kMaxPeerPayload));
    };
  }
  std::shared_ptr<const HeldFile> held;
  if (!whole_) {
    HeldRank rank;
    rank.shape = *shape_;
    for (const auto& [node, of] : holders_) rank.units[of].push_back(node);
    HeldFile::Places places;
    places.shelf = &shelf_;
    places.ask = ask;
    held = std::make_shared<HeldFile>(RecordOf(kOwnUnit), rank, std::move(places));
  }
  return [this, unit, held, &room](uint64_t at) -> Chunk {
    const uint64_t row = at / kChunkBytes;
    const auto chunk = std::span(room).first(shape_->ChunkBytesOf(unit, row, record_.rank().bytes));
    if (held) {
      CKPT_RETURN_IF_ERROR(held->FetchUnit(unit, row, chunk));
    } else {
      ChunkOf(unit, row, chunk);
    }
    return std::span<const std::byte>(chunk);
  };
}

Status SpreadFile::Send(uint32_t unit, const Digest& node, const HeldFile::AskNode& ask,
                        const std::function<bool(uint64_t bytes)>& paced) {
  std::vector<std::byte> room(kChunkBytes);
  const PeerClient::Source source = SourceOf(unit, ask, room);
  const UnitRecord record = RecordOf(unit);
  CKPT_RETURN_IF_ERROR(
      ask(node, [&](PeerClient& client) { return client.Offer(record, source, paced); }));
  holders_[node] = unit;
  return {};
}

Status SpreadFile::KeepUnit() {
  if (!shape_->cuts() || !whole_) return {};
  const UnitRecord record = RecordOf(kOwnUnit);
  const std::string directory = record.part.Directory();
  auto file = shelf_.Begin(record);
  if (!file && file.error().code == ErrorCode::kExhausted) return {};
  if (file) {
    const auto room = (*file)->room();
    for (uint64_t at = 0; at < room.size(); at += kChunkBytes) {
      const uint64_t row = at / kChunkBytes;
      ChunkOf(kOwnUnit, row, room.subspan(at, FileChunk(kOwnUnit, row).size()));
    }
    CKPT_RETURN_IF_ERROR(shelf_.Shelve(*std::move(file)));
  } else {
    const auto there = shelf_.Find(directory, rank(), record.slot());
    if (!there || !there->record().IsOf(record)) return Fail(std::move(file).error());
  }
  whole_ = nullptr;
  (void)shelf_.Remove(directory, rank(), 0);
  return {};
}

void SpreadFile::Protect() {
  const uint32_t slot = whole_ ? 0 : shape_->SlotOf(kOwnUnit);
  (void)shelf_.Protect(record_.part.Directory(), rank(), slot);
}

void SpreadFile::LetGo() {
  const std::string directory = record_.part.Directory();
  whole_ = nullptr;
  for (const uint32_t slot : {0u, kOwnUnit + 1}) (void)shelf_.Remove(directory, rank(), slot);
}

}  // namespace ckptfs
