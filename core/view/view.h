// SPDX-License-Identifier: Apache-2.0
//
// View is one step in one layout, as one framework's files: names and sizes
// without rendering anything, plans on demand.  It is opened by a ViewFormat
// (view_format.h) and keeps the ShownState that it spells.
//
// Paths are relative to view/<layout>/, '/'-separated, and begin with what the
// format owns there ("rank0/model.pt" or "deepspeed/latest").
//
// Thread safety: immutable or internally synchronised; all methods may be
// called concurrently.
// Lifetime: independent of its format; plans it returns own their literals and
// refer to the step by index.
// Units: bytes.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/view/plan.h"

namespace ckptfs {

// How the readers of a file go through it, as far as its format knows.
enum class Reading : uint8_t {
  kRandom,  // in any order, or nothing is known
  kMapped,  // mapped: processes share the pages
  // From start to end into the reader's own memory; some readers map instead.
  kCopied,
  // As kCopied, once per process and never mapped: what it takes to have it at
  // hand again would be wasted.
  kOnce,
};

// The reading that a file's name suggests where no format says it (source files as they are).
Reading GuessReading(std::string_view file_name);

struct ViewEntry {
  enum class Type { kFile, kDirectory, kSymlink };
  std::string name;  // last path component
  Type type = Type::kFile;
  uint64_t size = 0;                   // exact; of a symlink: the length of its target
  std::string target;                  // kSymlink
  Reading reading = Reading::kRandom;  // kFile

  static ViewEntry Folder(std::string_view name) {
    return {std::string(name), Type::kDirectory, 0, "", Reading::kRandom};
  }
  static ViewEntry File(std::string_view name, uint64_t size, Reading reading) {
    return {std::string(name), Type::kFile, size, "", reading};
  }
};

// kNotFound: a view does not have the path.
tl::unexpected<Error> NotInView(std::string_view path);

// A plan with the step whose atoms and blobs it names.
struct ShownPlan {
  Plan plan;
  std::shared_ptr<const StepModel> step;
};

class View {
 public:
  // `step`: the model that the view's plans refer to: the stored one, or that one under the names
  // of another dialect.
  explicit View(std::shared_ptr<const StepModel> step) : step_(std::move(step)) {}
  virtual ~View() = default;

  const std::shared_ptr<const StepModel>& step() const { return step_; }

  // Entries of a directory; "" is view/<layout>/ itself (only what this format
  // puts there).  kNotFound if this view has no such directory.
  virtual Result<std::vector<ViewEntry>> List(std::string_view directory) const = 0;

  // One path; as List, but without listing its siblings.
  virtual Result<ViewEntry> Find(std::string_view path) const = 0;

  // A file's plan; its size equals Find's.
  virtual Result<Plan> MakePlan(std::string_view file) const = 0;

  // The parts of the step that this view's files do not have though their reader might count on
  // them: a line each, in the view's own words.
  virtual std::vector<std::string> LeftOut() const { return {}; }

  // Heap bytes of what was derived, the ShownState apart, once everything was
  // asked for: what bounds a cache of views.
  virtual uint64_t MemoryBytes() const = 0;

 private:
  const std::shared_ptr<const StepModel> step_;
};

}  // namespace ckptfs
