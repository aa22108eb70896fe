// SPDX-License-Identifier: Apache-2.0
//
// PreparedPlan is a file that can be read: its plan, the step it reads from, under the names of
// its view, and the blobs whose change would spoil it.
//
// Thread safety: immutable.
// Lifetime: keeps its step; open files keep their PreparedPlan.
// Units: bytes.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/view/plan.h"
#include "core/view/plan_reader.h"
#include "core/view/view.h"
#include "fs/tree/mounted_step.h"

namespace ckptfs {

class PreparedPlan {
 public:
  // REQUIRES: shown.plan.Validate(*shown.step) succeeded; `shown.step` has the blobs of `step`.
  PreparedPlan(std::shared_ptr<const MountedStep> step, ShownPlan shown, std::string path);

  const MountedStep& step() const { return *step_; }
  const StepModel& model() const { return *shown_.step; }  // that the plan refers to
  const Plan& plan() const { return shown_.plan; }
  const PlanReader& reader() const { return reader_; }
  const std::string& path() const { return path_; }  // for messages
  // Sorted: what some byte is a copy of, or comes from; and what is read.
  const std::vector<BlobIndex>& blobs() const { return blobs_; }
  const std::vector<BlobIndex>& read_blobs() const { return read_; }
  uint64_t MemoryBytes() const;

 private:
  const std::shared_ptr<const MountedStep> step_;
  const ShownPlan shown_;
  const PlanReader reader_;
  const std::string path_;
  std::vector<BlobIndex> blobs_;
  std::vector<BlobIndex> read_;
};

}  // namespace ckptfs
