// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/optimizer_states.h"

#include <algorithm>
#include <array>
#include <set>

#include "core/base/strings.h"
#include "core/state/state_fit.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/plain_value.h"
#include "formats/torch/print_value.h"

namespace ckptfs::deepspeed {
namespace {

// Keys of the ZeRO dict that are tensors, layout or kept elsewhere; all others are documents.
constexpr std::array<std::string_view, 12> kOptimizerStructure = {"base_optimizer_state",
                                                                  "single_partition_of_fp32_groups",
                                                                  "group_paddings",
                                                                  "param_alignment_paddings",
                                                                  "partition_count",
                                                                  "param_slice_mappings",
                                                                  "ds_version",
                                                                  "optimizer_state_dict",
                                                                  "fp32_flat_groups",
                                                                  "universal_checkpoint_info",
                                                                  "ds_zero_partition_groups",
                                                                  "base_optimizer_state_step"};

// One file, as it is read once.
struct Input {
  const TorchFile& file;
  const RankKey& rank;
  OptimizerStatesWanted wanted;
  CopyBudget budget;
};

Result<std::vector<uint64_t>> Numbers(PickleRef list, std::string_view key, CopyBudget& budget) {
  std::vector<uint64_t> out;
  CKPT_RETURN_IF_ERROR(budget.Charge(list && list.IsSequence() ? list.size() : 0));
  for (size_t i = 0; list && list.IsSequence() && i < list.size(); ++i) {
    const auto number = list.at(i).Int();
    if (!number || *number < 0) {
      return Fail(ErrorCode::kInvalid, StrCat("'", key, "' holds something else than counts"));
    }
    out.push_back(static_cast<uint64_t>(*number));
  }
  return out;
}

// The dict of a group without its members' numbers.
Status ReadSettings(PickleRef group, const TorchFile& file, CopyBudget& budget, HyperGroup& out) {
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> items;
  for (const auto& [key, value] : group.Items()) {
    if (key.String() == "params" || key.String() == kMemberNames) continue;
    if (key.String() == "param_names") {  // that its members have names; views know which
      const NodeId name = builder.Copy(key);
      items.emplace_back(name, builder.None());
      continue;
    }
    CKPT_RETURN_IF_ERROR(budget.ChargeDeep(key));
    CKPT_RETURN_IF_ERROR(budget.ChargeDeep(value));
    const NodeId name = builder.Copy(key);
    CKPT_ASSIGN_OR_RETURN(const auto copy, CopyPlain(value, &file, builder));
    if (!copy) {
      out.tensors.push_back(KeyText(key));
      continue;
    }
    if (const TensorNode* tensor = value.Tensor()) {
      out.numbers.emplace(KeyText(key), std::pair(tensor->dtype, tensor->shape));
    }
    items.emplace_back(name, *copy);
  }
  const NodeId root = builder.Dict(items);
  const PickleTree tree = std::move(builder).Finish(root);
  for (const auto& [key, value] : RootOf(tree).Items()) {
    if (!RunsNoCode(value)) out.objects.push_back(KeyText(key));
  }
  CKPT_ASSIGN_OR_RETURN(out.hyper_parameters, PrintPickle(tree));
  return {};
}

Status ReadLayout(PickleRef zero, CopyBudget& budget, OptimizerStates& out) {
  if (const auto count = zero["partition_count"].Int()) {
    if (*count < 1) return Fail(ErrorCode::kInvalid, "'partition_count' is not positive");
    out.partition_count = {static_cast<uint64_t>(*count)};
  } else {
    CKPT_ASSIGN_OR_RETURN(out.partition_count,
                          Numbers(zero["partition_count"], "partition_count", budget));
  }
  const PickleRef paddings = zero["param_alignment_paddings"];
  for (size_t i = 0; paddings && paddings.IsSequence() && i < paddings.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(auto members,
                          Numbers(paddings.at(i), "param_alignment_paddings", budget));
    if (std::all_of(members.begin(), members.end(), [](uint64_t n) { return n == 0; })) {
      members.clear();
    }
    out.member_paddings.push_back(std::move(members));
  }
  return {};
}

// `param_slice_mappings`: by group, {name: fragment_address(numel, start)}.
Status ReadSlices(PickleRef zero, Input& in, OptimizerStates& out) {
  const PickleRef lists = zero["param_slice_mappings"];
  for (size_t g = 0; lists && lists.IsSequence() && g < lists.size(); ++g) {
    auto& group = out.slices.emplace_back();
    if (!lists.at(g).IsDict())
      return Fail(ErrorCode::kInvalid, "'param_slice_mappings' of a group is not a dict");
    for (const auto& [key, value] : lists.at(g).Items()) {
      CKPT_RETURN_IF_ERROR(in.budget.ChargeText(key));
      CKPT_RETURN_IF_ERROR(in.budget.Charge(4));
      const PickleRef address = value.State();
      const auto name = key.String();
      const int64_t start = address ? address["start"].Int().value_or(-1) : -1;
      const int64_t elements = address ? address["numel"].Int().value_or(-1) : -1;
      if (!name || start < 0 || elements < 0) {
        return Fail(ErrorCode::kInvalid, "'param_slice_mappings' has an entry without a place");
      }
      group.push_back(
          {std::string(*name), static_cast<uint64_t>(start), static_cast<uint64_t>(elements)});
    }
  }
  return {};
}

// How long the momentum of a group is.
enum class MomentumForm : uint8_t {
  kElements,    // as its partition, as any other state
  kParameters,  // Muon's: of whole parameters
  kTrimmed,     // Muon's in an elastic save, which cuts the partition's padding off its end
};

// Errors name a tensor that is not flat and as long as its master, or as the master with the
// padding that only the master lacks.
Status CheckFlat(const PartitionStates& partition, size_t index, std::string_view kind,
                 const FileTensor& tensor) {
  const uint64_t elements = partition.master->elements();
  const bool length =
      tensor.elements() == elements || tensor.elements() == elements + partition.padding;
  if (tensor.dense() && tensor.shape().size() == 1 && length) return {};
  return Fail(ErrorCode::kInvalid,
              StrCat("'", kind, "' of partition ", index, ", which has ", elements,
                     " elements, is of shape ", ShapeToString(tensor.shape()),
                     tensor.dense() ? "" : " and not contiguous"));
}

// Sets states apart that have names of ours: a group's `weight` is not the model's.
void SetOursApart(PartitionStates& partition) {
  const auto apart = [&](const auto& entry) {
    if (!IsOurs(entry.name)) return false;
    partition.uneven.push_back({entry.name, std::string(kNameOfOurs)});
    return true;
  };
  std::erase_if(partition.flat, apart);
  std::erase_if(partition.scalars, apart);
}

// Sorts the tensors of a partition by how they lie in it.  A moment that optimizers keep per
// element cannot be of another length: that is an error.  Any other state is left out alone.
Status SortStates(size_t index, MomentumForm form, PartitionStates& partition) {
  CKPT_RETURN_IF_ERROR(CheckFlat(partition, index, "master", *partition.master));
  SetOursApart(partition);
  std::vector<NamedTensor> flat;
  for (NamedTensor& entry : partition.flat) {
    const bool momentum = entry.name == kMomentum && form != MomentumForm::kElements;
    if (momentum && form == MomentumForm::kParameters) {
      partition.momenta = std::move(entry.tensor);
      continue;
    }
    if (momentum) {
      partition.uneven.push_back(
          {entry.name, "an elastic save cuts Muon's, and does not say which parameters it is of"});
      continue;
    }
    const Status checked = CheckFlat(partition, index, entry.name, entry.tensor);
    if (!checked && (entry.name == "exp_avg" || entry.name == "exp_avg_sq")) return checked;
    if (checked) {
      flat.push_back(std::move(entry));
    } else {
      partition.uneven.push_back({entry.name, "it is not a flat tensor as long as its partition"});
    }
  }
  partition.flat = std::move(flat);
  return {};
}

// `groups`: param_groups, which elastic saves do not have; then the configuration tells.
MomentumForm FormOf(PickleRef root, PickleRef groups, size_t index) {
  if (groups && groups.IsSequence()) {
    const bool muon = groups.at(index)["use_muon"].Bool().value_or(false);
    return muon ? MomentumForm::kParameters : MomentumForm::kElements;
  }
  const std::string_view type = root["ds_config"]["optimizer"]["type"].String().value_or("");
  const bool muon = std::ranges::equal(type, std::string_view("muon"), {}, [](char letter) {
    return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
  });
  return muon ? MomentumForm::kTrimmed : MomentumForm::kElements;
}

// The states of partition i: of a list, or of a dict by number.
PickleRef StateOf(PickleRef states, size_t i) {
  if (!states) return {};
  if (states.IsSequence()) return states.at(i);
  return states.AtInt(static_cast<int64_t>(i));
}

Status ReadPartitions(PickleRef masters, PickleRef states, Input& in, OptimizerStates& out) {
  if (!masters || !masters.IsSequence()) {
    return Fail(ErrorCode::kInvalid, out.stage == 3 ? "no 'fp32_flat_groups' list"
                                                    : "no 'single_partition_of_fp32_groups' list");
  }
  for (size_t i = 0; i < masters.size(); ++i) {
    const PickleRef state = StateOf(states, i);
    PartitionStates partition;
    if (state) {
      CKPT_ASSIGN_OR_RETURN(partition, ReadStateDict(state, in.file, out.blob, in.budget));
    }
    CKPT_ASSIGN_OR_RETURN(partition.master, FileTensorOf(masters.at(i), in.file, out.blob,
                                                         StrCat("master partition ", i)));
    out.partitions.push_back(std::move(partition));
  }
  if (states && states.size() > masters.size()) {
    return Fail(ErrorCode::kInvalid, StrCat("optimizer states of ", states.size(),
                                            " partitions, masters of ", masters.size()));
  }
  return {};
}

// States that no partition can be cut from go into documents of this rank.
Status KeepOpaque(PickleRef states, Input& in, OptimizerStates& out) {
  for (size_t i = 0; i < out.partitions.size(); ++i) {
    for (const std::string& name : out.partitions[i].opaque) {
      const PickleRef state = StateOf(states, i);
      CKPT_RETURN_IF_ERROR(in.budget.ChargeDeep(state[name]));
      CKPT_ASSIGN_OR_RETURN(
          Document document,
          DocumentOf(StrCat("optimizer/opaque/", i, "/", name),
                     StrCat("dp", in.rank.dp, "_mp", in.rank.mp), state[name], in.file, out.blob));
      out.opaque.push_back(std::move(document));
    }
  }
  return {};
}

Status KeepDocuments(PickleRef zero, Input& in, OptimizerStates& out) {
  for (const auto& [key, value] : zero.Items()) {
    const auto name = key.String();
    if (!name || std::find(kOptimizerStructure.begin(), kOptimizerStructure.end(), *name) !=
                     kOptimizerStructure.end()) {
      continue;
    }
    CKPT_RETURN_IF_ERROR(in.budget.ChargeDeep(value));
    CKPT_ASSIGN_OR_RETURN(Document document,
                          DocumentOf(StrCat(kZeroPrefix, *name), "", value, in.file, out.blob));
    out.documents.push_back(std::move(document));
  }
  return {};
}

Status RefuseUnknownLayouts(PickleRef root, PickleRef zero) {
  if (const PickleRef parts = zero["ds_zero_partition_groups"]; parts && parts.size() > 0) {
    return Fail(ErrorCode::kUnsupported,
                "'ds_zero_partition_groups' (AutoEP under ZeRO-3) is not understood");
  }
  if (root["folding"]) {
    return Fail(ErrorCode::kUnsupported, "'folding' (AutoEP with AutoTP) is not understood");
  }
  return {};
}

// The stage in 'zero_stage': DeepSpeed's ZeroStageEnum, which Python 3.11.0 to
// 3.11.3 stored as getattr(ZeroStageEnum, name) and others by calling it with its number.
std::optional<int64_t> StageOf(PickleRef value) {
  if (const auto number = value.Int()) return number;
  if (value.Arguments().size() == 1 &&
      value.ClassName() == "deepspeed.runtime.zero.config.ZeroStageEnum") {
    return value.Arguments().at(0).Int();
  }
  if (!value || value.node().kind != PickleNode::Kind::kGlobal) return std::nullopt;
  constexpr std::string_view kNames[] = {"disabled", "optimizer_states", "gradients", "weights"};
  const std::string path = value.ClassName();
  const auto found = std::find(std::begin(kNames), std::end(kNames),
                               std::string_view(path).substr(path.rfind('.') + 1));
  if (found == std::end(kNames)) return std::nullopt;
  return found - std::begin(kNames);
}

Status ReadZero12(PickleRef root, PickleRef zero, Input& in, OptimizerStates& out) {
  out.trimmed = static_cast<bool>(zero["zero_stage"]);
  const auto stage = StageOf(zero["zero_stage"]);
  if (out.trimmed && (!stage || *stage < 1 || *stage > 2)) {
    return Fail(ErrorCode::kInvalid, "'zero_stage' is not 1 or 2");
  }
  out.stage = stage && *stage == 2 ? 2 : 1;
  const PickleRef base = zero["base_optimizer_state"];
  if (!base) return Fail(ErrorCode::kInvalid, "no 'base_optimizer_state'");
  out.elastic = base.IsSequence();
  const PickleRef states = out.elastic ? base : base["state"];
  CKPT_RETURN_IF_ERROR(ReadPartitions(zero["single_partition_of_fp32_groups"], states, in, out));
  CKPT_ASSIGN_OR_RETURN(const auto paddings,
                        Numbers(zero["group_paddings"], "group_paddings", in.budget));
  for (size_t i = 0; out.trimmed && i < out.partitions.size() && i < paddings.size(); ++i) {
    out.partitions[i].padding = paddings[i];
  }
  for (size_t i = 0; i < out.partitions.size(); ++i) {
    const MomentumForm form = FormOf(root, out.elastic ? PickleRef() : base["param_groups"], i);
    CKPT_RETURN_IF_ERROR(SortStates(i, form, out.partitions[i]));
  }
  if (states) CKPT_RETURN_IF_ERROR(KeepOpaque(states, in, out));
  if (in.wanted.documents && !out.elastic) {
    CKPT_ASSIGN_OR_RETURN(out.groups, ReadHyperGroups(base["param_groups"], in.file, in.budget));
  }
  return {};
}

Status ReadZero3(PickleRef zero, Input& in, OptimizerStates& out) {
  out.stage = 3;
  const PickleRef base = zero["optimizer_state_dict"];
  CKPT_RETURN_IF_ERROR(ReadPartitions(zero["fp32_flat_groups"], base["state"], in, out));
  for (size_t i = 0; i < out.partitions.size(); ++i) {
    CKPT_RETURN_IF_ERROR(SortStates(i, MomentumForm::kElements, out.partitions[i]));
  }
  if (base && base["state"]) CKPT_RETURN_IF_ERROR(KeepOpaque(base["state"], in, out));
  if (in.wanted.documents && base) {
    CKPT_ASSIGN_OR_RETURN(out.groups, ReadHyperGroups(base["param_groups"], in.file, in.budget));
  }
  return {};
}

Result<OptimizerStates> ReadRoot(Input in, BlobIndex blob) {
  OptimizerStates out;
  out.file = in.file.name();
  out.blob = blob;
  const PickleRef root = in.file.root();
  const PickleRef zero = root["optimizer_state_dict"];
  if (!zero || !zero.IsDict()) {
    return Fail(ErrorCode::kInvalid, "no 'optimizer_state_dict': not a DeepSpeed optimizer file");
  }
  CKPT_RETURN_IF_ERROR(RefuseUnknownLayouts(root, zero));
  CKPT_RETURN_IF_ERROR(ReadLayout(zero, in.budget, out));
  if (zero["fp32_flat_groups"]) {
    CKPT_RETURN_IF_ERROR(ReadZero3(zero, in, out));
  } else {
    CKPT_RETURN_IF_ERROR(ReadZero12(root, zero, in, out));
    if (in.wanted.slices) CKPT_RETURN_IF_ERROR(ReadSlices(zero, in, out));
  }
  if (const auto version = root["ds_version"].String()) out.ds_version = *version;
  if (const PickleRef config = root["ds_config"]) {
    CKPT_ASSIGN_OR_RETURN(out.ds_config, DigestOfValue(config));
  }
  if (in.wanted.documents) CKPT_RETURN_IF_ERROR(KeepDocuments(zero, in, out));
  return out;
}

}  // namespace

Result<OptimizerStates> ReadOptimizerStates(const TorchFile& file, BlobIndex blob,
                                            const RankKey& rank,
                                            const OptimizerStatesWanted& wanted) {
  auto out = ReadRoot({file, rank, wanted, CopyBudget(file.tree())}, blob);
  if (!out) return Fail(std::move(out).error().WithContext(file.name()));
  return out;
}

Result<std::vector<HyperGroup>> ReadHyperGroups(PickleRef param_groups, const TorchFile& file,
                                                CopyBudget& budget) {
  std::vector<HyperGroup> groups;
  for (size_t i = 0; param_groups && param_groups.IsSequence() && i < param_groups.size(); ++i) {
    const PickleRef group = param_groups.at(i);
    if (!group.IsDict()) return Fail(ErrorCode::kInvalid, "a 'param_groups' entry is not a dict");
    HyperGroup out;
    CKPT_RETURN_IF_ERROR(ReadSettings(group, file, budget, out));
    CKPT_RETURN_IF_ERROR(budget.ChargeText(group["name"]));
    if (const auto name = group["name"].String()) out.name = *name;
    out.experts = group["moe"].Bool().value_or(false);
    const PickleRef members = group["params"];
    CKPT_RETURN_IF_ERROR(budget.Charge(members && members.IsSequence() ? members.size() : 0));
    for (size_t k = 0; members && members.IsSequence() && k < members.size(); ++k) {
      out.members.push_back(members.at(k).Int().value_or(-1));
    }
    groups.push_back(std::move(out));
  }
  return groups;
}

std::string KeyText(PickleRef key) {
  if (const auto name = key.String()) return std::string(*name);
  const auto number = key.Int();
  return number ? std::to_string(*number) : "?";
}

std::vector<LeftOut> LeftOutSettings(std::span<const HyperGroup> groups, std::string_view shown) {
  std::vector<LeftOut> out;
  std::set<std::string> named;
  const auto add = [&](const std::string& key, const std::string& why) {
    if (!named.insert(key).second) return;
    out.push_back(
        {LeftOutPart::kOptimizer, StrCat("the optimizer's setting '", key, "'"), why, ""});
  };
  for (const HyperGroup& group : groups) {
    for (const std::string& key : group.objects) {
      add(key, StrCat("setting '", key, "' is neither a number nor text", shown.empty() ? "" : "; ",
                      shown));
    }
    for (const std::string& key : group.tensors) {
      add(key, StrCat("setting '", key, "' is a tensor, or holds some"));
    }
  }
  return out;
}

std::vector<std::string> StateNames(const PartitionStates& partition) {
  std::vector<std::string> names;
  for (const NamedTensor& entry : partition.flat)
    names.push_back(StrCat("'", entry.name, "' (a tensor)"));
  for (const NamedScalar& entry : partition.scalars)
    names.push_back(StrCat("'", entry.name, "' (a number)"));
  for (const std::string& name : partition.opaque)
    names.push_back(StrCat("'", name, "' (an object)"));
  std::sort(names.begin(), names.end());
  return names;
}

bool CanBeReduced(std::string_view state, const Shape& shape, const Shape& parameter) {
  constexpr std::string_view kElementwise[] = {"master", "exp_avg", "exp_avg_sq",
                                               "momentum_buffer"};
  if (std::find(std::begin(kElementwise), std::end(kElementwise), state) !=
      std::end(kElementwise)) {
    return false;
  }
  const auto own = ElementCount(shape);
  const auto whole = ElementCount(parameter);
  return own && whole && *own < *whole;
}

Result<PartitionStates> ReadStateDict(PickleRef state, const TorchFile& file, BlobIndex blob,
                                      CopyBudget& budget, OtherTensors others) {
  PartitionStates out;
  if (!state.IsDict()) return Fail(ErrorCode::kInvalid, "an optimizer state is not a dict");
  CKPT_RETURN_IF_ERROR(budget.Charge(state.size()));
  for (const auto& [key, value] : state.Items()) {
    CKPT_RETURN_IF_ERROR(budget.ChargeText(key));
    const auto name = key.String();
    if (!name && others == OtherTensors::kOpaque) {
      out.opaque.push_back(key.Int() ? std::to_string(*key.Int()) : "?");
      continue;
    }
    if (!name) return Fail(ErrorCode::kInvalid, "an optimizer state has a name that is not text");
    CKPT_ASSIGN_OR_RETURN(auto scalar, ScalarOf(value, file));
    if (scalar) {
      NamedScalar& added =
          out.scalars.emplace_back(NamedScalar{std::string(*name), *std::move(scalar)});
      if (value.Tensor() != nullptr && IsWholeKind(*name)) {
        CKPT_ASSIGN_OR_RETURN(added.tensor, FileTensorOf(value, file, blob, *name));
      }
      continue;
    }
    // A subclass says with its class that it is something else (torchao's low-bit moments).
    const bool subclass = value.ClassName() == "torch._tensor._rebuild_from_type_v2";
    const bool other = value.IsOtherTensor() && others == OtherTensors::kRefused && !subclass;
    if (value.Tensor() == nullptr && !other) {
      out.opaque.emplace_back(*name);
      if (value.IsNone()) out.nothing.emplace_back(*name);
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(FileTensor tensor, FileTensorOf(value, file, blob, *name));
    out.flat.push_back(NamedTensor{std::string(*name), std::move(tensor)});
  }
  return out;
}

Result<Digest> DigestOfValue(PickleRef value) {
  CKPT_ASSIGN_OR_RETURN(const std::string text, PrintValue(value));
  return DigestOf(std::string_view(text));
}

Result<Document> DocumentOf(std::string key, std::string scope, PickleRef value,
                            const TorchFile& file, BlobIndex blob) {
  const std::string context = StrCat(file.name(), ": ", key);
  auto document = MakeDocument(std::move(key), std::move(scope), value, file, blob);
  if (!document) return Fail(std::move(document).error().WithContext(context));
  return document;
}

}  // namespace ckptfs::deepspeed
