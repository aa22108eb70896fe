// SPDX-License-Identifier: Apache-2.0
//
// ViewFormat is the seam for what a layout looks like in one framework's
// files: names and sizes without rendering anything, plans on demand, or the
// reason why not.
//
// Paths are relative to view/<layout>/, '/'-separated, and begin with what the
// format owns there ("rank0/model.pt" or "deepspeed/latest").
//
// Thread safety: stateless or internally synchronised; all methods may be
// called concurrently.
// Lifetime: returned plans own their literals.
// Units: bytes.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"
#include "core/view/plan.h"

namespace ckptfs {

struct ViewEntry {
  enum class Type { kFile, kDirectory, kSymlink };
  std::string name;  // last path component
  Type type = Type::kFile;
  uint64_t size = 0;   // exact; of a symlink: the length of its target
  std::string target;  // kSymlink
  // The framework's loader reads it from start to end, once per process: what
  // it takes to have it at hand again would be wasted.
  bool read_once = false;
};

class ViewFormat {
 public:
  virtual ~ViewFormat() = default;

  virtual std::string_view name() const = 0;  // "rank", "deepspeed"

  // Whether this step can be shown so; the error is the reason why not and
  // what would settle it (a flag, a family line, another layout).
  virtual Status Supports(const StepModel& step, const Layout& layout) const = 0;

  // Entries of a directory; "" is view/<layout>/ itself (only what this format
  // puts there).  kNotFound if this format has no such directory.
  virtual Result<std::vector<ViewEntry>> List(const StepModel& step, const Layout& layout,
                                              std::string_view directory) const = 0;

  // One path; as List, but without listing its siblings.
  virtual Result<ViewEntry> Find(const StepModel& step, const Layout& layout,
                                 std::string_view path) const = 0;

  // A file's plan; its size equals Find's.
  virtual Result<Plan> MakePlan(const StepModel& step, const Layout& layout,
                                std::string_view file) const = 0;
};

}  // namespace ckptfs
