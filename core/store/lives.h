// SPDX-License-Identifier: Apache-2.0
//
// A run has lives.  A training that begins again in its directory, or goes back after a loss
// spike, saves smaller iterations later: a life begins there.  `latest` is the newest step of
// the newest life; here is the one definition of that, for everybody who asks.
//
// Two kinds of runs have two kinds of evidence for the order in which steps were saved:
//
//   snapshots          the receiving daemon gives each save a time that is later than those of
//                      all saves before it: the order of times is the order of saves
//   adopted steps      times are those of files, of other machines' clocks, and whoever copies
//                      changes them: within a life steps are ordered by iteration.  A life begins
//                      only with evidence (LifeOf), when its first step is published, and its
//                      number is in the record of each step
//
// Thread safety: pure functions, but for what LifeOf is given to look with.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/store/store.h"

namespace ckptfs {

// Begins the root of every run of snapshots; the root of any other is an absolute path.
inline constexpr std::string_view kSnapshotRoot = "snapshot:";

// True if `a` is older.  REQUIRES: both are of one run.  Snapshots: by time.  Other steps: by
// life, iteration, what was converted before what it was converted from, what is called
// last..., time, id.  The greatest is the run's latest.
bool IsOlder(const StepRecord& a, const StepRecord& b);

// A run's steps, life by life; lives and the steps of each oldest first.  No life is empty.
using Life = std::vector<StepRecord>;
std::vector<Life> SplitIntoLives(std::vector<StepRecord> steps);

// Those of a run's steps that a policy of the newest `count` keeps, in no order: the newest as
// `latest` orders them, of the newest life first, and as many of the latest times, since an
// order by iteration may lack the evidence that a life began.
std::vector<StepRecord> NewestOf(std::vector<StepRecord> steps, uint64_t count);

// ---- steps that are found together -------------------------------------------------

struct FoundSave {
  std::string_view save;  // the save directory
  uint64_t iteration = 0;
  int64_t mtime_ns = 0;
  bool converted = false;
  bool named = false;    // by the job's own pointer
  uint32_t version = 0;  // NewSave
};

// Places of the saves in the order in which they were saved, oldest first: by iteration, what was
// converted before what it was converted from, time.  Where the pointer of a save directory, or
// its version, tells of a save that it came after all of greater iterations (of earlier versions),
// as its time does, that one and what was saved between come last: the job has gone back.
std::vector<size_t> OrderOfSaves(std::span<const FoundSave> saves);

// `order`: places in `items`, each once.
template <class Item>
std::vector<Item> InOrder(std::vector<Item> items, std::span<const size_t> order) {
  std::vector<Item> sorted;
  sorted.reserve(items.size());
  for (const size_t at : order) sorted.push_back(std::move(items[at]));
  return sorted;
}

// ---- whether a save begins a life ------------------------------------------------

// The state of the path that a step was adopted from.
enum class SourceNow {
  kThere,      // something, as far as can be told
  kGone,       // nothing, though its save directory is there
  kSame,       // the save that is asked about, with the bytes that were adopted
  kRewritten,  // the save that is asked about, with other bytes
};

// Facts that are known of a save that is about to be published.
struct NewSave {
  StepRecord record;  // run, iteration, mtime_ns, converted, source and root count
  // The step that the job's own pointer (DeepSpeed's file `latest`) names, if there is one.
  struct Named {
    uint64_t iteration = 0;
    int64_t mtime_ns = 0;
  };
  std::optional<Named> named;
  // It came, sealed, while the directory was followed, after a greater iteration.
  bool arrived = false;
  // The earliest time of a file that something is read of; 0: not known.  A save writes all of
  // them: a step of which some were converted later is not another save.
  int64_t oldest_ns = 0;
  // How many saves had its name before, as Lightning marks it: "a-v1.ckpt" beside "a.ckpt".
  uint32_t version = 0;
};

// Evidence that a life begins, strongest first.
enum class LifeEvidence { kNone, kSavedAgain, kGone, kNamed, kVersion, kArrived };

struct LifeChoice {
  uint32_t life = 0;  // StepRecord::life
  LifeEvidence begins = LifeEvidence::kNone;
  std::optional<StepRecord> after;  // where one begins: the newest step of the life before
  // Where none begins: a step of the life has a later time than the one of the greatest iteration,
  // which nothing proves to be of an earlier life.  One of them is the save; it has no record yet.
  struct Doubt {
    std::optional<StepRecord> later;
    std::optional<StepRecord> greater;
  };
  std::optional<Doubt> doubt;
};

// The life of a save in a run with these steps.  One begins where all files of the save have later
// times than the newest step of its kind, its iteration is smaller, and
//   kSavedAgain  its path held a step of that number or a greater one, of other bytes; or
//   kGone        that newest step's files are gone from their place; or
//   kNamed       the job's pointer names this save, or a later one that is smaller, too; or
//   kVersion     its tool marked it as another save of a name that was there; or
//   kArrived     who follows the directory saw it come, what its tool writes last after all else.
// Otherwise it is of the newest life, or of the last one that had begun when it was saved.  So
// steps of a finished run that are adopted in any order, or copied without their times, are of
// one life.  Steps are of one kind if their ids differ in digits and versions only ("best" is
// another).  A
// save with the bytes that its path had before is of the life of that, and what was converted
// of the life of its original; neither begins one.  Nor does a save of an equal iteration: it is
// the latest by its time.
LifeChoice LifeOf(std::span<const StepRecord> steps, const NewSave& save,
                  const std::function<SourceNow(const StepRecord&)>& look);

// For the user: "run/b begins life 2: ..." or that nothing proves it; empty if there is nothing to
// tell.
std::string DescribeChoice(const StepRecord& published, const LifeChoice& choice);

}  // namespace ckptfs
