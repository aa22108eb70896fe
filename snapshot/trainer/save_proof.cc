// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/save_proof.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace ckptfs {
namespace {

// A piece of a device's memory is so small that a small model keeps all of a device busy.
constexpr uint64_t kDevicePiece = 64 << 10;

}  // namespace

void SaveProof::Begin(CaptureFile& file) {
  std::vector<HostBytes> memory;
  unproved_ = 0;
  for (const CopyRun& run : file.Runs(0, file.bytes(), true)) {
    if (run.device == kHost) memory.emplace_back(run.from, run.bytes);
    if (run.device != kHost) unproved_ += run.bytes;
  }
  watch_ = memory.empty() ? nullptr : WriteWatch::Begin(memory);
  file.Narrow([&](HostBytes bytes) {
    const HostBytes covered = watch_ ? watch_->Covered(bytes) : HostBytes();
    if (covered.empty()) unproved_ += bytes.size();
    return covered.empty() ? bytes : covered;
  });
  samples_ = SourceSamples(file);
}

std::optional<uint64_t> SaveProof::FindChange(uint64_t begin, std::span<const std::byte> copied,
                                              std::span<const MemoryCopy> copies) const {
  const auto sampled = samples_.FindChange(begin, copied);
  if (sampled || !watch_) return sampled;
  for (const MemoryCopy& copy : copies) {
    if (copy.device != kHost) continue;
    const auto written = watch_->FindWritten({copy.from, copy.bytes});
    if (!written) continue;
    return begin + static_cast<uint64_t>(copy.to - copied.data()) +
           static_cast<uint64_t>(*written - copy.from);
  }
  return std::nullopt;
}

void SaveProof::Release(std::span<const MemoryCopy> copies) const {
  for (const MemoryCopy& copy : copies) {
    if (watch_ && copy.device == kHost) watch_->Release({copy.from, copy.bytes});
  }
}

Status SaveProof::BeginDevices(const CaptureFile& file, uint64_t chunk_bytes, Copier& copier) {
  std::vector<MemoryPiece> memory;
  std::vector<Piece> pieces;
  bool of_devices = true;
  const std::vector<CopyRun> runs = file.Runs(0, file.bytes(), true);
  uint64_t most = runs.size() + file.bytes() / chunk_bytes + 1;
  for (const CopyRun& run : runs) most += run.bytes / kDevicePiece;
  memory.reserve(most);
  pieces.reserve(most);
  for (const CopyRun& run : runs) {
    of_devices = of_devices && run.device != kHost;
    for (uint64_t at = 0; run.device != kHost && at < run.bytes;) {
      const uint64_t begin = run.at + at;
      const uint64_t bytes =
          std::min({kDevicePiece, run.bytes - at, chunk_bytes - begin % chunk_bytes});
      memory.push_back({run.from + at, bytes, run.device});
      pieces.push_back({begin, bytes});
      at += bytes;
    }
  }
  TakenRuns taken(file);
  if (pieces.empty() && taken.empty()) return {};
  CKPT_ASSIGN_OR_RETURN(moment_, copier.TakeMoment(memory, taken.pieces(), file.capture().streams));
  taken.Place(moment_.taken);
  taken_ = std::move(taken);
  of_devices_ = of_devices;
  for (const Piece& piece : pieces) unproved_ -= piece.bytes;
  pieces_ = std::move(pieces);
  return {};
}

SaveProof::Compared SaveProof::DigestAndCompare(uint64_t begin,
                                                std::span<const std::byte> copied) const {
  const uint64_t end = begin + copied.size();
  auto piece = std::ranges::lower_bound(pieces_, begin, {}, &Piece::at);
  if (piece == pieces_.end() || piece->at >= end) return {std::nullopt, DigestOf(copied)};
  Compared compared;
  DigestStream whole;
  uint64_t done = 0;
  for (; piece != pieces_.end() && piece->at < end && !compared.changed; ++piece) {
    const uint64_t at = piece->at - begin;
    const auto bytes = copied.subspan(at, piece->bytes);
    whole.Add(copied.subspan(done, at - done));
    const size_t index = static_cast<size_t>(piece - pieces_.begin());
    if (PieceDigestOf(bytes) != *moment_.digests[index]) compared.changed = piece->at;
    whole.Add(bytes);
    done = at + piece->bytes;
  }
  whole.Add(copied.subspan(done));
  compared.digest = whole.Finish();
  return compared;
}

}  // namespace ckptfs
