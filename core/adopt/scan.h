// SPDX-License-Identifier: Apache-2.0
//
// Scan finds the steps at a path; the ingest functions make their indexes.  Scan is cheap: it
// lists directories and asks each source whose they are.  IngestStep reads the
// headers of one step; IngestPlace those of all, in parallel, each with its own
// outcome: one that is broken refuses no other.
//
// Where a directory holds no step itself, the runs in the directories in it are
// found; folders that only hold steps ("checkpoints") count as what they lie in.
//
// A step that two sources claim is one step, the first source's; so are two
// parts of one tree, such as what one framework saved inside the directory of
// what another one saved.
//
// Thread safety: may be called concurrently.
// Lifetime: sources outlive what was found.

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/state/source.h"
#include "core/state/tool_names.h"

namespace ckptfs {

using Sources = std::span<const std::unique_ptr<Source>>;

struct FoundStep {
  StepCandidate candidate;
  const Source* source = nullptr;
  std::optional<SaveState> state = {};  // if somebody has asked for it a moment ago
};

// A directory that steps are looked for in (or a file that is one), and enough above it for a step
// that is the directory itself to lie in its save directory.
struct Place {
  std::shared_ptr<const Root> root;
  std::string directory;  // below the root

  std::string Path() const { return root->PathOf(directory); }
};

// Describes a directory or file in which no source has a step ("Megatron torch_dist: not
// readable yet").
struct Recognised {
  std::string what;
  std::optional<uint64_t> step;  // by its name a step of this number, of which `what` is missing
};
// Nothing if it is nothing known.
using Recognise =
    std::function<Result<std::optional<Recognised>>(const Root& root, const std::string& path)>;

// Facts about tools and formats that no source tells.
struct ToolHints {
  Recognise recognise;  // may be empty
  ToolNames names;
};

// A directory that is named like a step and is not one yet: a save that is under way, or died.
struct BegunStep {
  std::string directory;  // below the root
  std::string id;
  uint64_t iteration = 0;
  std::string missing;  // "no weights yet"
};

// The contents of a place.
struct ScanResult {
  std::vector<FoundStep> steps;   // in the sources' order
  std::vector<BegunStep> begun;   // named as the steps are, if there are any
  std::vector<Error> unread;      // recognised checkpoints that no source reads
  std::vector<std::string> said;  // where the runs are, if not at the place itself
};

// The place of a path of this machine, links resolved.  kInvalid if it is neither a
// directory nor a file.
Result<Place> PlaceOf(const std::string& path);
// The place of several directories that are shown as one (UnionRoot), whatever their order.
// kInvalid if one lies in another, or is not a directory.
Result<Place> PlaceOfUnion(const std::vector<std::string>& paths);

// Nothing is found when no source knows the place.  BLOCKS: on listing.
Result<ScanResult> ScanIfAny(const Place& place, Sources sources, const ToolHints& hints = {});

// "deepspeed, dcp".
std::string FormatNames(Sources sources);
// Describes a place without a step: "the directory is empty; looked for the formats deepspeed,
// dcp (...)".  BLOCKS: on listing.
std::string WhatIsThere(const Place& place, Sources sources);

// When there is no step the first of `unread`, kInvalid for one that was begun, or kNotFound,
// which says what is there and what was looked for.  BLOCKS: on listing.
Result<ScanResult> ScanPlace(const Place& place, Sources sources, const ToolHints& hints);
Result<std::vector<FoundStep>> Scan(const Place& place, Sources sources);

// The error of its save's state if the step cannot be read.  BLOCKS: on reading headers.
Result<StepModel> IngestStep(const FoundStep& found, const SourceOptions& options);

struct IngestedStep {
  StepCandidate candidate;
  StepModel model;
  const Source* source = nullptr;  // which read it
};

struct IngestResult {
  std::vector<IngestedStep> steps;   // oldest first (OrderOfSaves)
  std::vector<std::string> skipped;  // "global_step7: incomplete: file ..." of a save directory,
                                     // "checkpoint-9: not whole: no weights yet"
  std::vector<Error> refused;        // whole steps that cannot be taken, by name
  std::vector<std::string> said;     // where the runs are, if not at the place itself
};

// All steps of a place.  In a save directory incomplete steps are skipped and
// named, and malformed ones (a file that was cut off) unless the framework's
// own pointer names them.  An error if no step is left: the first there was.
Result<IngestResult> IngestPlace(const Place& place, Sources sources, const SourceOptions& options,
                                 const ToolHints& hints = {});

}  // namespace ckptfs
