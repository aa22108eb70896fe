// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/fsdp/tensors.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/megatron/dist_keys.h"
#include "formats/megatron/fsdp/keys.h"
#include "formats/megatron/legacy/local_names.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kDecoder = "decoder.layers.";
constexpr uint64_t kMaxNumber = uint64_t{1} << 20;  // of layers, of experts of one

// One name of the module stands for this: all of a parameter, or its halves.
struct Held {
  std::optional<size_t> all, gate, up;  // tensors of the metadata
};

using HeldByName = std::map<std::string, Held, std::less<>>;

Status Take(std::optional<size_t>& place, size_t tensor, std::string_view name) {
  if (place) return Refuse("two keys of the model are '", name, "' without its wrappers");
  place = tensor;
  return {};
}

Result<HeldByName> HeldOf(const dcp::DcpMetadata& metadata) {
  HeldByName out;
  for (size_t t = 0; t < metadata.tensors.size(); ++t) {
    const FsdpKey key = FsdpKeyOf(metadata.tensors[t].name);
    if (key.of != FsdpKey::Of::kModel) continue;
    const HalvedName name = HalvedNameOf(key.name);
    Held& held = out[std::string(name.name)];
    std::optional<size_t>& place = name.half == FsdpHalf::kAll    ? held.all
                                   : name.half == FsdpHalf::kGate ? held.gate
                                                                  : held.up;
    CKPT_RETURN_IF_ERROR(Take(place, t, key.name));
  }
  return out;
}

// Rows of several projections in one tensor, of which tensor ranks have runs of each.
bool IsOfSeveralProjections(std::string_view name) {
  for (const std::string_view what :
       {"in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias"}) {
    if (name.ends_with(what) && name.size() > what.size() &&
        name[name.size() - what.size() - 1] == '.') {
      return true;
    }
  }
  return false;
}

// Rows that ranks hold are saved one rank's behind the other's: of a gated linear_fc1 that would be
// gate, up, gate, up.
Status CheckOrder(std::string_view name, const FsdpJob& job) {
  const bool expert = name.find(".mlp.experts.") != name.npos;
  const auto ranks = expert ? job.etp : job.tp;
  if (ranks == 1) return {};
  const bool gated =
      job.gated && IsHalvable(name) && (name.starts_with(kDecoder) || name.starts_with("mtp."));
  if (!gated && !IsOfSeveralProjections(name)) return {};
  return Fail(ErrorCode::kUnsupported,
              StrCat("'", name, "' is in one tensor, in which the rows of ",
                     ranks ? std::to_string(*ranks) : "any number of",
                     " tensor-parallel ranks are one behind the other, each rank's of several "
                     "projections; save with a core that splits it (0.16 and later: linear_fc1; "
                     "0.18 and later: linear attention)"));
}

// The parts of one name; `unit` becomes the shape that they make up.
Result<std::vector<FsdpTensor::Part>> PartsOf(const std::string& name, const Held& held,
                                              const dcp::DcpMetadata& metadata, const FsdpJob& job,
                                              Shape& unit) {
  std::vector<FsdpTensor::Part> parts;
  if (!held.gate && !held.up) {
    CKPT_RETURN_IF_ERROR(CheckOrder(name, job));
    unit = metadata.tensors[*held.all].shape;
    parts.push_back({name, name, {*held.all, std::vector<uint64_t>(unit.size(), 0)}});
    return parts;
  }
  if (held.all) return Refuse("'", name, "' is there in one tensor and in two halves");
  if (!held.up) return Refuse("'", name, "_w' is there without '_v', its other half");
  if (!held.gate) return Refuse("'", name, "_v' is there without '_w', its other half");
  if (!job.gated) {
    return Refuse("'", name,
                  "' is in two halves, but the arguments say that it is not gated "
                  "(swiglu)");
  }
  const dcp::TensorEntry& gate = metadata.tensors[*held.gate];
  const dcp::TensorEntry& up = metadata.tensors[*held.up];
  if (gate.shape != up.shape || gate.dtype != up.dtype || gate.shape.empty()) {
    return Refuse("'", name, "': its halves are not alike: ", ShapeToString(gate.shape), " and ",
                  ShapeToString(up.shape));
  }
  unit = gate.shape;
  CKPT_ASSIGN_OR_RETURN(unit.front(), CheckedMul(gate.shape.front(), 2, "rows"));
  std::vector<uint64_t> begin(unit.size(), 0);
  parts.push_back({StrCat(name, "_w"), name, {*held.gate, begin}});
  begin.front() = gate.shape.front();
  parts.push_back({StrCat(name, "_v"), name, {*held.up, std::move(begin)}});
  return parts;
}

struct Expert {
  std::string name;  // of the module
  uint64_t number = 0;
};

// Names of experts outside of the decoder (mtp.layers.0.transformer_layer.mlp.experts...), too.
LocalName NameOf(const LocalNames& names, const std::string& name) {
  constexpr std::string_view kExperts = ".mlp.experts.";
  const size_t at = name.find(kExperts);
  if (at == name.npos || LayeredNameOf(name)) return names.Of(name);
  const std::string layer = StrCat(kDecoder, "0");
  LocalName out = names.Of(StrCat(layer, name.substr(at)));
  out.name = StrCat(name.substr(0, at), out.name.substr(layer.size()));
  return out;
}

// All experts of a layer, in one tensor.
Result<FsdpTensor> ExpertsOf(const std::string& name, std::vector<Expert> experts,
                             const HeldByName& held, const dcp::DcpMetadata& metadata,
                             const FsdpJob& job, uint64_t count) {
  std::ranges::sort(experts, {}, &Expert::number);
  FsdpTensor out{name, DType::kF32, {}, {}};
  for (size_t i = 0; i < experts.size(); ++i) {
    if (experts[i].number != i) {
      return Refuse("'", experts[i].name, "' is there, but not '", name, "' of expert ", i);
    }
    Shape unit;
    CKPT_ASSIGN_OR_RETURN(auto parts, PartsOf(experts[i].name, held.find(experts[i].name)->second,
                                              metadata, job, unit));
    Shape whole = unit;
    whole.insert(whole.begin(), count);
    const DType dtype = metadata.tensors[parts.front().inset.tensor].dtype;
    if (i > 0 && (whole != out.shape || dtype != out.dtype)) {
      return Refuse("'", experts[i].name, "' does not have the shape and type of expert 0's");
    }
    out.shape = std::move(whole);
    out.dtype = dtype;
    for (FsdpTensor::Part& part : parts) {
      part.inset.begin.insert(part.inset.begin.begin(), i);
      out.parts.push_back(std::move(part));
    }
  }
  if (experts.size() != count) {
    return Refuse("'", name, "' is there of ", experts.size(), " experts, but ",
                  job.experts ? "the arguments say num_experts " : "others are of ", count,
                  " (ranks of expert parallelism give biases the same names, and save over each "
                  "other)");
  }
  CKPT_RETURN_IF_ERROR(ElementCount(out.shape));
  return out;
}

// Each block must have all of its layers; the decoder as many as the arguments say.
Status CheckLayers(const std::vector<FsdpTensor>& tensors, const FsdpJob& job) {
  std::map<std::string_view, std::set<uint64_t>> blocks;
  for (const FsdpTensor& tensor : tensors) {
    if (const auto name = LayeredNameOf(tensor.name)) blocks[name->before].insert(name->layer);
  }
  for (const auto& [before, layers] : blocks) {
    const bool decoder = before == kDecoder;
    const uint64_t count = decoder && job.layers ? *job.layers : *layers.rbegin() + 1;
    if (layers.size() == count && *layers.rbegin() + 1 == count) continue;
    return Refuse("'", before, "' has ", layers.size(), " layers, the last with the number ",
                  *layers.rbegin(), ", of ", count);
  }
  return {};
}

}  // namespace

Result<FsdpJob> FsdpJobOf(const CommonState& common) {
  FsdpJob job;
  const auto layers = common.Argument("num_layers");
  if (!layers || *layers <= 0 || static_cast<uint64_t>(*layers) > kMaxNumber) {
    return Refuse("the arguments do not say num_layers");
  }
  job.layers = static_cast<uint64_t>(*layers);
  const auto experts = common.Argument("num_experts");
  job.experts = experts && *experts > 0 ? static_cast<uint64_t>(*experts) : 0;
  if (*job.experts > kMaxNumber) {
    return Refuse("the arguments say num_experts ", *job.experts, ", more than ", kMaxNumber);
  }
  const auto degree = [&](std::string_view name) -> std::optional<uint32_t> {
    const auto said = common.Argument(name);
    if (!said || *said <= 0 || *said >= (1 << 16)) return std::nullopt;
    return static_cast<uint32_t>(*said);
  };
  const auto tp = degree("tensor_model_parallel_size");
  const auto pp = degree("pipeline_model_parallel_size");
  if (!tp || !pp) {
    return Refuse("the arguments do not say ", tp ? "pipeline" : "tensor", "_model_parallel_size");
  }
  if (*pp > 1) {
    return Refuse("the arguments say ", *pp,
                  " pipeline stages, which Megatron-FSDP does not have: layers of all stages would "
                  "have the same names");
  }
  job.tp = *tp;
  job.etp = degree("expert_tensor_parallel_size").value_or(*tp);
  job.gated = common.Flag("swiglu");
  return job;
}

std::optional<FsdpJob> FsdpJobOf(const dcp::DcpMetadata& metadata) {
  std::set<std::string_view> model, groups, owners;
  const auto add = [&](std::string_view name, bool object) {
    const FsdpKey key = FsdpKeyOf(name);
    if (key.of == FsdpKey::Of::kModel && !object) model.insert(key.name);
    if (key.of == FsdpKey::Of::kGroup) groups.insert(key.name);
    if (key.of == FsdpKey::Of::kState) owners.insert(key.name);
  };
  for (const auto& tensor : metadata.tensors) add(tensor.name, false);
  for (const auto& object : metadata.objects) add(object.name, true);
  if (groups.empty()) return std::nullopt;
  FsdpJob job;
  std::set<std::string_view> said;  // parameters of the model
  for (const std::string_view name : model) {
    const HalvedName of = HalvedNameOf(name);
    said.insert(of.name);
    if (of.half == FsdpHalf::kAll) continue;
    if (!groups.contains(of.name) || groups.contains(name)) return std::nullopt;
    job.gated = true;
  }
  const auto known = [&](std::string_view name) { return said.contains(name); };
  const auto has = [&](std::string_view name) { return model.contains(name); };
  if (!std::ranges::all_of(groups, known) || !std::ranges::all_of(owners, has)) return std::nullopt;
  return job;
}

std::vector<dcp::StoredState::Inset> FsdpTensor::Insets() const {
  std::vector<dcp::StoredState::Inset> out;
  for (const Part& part : parts) out.push_back(part.inset);
  return out;
}

Result<std::vector<FsdpTensor>> FsdpTensorsOf(const dcp::DcpMetadata& metadata,
                                              const FsdpJob& job) {
  CKPT_ASSIGN_OR_RETURN(const HeldByName held, HeldOf(metadata));
  std::vector<std::string_view> module;
  for (const auto& [name, one] : held) module.push_back(name);
  const LocalNames names(module, 0);
  std::vector<FsdpTensor> out;
  std::set<std::string> known;
  std::map<std::string, std::vector<Expert>> experts;
  for (const auto& [name, one] : held) {
    LocalName said = NameOf(names, name);
    if (said.form == LocalName::Form::kGrouped) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("'", name,
                         "' holds the experts of one rank (GroupedMLP), whose names are "
                         "the same on all of them: nothing tells which rank's were saved"));
    }
    if (said.form == LocalName::Form::kExpert) {
      experts[said.name].push_back({name, said.expert});
      continue;
    }
    FsdpTensor tensor{std::move(said.name), DType::kF32, {}, {}};
    CKPT_ASSIGN_OR_RETURN(tensor.parts, PartsOf(name, one, metadata, job, tensor.shape));
    tensor.dtype = metadata.tensors[tensor.parts.front().inset.tensor].dtype;
    CKPT_RETURN_IF_ERROR(ElementCount(tensor.shape));
    out.push_back(std::move(tensor));
  }
  uint64_t most = 0;
  for (const auto& [name, of] : experts) most = std::max<uint64_t>(most, of.size());
  for (auto& [name, of] : experts) {
    CKPT_ASSIGN_OR_RETURN(FsdpTensor tensor, ExpertsOf(name, std::move(of), held, metadata, job,
                                                       job.experts.value_or(most)));
    out.push_back(std::move(tensor));
  }
  for (const FsdpTensor& tensor : out) {
    if (!known.insert(tensor.name).second) {
      return Refuse("two keys of the model stand for '", tensor.name, "'");
    }
  }
  CKPT_RETURN_IF_ERROR(CheckLayers(out, job));
  const auto order = [](const FsdpTensor& one) {
    const auto layered = LayeredNameOf(one.name);
    return ModuleOrderOf(one.name, layered ? static_cast<int64_t>(layered->layer) : -1);
  };
  std::ranges::sort(out, {}, order);
  return out;
}

}  // namespace ckptfs::megatron
