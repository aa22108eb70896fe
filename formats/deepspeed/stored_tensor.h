// SPDX-License-Identifier: Apache-2.0
//
// FileTensor is a tensor of a torch file by where its bytes lie, so that the
// file's tree can be dropped.
//
// Thread safety: values.
// Units: shapes, strides and offsets are elements, storage_at is bytes.

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

struct FileTensor {
  BlobIndex blob{};
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<uint64_t> strides;
  uint64_t storage_elements = 0;
  uint64_t storage_offset = 0;  // of the tensor's first element
  uint64_t storage_at = 0;      // byte of the file where the storage begins
  std::string storage_key;

  uint64_t elements() const;    // REQUIRES: made by FileTensorOf
  bool contiguous() const;
  uint64_t first_byte() const;  // of the tensor's first element
  // The same bytes under another name (torch's own tying).
  bool SameBytes(const FileTensor& other) const;
};

// kInvalid unless `value` is a dense tensor whose storage is in the file;
// `what` names it.
Result<FileTensor> FileTensorOf(PickleRef value, const TorchFile& file, BlobIndex blob,
                                std::string_view what);

// `local`, which describes the tensor as row-major, as a view of its storage.
LocalTensor RestridedTo(const FileTensor& tensor, const LocalTensor& local);

// A number or a tensor of at most 64 bytes: an atom's inline value.
struct ScalarValue {
  DType dtype = DType::kF32;
  Shape shape;
  std::string bytes;  // little-endian elements
  bool python_number = false;
};

// Nothing if the value is something else.  BLOCKS: on reading the tensor.
Result<std::optional<ScalarValue>> ScalarOf(PickleRef value, const TorchFile& file,
                                            const std::string& path);

}  // namespace ckptfs::deepspeed
