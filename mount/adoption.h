// SPDX-License-Identifier: Apache-2.0
//
// Adopt turns a path into steps of a store: index it, take ownership of the
// files if asked, pack small pieces, publish every step.  Doing it again
// changes nothing.
//
// Thread safety: may be called concurrently, also by several processes.

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/ingest/ingest.h"
#include "core/store/store.h"
#include "mount/ownership.h"

namespace ckptfs {

// How a user asks for names and rules of what is read (adopt, info, explain).
struct IngestRequest {
  std::string path;
  std::string family;                     // a name or a file of rules
  std::vector<std::string> family_set;    // "name=value"
  std::vector<std::string> replicated;    // regular expressions
  std::vector<std::string> averaged;
  bool weights_only = false;              // optimizer files may be gone
};

struct AdoptRequest {
  IngestRequest ingest;
  std::string name;  // of the run; empty: the save directory's base name
  Ownership ownership = Ownership::kReference;
  bool pack = true;  // small pieces into a side blob
};

struct AdoptOutcome {
  std::vector<StepRecord> steps;     // in order, the newest last
  std::vector<std::string> skipped;  // incomplete tags of a save directory
  std::vector<std::string> warnings;
  bool whole_run = false;            // the path was a save directory, not one step's
};

// "heads=32"; kInvalid if it is not written so.
Result<std::pair<std::string, int64_t>> ParseFamilyVariable(const std::string& word);

// Index without publishing.  BLOCKS: on reading headers.
Result<IngestResult> IngestRequested(const IngestRequest& request);

Result<AdoptOutcome> Adopt(Store& store, const AdoptRequest& request);

}  // namespace ckptfs
