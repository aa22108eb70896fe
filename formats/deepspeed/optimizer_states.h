// SPDX-License-Identifier: Apache-2.0
//
// OptimizerStates is the content of one optim_states file, extracted so that its pickle
// tree can be dropped at once: only this stays of 1,024 rank files.  Stages 1, 2
// (stage_1_and_2.py state_dict), BF16_Optimizer (bf16_optimizer.py) and 3
// (stage3.py) come out in one form.
//
// Thread safety: values; ReadOptimizerStates is pure but for reading the file.
// Units: elements.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/digest.h"
#include "core/model/step_model.h"
#include "formats/deepspeed/names.h"
#include "formats/torch/pickle/copy_budget.h"
#include "formats/torch/stored_tensor.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::deepspeed {

// The state that DeepSpeed's Muon keeps.
inline constexpr std::string_view kMomentum = "momentum_buffer";

struct NamedScalar {
  std::string name;
  ScalarValue value;
  // A state of a kind that has its parameter's shape (IsWholeKind): the state of a 0-d parameter.
  std::optional<FileTensor> tensor = {};
};

// A state of a partition that is not taken, and the reason.
struct UnevenState {
  std::string name;
  std::string why;
};

// A flat partition (stages 1, 2) or sub-group (stage 3).
struct PartitionStates {
  std::optional<FileTensor> master;
  uint64_t padding = 0;           // stages 1, 2: what the master lacks at its end
  std::vector<NamedTensor> flat;  // of the optimizer: one-dimensional, as long as the partition
  // Muon's at stages 1, 2: flat, of the whole parameters of which the partition has a part.
  std::optional<FileTensor> momenta;
  std::vector<UnevenState> uneven;   // those that no parameter's part can be told of
  std::vector<NamedScalar> scalars;  // "step"
  std::vector<std::string> opaque;   // names kept as documents
  std::vector<std::string> nothing;  // of these: which are None
};

// The states of the partition besides its master, sorted: each state's name in
// quotes and what it is.
std::vector<std::string> StateNames(const PartitionStates& partition);

// True if a state of this shape can belong to such a parameter though the
// shapes differ: it has fewer elements (factored moments), and is not one that
// optimizers keep per element.
bool CanBeReduced(std::string_view state, const Shape& shape, const Shape& parameter);

// A snapshot's file adds this key to a group of which DeepSpeed's own does not name the members.
inline constexpr std::string_view kMemberNames = "ckptfs_member_names";

// A param_groups entry: hyper-parameters as the pickle of a dict, in which tensors of one element
// and numbers of numpy are numbers, and `param_names` is None where the members have names.
struct HyperGroup {
  std::string hyper_parameters;
  std::vector<std::string> objects;  // its keys whose values take code to load
  std::vector<std::string> tensors;  // keys that it lacks: their values hold other tensors
  NumbersOfTensors numbers;          // its keys whose values are tensors of one element
  std::string name;                  // "" unless the group has one
  bool experts = false;              // DeepSpeed's `moe`
  std::vector<int64_t> members;      // "params": indexes of states
};

// The part of a parameter in a rank's partition, as `param_slice_mappings` has it.
struct ParameterSlice {
  std::string name;
  uint64_t start = 0;  // in the partition
  uint64_t elements = 0;
};

struct OptimizerStates {
  std::string file;
  BlobIndex blob{};
  int stage = 1;         // 1, 2 or 3
  bool trimmed = false;  // masters lack group_paddings (not so in BF16_Optimizer)
  bool elastic = false;
  std::vector<uint64_t> partition_count;               // per group; stage 3: one number
  std::vector<std::vector<uint64_t>> member_paddings;  // per group; may be empty
  std::vector<PartitionStates> partitions;
  std::vector<std::vector<ParameterSlice>> slices;  // per group; only if asked for
  std::vector<HyperGroup> groups;                   // only if asked for
  std::vector<Document> documents;                  // only if asked for: scope ""
  std::vector<Document> opaque;                     // scope is the rank's
  std::string ds_version;
  Digest ds_config;
};

// The parts of a file that are read besides partitions.
struct OptimizerStatesWanted {
  bool documents = false;  // and groups: of one rank of each model-parallel rank
  bool slices = false;     // where no model states have param_shapes
};

// kInvalid names the key.
Result<OptimizerStates> ReadOptimizerStates(const TorchFile& file, BlobIndex blob,
                                            const RankKey& rank,
                                            const OptimizerStatesWanted& wanted);

// The pieces that stage 0 shares.  `budget`: of the file, for what is copied per mention.
// Tensors of one element are read of the file, and are numbers.  BLOCKS: on reading them.
Result<std::vector<HyperGroup>> ReadHyperGroups(PickleRef param_groups, const TorchFile& file,
                                                CopyBudget& budget);
// How messages write a key of a dict.
std::string KeyText(PickleRef key);
// Describes, each once, the hyper-parameters that views lack.  shown: where objects are seen
// nevertheless ("only deepspeed/ has it"); empty: nowhere.
std::vector<LeftOut> LeftOutSettings(std::span<const HyperGroup> groups, std::string_view shown);
// Tensors that are not plain ones (quantised, sparse) are kInvalid, or opaque.
enum class OtherTensors : uint8_t { kRefused, kOpaque };
Result<PartitionStates> ReadStateDict(PickleRef state, const TorchFile& file, BlobIndex blob,
                                      CopyBudget& budget,
                                      OtherTensors others = OtherTensors::kRefused);
// Digest of a value as our printer prints it, equal strings taken for one.
Result<Digest> DigestOfValue(PickleRef value);
// As MakeDocument, with the file's path in the error.
Result<Document> DocumentOf(std::string key, std::string scope, PickleRef value,
                            const TorchFile& file, BlobIndex blob);

}  // namespace ckptfs::deepspeed
