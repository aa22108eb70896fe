// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/view_entries.h"

#include <algorithm>
#include <map>
#include <string>
#include <unordered_set>
#include <utility>

#include "core/base/strings.h"
#include "core/model/pattern.h"
#include "formats/dcp/object_archives.h"
#include "formats/megatron/dist_keys.h"
#include "formats/megatron/group_rule.h"
#include "formats/torch/pickle_writer.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kEmbedding = "embedding.word_embeddings.weight";
// A norm as two specifications of the layers name it.  The first is the dialect's word; a layer
// without experts of Transformer Engine has the second of the first row.
constexpr std::pair<std::string_view, std::string_view> kNorms[] = {
    {"pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"},
    {"self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"},
    {"self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"}};

// The tensors of one name, of all layers or of none.
struct Stack {
  std::string before;  // "decoder.layers.", or ""
  std::string after;
  bool stacked = false;
  std::vector<ParameterIndex> members;  // by layer

  std::string Key() const { return StrCat(before, after); }
};

// Modules keep these beside their tensors: the object's name, and the grid of its parts.
using Objects = std::map<std::string, Shape>;

// Linear layers of both specifications, and Transformer Engine's norms.
bool KeepsObject(std::string_view module) {
  const std::string_view last = module.substr(module.rfind('.') + 1);
  return last.starts_with("linear_") || last.ends_with("layernorm");
}

class Collector {
 public:
  Collector(const ShownState& shown, const ViewRequest& request)
      : shown_(shown), step_(shown.step()), request_(request) {
    for (const Alias& alias : shown.aliases()) {
      if (alias.name == kEmbedding) embedding_ = &alias;
    }
  }

  Result<std::vector<dcp::BoxEntry>> Collect() && {
    MakeStacks();
    for (const Stack& stack : stacks_) CKPT_RETURN_IF_ERROR(AddWeight(stack));
    if (request_.optimizer) {
      for (const std::string_view kind : {"param", "exp_avg", "exp_avg_sq"}) {
        for (const Stack& stack : stacks_) CKPT_RETURN_IF_ERROR(AddState(stack, kind));
      }
    }
    CKPT_RETURN_IF_ERROR(AddObjects());
    CKPT_RETURN_IF_ERROR(CheckKeys());
    return std::move(entries_);
  }

 private:
  struct Member {
    uint64_t layer;
    ParameterIndex parameter;
  };

  // A tied weight is stored as the embedding, whichever name is its first.
  const std::string& NameOf(ParameterIndex p) const {
    const bool tied = embedding_ != nullptr && embedding_->parameter == p;
    return tied ? embedding_->name : shown_.NameOf(p);
  }

  bool Alike(ParameterIndex a, ParameterIndex b) const {
    const Parameter& one = step_.parameter(a);
    const Parameter& other = step_.parameter(b);
    const auto& first = shown_.FindWeight(a);
    const auto& second = shown_.FindWeight(b);
    return one.shape == other.shape && one.role == other.role && first && second &&
           first->dtype == second->dtype;
  }

  // The names of one block are stacked if every layer has all of them, of one shape.
  void MakeStacks() {
    struct Block {
      uint64_t layers = 0;
      std::map<std::string, std::vector<Member>> names;
    };
    std::map<std::string, Block> blocks;
    for (uint32_t i = 0; i < step_.parameters.size(); ++i) {
      const ParameterIndex p{i};
      if (!IsOfModel(step_.parameters[i])) continue;
      const std::string& name = NameOf(p);
      const auto layered = LayeredNameOf(name);
      if (!layered) {
        stacks_.push_back({"", name, false, {p}});
        continue;
      }
      Block& block = blocks[std::string(layered->before)];
      block.layers = std::max(block.layers, layered->layer + 1);
      block.names[std::string(layered->after)].push_back({layered->layer, p});
    }
    for (auto& [before, block] : blocks) {
      bool stacked = !step_.facts.modules || step_.facts.modules->stacked;
      for (auto& [after, members] : block.names) {
        std::ranges::sort(members, {}, &Member::layer);
        stacked = stacked && members.size() == block.layers &&
                  std::ranges::all_of(members, [&](const Member& one) {
                    return Alike(members.front().parameter, one.parameter);
                  });
      }
      for (const auto& [after, members] : block.names) AddStacks(before, after, members, stacked);
    }
  }

  void AddStacks(const std::string& before, const std::string& after,
                 const std::vector<Member>& members, bool stacked) {
    if (stacked) {
      Stack stack{before, after, true, {}};
      for (const Member& one : members) stack.members.push_back(one.parameter);
      stacks_.push_back(std::move(stack));
      return;
    }
    for (const Member& one : members) {
      stacks_.push_back({before, StrCat(one.layer, ".", after), false, {one.parameter}});
    }
  }

  Status AddWeight(const Stack& stack) {
    std::vector<AtomIndex> atoms;
    DType dtype = DType::kF32;
    for (const ParameterIndex p : stack.members) {
      CKPT_ASSIGN_OR_RETURN(const ShownWeight weight, shown_.WeightOf(p));
      dtype = weight.dtype;
      atoms.push_back(weight.atom);
    }
    return AddTensor(stack, "", dtype, std::move(atoms));
  }

  Status AddState(const Stack& stack, std::string_view kind) {
    if (step_.parameter(stack.members.front()).role != Role::kTrainable) return {};
    std::vector<AtomIndex> atoms;
    for (const ParameterIndex p : stack.members) {
      if (kind == "param") {
        CKPT_ASSIGN_OR_RETURN(const AtomIndex master, MasterOf(shown_, p));
        atoms.push_back(master);
        continue;
      }
      const StatesByKind states = shown_.StatesOf(p);
      const auto found = states.find(kind);
      if (found == states.end()) {
        return Fail(Error{ErrorCode::kUnsupported, StrCat("no state '", kind, "'")}.OfParameter(
            shown_.NameOf(p)));
      }
      atoms.push_back(found->second);
    }
    // A weight stands for its master, whose elements it has.
    const DType dtype = kind == "param" ? DType::kF32 : step_.atom(atoms.front()).dtype;
    return AddTensor(stack, StrCat("optimizer.state.", kind, "."), dtype, std::move(atoms));
  }

  Status AddTensor(const Stack& stack, const std::string& prefix, DType dtype,
                   std::vector<AtomIndex> atoms) {
    if (ByteWidth(dtype) == 0 || TorchName(dtype).empty()) {
      return Fail(Error{ErrorCode::kUnsupported,
                        StrCat("torch has no dtype ", DTypeName(dtype), " of whole bytes")}
                      .OfParameter(shown_.NameOf(stack.members.front())));
    }
    const Shape& shape = step_.parameter(stack.members.front()).shape;
    for (const AtomIndex atom : atoms) {
      if (step_.atom(atom).shape == shape) continue;
      return Fail(Error{ErrorCode::kUnsupported,
                        StrCat("'", step_.atom(atom).kind, "' is not of its shape")}
                      .OfParameter(shown_.NameOf(stack.members.front())));
    }
    dcp::BoxEntry entry;
    entry.key = StrCat(prefix, stack.Key());
    entry.path = {{entry.key, {}}};
    entry.tensor = true;
    entry.dtype = dtype;
    entry.shape = shape;
    entry.stacked = stack.stacked;
    if (stack.stacked) entry.shape.insert(entry.shape.begin(), atoms.size());
    entry.atoms = std::move(atoms);
    CKPT_ASSIGN_OR_RETURN(entry.parts, PartsOf(stack, dtype));
    entries_.push_back(std::move(entry));
    AddOtherName(stack, prefix);
    return {};
  }

  // A norm under the other specification's name.
  void AddOtherName(const Stack& stack, const std::string& prefix) {
    if (step_.facts.modules || stack.before.empty()) return;
    for (const auto& [name, other] : kNorms) {
      if (!stack.after.ends_with(name)) continue;
      const size_t at = stack.after.size() - name.size();
      if (at > 0 && stack.after[at - 1] != '.') continue;
      dcp::BoxEntry entry = entries_.back();
      entry.key = StrCat(prefix, stack.before, stack.after.substr(0, at), other);
      entry.path = {{entry.key, {}}};
      entry.bytes_of = entries_.size() - 1;
      entries_.push_back(std::move(entry));
      return;
    }
  }

  // How the layout's ranks divide each layer's tensor.
  Result<std::vector<dcp::BoxEntry::Part>> PartsOf(const Stack& stack, DType dtype) const {
    const Parameter& first = step_.parameter(stack.members.front());
    const Shape& shape = first.shape;
    const std::vector<dcp::BoxEntry::Part> whole = {{Shape(shape.size(), 0), shape, 0}};
    CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount(shape, dtype));
    if (bytes < request_.cut_from || bytes == 0) return whole;
    if (first.stacked_experts > 0) return Experts(first);
    const bool alike = std::ranges::all_of(stack.members, [&](ParameterIndex p) {
      return step_.parameter(p).pattern == first.pattern;
    });
    if (!alike || first.pattern.kind != PatternKind::kShard || first.pattern.bias_scaled) {
      return whole;
    }
    return shown_.layout().tp == 1 ? Fused(first, whole) : Sharded(first, whole);
  }

  // A gated layer's two halves, each of which Megatron asks for by itself: a reader of DCP reads
  // all of a piece for each part of it that is asked for.  `whole` of other tensors.
  static std::vector<dcp::BoxEntry::Part> Fused(const Parameter& parameter,
                                                const std::vector<dcp::BoxEntry::Part>& whole) {
    if (!IsOneCut(parameter.pattern)) return whole;
    const Cut& cut = parameter.pattern.cuts[0];
    if (cut.dim >= parameter.shape.size()) return whole;
    std::vector<dcp::BoxEntry::Part> parts;
    uint64_t begin = 0;
    for (const uint64_t size : cut.parts) {
      dcp::BoxEntry::Part part{Shape(parameter.shape.size(), 0), parameter.shape, 0};
      part.begin[cut.dim] = std::exchange(begin, begin + size);
      part.shape[cut.dim] = size;
      parts.push_back(std::move(part));
    }
    return parts.size() > 1 && begin == parameter.shape[cut.dim] ? parts : whole;
  }

  static std::vector<dcp::BoxEntry::Part> Experts(const Parameter& parameter) {
    const uint64_t rows = parameter.shape[0] / parameter.stacked_experts;
    std::vector<dcp::BoxEntry::Part> parts;
    for (uint64_t e = 0; e < parameter.stacked_experts; ++e) {
      dcp::BoxEntry::Part part{Shape(parameter.shape.size(), 0), parameter.shape, 0};
      part.begin[0] = e * rows;
      part.shape[0] = rows;
      parts.push_back(std::move(part));
    }
    return parts;
  }

  // The pieces of all ranks; `whole` where they are not exactly the tensor.
  Result<std::vector<dcp::BoxEntry::Part>> Sharded(
      const Parameter& parameter, const std::vector<dcp::BoxEntry::Part>& whole) const {
    const uint32_t tp = shown_.layout().tp;
    std::vector<dcp::BoxEntry::Part> parts;
    uint64_t covered = 0;
    for (uint32_t rank = 0; rank < tp; ++rank) {
      const auto local = MakeLocal(parameter.pattern, parameter.shape, rank, tp);
      if (!local) return whole;
      for (const Piece& piece : local->pieces) {
        CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(piece.shape));
        if (piece.scale != 1.0) return whole;
        if (elements == 0) continue;
        covered += elements;
        parts.push_back({piece.atom_begin, piece.shape, rank});
      }
    }
    CKPT_ASSIGN_OR_RETURN(const uint64_t all, ElementCount(parameter.shape));
    return covered == all ? parts : whole;
  }

  // ---- objects ----------------------------------------------------------------------

  Status AddObjects() {
    PickleBuilder builder;
    const NodeId nothing = builder.None();
    const NodeId root = builder.List({nothing});
    dcp::ObjectArchives archives;
    CKPT_ASSIGN_OR_RETURN(const dcp::ObjectBytes bytes,
                          archives.Of(std::move(builder).Finish(root)));
    for (const auto& [name, grid] :
         step_.facts.modules ? step_.facts.modules->objects : ObjectsOfModules()) {
      for (const std::string& place : PlacesOf(grid)) {
        dcp::BoxEntry entry;
        entry.key = StrCat(name, "/shard_", place);
        entry.path = {{entry.key, {}}};
        entry.object = bytes;
        entries_.push_back(std::move(entry));
      }
    }
    return {};
  }

  // Those of both specifications of the layers.
  Objects ObjectsOfModules() const {
    Objects objects;
    for (const Stack& stack : stacks_) {
      const Parameter& parameter = step_.parameter(stack.members.front());
      Shape grid;
      if (stack.stacked) grid.push_back(stack.members.size());
      if (IsExperts(stack.Key()) && parameter.stacked_experts > 0) {
        grid.push_back(parameter.stacked_experts);
      }
      if (grid.empty()) grid.push_back(1);
      const std::string module = stack.Key().substr(0, stack.Key().rfind('.'));
      if (KeepsObject(module)) objects.emplace(StrCat(module, ".", kExtraState), grid);
      constexpr std::string_view kQkv = ".linear_qkv";
      if (module.ends_with(kQkv)) {
        const std::string attention = module.substr(0, module.size() - kQkv.size());
        objects.emplace(StrCat(attention, ".core_attention.", kExtraState), grid);
      }
    }
    return objects;
  }

  Status CheckKeys() const {
    std::unordered_set<std::string_view> seen;
    for (const dcp::BoxEntry& entry : entries_) {
      if (seen.insert(entry.key).second) continue;
      return Fail(ErrorCode::kUnsupported,
                  StrCat("two values would have the key '", entry.key, "'"));
    }
    return {};
  }

  const ShownState& shown_;
  const StepModel& step_;
  const ViewRequest& request_;
  const Alias* embedding_ = nullptr;
  std::vector<Stack> stacks_;
  std::vector<dcp::BoxEntry> entries_;
};

}  // namespace

Result<AtomIndex> MasterOf(const ShownState& shown, ParameterIndex parameter) {
  const StepModel& step = shown.step();
  if (const auto master = step.FindAtom(parameter, "master")) return *master;
  const auto weight = step.FindAtom(parameter, "weight");
  if (weight && IsFloat(step.atom(*weight).dtype)) return *weight;
  return Fail(Error{ErrorCode::kUnsupported, "neither a master nor a weight in floats"}.OfParameter(
      shown.NameOf(parameter)));
}

Result<std::vector<dcp::BoxEntry>> EntriesOf(const ShownState& shown, const ViewRequest& request) {
  return Collector(shown, request).Collect();
}

}  // namespace ckptfs::megatron
