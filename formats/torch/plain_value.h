// SPDX-License-Identifier: Apache-2.0
//
// Hyper-parameters as every reader takes them: numbers, texts and containers of them, where
// optimizers have tensors of one element (lr=torch.tensor(1e-3)) and numbers of numpy, too.
//
// Thread safety: pure but for reading the file.

#pragma once

#include <optional>
#include <string>

#include "core/base/result.h"
#include "core/tensor/dtype.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {

// The Python number that bytes of a dtype are; nothing for a dtype of no number.
// REQUIRES: as many bytes as one element has.
std::optional<NodeId> NumberNode(DType dtype, const std::string& bytes, PickleBuilder& builder);

// A copy in which tensors of one element and numbers of numpy are numbers of Python; nothing if the
// value holds another tensor, or any tensor where there is no file (null) to read.  BLOCKS: on
// reading the tensors.
Result<std::optional<NodeId>> CopyPlain(PickleRef value, const TorchFile* file,
                                        PickleBuilder& builder);

}  // namespace ckptfs
