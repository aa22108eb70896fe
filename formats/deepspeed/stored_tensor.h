// SPDX-License-Identifier: Apache-2.0
//
// What a value of a torch file is to a DeepSpeed reader: a tensor by where its
// bytes lie, or a scalar that is read at once.
//
// Thread safety: pure but for reading the file.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::deepspeed {

// kInvalid unless `value` is a plain dense-layout tensor whose storage is in
// the file; `what` names it.
Result<FileTensor> FileTensorOf(PickleRef value, const TorchFile& file, BlobIndex blob,
                                std::string_view what);

// A number or a tensor of at most 64 bytes: an atom's inline value.
struct ScalarValue {
  DType dtype = DType::kF32;
  Shape shape;
  std::string bytes;  // little-endian elements
  bool python_number = false;
  bool operator==(const ScalarValue&) const = default;
};

// Nothing if the value is something else.  BLOCKS: on reading the tensor.
Result<std::optional<ScalarValue>> ScalarOf(PickleRef value, const TorchFile& file,
                                            const std::string& path);

}  // namespace ckptfs::deepspeed
