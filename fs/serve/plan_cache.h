// SPDX-License-Identifier: Apache-2.0
//
// PreparedPlan is a file that can be read: its plan, the step it reads from
// and the blobs whose change would spoil it.  PlanCache keeps those that were
// opened last, within a bound of memory.
//
// Thread safety: PreparedPlan is immutable; PlanCache is internally
// synchronised and holds no lock while a plan is made.
// Lifetime: a PreparedPlan keeps its step; open files keep their PreparedPlan.
// Units: bytes.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/view/plan.h"
#include "core/view/plan_reader.h"
#include "fs/filesystem.h"
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
  // Blobs that some byte may come from, sorted.
  const std::vector<BlobIndex>& blobs() const { return blobs_; }
  uint64_t MemoryBytes() const;

 private:
  const std::shared_ptr<const MountedStep> step_;
  const Plan plan_;
  const PlanReader reader_;
  const std::string path_;
  std::vector<BlobIndex> blobs_;
};

// Blobs that bytes of `plan` may come from: those of its blob segments and all
// those of its atoms' sources.
std::vector<BlobIndex> BlobsOf(const Plan& plan, const StepModel& model);

class PlanCache {
 public:
  explicit PlanCache(uint64_t limit) : limit_(limit) {}

  std::shared_ptr<const PreparedPlan> Find(InodeNumber inode);
  // Returns the one that is kept: an earlier one if there is one by now.
  std::shared_ptr<const PreparedPlan> Insert(InodeNumber inode,
                                             std::shared_ptr<const PreparedPlan> plan);
  // Forget the plans of a removed step.
  void DropStep(const Digest& manifest);

  uint64_t bytes() const;
  size_t size() const;

 private:
  struct Kept {
    InodeNumber inode{};
    std::shared_ptr<const PreparedPlan> plan;
    uint64_t bytes = 0;
  };
  using Order = std::list<Kept>;  // used last first

  const uint64_t limit_;
  mutable Mutex mutex_;
  Order order_ GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, Order::iterator> places_ GUARDED_BY(mutex_);
  uint64_t bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace ckptfs
