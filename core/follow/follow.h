// SPDX-License-Identifier: Apache-2.0
//
// Follower adopts the steps of a directory in which a job saves, each once nobody writes it
// any more.  How long it waits follows from how far the save is (SavePhase):
//
//   sealed              nothing of the step changed for `quiet`; or, while files of which nothing
//   is
//                       read (a log) only become longer, nothing else for `unsealed_quiet`
//   provisional         for `unsealed_quiet`
//   all but last        for `missing_quiet`; so for any in which a part of a file is
//   (".NAME.partial") begun, saved again  it is not taken
//
// Nor is a step taken while a process has a file of it open for writing, or while bytes of one
// were never written (core/io/write_traces.h), unless it is sealed.  Then it has to parse and
// cover, as always.  A step that does not is looked at again when it changes; one that later
// steps have overtaken was left behind by a save that died.  So is a directory that is named as
// the next step and has nothing of one yet.  Steps that retention removed stay what they are in
// the store.
//
// A step that nothing sealed is provisional (StepRecord) for `missing_quiet` after its last
// change.  If it is written in that time it is withdrawn, and takes its own place again later.
//
// A step that is written again under its name after that is another attempt; where its files are
// not the store's own it takes the place of the first, whose bytes are gone.
//
// It looks when it is told to and has no clock or thread of its own (mount/daemon/follow_service.h
// has).
//
// Thread safety: Look by one thread at a time.
// Lifetime: store and sources must outlive it.

#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/adopt/adopt.h"
#include "core/adopt/step_notices.h"
#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/io/file_stamp.h"
#include "core/store/store.h"

namespace ckptfs {

class Follower {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::steady_clock::duration;

  struct Options {
    AdoptOptions adopt;  // but for `refresh`, which follows from the ownership
    Duration quiet = std::chrono::seconds(1);
    Duration unsealed_quiet = std::chrono::seconds(10);
    Duration missing_quiet = std::chrono::seconds(120);
    Duration retry = std::chrono::seconds(10);  // after what may pass: no space, a device
  };

  struct Seen {
    std::vector<StepRecord> adopted;    // by iteration
    std::vector<StepRecord> withdrawn;  // provisional ones that are written again
    std::vector<StepRecord> confirmed;  // those that rested, as they were
    std::vector<std::string> said;      // each once, for the log
    Time next;                          // to look again, should nothing be heard before
    Time earliest;                      // whatever is heard: looking must not keep a machine busy
  };

  // One that is not adopted.
  struct Waiting {
    std::string id;
    std::string why;
    std::string path;          // its directory, absolute; empty while what is followed is not there
    bool left_behind = false;  // by its save: it did not change while a later step came
    bool refused = false;      // it is whole, and cannot be adopted as it is
  };

  // While nothing was adopted: what lies there instead, and what is waited for.
  struct Idle {
    std::string why;      // a line; empty once something was adopted
    bool unread = false;  // checkpoints are there, and no source reads them
  };

  // `directory`: absolute.  It need not be there yet.
  Follower(Store& store, std::string directory, Sources sources, Options options);

  const std::string& directory() const { return directory_; }

  // BLOCKS: on listing, on reading headers, on copying, on the store.
  Seen Look(Time now);
  // As of the last look: first those that are left behind.
  std::vector<Waiting> waiting() const;
  const Idle& idle() const { return idle_; }

 private:
  using Order = std::pair<uint64_t, int64_t>;  // iteration by its name, newest entry
  struct Newest {
    uint32_t life = 0;  // StepRecord::life
    Order order;
    auto operator<=>(const Newest&) const = default;
  };

  // The states of one candidate:
  //
  //   when                                    was                           is
  //   its files change                        any                           kWritten
  //   it is due, and is adopted               kWritten, kRetried, ...Behind kAdopted, or
  //   kProvisional
  //      and is malformed                     the same                      kCutOff
  //      and is refused; for what may pass    the same                      kRefused; kRetried
  //      and changes while it is read         the same                      kWritten
  //   it rests for `missing_quiet`            kProvisional                  kAdopted
  //   a later step is adopted                 kBegun, kWritten, kCutOff     kLeftBehind
  enum class State {
    kBegun,       // no more than a directory of the name
    kWritten,     // it changes, or is waited for
    kCutOff,      // malformed as it is: it waits for a change
    kRetried,     // whole as far as is known; it could not be adopted for what may pass
    kRefused,     // whole, and cannot be adopted as it is
    kLeftBehind,  // its save died, as far as is known; it is adopted if it is due nevertheless
    kProvisional,
    kAdopted,
  };

  // The state of one candidate; the map's key is its directory.
  struct Known {
    State state = State::kWritten;
    bool arrived = false;  // it was not there when a greater iteration had been adopted
    std::string id;
    uint64_t iteration = 0;
    int64_t mtime_ns = 0;
    Digest stamp;  // of its files' names, sizes and times
    Time since;    // it is as it is now, but for what grows
    Time due;      // nothing is done with it before, unless it changes
    std::string why;
    std::map<std::string, FileStamp> files;  // while it is waited for, or some of them grow
    std::set<std::string> growing;           // of them; others read them
    std::set<std::string> read;              // files that grew, and are not logs
    std::vector<uint64_t> taken;             // hashes of its files when it was adopted; sorted
    std::string last;  // the last file of the save that was adopted, as it was
    std::optional<uint64_t> last_hash;
    std::optional<StepRecord> provisional;  // its record in the store, which may have to go

    bool adopted() const { return state == State::kProvisional || state == State::kAdopted; }
    bool refused() const { return state == State::kRetried || state == State::kRefused; }
  };

  Result<ScanResult> Find();
  // A pointer to a step that is not there yet is no step, and its name nobody's.
  void DropPointers(ScanResult& found);
  Duration QuietOf(const Known& known, SavePhase phase) const;
  // How far the save is, as if the step had no files that grow.
  SaveState StateOf(const FoundStep& found, const Known& known) const;
  // True if the step is as it was, but for files that became longer.
  bool OnlyGrew(Known& known, const std::map<std::string, FileStamp>& now) const;
  // How an adopted step differs from what was adopted.  kNone: at most, files went
  // or are marked.  kSave: files that a save writes differ.  kOther: only others do.
  enum class Change { kNone, kSave, kOther };
  Change ChangeOf(const Known& known, const std::map<std::string, FileStamp>& now) const;
  // Notes what the step's files are now; true if nothing changed but that some grew.
  struct Files;
  bool Note(const StepCandidate& step, Known& known, const Files& files, Time now, Seen& seen);
  // Does what is due with a step; until when it is left alone.
  Time Visit(const FoundStep& found, Known& known, Time now, Seen& seen);
  // Until when a step that is not adopted is left alone; nothing if it can be taken.
  std::optional<Time> Wait(const SaveState& state, bool grew, Known& known, Time now) const;
  // The name of a file of which a program that copies has a part; "" without one.
  std::string PartOf(const Known& known) const;
  void Take(FoundStep found, SaveState state, Known& known, Time now, Seen& seen);
  void Refuse(Known& known, const Error& error, Time now, Seen& seen) const;
  // A provisional step is another one; is whole.
  void Withdraw(const StepCandidate& step, Known& known, Seen& seen);
  void Confirm(Known& known, Seen& seen);
  // Those of steps that are later than what was adopted: of earlier ones the rest is being deleted.
  void NoteBegun(const std::vector<BegunStep>& begun, Time now);
  // Steps that are gone, and those that are overtaken.
  void Sort(const ScanResult& found, Time now, Seen& seen);
  Idle IdleOf(const ScanResult& found) const;

  Store& store_;
  const std::string directory_;
  const Sources sources_;
  const Options options_;
  std::map<std::string, Known> known_;
  Newest newest_;  // of what was adopted, as `latest` orders it
  Idle idle_;
  bool first_ = true;
  StepNotices notices_;
  std::string unproven_;                                 // Adopted::unproven, of the last step
  std::shared_ptr<const std::set<std::string>> before_;  // names of the files of the step before
  std::shared_ptr<RunListings> listings_;                // of this look
  std::string pointer_;  // what a pointer that names no directory says; "" without one
  std::string failed_;   // why it could not look the last time
  Duration taking_{};    // of this look: it waits for a disk, and is not a reason to look away
};

}  // namespace ckptfs
