// SPDX-License-Identifier: Apache-2.0
//
// One file of weights: its tensors and where their bytes lie.  The header
// of safetensors says that; in a torch file, the state_dict that is in it
// (torch_state.h).  Other content of the file becomes documents, or is said
// to be left out.  An optimizer is for the step's reader (ReadOptimizer).
//
// Thread safety: pure but for reading the file.

#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/blob/safetensors_header.h"
#include "core/io/root.h"
#include "core/model/left_out.h"
#include "core/model/step_model.h"
#include "core/state/trained_module.h"
#include "formats/torch/file_tensor.h"

namespace ckptfs::huggingface {

struct StoredWeight {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  FileTensor::Held held;  // all of it
  // Torch files: the same for names of one tensor; empty where that cannot be.
  std::string storage;
};

struct WeightsFile {
  std::vector<StoredWeight> weights;           // in the file's order
  std::map<std::string, std::string> aliases;  // second names that the file itself tells
  std::vector<std::string> left_out;           // entries that are not tensors
  std::string model;                           // of a torch file: the key of its state_dict
  std::vector<std::string> twins;              // keys of dicts of the same names and shapes
  std::vector<TrainableModule> modules;        // other models beside it
  // Keys of optimizers in a torch file: the step's reader takes or names them.
  std::vector<std::string> optimizers;
  std::vector<LeftOut> beside;      // parts of a torch file that are not taken
  std::vector<Document> documents;  // parts that are
  Digest frame;                     // of a torch file (core/blob/frame.h)
  // The offset of the tensors, in safetensors that say they are torch's.
  std::optional<uint64_t> data_offset;
};

// kInvalid names file and rule; kUnsupported for tensors of less than a byte an
// element and for files that another framework's layout is in.
// `asked`: --model, which safetensors, having one model, refuse.
// BLOCKS: on reading the header.
Result<WeightsFile> ReadWeightsFile(const Root& root, const std::string& path, BlobIndex blob,
                                    std::string_view asked);

// kInvalid names the rule.  BLOCKS: on reading it.
Result<SafetensorsHeader> ReadSafetensorsHeader(const Root& root, const std::string& path);

}  // namespace ckptfs::huggingface
