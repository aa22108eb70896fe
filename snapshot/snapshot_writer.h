// SPDX-License-Identifier: Apache-2.0
//
// SnapshotWriter is the trainer's end of snapshots: one per rank.  Save takes what must
// be taken at once and returns; a thread of its own copies the rest into the daemon's
// arena while the trainer computes, and WaitBeforeUpdate returns when the memory may
// change.
//
// Nothing here fails a training job: a snapshot that cannot be taken is dropped,
// counted, and said once in TakeLog.
//
// Thread safety: all methods may be called concurrently.  In a child that was forked
// they do nothing.
// Lifetime: the destructor is Close.
// Units: bytes, seconds where said.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "snapshot/capture.h"
#include "snapshot/copier.h"

namespace ckptfs {

struct WriterOptions {
  std::string store;  // absolute
  std::string run;
  std::string job;  // what all ranks of this life of the training job share
  uint32_t rank = 0;
  uint32_t world = 1;
  uint32_t slots = 2;  // snapshots that the arena shall have room for
  // For how long an update is held up: then the snapshot is dropped.
  std::chrono::milliseconds update_limit{60'000};
  std::function<std::unique_ptr<Copier>()> make_copier;  // the host's if it is empty
};

struct WriterStatus {
  bool connected = false;
  uint64_t saves = 0;
  uint64_t durable = 0;
  uint64_t dropped = 0;
  uint64_t under_way = 0;
  std::optional<uint64_t> last_durable;  // step
  std::string last_drop;                 // why; empty: none was
  uint64_t file_bytes = 0;               // of the last capture
  double save_seconds = 0;               // in Save, all together
  double wait_seconds = 0;               // in WaitBeforeUpdate, all together
};

class SnapshotWriter {
 public:
  explicit SnapshotWriter(WriterOptions options);
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // False if it was dropped.  Until WaitBeforeUpdate returned, the lazy tensors must
  // not change; of the others nothing is needed any more.
  // BLOCKS: on copying what is not lazy; the first time, on the daemon, which makes
  // the arena.
  bool Save(Capture capture);
  // A save that there is nothing to capture of: the other ranks' parts are dropped.
  void Drop(uint64_t step, const std::string& why);

  // BLOCKS: until all that was saved is copied, no longer than update_limit.
  void WaitBeforeUpdate();
  // True when the newest save of the step is durable with all ranks' parts, false if it
  // was dropped, is unknown, or the time is over.
  bool WaitDurable(uint64_t step, std::chrono::milliseconds timeout);

  WriterStatus status() const;
  // What happened since the last call, in lines; the same trouble is said once.
  std::vector<std::string> TakeLog();

  // Ends the copying and leaves.  What was handed over goes on without us.
  // BLOCKS: on what is being copied.
  void Close();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ckptfs
