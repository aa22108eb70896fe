// SPDX-License-Identifier: Apache-2.0
//
// WorldCommit is how one daemon makes steps together with others that share its store,
// each of which has some ranks of a job (commit_records.h says what is written):
//
//   1. each says which ranks it has.  The daemon with rank 0, the leader, gathers that in one
//      record, which all others read.  When all ranks of the world are known, the digest of
//      their lives tells this life of the job from any other of the same name;
//   2. each makes the files of its ranks durable, then publishes one part: their sizes and
//      digests;
//   3. the daemon with rank 0 reads all parts, puts the manifest, which is the same whoever
//      makes it, into the store, and publishes the outcome if it is absent: the step is
//      decided.  From here on collectors keep the manifest, and all files that it names.  Or
//      somebody publishes that it is dropped.  One of them wins, for all.  Others only glance
//      whether it is decided;
//   4. the step is published and, with it, what became of the attempt.  Another daemon goes
//      on when those before it have gone;
//   5. each removes its part when it has seen that, and the one that published what is left.
//
// A save costs each daemon the same few calls, however many there are; only the leader, and who
// goes on in its place, lists and reads what others wrote.
//
// Nothing is decided by a clock; times are shown only.  Parts of different attempts, lives,
// worlds or steps never make a step.
//
// Thread safety: one thread at a time.
// Lifetime: the store must outlive it.

#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/commit/kept_files.h"
#include "core/model/step_model.h"
#include "core/records/commit_records.h"
#include "core/records/node_presence.h"
#include "core/store/store.h"

namespace ckptfs {

// Where the ranks of a job are.
struct JobWorld {
  std::optional<Digest> life;                 // once all are known
  std::map<uint32_t, std::string> elsewhere;  // other daemons' ranks, and their hosts
};

// The state of an attempt, as far as this daemon knows.
struct AttemptNews {
  enum class State {
    kWaiting,
    kDecided,  // it becomes a step, which somebody has still to publish
    kDurable,
    kDropped,
  };
  State state = State::kWaiting;
  bool whole = false;                  // kWaiting, kDecided: only to be published
  std::set<uint32_t> missing;          // kWaiting: ranks whose parts are not there
  std::set<uint32_t> passed;           // of them, those that are in a later save already
  std::map<uint64_t, uint64_t> later;  // attempts of such saves, and their steps
  std::optional<StepRecord> record;    // kDurable, unless the step is gone again
  bool published = false;              // kDurable: by this call
  std::string why;                     // kDropped
};

class WorldCommit {
 public:
  using Clock = std::chrono::steady_clock;
  // The model of rank files, by rank, below the store's blobs.
  using ModelOf = std::function<Result<StepModel>(const std::shared_ptr<const Root>& blobs,
                                                  const std::vector<std::string>& paths)>;
  WorldCommit(Store& store, ModelOf model_of, std::chrono::milliseconds beat = kBeat);
  ~WorldCommit();

  // Says that this daemon has those ranks of a job (more than before, or the same), and finds
  // the others, of daemons that work: with rank 0 from what each says, else from what the leader
  // gathered.  kExists if two have a rank of the same number of two lives, or ranks of two
  // worlds, or one is of an older build.  The host is filled in.
  Result<JobWorld> Join(NodeRanks mine);
  void Leave(const std::string& run, const std::string& job);
  // Writes again what this daemon gathered and somebody removed as a dead daemon's.  Called
  // every few seconds.
  Status KeepWorlds();

  // Makes this daemon's part durable: the files, which `bytes` has under PathOf, and its
  // record.  Nothing if the attempt is decided.  Files that an earlier daemon prepared just so
  // are not written again, but each daemon has a record of its own: while that is there, what
  // became of the attempt is not forgotten.  kExists if something else is there of one of its
  // ranks.  May be tried again.
  Status Prepare(PreparedPart part, const Root& bytes);
  // Forgets our part of an attempt that turned out to be a step already.
  void Withdraw(const AttemptName& name);

  // Returns what became of the attempt; with `publish` makes it a step if it is whole.
  // Forgets our part of one that is decided.  Reads all parts of it, each once.
  Result<AttemptNews> Look(const AttemptName& name, bool publish);
  // The same of one that is over; nothing of another.  Looks at two names.
  Result<std::optional<AttemptNews>> Glance(const AttemptName& name);
  // True if nobody is before this daemon in publishing the attempt: the daemons whose parts
  // begin with lower ranks than ours (all others, if we have none) have gone.  The one with rank
  // 0 need not ask.  Reads presences until one is not gone.
  Result<bool> IsOurTurn(const AttemptName& name);
  // Drops the attempt.  An earlier decision counts.
  Result<AttemptNews> Drop(const AttemptName& name, uint64_t step, const std::string& why);

  // Forgets what is left of our own attempts.  The first of the daemons that work also goes on
  // with what others left: whole attempts whose records have been the same for `quiet`.  True if
  // it finds that some other daemon seems to be gone.
  Result<bool> FinishOthers(Clock::time_point now, Clock::duration quiet);

  const Digest& node() const { return said_.node(); }
  // This daemon's own presence; its methods may be called concurrently.
  PresenceSaid& presence() { return said_; }

 private:
  struct Names;  // of one attempt, as listed
  struct Left {  // of others, as FinishOthers has seen it
    std::set<std::string> names;
    Clock::time_point since;
  };
  using Job = std::pair<std::string, std::string>;

  Status Say(const NodeRanks& mine);
  Result<JobWorld> Gather(const NodeRanks& mine);
  // kExists if a daemon that works has ranks of the job and cannot make steps with this build.
  Status CheckNoOlderBuild(const NodeRanks& mine);
  Result<JobWorld> ReadWorld(const NodeRanks& mine);
  // True if this daemon wrote the record of the job's world.
  bool IsMyWorld(const std::string& run, const std::string& job) const;
  Result<Names> NamesOf(const AttemptName& name) const;
  Result<const PreparedPart*> PartAt(const std::string& path);
  Result<std::map<uint32_t, const PreparedPart*>> PartsOf(const Names& names);
  struct Later;  // saves of the job, in some node's part
  Result<Later> SavesAfter(const AttemptName& name);
  Result<AttemptNews> Waiting(const AttemptName& name, const Names& names, const Later& later,
                              bool publish);
  // A part may have nothing there, its files with another daemon's record, or all of it.
  enum class Prepared { kNothing, kFiles, kAll };
  // The part gets the time of what is there.
  Result<Prepared> WhatIsPrepared(PreparedPart& part);
  // Keeps in `holds` what it points into.
  Result<StepModel> ModelOfParts(const std::map<uint32_t, const PreparedPart*>& parts,
                                 BlobHolds& holds);
  // Decides that the parts become a step, and makes them one.
  Result<AttemptNews> Publish(const AttemptName& name,
                              const std::map<uint32_t, const PreparedPart*>& parts);
  // Makes the step that was decided.  kNotFound if its manifest is not in the store: an older
  // build decided it.
  Result<AttemptNews> Finish(const AttemptOutcome& outcome);
  Result<AttemptNews> PublishPut(const AttemptName& name, uint64_t step, const PutStep& put);
  Status Decide(const AttemptOutcome& outcome, std::optional<AttemptOutcome>& decided);
  AttemptNews Dropped(const AttemptOutcome& outcome);
  Result<AttemptNews> Done(const AttemptName& name);
  void Forget(const std::string& path);
  void Prune(const std::string& folder) const;
  void ForgetPart(const AttemptName& name);
  // Forgets what became of an attempt that is a step, unless somebody has still to see it.
  bool ForgetDone(const AttemptName& name);
  void ForgetDrops(Clock::time_point now);
  Result<bool> IsFirst();
  Result<bool> AnyGone(const std::vector<std::string>& names);
  Result<bool> HasGone(const Digest& other);
  Result<bool> HasTurn(const std::vector<std::string>& parts);

  Store& store_;
  const ModelOf model_of_;
  PresenceSaid said_;
  std::map<Job, NodeRanks> joined_;    // the ranks that were said last
  std::map<Job, WorldRecord> worlds_;  // that we gathered
  std::map<Job, std::shared_ptr<const void>> joined_holds_;
  std::map<std::string, PreparedPart> parts_;          // parts that were read, by path
  std::map<AttemptName, std::set<std::string>> ours_;  // our parts' paths
  std::map<std::string, Left> left_;                   // by the attempt's folder
  std::set<AttemptName> published_;                    // by us; not forgotten yet
  std::map<AttemptName, Clock::time_point> drops_;     // by us, since when
  bool marked_ = false;                                // LayoutMarks are there
};

// A rank's file of a part, as CopyOwnedBlob takes it.
Blob FileOf(const PreparedPart& part, const PreparedRank& rank);
// kDataLoss if the rank's file there is of another size than the part says.
Status CheckFile(const Root& root, const PreparedPart& part, const PreparedRank& rank);

// Makes the files of a model of rank files the store's own.  `ranks`: in order, whose blobs come
// first; `kept`: the blobs behind them (kept_files.h).
void OwnRankFiles(StepModel& model, const std::string& blobs, int64_t mtime_ns,
                  const std::vector<const PreparedRank*>& ranks, const std::vector<Blob>& kept);
// StepRecord::root of a run's snapshots; "/<step>" behind it is the source.
std::string SnapshotHome(const std::string& run);

}  // namespace ckptfs
