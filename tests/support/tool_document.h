// SPDX-License-Identifier: Apache-2.0
//
// Makes the document that a step keeps of the training tool that wrote it, as
// formats/tools/tool_files.h says, without the code that writes it.
//
// Thread safety: pure function.

#pragma once

#include <string>

#include "core/model/step_model.h"
#include "formats/torch/pickle_writer.h"

namespace ckptfs::testing_support {

inline Document ToolDocument(const std::string& tool, const std::string& own) {
  PickleBuilder builder;
  const NodeId tool_key = builder.String("tool");
  const NodeId tool_value = builder.String(tool);
  const NodeId own_key = builder.String("own");
  const NodeId dict = builder.Dict({{tool_key, tool_value}, {own_key, builder.String(own)}});
  return {"training_tool", "", PrintPickle(std::move(builder).Finish(dict)).value(), {}};
}

}  // namespace ckptfs::testing_support
