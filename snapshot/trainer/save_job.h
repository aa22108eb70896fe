// SPDX-License-Identifier: Apache-2.0
//
// A SaveJob is a snapshot whose lazy part is not in the arena yet, or not handed over: what
// SnapshotWriter knows of it.
//
// Thread safety: none but where said.
// Units: bytes.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "snapshot/device/copier.h"
#include "snapshot/trainer/capture.h"
#include "snapshot/trainer/save_proof.h"
#include "snapshot/trainer/snapshot_link.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {

inline constexpr std::string_view kWritten =
    " was written before the update: code that writes it must call before_update() first";
// Why a save is dropped for which there are too few free chunks, and what helps.
inline constexpr std::string_view kNoRoom =
    "the arena is full of steps that are still being written";
inline constexpr std::string_view kMakesRoom =
    ": some ranks of the job do not save these steps, or the store takes them more slowly than the "
    "job saves, or has no space or fails: `ckptfs status` tells which; more slots=, a daemon with "
    "--spool (a tier on a local disk), fewer "
    "saves, or full='wait' would help a slow one";

struct SaveJob {
  using Clock = std::chrono::steady_clock;

  CaptureFile file;
  std::shared_ptr<TensorDigests> digests = {};  // the copying thread's
  SaveProof proof = {};
  uint64_t attempt = 0;
  std::shared_ptr<SnapshotLink> link;
  std::vector<uint32_t> chunks;
  size_t copied = 0;  // chunks whose bytes are in the arena, as the copying thread knows
  size_t sent = 0;
  // Under the writer's copy_mutex, of a save whose copies run ahead (proof.is_of_devices()): chunks
  // whose copies were begun, and how far the marks behind them reach.
  struct Begun {
    size_t chunks = 0;
    std::shared_ptr<const CopyMark> mark;
  };
  size_t begun = 0;
  std::deque<Begun> marks = {};
  Clock::time_point end = Clock::time_point::max();  // dropped if it is not over by then
  bool waited = false;                               // for room
  bool interrupted = false;                          // while it did, or waited for a daemon
  // Under the writer's mutex:
  bool safe = false;                    // its memory may change
  std::vector<DeviceStream> held = {};  // these wait for its copies, and may then change it
  bool ended = false;                   // all is handed over, or it is dropped
  std::string failure = {};             // why it is dropped

  uint64_t ChunkBegin(size_t i) const { return i * link->shape().payload_bytes(); }
  uint64_t ChunkEnd(size_t i) const {
    return std::min(file.bytes(), ChunkBegin(i) + link->shape().payload_bytes());
  }

  bool IsCopied() const { return copied == chunks.size(); }
  bool IsOver() const { return IsCopied() && sent == chunks.size(); }

  // How much of the arena has to be page-locked so that copies into these chunks are.
  uint64_t PinnedBytes() const {
    return chunks.empty() ? 0 : (*std::ranges::max_element(chunks) + 1) * link->shape().chunk_bytes;
  }
  bool IsPinned() const {
    return link->pinner() != nullptr && link->pinner()->pinned_bytes() >= PinnedBytes();
  }

  // Capture::interrupted; by the thread that saves.
  bool Interrupted() {
    const auto& ask = file.capture().interrupted;
    interrupted = interrupted || (ask && ask());
    return interrupted;
  }

  // Capture::changed.
  std::string Changed(bool all) const {
    const auto& changed = file.capture().changed;
    return changed ? changed(all) : "";
  }

  // Returns the copies that fill chunk `i`, in order: those that the save waits for, or all others,
  // of which some are copies of what devices have taken.
  std::vector<MemoryCopy> Copies(size_t i, bool lazy) const {
    const uint64_t begin = ChunkBegin(i);
    const std::span<std::byte> payload = link->arena().Payload(chunks[i]);
    std::vector<MemoryCopy> copies;
    const auto add = [&](const CopyRun& run) {
      copies.push_back({run.from, payload.data() + (run.at - begin), run.bytes, run.device});
    };
    for (const CopyRun& run : file.Runs(begin, ChunkEnd(i), lazy)) {
      if (lazy || !proof.taken().Has(run.at)) add(run);
    }
    if (!lazy || proof.taken().empty()) return copies;
    for (const CopyRun& run : proof.taken().Runs(begin, ChunkEnd(i))) add(run);
    std::ranges::sort(copies, {}, &MemoryCopy::to);
    return copies;
  }

  // The key of a tensor that chunk `i`, which `copies` made, has from another moment; or "".
  std::string FindChange(size_t i, std::span<const MemoryCopy> copies) const {
    const uint64_t begin = ChunkBegin(i);
    const std::span<const std::byte> taken =
        link->arena().Payload(chunks[i]).first(ChunkEnd(i) - begin);
    const auto changed = proof.FindChange(begin, taken, copies);
    return changed ? file.KeyAt(*changed) : "";
  }
  // The same of devices' memory in chunk `i`, and the chunk's digest.  REQUIRES: in order.
  std::pair<std::string, Digest> DigestChunk(size_t i) const {
    const auto taken = link->arena().Payload(chunks[i]).first(ChunkEnd(i) - ChunkBegin(i));
    digests->Take(ChunkBegin(i), taken);
    const auto found = proof.DigestAndCompare(ChunkBegin(i), taken);
    return {found.changed ? file.KeyAt(*found.changed) : "", found.digest};
  }

  SnapshotMessage Message(SnapshotWord word) const {
    SnapshotMessage message{word};
    message.step = file.capture().step;
    message.attempt = attempt;
    return message;
  }
};

}  // namespace ckptfs
