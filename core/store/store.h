// SPDX-License-Identifier: Apache-2.0
//
// Store keeps the manifests of committed steps and small records (names, tags,
// deletions) in a Storage.  A step exists exactly when its record has been
// published (and not its deletion); nothing else needs to be intact for that.  A
// local SQLite catalogue is a cache over the records and is rebuilt when absent
// or damaged.
//
//   format                  version and identity of the store
//   manifests/<digest>      one immutable manifest per step (store-format.md)
//   runs/<run>/<n>          record: the root that the run's name belongs to
//   runs/<run>/<n>.settled  record: no step of another root is in the run
//   steps/<run>/<id>/<n>    record: digest, iteration, mtime, source path
//   deleted/<run>/<id>/<n>  record: that step is gone (records.h says what n is)
//   prepared/..., nodes/... what daemons do together (core/records/commit_records.h)
//   blobs/...               store-owned blobs (--link, --copy)
//   blobs/.../<n>.digests   those of one blob's chunks (core/blob/chunk_list.h)
//   blobs/side/...          copies of small pieces (side_blobs.h)
//   holds/<digest>          locks on blobs in work (blob_directories.h)
//   catalogue.sqlite        the cache
//
// Thread safety: all methods may be called concurrently, also by several
// processes on one store.
// Lifetime: loaded steps are shared and outlive their removal.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/digest.h"
#include "core/base/names.h"
#include "core/base/result.h"
#include "core/io/root.h"
#include "core/model/step_model.h"
#include "core/records/step_record.h"

namespace ckptfs {

// A side blob on its way into a step (WithSideBlob).
struct SideBlob {
  Blob blob;  // access is the caller's to fill in
  std::string root;
  std::shared_ptr<const void> hold;  // while it lives no sweep removes the blob
};

// A step came, or became another one under its name, or went.
struct StepChange {
  std::string run;
  std::string id;
  std::optional<StepRecord> record;  // nothing: it is gone
  StepPlace place = StepPlace::kStep;
};

// Another name of a step of a run, that a user gave it.
struct StepTag {
  std::string name;
  std::string id;   // of the step when it was tagged
  Digest unpacked;  // its identity (StepRecord::unpacked)
};

// The changes since a caller last asked.
struct StepNews {
  uint64_t generation = 0;          // the argument of the next call
  bool all = false;                 // `changes` is all there is: what it does not name is gone
  std::vector<StepChange> changes;  // in order
};

// A manifest that was put into the store before its step is published.
struct PutStep {
  StepModel model;
  RenderedStep rendered;
  std::shared_ptr<const void> hold;  // while it lives nobody takes the manifest for a dead one
};

class BlobStream;       // core/store/blob_stream.h
class Root;             // core/io/root.h
class PresenceWatch;    // core/records/node_presence.h
struct CollectRequest;  // core/store/collect.h
struct CollectReport;

// A loaded, verified step.
struct Step {
  StepRecord record;
  StepModel model;
  std::shared_ptr<const void> hold;  // keeps what it needs of the store from being removed
  // Where a step that is only in memory has its bytes, by the model's roots.
  std::map<std::string, std::shared_ptr<const Root>> roots = {};
};

class Store {
 public:
  // `directory` on local disk; created (0700 if new) when `create`, else
  // kNotFound where there is no store.  kInvalid for a directory that holds
  // something else: nothing is written there.
  static Result<std::unique_ptr<Store>> Open(const std::string& directory, bool create);
  // Over any storage: what Open does with that of a directory.  One that holds no
  // store yet becomes one when `create`.  `directory`: where it lies on local
  // disk, for the catalogue and for holding side blobs; empty: nowhere.
  static Result<std::unique_ptr<Store>> OpenOn(std::shared_ptr<Storage> storage, bool create = true,
                                               std::string directory = {});
  ~Store();

  // The model's manifest here.  `unpacked`: of the same step before it had a side
  // blob, if that is known; else it is rendered, too.
  Result<RenderedStep> Render(const StepModel& model, std::optional<Digest> unpacked = {}) const;

  // Make `model` a step of `run`, at once or not at all, durably.  If the very
  // same manifest, but for side blobs, is there already under that name, that
  // record is returned.
  // Another step of the same id is replaced, if asked for or provisional, and from the same
  // source, at once: at any moment one of them is there.  Else the new one becomes
  // "<id>-<attempt>" (attempt from 1).
  // kExists if the run's name belongs to another root (of which steps are left).
  // Costs the same however many steps there are.
  // REQUIRES: `rendered` is of the model.
  Result<StepRecord> Publish(std::string_view run, const StepModel& model,
                             const RenderedStep& rendered, const std::string& source,
                             const std::string& root, const PublishHow& how = {});
  // As `id` if that is free or this very step's, else as above.
  Result<StepRecord> PublishAs(std::string_view id, std::string_view run, const StepModel& model,
                               const RenderedStep& rendered, const std::string& source,
                               const std::string& root, const PublishHow& how = {});
  Result<StepRecord> Publish(std::string_view run, const StepModel& model,
                             const std::string& source, const std::string& root,
                             const PublishHow& how = {});
  // Puts the manifest into the store, durably, for a step that is published later, by
  // whomever.  REQUIRES: until that is recorded elsewhere, the result is held.
  Result<std::shared_ptr<const void>> Put(const RenderedStep& rendered);
  // Finds the step put under that digest: kNotFound if none was; kDataLoss if it is damaged.
  Result<PutStep> FindPut(const Digest& manifest);
  // A provisional step is one for good.  Nothing if it is gone, or another one by now.
  Status Confirm(const StepRecord& record);
  // The same step with its bytes elsewhere: `rendered`, which is of `model`, takes the place of the
  // manifest that `record` names, at once.  kNotFound if the step is gone, kStale if another took
  // its place.  REQUIRES: `rendered.unpacked` is the record's.
  Result<StepRecord> Replace(const StepRecord& record, const StepModel& model,
                             const RenderedStep& rendered);
  // The record that Publish would return without publishing, if any.
  Result<std::optional<StepRecord>> FindPublished(std::string_view run, std::string_view id,
                                                  const RenderedStep& rendered);

  // A new blob of the store's own, at `path` in blobs().
  Result<std::unique_ptr<StorageWriter>> CreateBlob(std::string_view path);
  // A blob whose bytes are still coming in: BlobStreams::Begin.
  std::shared_ptr<BlobStream> StreamBlob(const std::string& path, uint64_t size,
                                         std::weak_ptr<const void> owner);
  // The bytes of `blob.path` in `bytes` are the store's own then: what is left of its stream, or
  // all (CopyOwnedBlob).  BLOCKS: on writing them.
  // So is the file with its digests, where it has one.
  Status StoreBlob(const Root& bytes, const Blob& blob);
  // Writes the list of digests of a blob in blobs(), if it has one (core/blob/chunk_list.h).
  Status PutChunkList(const Blob& blob);
  // Writes those of the model's own blobs whose digests are too many for its manifest, which has
  // the lists' from then on.  REQUIRES: what holds these blobs.
  Status PutChunkLists(StepModel& model);

  // Where CreateBlob of this path writes stays as long as the result lives, though no step
  // names it yet; null where that is not a directory of its own.
  Result<std::shared_ptr<const void>> HoldBlobs(std::string_view path);

  // Store the bytes of a side blob, durably.  Hold the result until the step is
  // published.  kExhausted if there is no space.
  Result<SideBlob> PutSideBlob(std::string_view bytes);
  // Remove side blobs that no step needs: of removed steps that nobody has open,
  // and of adopts that were killed.
  Status Sweep();

  Result<std::vector<std::string>> Runs();                      // sorted
  Result<std::vector<StepRecord>> Steps(std::string_view run);  // oldest first (IsOlder)
  // `id`, "latest" or a tag; a step's own id goes before a tag.  A record that cannot be
  // read is an error for its own id and for "latest".  kStale for a tag whose step was replaced by
  // another one, kNotFound if it is gone.
  Result<StepRecord> Resolve(std::string_view run, std::string_view id);
  // kDataLoss if the manifest fails its digest.  A side blob that is missing or
  // another is done without, and noted.
  // BLOCKS: on reading and checking it, unless somebody holds the step.
  Result<std::shared_ptr<const Step>> Load(const StepRecord& record);
  // Returns the time of a save of a run of snapshots: `time`, or later than all steps of the
  // run, whatever clocks do.  Looks at others' steps when another job than before saves.
  int64_t SaveTimeOf(const std::string& run, const std::string& job, int64_t time);
  // As long as the result lives the step is not collected, nor what it needs; as if it was
  // loaded.  Null if it is gone.
  std::shared_ptr<const void> Hold(const StepRecord& record);
  // The name is gone at once; what it needed is reclaimed by a later Collect.
  // kNotFound if it is gone already.
  Status Remove(const StepRecord& record);
  // The run's tags, sorted by name; none of a run that is not there.
  Result<std::vector<StepTag>> Tags(std::string_view run);
  // The step has the name, too, from now on, and another one that had it does not.  kInvalid for
  // what is not a name, kExists if a step is called so.
  Status Tag(const StepRecord& record, std::string_view name);
  // kNotFound if there is no such tag.
  Status Untag(std::string_view run, std::string_view name);
  // All steps of a run, and its tags, get another run's name, one step after the other: a call
  // that was killed is finished by the same call.  Returns how many steps there were.  kExists if
  // there is such a run, or the run is getting another name.
  Result<uint64_t> RenameRun(std::string_view run, std::string_view name);

  // Removes the steps that a policy does not keep, and reclaims the manifests and blobs of
  // the store's own that no step needs any more, or never did: those of removed steps, and
  // of processes that were killed.  A held step stays: one that is loaded, and files that are
  // being written; so does all that a record or manifest which cannot be read might need.
  // Files outside of the store are not touched.
  // Safe beside publishers and others that collect; killed at any moment it leaves a sound
  // store.  BLOCKS: on the disk.
  Result<CollectReport> Collect(const CollectRequest& request);

  // Notice what other processes published since; of one step, which costs the
  // same however many there are.  A store that is away, or another one in its
  // place, is an error (kIo) and changes nothing.
  Status Refresh();
  Status RefreshStep(std::string_view run, std::string_view id);

  // The steps that came and went since the News that said `generation`; 0: everything.
  // Steps whose record cannot be read are not among them.
  Result<StepNews> News(uint64_t generation);

  const std::string& directory() const;  // empty unless on local disk
  // The storage below, for records that are not about steps (core/commit).
  const std::shared_ptr<Storage>& storage() const;
  // Returns the other daemons that are at work, as far as this process has seen.
  PresenceWatch& presences();
  std::string blobs() const;  // where its own blobs are; empty likewise

  struct State;  // store_state.h

 private:
  explicit Store(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// CheckName of a step's; "latest" is taken.
Status CheckStepId(std::string_view id);

}  // namespace ckptfs
