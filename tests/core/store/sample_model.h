// SPDX-License-Identifier: Apache-2.0
//
// Models for the store's tests: a small one in which every field of a manifest
// has a value of its own, and the index of a very large step.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/model/step_model.h"
#include "core/store/store.h"

namespace ckptfs::testing_support {

// Every source kind, relation, role and table occurs.
StepModel SampleModel();

// The sample with what version 2 says of it: one file is the store's own, below
// its blob directory.
StepModel OwnedModel(const std::string& blobs);

// A step of `atoms` parameters over `ranks` ZeRO-3 ranks, three states each,
// whose record offsets shift with the width of the rank's number.
StepModel LargeModel(uint32_t atoms, uint32_t ranks);

// A step that differs from others of the same id by `seed` alone.
StepModel TinyModel(const std::string& id, uint64_t iteration, int64_t mtime_ns, uint64_t seed = 0);

// The steps that the news are of, in order: "s3", "-s3" if it is gone.
std::vector<std::string> NamesOf(const StepNews& news);

}  // namespace ckptfs::testing_support
