// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/prepared_plan.h"

namespace ckptfs {

PreparedPlan::PreparedPlan(std::shared_ptr<const MountedStep> step, ShownPlan shown,
                           std::string path)
    : step_(std::move(step)),
      shown_(std::move(shown)),
      reader_(shown_.plan, *shown_.step, step_->blobs()),
      path_(std::move(path)),
      blobs_(shown_.plan.Blobs(*shown_.step, BlobUse::kAny)),
      read_(shown_.plan.Blobs(*shown_.step, BlobUse::kRead)) {}

uint64_t PreparedPlan::MemoryBytes() const {
  return sizeof(*this) + shown_.plan.MemoryBytes() + path_.size() +
         (blobs_.size() + read_.size()) * sizeof(BlobIndex);
}

}  // namespace ckptfs
