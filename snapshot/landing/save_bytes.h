// SPDX-License-Identifier: Apache-2.0
//
// SaveBytes is the files of a save that waits for its store, wherever they are: in arenas at
// first, then on a disk of this node (core/commit/spool.h).  They are the same bytes under the
// same names, so their readers (a view, the copy into the store) do not notice the move.
//
// Thread safety: all methods may be called concurrently, once Add is no longer.
// Lifetime: arenas are let go of when the files are on the disk and nobody is in the middle of
// a read of them; files on the disk are open as long as this is or a File of it.
// Units: bytes.

#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/io/memory_root.h"
#include "core/io/root.h"
#include "core/records/commit_records.h"
#include "snapshot/landing/received_step.h"

namespace ckptfs {

class SaveBytes final : public Root {
 public:
  enum class Moves {
    kMay,    // to a disk: files in memory are not mapped, since they could not move then
    kNever,  // there is none
  };
  // Makes a save without ranks so far.
  SaveBytes(AttemptName name, uint64_t step, uint32_t world, Moves moves = Moves::kMay);
  static std::shared_ptr<SaveBytes> Of(ReceivedPart part, Moves moves);
  // Adds a rank's file, ascending by rank; takes its rope, lease and shelve.
  Status Add(uint32_t rank, ReceivedFile& file);
  // Opens a save that an earlier daemon left on a disk.
  static Result<std::shared_ptr<SaveBytes>> OnDisk(PreparedPart part, const Root& disk);

  // Returns the save's name, which has a life, and its ranks.
  const PreparedPart& part() const { return part_; }
  bool on_disk() const { return on_disk_; }
  // True if an earlier daemon left it.
  bool left() const { return left_; }
  // True if an earlier daemon may have stored it, or prepared this daemon's part.
  bool may_be_stored() const { return left_ || again_; }
  // Moves it to the disk: from now on all is read from there.  On an error it is where it was.
  Status MoveTo(const Root& disk);
  // Called when the daemon ends: reads of what is on the disk
  // fail, so that nobody waits for a copy into the store.
  void End() { *ending_ = true; }
  // Leaves it to the next daemon to store it.
  void Leave() { stays_ = true; }
  bool stays() const { return stays_; }

  Result<std::vector<RootEntry>> List(std::string_view path) const override;
  Result<EntryStat> Stat(std::string_view path) const override;
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override;

 private:
  struct Place;
  class MovingFile;
  using Places = std::map<std::string, std::shared_ptr<Place>, std::less<>>;  // by path
  Result<Places::const_iterator> Find(std::string_view path) const;

  PreparedPart part_;
  const Moves moves_;
  bool left_ = false;
  bool again_ = false;  // a rank has handed over its file before
  std::unique_ptr<MemoryRoot> memory_;
  Places places_;
  std::vector<std::function<void(const std::string&)>> shelve_;
  std::atomic<bool> on_disk_{false};
  std::atomic<bool> stays_{false};
  const std::shared_ptr<std::atomic<bool>> ending_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace ckptfs
