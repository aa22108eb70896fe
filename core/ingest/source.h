// SPDX-License-Identifier: Apache-2.0
//
// Source is the seam for reading one on-disk checkpoint format: it detects it,
// says which steps a directory holds and whether each is complete, and indexes
// one (headers only, never tensor bytes) into an Assembler.
//
// Thread safety: stateless; all methods may be called concurrently.
// Inputs are hostile: every refusal names the file and the rule.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/model/family.h"
#include "core/model/step_model.h"

namespace ckptfs {

// What the user added to what the checkpoint says (adopt --family, ...).
struct SourceOptions {
  const FamilySet* families = nullptr;  // never null when a source is called
  std::string family;                   // forced by name; empty: chosen
  FamilyVariables variables;            // --family-set name=value
  std::vector<std::string> replicated;  // --replicated REGEX: declared equal over tp
  std::vector<std::string> averaged;    // --averaged REGEX
  bool weights_only = false;            // --weights-only: optimizer files may be gone
};

struct StepCandidate {
  std::string directory;  // absolute; the tag directory, or the one file that is a step
  std::string root;       // absolute; the save directory, which holds or is it
  std::string id;         // the framework's tag
  uint64_t iteration = 0;  // as far as the name tells
  int64_t mtime_ns = 0;
  bool latest = false;    // what the framework's own pointer names
  bool converted = false;  // made from another save: that one comes first

  // Of its files below the root: "global_step5/", "" where it is the root.
  std::string Prefix() const {
    if (directory == root) return "";
    return directory.substr(root.size() + (root.ends_with('/') ? 0 : 1)) + "/";
  }
};

class Source {
 public:
  virtual ~Source() = default;
  virtual std::string_view name() const = 0;

  // The steps of `path`: all tags of a save directory, the tag directory itself,
  // or a file.  What Complete will refuse may be among them, a pointer to no tag,
  // too.  Empty if this is not the source's format; an error if it is but is
  // broken.
  virtual Result<std::vector<StepCandidate>> Find(const std::string& path) const = 0;

  // Success if every file the step needs is there; else which is missing.
  virtual Status Complete(const StepCandidate& step, const SourceOptions& options) const = 0;

  // Index the step.  BLOCKS: on reading headers.
  virtual Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const = 0;
};

}  // namespace ckptfs
