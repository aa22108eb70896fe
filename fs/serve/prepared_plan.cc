// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/prepared_plan.h"

namespace ckptfs {

PreparedPlan::PreparedPlan(std::shared_ptr<const MountedStep> step, Plan plan, std::string path)
    : step_(std::move(step)),
      plan_(std::move(plan)),
      reader_(plan_, step_->model(), step_->blobs()),
      path_(std::move(path)),
      blobs_(plan_.Blobs(step_->model(), BlobUse::kAny)),
      read_(plan_.Blobs(step_->model(), BlobUse::kRead)) {}

uint64_t PreparedPlan::MemoryBytes() const {
  return sizeof(*this) + plan_.MemoryBytes() + path_.size() +
         (blobs_.size() + read_.size()) * sizeof(BlobIndex);
}

}  // namespace ckptfs
