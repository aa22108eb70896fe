// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/model_states.h"

#include <algorithm>
#include <array>

#include "core/base/strings.h"
#include "core/state/roles.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/deepspeed/state_dict_names.h"

namespace ckptfs::deepspeed {
namespace {

// Top-level keys that become atoms, or are rebuilt from them.
constexpr std::array<std::string_view, 8> kModelStructure = {
    "module",        "buffer_names",           "optimizer", "param_shapes", "frozen_param_shapes",
    "shared_params", "frozen_param_fragments", "folding"};

bool IsOneOf(std::string_view name, const auto& list) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

constexpr uint64_t kMaxModelRanks = uint64_t{1} << 20;

// A tensor that is not a plain one is refused: left out, its weight would be
// shown as a cast of the master, and a buffer not at all.
// The value of a key, which must be a dict if it is there and not None.
Result<PickleRef> DictOf(PickleRef root, std::string_view key) {
  const PickleRef value = root[key];
  if (!value || value.IsNone()) return PickleRef();
  if (value.IsDict()) return value;
  return Fail(ErrorCode::kInvalid, StrCat("'", key, "' is not a dict that can be read"));
}

Result<PickleRef> SequenceOf(PickleRef root, std::string_view key) {
  const PickleRef value = root[key];
  if (!value || value.IsNone()) return PickleRef();
  if (value.IsSequence()) return value;
  return Fail(ErrorCode::kInvalid, StrCat("'", key, "' is not a list"));
}

Result<std::vector<NamedShape>> Shapes(PickleRef dict, CopyBudget& budget) {
  std::vector<NamedShape> out;
  if (!dict.IsDict()) return Fail(ErrorCode::kInvalid, "the shapes of a group are not a dict");
  for (const auto& [key, value] : dict.Items()) {
    const auto name = key.String();
    CKPT_RETURN_IF_ERROR(budget.Charge(1 + value.size()));
    CKPT_RETURN_IF_ERROR(budget.ChargeText(key));
    const auto shape = value.AsShape();
    if (!name || !shape) return Fail(ErrorCode::kInvalid, "a parameter's shape is not a shape");
    CKPT_RETURN_IF_ERROR(ElementCount(*shape));
    out.push_back(NamedShape{std::string(*name), *shape});
  }
  return out;
}

Status ReadNames(PickleRef root, const TorchFile& file, CopyBudget& budget, ModelStates& out) {
  CKPT_ASSIGN_OR_RETURN(const PickleRef module, DictOf(root, "module"));
  if (module) {
    out.has_module = true;
    CKPT_ASSIGN_OR_RETURN(TensorDict dict, TensorDictOf(module, file, out.blob));
    out.module = std::move(dict.tensors);
    out.left_out = std::move(dict.left_out);
  }
  CKPT_ASSIGN_OR_RETURN(const PickleRef buffers, SequenceOf(root, "buffer_names"));
  out.names_buffers = static_cast<bool>(buffers);
  for (size_t i = 0; buffers && i < buffers.size(); ++i) {
    const auto name = buffers.at(i).String();
    CKPT_RETURN_IF_ERROR(budget.Charge(1 + name.value_or("").size()));
    if (!name) return Fail(ErrorCode::kInvalid, "'buffer_names' holds something else than names");
    out.buffers.emplace_back(*name);
  }
  CKPT_ASSIGN_OR_RETURN(const PickleRef groups, SequenceOf(root, "param_shapes"));
  out.has_shapes = static_cast<bool>(groups);
  for (size_t i = 0; out.has_shapes && i < groups.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(auto shapes, Shapes(groups.at(i), budget));
    out.groups.push_back(std::move(shapes));
  }
  CKPT_ASSIGN_OR_RETURN(const PickleRef shared, DictOf(root, "shared_params"));
  for (const auto& [alias, stored] :
       shared ? shared.Items() : std::vector<std::pair<PickleRef, PickleRef>>()) {
    if (alias.String() && stored.String())
      out.shared.emplace_back(*alias.String(), *stored.String());
  }
  return {};
}

Status ReadFrozen(PickleRef root, const TorchFile& file, CopyBudget& budget, ModelStates& out) {
  CKPT_ASSIGN_OR_RETURN(const PickleRef frozen, DictOf(root, "frozen_param_shapes"));
  if (frozen) {
    CKPT_ASSIGN_OR_RETURN(out.frozen, Shapes(frozen, budget));
  }
  CKPT_ASSIGN_OR_RETURN(const PickleRef pieces, DictOf(root, "frozen_param_fragments"));
  if (pieces) {
    CKPT_ASSIGN_OR_RETURN(TensorDict dict, TensorDictOf(pieces, file, out.blob));
    out.frozen_fragments = std::move(dict.tensors);
  }
  return {};
}

// Files of old engines do not name the buffers.
void InferBuffers(ModelStates& out) {
  if (out.names_buffers) return;
  std::set<std::string, std::less<>> parameters;
  const auto add = [&](const std::vector<NamedShape>& shapes) {
    for (const NamedShape& entry : shapes) {
      parameters.insert(entry.name);
      parameters.insert(InStateDict(entry.name));
    }
  };
  for (const auto& group : out.groups) add(group);
  add(out.frozen);
  std::set<std::string, std::less<>> names;
  for (const NamedTensor& entry : out.module) names.insert(entry.name);
  const auto has = [&](std::string_view name) { return names.contains(name); };
  for (const NamedTensor& entry : out.module) {
    const FileTensor& tensor = entry.tensor;
    if (parameters.contains(entry.name)) continue;
    if (LooksLikeBuffer(entry.name, tensor.dtype(), tensor.shape(), has))
      out.buffers.push_back(entry.name);
  }
}

// A number of ranks; 0 if it is not recorded.
Result<uint32_t> Degree(PickleRef dict, std::string_view key) {
  const PickleRef value = dict[key];
  if (!value || value.IsNone()) return 0;
  const auto number = value.Int();
  if (number && *number >= 0 && static_cast<uint64_t>(*number) <= kMaxModelRanks) {
    return static_cast<uint32_t>(*number);
  }
  return Fail(ErrorCode::kInvalid,
              StrCat("'", key, "' is not a number of ranks up to ", kMaxModelRanks));
}

Status ReadCounters(PickleRef root, ModelStates& out) {
  const std::pair<std::string_view, uint64_t*> counters[] = {{kGlobalSteps, &out.global_steps},
                                                             {kSkippedSteps, &out.skipped_steps},
                                                             {kDpWorldSize, &out.dp_world},
                                                             {kMpWorldSize, &out.mp_world}};
  for (const auto& [key, target] : counters) {
    const PickleRef value = root[key];
    if (!value) continue;
    const auto number = value.Int();
    if (!number || *number < 0) {
      return Fail(ErrorCode::kInvalid, StrCat("'", key, "' is not a count"));
    }
    *target = static_cast<uint64_t>(*number);
  }
  for (const std::string_view key : {kDpWorldSize, kMpWorldSize}) {
    CKPT_RETURN_IF_ERROR(Degree(root, key));
  }
  CKPT_ASSIGN_OR_RETURN(const PickleRef degrees, DictOf(root, kParallelDimensions));
  if (degrees) {
    CKPT_ASSIGN_OR_RETURN(out.pp_degree, Degree(degrees, "pp_degree"));
    CKPT_ASSIGN_OR_RETURN(out.tp_degree, Degree(degrees, "tp_degree"));
    // One rank has all of the model, whatever the degrees are: DeepSpeed records that of a
    // sequence-parallel group (Ulysses) as tensor-parallel.
    if (out.mp_world == 1) out.pp_degree = out.tp_degree = 1;
  }
  for (const std::string_view key : {"ds_autoep_layers", "autoep_layers"}) {
    const PickleRef layers = root[key];
    out.auto_experts = out.auto_experts || (layers && !layers.IsNone());
  }
  if (const auto version = root[kDsVersion].String()) out.ds_version = *version;
  return {};
}

Status ReadConfig(PickleRef root, ModelStates& out) {
  const PickleRef config = root[kDsConfig];
  if (!config || !config.IsDict()) return {};
  CKPT_ASSIGN_OR_RETURN(out.ds_config, DigestOfValue(config));
  out.experts_first = config["use_data_before_expert_parallelism"].Bool().value_or(false);
  for (const std::string_view dtype : {"bf16", "bfloat16", "fp16"}) {
    const PickleRef section = config[dtype];
    if (section && section["enabled"].Bool().value_or(false)) {
      out.config_dtype = dtype == "fp16" ? "fp16" : "bf16";
    }
  }
  if (out.config_dtype.empty()) out.config_dtype = "fp32";
  return {};
}

// Integers and truth values of an argparse.Namespace, a dict or any object with a dict state.
void ReadVariables(PickleRef args, std::map<std::string, int64_t>& out) {
  if (!args) return;
  const PickleRef fields = args.IsDict() ? args : args.State();
  if (!fields || !fields.IsDict()) return;
  for (const auto& [key, value] : fields.Items()) {
    if (!key.String()) continue;
    if (const auto flag = value.Bool()) out.emplace(*key.String(), *flag ? 1 : 0);
    if (value.node().kind == PickleNode::Kind::kInt) {
      out.emplace(*key.String(), value.node().integer);
    }
  }
}

Status KeepDocuments(PickleRef root, const TorchFile& file, ModelStates& out) {
  for (const auto& [key, value] : root.Items()) {
    const auto name = key.String();
    if (!name || IsOneOf(*name, kModelStructure)) continue;
    const bool own = IsOneOf(*name, kModelStateKeys);
    CKPT_ASSIGN_OR_RETURN(Document document,
                          DocumentOf(own ? std::string(*name) : StrCat(kClientPrefix, *name), "",
                                     value, file, out.blob));
    out.documents.push_back(std::move(document));
  }
  return {};
}

// ---- stage 0 --------------------------------------------------------------

Status ReadUnsharded(PickleRef optimizer, const TorchFile& file, CopyBudget& budget,
                     ModelStates& model) {
  UnshardedOptimizer out;
  CKPT_ASSIGN_OR_RETURN(const PickleRef flat, SequenceOf(optimizer, "fp32_groups_flat"));
  CKPT_ASSIGN_OR_RETURN(const PickleRef whole, SequenceOf(optimizer, "fp32_groups"));
  for (size_t g = 0; flat && g < flat.size(); ++g) {
    out.form = UnshardedOptimizer::Form::kFused;
    CKPT_ASSIGN_OR_RETURN(FileTensor master,
                          FileTensorOf(flat.at(g), file, model.blob, "fp32_groups_flat"));
    if (!master.dense() || master.shape().size() != 1) {
      return Fail(ErrorCode::kInvalid,
                  StrCat("'fp32_groups_flat' ", g, " has shape ", ShapeToString(master.shape()),
                         master.dense() ? "" : " and not contiguous"));
    }
    out.flat_masters.push_back(std::move(master));
  }
  for (size_t g = 0; whole && g < whole.size(); ++g) {
    out.form = UnshardedOptimizer::Form::kUnfused;
    out.parameter_masters.emplace_back();
    const PickleRef group = whole.at(g);
    CKPT_RETURN_IF_ERROR(budget.Charge(group.IsSequence() ? group.size() : 0));
    for (size_t i = 0; group.IsSequence() && i < group.size(); ++i) {
      CKPT_ASSIGN_OR_RETURN(FileTensor master,
                            FileTensorOf(group.at(i), file, model.blob, "fp32_groups"));
      out.parameter_masters.back().push_back(std::move(master));
    }
  }
  const bool plain = out.form == UnshardedOptimizer::Form::kPlain;
  const PickleRef base = plain ? optimizer : optimizer["optimizer_state_dict"];
  if (!base) return Fail(ErrorCode::kInvalid, "'optimizer' holds no 'optimizer_state_dict'");
  CKPT_ASSIGN_OR_RETURN(static_cast<TorchOptimizer&>(out),
                        ReadTorchOptimizer(base, file, model.blob));
  for (const auto& [key, value] :
       plain ? std::vector<std::pair<PickleRef, PickleRef>>() : optimizer.Items()) {
    const std::string_view name = key.String().value_or("");
    if (name.empty() || name == "optimizer_state_dict" || name.starts_with("fp32_groups")) continue;
    CKPT_ASSIGN_OR_RETURN(Document document,
                          DocumentOf(StrCat(kZeroPrefix, name), "", value, file, model.blob));
    model.documents.push_back(std::move(document));
  }
  model.optimizer = std::move(out);
  return {};
}

// Only a ZeRO optimizer has param_shapes; BF16_Optimizer without ZeRO leaves
// rank 0's part in the model states, too.
bool HasShardedOptimizer(PickleRef root) {
  const PickleRef shapes = root["param_shapes"];
  const PickleRef optimizer = root["optimizer"];
  return (shapes && shapes.IsSequence()) ||
         (optimizer && optimizer.IsDict() && optimizer["single_partition_of_fp32_groups"]);
}

Result<ModelStates> ReadRoot(const TorchFile& file, BlobIndex blob,
                             const ModelStatesWanted& wanted) {
  ModelStates out;
  out.file = file.name();
  out.blob = blob;
  const PickleRef root = file.root();
  if (!root.IsDict() || !(root["dp_world_size"] || root["param_shapes"])) {
    return Fail(ErrorCode::kInvalid,
                "neither 'dp_world_size' nor 'param_shapes': not a DeepSpeed model states file");
  }
  CKPT_RETURN_IF_ERROR(ReadCounters(root, out));
  CKPT_RETURN_IF_ERROR(ReadConfig(root, out));
  CopyBudget budget(file.tree());
  CKPT_RETURN_IF_ERROR(ReadFrozen(root, file, budget, out));
  out.sharded = HasShardedOptimizer(root);
  if (const PickleRef shapes = root["param_shapes"]; shapes && !shapes.IsNone()) {
    CKPT_ASSIGN_OR_RETURN(out.shapes, DigestOfValue(shapes));
  }
  if (wanted.names) {
    CKPT_RETURN_IF_ERROR(ReadNames(root, file, budget, out));
    InferBuffers(out);
    if (const PickleRef info = root["universal_checkpoint_info"]; info && info.IsDict()) {
      CKPT_ASSIGN_OR_RETURN(ShardingInfo parsed, ParseShardingInfo(info));
      out.info = std::move(parsed);
    }
    ReadVariables(root["args"], out.variables);
    const PickleRef optimizer = root["optimizer"];
    if (optimizer && optimizer.IsDict()) {
      CKPT_RETURN_IF_ERROR(ReadUnsharded(optimizer, file, budget, out));
    }
  }
  if (wanted.documents) CKPT_RETURN_IF_ERROR(KeepDocuments(root, file, out));
  return out;
}

}  // namespace

std::vector<std::string> NamesOf(const std::vector<NamedShape>& shapes) {
  std::vector<std::string> names;
  names.reserve(shapes.size());
  for (const NamedShape& shape : shapes) names.push_back(shape.name);
  return names;
}

Result<ModelStates> ReadModelStates(const TorchFile& file, BlobIndex blob,
                                    const ModelStatesWanted& wanted) {
  auto out = ReadRoot(file, blob, wanted);
  if (!out) return Fail(std::move(out).error().WithContext(file.name()));
  return out;
}

Result<TensorDict> ReadTensorDict(const TorchFile& file, BlobIndex blob) {
  if (!file.root().IsDict()) return Fail(ErrorCode::kInvalid, StrCat(file.name(), ": not a dict"));
  auto out = TensorDictOf(file.root(), file, blob);
  if (!out) return Fail(std::move(out).error().WithContext(file.name()));
  return out;
}

}  // namespace ckptfs::deepspeed
