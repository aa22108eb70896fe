// SPDX-License-Identifier: Apache-2.0
//
// StoreIndex is what a store's records say: runs and their live steps.  Also
// the few look-ups in the Storage that publishing needs; each lists one run's or
// one step's names, whose number does not depend on how many steps there are.
//
// Thread safety: StoreIndex is a value; the functions may run concurrently.
// BLOCKS: the functions, on the storage.

#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"
#include "core/records/records.h"
#include "core/store/catalogue.h"
#include "core/store/store.h"

namespace ckptfs {

struct IndexedStep {
  StepName name;
  Result<StepRecord> record;  // or why it cannot be read
};

struct StoreIndex {
  // run -> id -> step; only live steps, no run without one.
  std::map<std::string, std::map<std::string, IndexedStep>> runs;
  // The newest recorded id without a live step, when this was built.
  std::vector<StepName> dead;

  // Null if there is none.
  const IndexedStep* Find(const std::string& run, const std::string& id) const;
  // A step was published, or is gone; nothing if the index knows of a later one
  // of that id.  True if that changed something.
  bool Put(IndexedStep step);
  bool Drop(const StepName& name);
};

// A record that was read before; records never change.
using KnownRecord = std::function<std::optional<StepRecord>(const StepName&)>;

// Lists the records, of one run unless that is empty, and reads those that are
// not known; `added` gets their texts.
Result<StoreIndex> BuildStoreIndex(Storage& storage, const std::string& run,
                                   const KnownRecord& known, RecordTexts& added);

// The record of a live step; it may be unreadable.  Nothing if the step is gone meanwhile.
Result<std::optional<IndexedStep>> ReadStep(Storage& storage, const StepName& name,
                                            const KnownRecord& known, RecordTexts& added);

// True if there is a deletion of it.  A record goes after that.
Result<bool> IsDeleted(const Storage& storage, const StepName& name);
// True if a step of its number was retired (records.h).
Result<bool> IsRetired(const Storage& storage, const StepName& name);

// The newest step that was published as (run, id), if any.
struct Incarnation {
  StepName name;
  bool any = false;   // some step was published so
  bool live = false;  // and the newest is not deleted
  StepName next() const { return StepName{name.run, name.id, any ? name.n + 1 : 0}; }
};
Result<Incarnation> LastIncarnation(Storage& storage, const std::string& run,
                                    const std::string& id);

// The owner of the run's name.  A claim is settled once a look at the run, taken
// after it was made, found no step of another root: until somebody claims the
// name again there will be none, since every publisher looks at the claim once
// more when its step is published.
struct Claim {
  uint64_t n = 0;
  std::string root;
  bool settled = false;
  bool old = false;  // builds can publish by it that look for used numbers among steps alone
};
Result<std::optional<Claim>> LatestClaim(Storage& storage, const std::string& run);
// Publishes that claim; kExists if another has its number.
Status PublishClaim(Storage& storage, const std::string& run, const Claim& claim);
Status SettleClaim(Storage& storage, const std::string& run, const Claim& claim);

Status PublishText(Storage& storage, std::string_view name, std::string_view text);

// ParseManifest, and that the manifest is the one of this name.
Result<StepModel> ParseNamedManifest(std::string_view bytes, const Digest& name,
                                     std::string_view blobs);

}  // namespace ckptfs
