// SPDX-License-Identifier: Apache-2.0
//
// Source is the seam for reading one on-disk checkpoint format: it detects it,
// says which steps a directory holds and how far the save of each is, and indexes
// one (headers only, never tensor bytes) into an Assembler.
//
// Thread safety: stateless; all methods may be called concurrently.
// Inputs are hostile: every refusal names the file and the rule.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"
#include "core/model/family.h"
#include "core/model/step_model.h"
#include "core/state/run_listings.h"

namespace ckptfs {

// The options that the user adds to what the checkpoint says (adopt --family, ...).
struct SourceOptions {
  const FamilySet* families = nullptr;  // never null when a source is called
  std::string family;                   // forced by name; empty: chosen
  FamilyVariables variables;            // --family-set name=value
  FamilyVariables configured;  // of a config.json that --hf-config gives, for steps without one
  std::string config;          // the path of the config.json
  std::vector<std::string> replicated;  // --replicated REGEX: declared equal over tp
  std::vector<std::string> averaged;    // --averaged REGEX
  bool weights_only = false;            // --weights-only: optimizer files may be gone
  bool pieces = false;                  // one file of a model in several may be looked at by itself
  std::vector<std::string> parameter_order;  // --parameter-order: the optimizer's, by group
  std::string model;  // --model: the key of the model in its state; empty: chosen (core/state)
};

struct StepCandidate {
  std::shared_ptr<const Root> root;  // the root that it was found in
  std::string directory;  // below the root: the tag directory, or the one file that is a step
  // Below the root: what is all the step's, the tag directory or what a training tool
  // wrote around it (checkpoint-500).  Empty: `directory`.
  std::string own;
  std::string save;        // below the root: the save directory, which holds or is it
  std::string id;          // the framework's tag
  uint64_t iteration = 0;  // as far as the name tells
  int64_t mtime_ns = 0;
  bool latest = false;     // the framework's own pointer names it
  bool pointer = false;    // no step: a pointer file that names no directory, as StateOf says
  bool converted = false;  // made from another save: that one comes first
  // How many saves had its name before, as its tool marks it; the first of them is there.
  uint32_t version = 0;

  const std::string& Own() const { return own.empty() ? directory : own; }

  // For messages and records: absolute paths of local files.
  std::string Path() const { return root->PathOf(directory); }
  std::string SavePath() const { return root->PathOf(save); }
  // The prefix of its files below the save directory: "global_step5/"; "" if it is that directory.
  std::string Prefix() const {
    if (directory == save) return "";
    return directory.substr(save.empty() ? 0 : save.size() + 1) + "/";
  }
};

// How far the save of a step is, as far as its files tell (formats/tools/save_order.h has the
// rows).
enum class SavePhase {
  kAbsent,       // not a step: a pointer to none
  kBegun,        // a file that the step needs is not there, or its tool's last one
  kAllButLast,   // it can be read; what such directories' tools write last is not there
  kProvisional,  // all that it needs is there, and nothing proves that its save is over
  kResaved,      // the last file belongs to the save before (told by a caller that knows it)
  kSealed,       // the last file is there, and no file of the step is newer
};

// A file that a save writes after others, and before more of its own.
struct WrittenAfter {
  std::string path;  // below the root, as the others are
  std::vector<std::string> files;
  std::string_view order;  // "which is written after all shards"
  // The files are written together: if all of them are newer than `path`, they are of one save.
  bool together = false;
};

struct SaveState {
  SavePhase phase = SavePhase::kProvisional;
  std::string last =
      {};  // what is written last, below the root, there or not; "" where nothing tells
  std::optional<Error> missing = {};  // of kAbsent and kBegun: what, or why nobody can tell
  std::vector<WrittenAfter> after = {};

  static SaveState Begun(Error missing) { return {SavePhase::kBegun, {}, std::move(missing)}; }
  // Success unless the step cannot be read, for want of a file.
  Status Readable() const { return missing ? Status(Fail(Error(*missing))) : Status(); }
};

// Facts that a caller knows of a run: the follower's, which the run's files do not tell, and what
// was listed for other steps.
struct SaveHistory {
  // Below the root: files that only become longer.  They may be logs: that they are newer than what
  // is written last says nothing, but where that is one of them.
  std::set<std::string> growing = {};
  // The names of the files of the step before in this run: a tool may have deleted that.
  std::shared_ptr<const std::set<std::string>> before = {};
  // Shared by all steps of one look at a tree; null: the state of this one lists for itself.
  std::shared_ptr<RunListings> listings = {};
};

class Source {
 public:
  virtual ~Source() = default;
  virtual std::string_view name() const = 0;

  // The steps of a directory of `root`: all tags of a save directory, or the tag
  // directory itself; or of a file.  Steps that were only begun may be among them, and a
  // pointer to no tag.  Empty if this is not the source's format; an error if it is but
  // is broken.
  // REQUIRES: `directory` is not the root itself, which holds its save directory.
  virtual Result<std::vector<StepCandidate>> Find(const std::shared_ptr<const Root>& root,
                                                  const std::string& directory) const = 0;

  // How far its save is.  BLOCKS: on listing, on reading a header.
  virtual SaveState StateOf(const StepCandidate& step, const SourceOptions& options,
                            const SaveHistory& history) const = 0;

  // Index the step.  BLOCKS: on reading headers.
  virtual Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const = 0;
};

}  // namespace ckptfs
