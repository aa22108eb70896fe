// SPDX-License-Identifier: Apache-2.0
//
// IngestRequest and AdoptRequest hold what a user asks of adopt: the words of the command line,
// and the options of core/adopt that they become.
//
// Thread safety: may be called concurrently, also by several processes.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/adopt/adopt.h"
#include "core/base/result.h"
#include "core/store/store.h"

namespace ckptfs {

// How a user asks for names and rules of what is read (adopt, info, explain).
struct IngestRequest {
  std::string path;
  std::string link;                     // the link that led to `path`; "" without one
  std::vector<std::string> joined;      // directories that are one with `path` (adopt --union)
  std::string family;                   // a name or a file of rules
  std::vector<std::string> family_set;  // "name=value"
  std::string hf_config;                // a directory with a config.json, for steps without one
  std::vector<std::string> replicated;  // regular expressions
  std::vector<std::string> averaged;
  bool weights_only = false;    // optimizer files may be gone
  std::string parameter_order;  // a file of names
  std::string model;            // a key of a saved state
};

struct AdoptRequest {
  IngestRequest ingest;
  std::string name;  // of the run; empty: the save directory's base name
  Ownership ownership = Ownership::kReference;
  bool pack = true;      // small pieces into a side blob
  bool check = true;     // a sample of the weights against their masters
  bool refresh = false;  // replace a step that changed
  std::string require;   // "optimizer": refuse a step without it; "": nothing
};

// "heads=32"; kInvalid if it is not written so.
Result<std::pair<std::string, int64_t>> ParseFamilyVariable(const std::string& word);

// Index without publishing.  BLOCKS: on reading headers.
Result<IngestResult> IngestRequested(const IngestRequest& request);

// The store in `directory` (absolute), which is made when the first step is adopted.
// Thread safety: one thread at a time.
class StoreForAdoption {
 public:
  explicit StoreForAdoption(std::string directory);
  const std::string& directory() const { return directory_; }
  bool fresh() const { return fresh_ && !store_; }
  Result<Store*> Open();
  // Null if nothing was adopted into a store that was not there.
  std::unique_ptr<Store> Take() { return std::move(store_); }

 private:
  const std::string directory_;
  const bool fresh_;
  std::unique_ptr<Store> store_;
};

// Success if anything at the path could be adopted.  The command asks this of several paths
// before it adopts the first.  `store`: its directory.  BLOCKS: on listing.
Status CheckRequested(const std::string& store, const AdoptRequest& request);

// The options for AdoptPlace and a Follower.  `families` gets the family of a file, and must
// outlive the options.  `store`: its directory.  kUnsupported if the path lies in a mount of
// this very store.
Result<AdoptOptions> AdoptOptionsOf(const std::string& store, const AdoptRequest& request,
                                    FamilySet& families);

// AdoptPlace; kUnsupported if the path lies in a mount of this very store.
Result<AdoptReport> AdoptRequested(StoreForAdoption& store, const AdoptRequest& request);

}  // namespace ckptfs
