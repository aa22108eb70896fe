// SPDX-License-Identifier: Apache-2.0
//
// The explicit list of formats this build knows.
//
// Thread safety: the returned objects are stateless or synchronised.
// Lifetime: owned by the vectors.

#pragma once

#include <memory>
#include <vector>

#include "core/ingest/source.h"
#include "core/view/view_format.h"

namespace ckptfs {

// In the order in which they are asked to detect a path.
std::vector<std::unique_ptr<Source>> MakeSources();
std::vector<std::unique_ptr<ViewFormat>> MakeViewFormats();

}  // namespace ckptfs
