// SPDX-License-Identifier: Apache-2.0
//
// ModelStates is the content of one model_states file (engine.py _common_checkpoint_state
// and _save_moe_checkpoint of 0.19.7; older files lack keys), extracted so that its
// tree can be dropped.
//
// Thread safety: values; ReadModelStates is pure but for reading the file.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/digest.h"
#include "core/model/step_model.h"
#include "formats/deepspeed/torch_optimizer.h"
#include "formats/sharding/sharding_info.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::deepspeed {

struct NamedShape {
  std::string name;
  Shape shape;
  bool operator==(const NamedShape&) const = default;
};

// Stage 0 keeps its optimizer here.
struct UnshardedOptimizer : TorchOptimizer {
  enum class Form {
    kPlain,    // a torch optimizer: states of whole parameters, the weights are the masters
    kFused,    // FP16_Optimizer: one flat fp32 tensor per group
    kUnfused,  // FP16_UnfusedOptimizer: an fp32 tensor per parameter
  };
  Form form = Form::kPlain;
  std::vector<FileTensor> flat_masters;                    // kFused: per group
  std::vector<std::vector<FileTensor>> parameter_masters;  // kUnfused: per group
};

struct ModelStates {
  std::string file;
  BlobIndex blob{};
  bool has_module = false;            // false: a PipelineModule, weights are in layer files
  std::vector<NamedTensor> module;    // in order; (0,)-shaped where stage 3 holds no weight
  std::vector<std::string> left_out;  // entries of the module that are not tensors at all
  std::vector<std::string> buffers;   // as the file names them; without names, as they look
  bool names_buffers = false;         // it has a list of them
  bool has_shapes = false;
  std::vector<std::vector<NamedShape>> groups;  // param_shapes: per group or sub-group
  std::vector<NamedShape> frozen;
  std::vector<NamedTensor> frozen_fragments;
  std::vector<std::pair<std::string, std::string>> shared;  // alias, stored name
  std::optional<UnshardedOptimizer> optimizer;
  bool sharded = false;              // an optimizer of which every rank has a part in a file
  std::optional<ShardingInfo> info;  // universal_checkpoint_info
  std::map<std::string, int64_t> variables;  // the integers of client state's args
  uint64_t global_steps = 0;                 // the skipped ones too
  uint64_t skipped_steps = UINT64_MAX;       // of these; not recorded
  uint64_t dp_world = 0;                     // 0: not recorded, as mp_world; then the files tell
  uint64_t mp_world = 0;
  uint32_t pp_degree = 0;  // 0: not recorded
  uint32_t tp_degree = 0;
  bool experts_first = false;  // use_data_before_expert_parallelism
  bool auto_experts = false;   // AutoEP: DeepSpeed replaced the model's expert layers
  std::string ds_version;
  std::string config_dtype;  // "bf16", "fp16", "fp32": what ds_config enables
  Digest ds_config;
  Digest shapes;                    // of param_shapes and frozen_param_shapes
  std::vector<Document> documents;  // scope ""
};

struct ModelStatesWanted {
  bool names = true;  // module, shapes, optimizer, info
  bool documents = true;
};

// kInvalid names the file and the key.
Result<ModelStates> ReadModelStates(const TorchFile& file, BlobIndex blob,
                                    const ModelStatesWanted& wanted);

// A file that is one dict of tensors: layer and expert files.
Result<TensorDict> ReadTensorDict(const TorchFile& file, BlobIndex blob);

}  // namespace ckptfs::deepspeed
