// SPDX-License-Identifier: Apache-2.0
//
// PreparedPlan is a file that can be read: its plan, the step it reads from
// and the blobs whose change would spoil it.
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
#include "fs/tree/mounted_step.h"

namespace ckptfs {

class PreparedPlan {
 public:
  // REQUIRES: plan.Validate(step->model()) succeeded.
  PreparedPlan(std::shared_ptr<const MountedStep> step, Plan plan, std::string path);

  const MountedStep& step() const { return *step_; }
  const Plan& plan() const { return plan_; }
  const PlanReader& reader() const { return reader_; }
  const std::string& path() const { return path_; }  // for messages
  // Sorted: what some byte is a copy of, or comes from; and what is read.
  const std::vector<BlobIndex>& blobs() const { return blobs_; }
  const std::vector<BlobIndex>& read_blobs() const { return read_; }
  uint64_t MemoryBytes() const;

 private:
  const std::shared_ptr<const MountedStep> step_;
  const Plan plan_;
  const PlanReader reader_;
  const std::string path_;
  std::vector<BlobIndex> blobs_;
  std::vector<BlobIndex> read_;
};

}  // namespace ckptfs
