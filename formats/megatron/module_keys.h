// SPDX-License-Identifier: Apache-2.0
//
// ModuleKeysOf reads from the keys of a torch_dist directory how they name what the modules have.
// A view of the step has the same keys.
//
// Thread safety: pure functions.

#pragma once

#include "core/model/step_facts.h"
#include "formats/dcp/metadata.h"

namespace ckptfs::megatron {

// Objects of which a part is missing are passed over.
ModuleKeys ModuleKeysOf(const dcp::DcpMetadata& metadata);

}  // namespace ckptfs::megatron
