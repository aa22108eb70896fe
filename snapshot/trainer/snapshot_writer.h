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
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "snapshot/device/copier.h"
#include "snapshot/trainer/capture.h"

namespace ckptfs {

struct WriterOptions {
  std::string store;  // absolute
  std::string run;
  std::string job;  // a text that all ranks of this life of the job share
  uint32_t rank = 0;
  uint32_t world = 1;
  uint32_t slots = 2;  // snapshots that the arena shall have room for
  // For how long training is held up, by an update that waits for a copy or a save
  // that waits for room: then the snapshot is dropped.
  std::chrono::milliseconds update_limit{60'000};
  std::function<std::unique_ptr<Copier>()> make_copier;  // the host's if it is empty
  // True: a save waits for room while the arena is full of steps
  // that are being written.  False: it drops the snapshot at once.
  bool wait_for_room = false;
  // How fast memory is read for snapshots, in bytes per second, while no update waits;
  // 0: as fast as it goes.  So that copies leave room on a bus that training needs.
  uint64_t pace = 0;
  // For how long snapshots that are not durable wait for another daemon when theirs died.
  std::chrono::milliseconds away_limit{600'000};
  // For how long a save waits for a daemon that takes its time to make the arena.
  std::chrono::milliseconds welcome_limit{60'000};
};

struct WriterStatus {
  bool connected = false;
  uint64_t saves = 0;
  uint64_t durable = 0;
  uint64_t dropped = 0;
  uint64_t under_way = 0;
  uint64_t full_drops = 0;               // of the dropped ones, because the arena was full
  uint64_t full_waits = 0;               // saves that waited for room
  std::optional<uint64_t> last_durable;  // step
  std::string last_drop;                 // why; empty: none was
  uint64_t file_bytes = 0;               // of the last capture
  uint64_t arena_bytes = 0;              // of the newest arena; 0: there is none
  uint64_t pinned_bytes = 0;             // of it, page-locked for devices
  uint64_t unproved = 0;                 // saves of which a write could go unseen (save_proof.h)
  uint64_t unproved_bytes = 0;           // of the last capture: how much
  double save_seconds = 0;               // in Save, all together
  double wait_seconds = 0;               // before updates, all together
};

// How far a save of a step has come, in bytes of this rank's file.
struct WriterProgress {
  uint64_t bytes = 0;    // 0: not known (any more)
  uint64_t copied = 0;   // their memory was read
  uint64_t durable = 0;  // all at once, with those of all ranks
};

class SnapshotWriter {
 public:
  explicit SnapshotWriter(WriterOptions options);
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  // Has the daemon make an arena for saves of so many bytes, and page-locks it for devices, of
  // which `device` is one, while the caller goes on.  Without this the first save waits for
  // it.  Once, before the first save.  If there is no daemon nothing happens.
  void Expect(uint64_t bytes, int device);
  // Returns false if the snapshot was dropped.  The lazy tensors must not
  // change until WaitBeforeUpdate returned; the others may change at once.  The
  // snapshot is dropped if it is not handed over whole `limit` after this call.
  // BLOCKS: on copying what is not lazy; the first time, on the daemon, which makes
  // the arena; on room for it if it shall wait for that.
  bool Save(Capture capture, std::optional<std::chrono::milliseconds> limit = std::nullopt);
  // Drops the newest save of the step.  False if it is handed over whole already (then it
  // becomes durable), over, or unknown.
  bool Cancel(uint64_t step);
  // Drops the other ranks' parts of a save that has nothing to capture.
  // If there is no step, it only counts the drop and says it.
  // BLOCKS: the first time, on the daemon; `interrupted` as Capture has it.
  void Drop(std::optional<uint64_t> step, const std::string& why,
            const std::function<bool()>& interrupted = {});

  // BLOCKS: until all that was saved is copied, at most `limit` (update_limit).  Then it
  // drops what is not copied; or it returns false if this is not the `last` part of a wait.
  bool WaitBeforeUpdate(std::optional<std::chrono::milliseconds> limit = std::nullopt,
                        bool last = true);
  // The same on the devices: work that these streams, of all devices that are saved, are given from
  // now on comes after all copies, and the caller does not wait for these.  False if that
  // cannot be, and WaitBeforeUpdate has to be called: of the host's memory, of memory that is
  // unproved, while a graph is captured.
  // BLOCKS: until all copies are begun.
  bool HoldUpdate(std::span<const DeviceStream> streams);
  // Returns true when the newest save of the step is durable with all ranks' parts.  False if
  // it was dropped, is unknown, or the time is over; also for what was under way at Close.
  bool WaitDurable(uint64_t step, std::chrono::milliseconds timeout);

  WriterStatus status() const;
  // Returns how far the newest save of the step has come.
  WriterProgress Progress(uint64_t step) const;
  // A dry run: nothing is copied.  kInvalid as CaptureFile::Make.
  Result<SnapshotSize> SizeOf(Capture capture) const;
  // Returns what happened since the last call, in lines.  It says the same trouble once.
  std::vector<std::string> TakeLog();

  // Ends the copying and leaves.  The daemon goes on with what was handed over.
  // BLOCKS: on what is being copied.
  void Close();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ckptfs
