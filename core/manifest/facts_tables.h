// SPDX-License-Identifier: Apache-2.0
//
// StepFacts as a table of the manifest and back.
//
// Thread safety: pure functions; none for a builder.
// Units: bytes.

#pragma once

#include <cstdint>

#include "core/base/result.h"
#include "core/manifest/tables.h"
#include "core/model/step_facts.h"

namespace ckptfs {

flatbuffers::Offset<fb::Facts> WriteFacts(TableBuilder& tables, const StepFacts& facts);

// Enums and shapes are checked; the rest is CheckFacts' (core/manifest/manifest_check.h).
Result<StepFacts> ReadFacts(const fb::Facts& table);

// No fewer bytes than WriteFacts takes.
uint64_t UpperBound(const StepFacts& facts);

}  // namespace ckptfs
