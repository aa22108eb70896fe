// SPDX-License-Identifier: Apache-2.0
//
// Store::State holds a Store's members, for the sources that implement it: opening, index and
// loading (store.cc), publishing and removing (store_publish.cc), holding and collecting
// (collect.cc).
//
// The index is built when it is first asked for, so that a process that only publishes never
// lists the store; from then on it is kept up by refreshes and by what this
// process publishes and removes itself.
//
// Thread safety: `mutex` guards what it names; no lock is held across I/O.

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/mutex.h"
#include "core/records/node_presence.h"
#include "core/store/blob_stream.h"
#include "core/store/step_changes.h"
#include "core/store/store.h"
#include "core/store/store_index.h"

namespace ckptfs {

struct Store::State {
  // The changes that this process made to the steps while a refresh may have been looking.
  struct LocalChange {
    uint64_t ticket = 0;
    StepName name;
    std::optional<Result<StepRecord>> record;  // nothing: it is gone
  };

  std::shared_ptr<Storage> storage;
  std::string directory;  // empty: not on local disk
  std::string identity;
  PresenceWatch presences;
  BlobStreams streams;

  Mutex mutex;
  StoreIndex index GUARDED_BY(mutex);
  StepChanges changes GUARDED_BY(mutex);
  uint64_t tickets GUARDED_BY(mutex) = 0;            // refreshes begun and local changes
  uint64_t installed GUARDED_BY(mutex) = 0;          // the refresh that `index` is of; 0: none yet
  int refreshing GUARDED_BY(mutex) = 0;              // refreshes in progress
  std::vector<LocalChange> local GUARDED_BY(mutex);  // since the first of those began
  std::map<std::string, std::weak_ptr<const Step>> loaded GUARDED_BY(mutex);  // by record name

  std::map<std::string, std::string> saving
      GUARDED_BY(mutex);  // the last job of SaveTimeOf, by run

  // The blobs that a manifest needs in the store's own directories.
  struct Needs {
    std::set<std::string> directories;  // below Blobs()
    bool owned = false;                 // the step's bytes are the store's, some at least
  };
  std::map<Digest, Needs> needs GUARDED_BY(mutex);  // of manifests that Collect has read

  std::string CataloguePath() const { return directory + "/catalogue.sqlite"; }
  std::string Blobs() const;  // the store's blob directory

  // kIo unless what lies here is the store that was opened.
  Status CheckPresent();

  // --- index (store.cc) ---
  // The record if the index has this very step.
  std::optional<StepRecord> Known(const StepName& name);
  // The step of that id; nothing if the run has none such.  REQUIRES: NeedIndex().
  Result<std::optional<StepRecord>> FindStep(std::string_view run, std::string_view id);
  Result<StepRecord> ResolveTag(std::string_view run, std::string_view name);  // tags.cc
  // Builds the index if there is none yet.
  Status NeedIndex();
  Status BuildIndex();
  void Install(StoreIndex fresh, uint64_t ticket) EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // This process published or removed a step, or looked at one.
  void Note(const StepName& name, std::optional<Result<StepRecord>> record);
  bool Apply(const LocalChange& change, StoreIndex& to) const;
  void Remember(const RecordTexts& added) const;

  // --- what is held and what goes (collect.cc) ---
  Result<Needs> NeedsOfManifest(const Digest& manifest);
  // True if a tag means this very step, and its bytes are the store's.
  Result<bool> IsKeptByTag(const StepRecord& record);
  // Null if it is not there, or the store is on no local disk.  BLOCKS: on who is
  // removing it.
  std::shared_ptr<const void> HoldManifest(const Digest& manifest) const;

  // --- publishing (store_publish.cc) ---
  Status PutManifest(const std::string& bytes, const Digest& digest);
  // As long as the result lives nobody takes it for one that no step needs.
  Result<std::shared_ptr<const void>> PutHeldManifest(const std::string& bytes,
                                                      const Digest& digest);
  Status ClaimRun(const std::string& run, const std::string& root);
  Status CheckOthers(const std::string& run, const std::string& root);
  Result<std::optional<StepRecord>> RecordOf(const Incarnation& live);
  bool IsSame(const std::optional<StepRecord>& there, const RenderedStep& rendered);
  // The step is gone, without a byte or an inode more: its record, and those of the steps that it
  // replaced, get their retired names.  REQUIRES: the store is on local disk.
  Status Retire(const StepName& name);
  // The same step in another run; it may be there already.
  Status PublishUnder(const std::string& run, StepRecord step);  // rename_run.cc
  Result<bool> TryRecord(const StepRecord& wanted, const Incarnation& last);
  Result<std::optional<StepRecord>> TryPublish(StepRecord wanted, const RenderedStep& rendered,
                                               const PublishHow& how);
};

}  // namespace ckptfs
