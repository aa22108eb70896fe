// SPDX-License-Identifier: Apache-2.0
//
// The explicit list of formats this build knows.
//
// Thread safety: the returned objects are stateless or synchronised.
// Lifetime: owned by the vectors.

#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/state/source.h"
#include "core/view/view_format.h"
#include "formats/tools/model_files.h"

namespace ckptfs {

// In the order in which they are asked to detect a path.
std::vector<std::unique_ptr<Source>> MakeSources();
// `models`: files of the model for steps that do not have theirs (--hf-config).
std::vector<std::unique_ptr<ViewFormat>> MakeViewFormats(
    std::optional<ModelFiles> models = std::nullopt);

}  // namespace ckptfs
