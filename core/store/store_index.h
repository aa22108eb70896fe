// SPDX-License-Identifier: Apache-2.0
//
// StoreIndex is what a store's records say at one moment: runs, their live
// steps, and the texts already read.  Also the few look-ups in the Storage that
// publishing needs.
//
// Thread safety: immutable once built; the functions may run concurrently.
// BLOCKS: the functions, on the storage.

#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/blob/storage.h"
#include "core/store/catalogue.h"
#include "core/store/records.h"
#include "core/store/store.h"

namespace ckptfs {

struct IndexedStep {
  StepName name;
  Result<StepRecord> record;  // or why it cannot be read
};

struct StoreIndex {
  // run -> id -> step; only live steps, no run without one.
  std::map<std::string, std::map<std::string, IndexedStep>> runs;
  RecordTexts texts;  // of those records
};

// Lists the records and reads those that `known` does not have; `added` gets
// their texts.
Result<StoreIndex> BuildStoreIndex(Storage& storage, const StoreIndex& known, RecordTexts& added);

// The newest step that was published as (run, id), if any.
struct Incarnation {
  StepName name;
  bool any = false;   // some step was published so
  bool live = false;  // and the newest is not deleted
  StepName next() const { return StepName{name.run, name.id, any ? name.n + 1 : 0}; }
};
Result<Incarnation> LastIncarnation(Storage& storage, const std::string& run,
                                    const std::string& id);

// Whose the run's name is.
struct Claim {
  uint64_t n = 0;
  std::string root;
};
Result<std::optional<Claim>> LatestClaim(Storage& storage, const std::string& run);

// A whole object; kInvalid above `limit` bytes.
Result<std::string> ReadObject(Storage& storage, std::string_view name, uint64_t limit);
Status PublishText(Storage& storage, std::string_view name, std::string_view text);

// ParseManifest, and that the manifest is the one of this name.
Result<StepModel> ParseNamedManifest(std::string_view bytes, const Digest& name);

}  // namespace ckptfs
