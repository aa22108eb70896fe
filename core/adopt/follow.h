// SPDX-License-Identifier: Apache-2.0
//
// Follower adopts the steps of a directory in which a job saves, each once nobody writes it
// any more:
//
//   what the format writes last is there   nothing of the step changed for `quiet`; or, while
//                                          files of which nothing is read (a log) only become
//                                          longer, nothing else for `unsealed_quiet`
//   nothing tells                          for `unsealed_quiet`
//   it is not there, and others write it   for `missing_quiet`
//
// and it parses and covers, as always.  A step that does not is looked at again when it changes;
// one that later ones have overtaken was left behind by a save that died.  So is a directory that
// is named as the next step and has nothing of one yet.  Steps that retention
// removed stay what they are in the store.
//
// A step that is written again under its name is another attempt; where its files are not
// the store's own it takes the place of the first, whose bytes are gone.
//
// It looks when it is told to and has no clock or thread of its own (mount/follow_service.h has).
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
    std::vector<StepRecord> adopted;  // by iteration
    std::vector<std::string> said;    // each once, for the log
    Time next;                        // to look again, should nothing be heard before
    Time earliest;                    // whatever is heard: looking must not keep a machine busy
  };

  // One that is not adopted.
  struct Waiting {
    std::string id;
    std::string why;
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

  // Of one candidate, by its directory.
  struct Known {
    std::string id;
    uint64_t iteration = 0;
    int64_t mtime_ns = 0;
    Digest stamp;               // of its files' names, sizes and times
    Time since;                 // it is as it is now, but for what grows
    std::map<std::string, FileStamp> files;  // while it is waited for, or some of them grow
    std::set<std::string> growing;           // of them; others read them
    std::set<std::string> read;              // that grew, and are not logs
    std::vector<uint64_t> taken;  // hashes of its files when it was adopted; sorted
    std::string last;             // what the save that was adopted wrote last, as that was
    std::optional<uint64_t> last_hash;
    bool settled = false;       // adopted or refused as it is
    bool adopted = false;
    bool left_behind = false;
    bool refused = false;       // though it is whole
    bool begun = false;         // no more than a directory of the name
    bool arrived = false;       // it was not there when a greater iteration had been adopted
    std::string why;
    Time retry;
  };

  Result<ScanResult> Find();
  // A pointer to a step that is not there yet is no step, and its name nobody's.
  void DropPointers(ScanResult& found);
  Duration QuietOf(const Known& known, Seal seal) const;
  // The step as if it had no files that grow.
  static StepCandidate WithoutGrowing(StepCandidate step, const Known& known);
  // Whether that is the step as it was, but for files that became longer.
  static bool OnlyGrew(Known& known, const std::map<std::string, FileStamp>& now);
  // What a step that was adopted differs in from what was adopted: in nothing but that files went
  // or are marked, in what a save writes, in other files.
  enum class Change { kNone, kSave, kOther };
  static Change ChangeOf(const Known& known, const std::map<std::string, FileStamp>& now);
  // Whether the save of a step that is written again under its name goes on: what it writes last is
  // that of the save that was adopted.
  static bool GoesOn(const Known& known, const StepCandidate& step);
  // Until when the step is left alone; nothing if it can be taken.
  std::optional<Time> Wait(const FoundStep& found, Known& known, Time now);
  void Take(const FoundStep& found, Known& known, Time now, Seen& seen);
  void Refuse(Known& known, const Error& error, Time now, Seen& seen);
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
  LeftOutNotice left_out_;
  ClosedFileNotice closed_;
  std::shared_ptr<const std::set<std::string>> before_;  // names of the files of the step before
  std::string unproven_;  // Adopted::unproven, of the last step
  std::string pointer_;  // what a pointer that names no directory says; "" without one
  std::string failed_;   // why it could not look the last time
};

}  // namespace ckptfs
