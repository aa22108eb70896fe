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
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "snapshot/capture.h"
#include "snapshot/copier.h"
#include "snapshot/protocol.h"
#include "snapshot/snapshot_link.h"
#include "snapshot/source_samples.h"

namespace ckptfs {

inline constexpr std::string_view kWritten = " was written before the update";
// Why a save is dropped for which there are too few free chunks, and what helps.
inline constexpr std::string_view kNoRoom = "the arena is full of steps that are still being written";
inline constexpr std::string_view kMakesRoom =
    ": the store takes them more slowly than the job saves; more slots=, a daemon with --spool, fewer "
    "saves, or full='wait' would help";

struct SaveJob {
  using Clock = std::chrono::steady_clock;

  CaptureFile file;
  SourceSamples samples = {};
  uint64_t attempt = 0;
  std::shared_ptr<SnapshotLink> link;
  std::vector<uint32_t> chunks;
  size_t copied = 0;  // chunks whose bytes are in the arena
  size_t sent = 0;
  Clock::time_point end = Clock::time_point::max();  // dropped if it is not over by then
  bool waited = false;                               // for room
  bool interrupted = false;                          // while it did, or waited for a daemon
  // Under the writer's mutex:
  bool safe = false;         // its memory may change
  bool ended = false;        // all is handed over, or it is dropped
  std::string failure = {};  // why it is dropped

  uint64_t ChunkBegin(size_t i) const { return i * link->shape().payload_bytes(); }
  uint64_t ChunkEnd(size_t i) const {
    return std::min(file.bytes(), ChunkBegin(i) + link->shape().payload_bytes());
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

  // What chunk `i` is made of, as CaptureFile::Runs has it.
  std::vector<MemoryCopy> Copies(size_t i, bool lazy) const {
    const uint64_t begin = ChunkBegin(i);
    const std::span<std::byte> payload = link->arena().Payload(chunks[i]);
    std::vector<MemoryCopy> copies;
    for (const CopyRun& run : file.Runs(begin, ChunkEnd(i), lazy)) {
      copies.push_back({run.from, payload.data() + (run.at - begin), run.bytes, run.device});
    }
    return copies;
  }

  SnapshotMessage Message(SnapshotWord word) const {
    SnapshotMessage message{word};
    message.step = file.capture().step;
    message.attempt = attempt;
    return message;
  }
};

}  // namespace ckptfs
