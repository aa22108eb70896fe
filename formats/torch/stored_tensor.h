// SPDX-License-Identifier: Apache-2.0
//
// A value of a torch file as a source takes it: a tensor by where its bytes lie, a
// scalar that is read at once, or a dict of tensors (a state_dict).
//
// Thread safety: pure but for reading the file.

#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/state/state_dict.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {

// kInvalid unless `value` is a plain dense-layout tensor whose storage is in
// the file; `what` names it.
Result<FileTensor> FileTensorOf(PickleRef value, const TorchFile& file, BlobIndex blob,
                                std::string_view what);

// Nothing if the value is something else.  BLOCKS: on reading the tensor.
Result<std::optional<ScalarValue>> ScalarOf(PickleRef value, const TorchFile& file);

struct NamedTensor {
  std::string name;
  FileTensor tensor;
};

// A dict of tensors, in order, and the names of what is not a tensor at all
// (_extra_state and the like).
struct TensorDict {
  std::vector<NamedTensor> tensors;
  std::vector<std::string> left_out;
};

// REQUIRES: `dict` is a dict of `file`.
Result<TensorDict> TensorDictOf(PickleRef dict, const TorchFile& file, BlobIndex blob);

// Describes entries of a module that are not tensors.  REQUIRES: names has one.
LeftOut LeftOutEntries(const std::set<std::string>& names);
// The same of any number of them.
void LeaveOutEntries(const std::set<std::string>& names, StepModel& header);

}  // namespace ckptfs
