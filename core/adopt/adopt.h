// SPDX-License-Identifier: Apache-2.0
//
// Adopt makes a step that Scan found a step of a store: index it, compare a
// sample of its weights, take ownership of its files if asked, pack small
// pieces, publish.  It is read once.  AdoptPlace does so for all steps of a
// place, each with its own outcome.  Doing it again changes nothing.
//
// Its callers have steps to show: the command line, writes into a mount, a snapshot
// daemon.  They choose the sources.
//
// Thread safety: may be called concurrently, also by several processes.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/adopt/closed_file.h"
#include "core/adopt/own.h"
#include "core/adopt/scan.h"
#include "core/base/result.h"
#include "core/store/store.h"

namespace ckptfs {

struct AdoptOptions {
  SourceOptions source;
  ToolHints hints;
  // The run's name, whatever save directories it has; empty: named after the save
  // directory, or its parent if it is only called "checkpoints".
  std::string run;
  Ownership ownership = Ownership::kReference;
  bool pack = true;  // small pieces into a side blob
  // A sample of the weights against their masters, and that nobody writes the step's files.
  bool check = true;
  bool refuse_blank =
      false;  // by Adopt: kDataLoss where bytes were never written; else that is said
  bool provisional = false;  // StepRecord::provisional
  bool refresh = false;      // a step that changed takes the place of what it was
  // Refuse a step that has no optimizer, or of whose optimizer anything is left out.
  bool require_optimizer = false;
  std::set<uint64_t> growing =
      {};                // inodes of files of which nothing may be read: they are written
  bool arrived = false;  // NewSave::arrived
  bool notes = false;    // with `refresh`: also one of which only files changed that nothing reads
};

// The run that steps below the directory `root` belong to: `wanted` (AdoptOptions::run), or by its
// name.  kInvalid if that cannot name one.
Result<std::string> RunNameOf(const std::string& wanted, const std::string& root,
                              const ToolNames& names);

struct Adopted {
  StepRecord record;
  std::vector<std::string> warnings;
  std::vector<LeftOut> left_out;     // parts of the checkpoint that the step lacks
  std::optional<ClosedFile> closed;  // the file that hides the step from others
  std::string unproven;              // says that it may begin a life without proof (DescribeChoice)
};

// Errors: those of the source; kStale if something is read of a file that is `growing`, or a
// process has one open for writing; kDataLoss if the sample differs; those of Own and PublishStep.
// BLOCKS: on reading headers, on copying, on the store.
Result<Adopted> Adopt(Store& store, const FoundStep& found, const AdoptOptions& options);

struct AdoptReport {
  std::vector<StepRecord> steps;      // in order, the newest last
  std::vector<std::string> skipped;   // incomplete tags of a save directory
  std::vector<Error> refused;         // steps that are not adopted, by name
  std::vector<std::string> warnings;  // why optimizers are not taken, too: once for all steps
  std::vector<std::string> said;      // where the runs are, if not at the place itself
  bool whole_run = false;             // the path was a save directory, not one step's
};

// A step that a process writes is skipped, or refused if it is the place itself; one of which
// bytes were never written is taken, and that is said.
// An error if no step was adopted.
Result<AdoptReport> AdoptPlace(Store& store, const Place& place, Sources sources,
                               const AdoptOptions& options);

// A store that is opened, or made, when there is something to adopt: so that a place with
// nothing in it leaves none behind.
struct LaterStore {
  std::function<Result<Store*>()> open;
  bool fresh = false;  // it is not there yet: steps are checked before it is made
};
Result<AdoptReport> AdoptPlace(const LaterStore& store, const Place& place, Sources sources,
                               const AdoptOptions& options);

}  // namespace ckptfs
