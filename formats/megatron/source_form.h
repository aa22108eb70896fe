// SPDX-License-Identifier: Apache-2.0
//
// SourceForm is how the directory of a torch_dist step named what the step has under the module's
// names: whether each layer had keys of its own, and which objects its modules kept beside their
// tensors.  A step keeps it as a document, so that a view of it has the same keys.
//
//   kFormDocument {"layers": "stacked" | "apart", "objects": {name: [the grid of its parts]}}
//
// Thread safety: immutable values; pure functions.

#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/tensor/shape.h"
#include "formats/dcp/metadata.h"

namespace ckptfs::megatron {

inline constexpr std::string_view kFormDocument = "ckptfs.megatron";

struct SourceForm {
  bool stacked = true;
  std::map<std::string, Shape> objects;  // by name: "decoder.layers.mlp.linear_fc1._extra_state"
};

// Objects of which a part is missing are passed over.
SourceForm FormOf(const dcp::DcpMetadata& metadata);

Document DocumentOf(const SourceForm& form);
// Nothing for a step that is not of such a directory, or was adopted before this was kept.
// kInvalid if the document is not as DocumentOf makes it.
Result<std::optional<SourceForm>> SourceFormOf(const StepModel& step);

}  // namespace ckptfs::megatron
