// SPDX-License-Identifier: Apache-2.0
//
// NativeReader: stage 0, where the optimizer lies in the model states file and
// knows its parameters by number only.

#include <algorithm>

#include "core/base/strings.h"
#include "formats/deepspeed/native_reader.h"
#include "formats/deepspeed/state_names.h"
#include "formats/deepspeed/zero_layout.h"

namespace ckptfs::deepspeed {
namespace {

using Form = UnshardedOptimizer::Form;
using GroupNames = std::vector<std::vector<std::string>>;

// The shape that a member's states have, if it has any of its own.
std::optional<Shape> ShapeOfState(const UnshardedOptimizer& optimizer, size_t group, size_t i) {
  if (optimizer.form == Form::kUnfused) {
    if (i < optimizer.parameter_masters[group].size()) {
      return optimizer.parameter_masters[group][i].shape();
    }
    return std::nullopt;
  }
  const auto state = optimizer.states.find(optimizer.groups[group].members[i]);
  if (state == optimizer.states.end()) return std::nullopt;
  for (const NamedTensor& entry : state->second.flat) {
    if (entry.name == "exp_avg" || entry.name == "exp_avg_sq" || entry.name == "momentum_buffer") {
      return entry.tensor.shape();
    }
  }
  return std::nullopt;
}

// FP16_Optimizer makes a group's weights views of one storage: each storage
// that parameters tile without a gap, and their names in its order.
std::map<uint64_t, GroupNames> TiledStorages(const ModelStates& model) {
  std::map<std::string, std::map<uint64_t, const NamedTensor*>> storages;
  for (const NamedTensor& entry : model.module) {
    if (entry.tensor.elements() > 0 && entry.tensor.dense()) {
      storages[entry.tensor.storage_key()].try_emplace(entry.tensor.storage_offset(), &entry);
    }
  }
  std::map<uint64_t, GroupNames> out;  // by elements
  for (const auto& [key, tensors] : storages) {
    uint64_t at = 0;
    std::vector<std::string> names;
    for (const auto& [offset, entry] : tensors) {
      if (offset != at) break;
      at += entry->tensor.elements();
      names.push_back(entry->name);
    }
    if (names.size() == tensors.size() && at == tensors.begin()->second->tensor.storage_elements()) {
      out[at].push_back(std::move(names));
    }
  }
  return out;
}

Result<GroupNames> NamesOfFused(const ModelStates& model, const UnshardedOptimizer& optimizer) {
  const std::map<uint64_t, GroupNames> storages = TiledStorages(model);
  GroupNames out;
  std::set<uint64_t> used;
  for (const FileTensor& master : optimizer.flat_masters) {
    const auto found = storages.find(master.elements());
    const bool clear = found != storages.end() && found->second.size() == 1 &&
                       used.insert(master.elements()).second;
    if (!clear) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat(model.file, ": no single storage of the module's weights has the ",
                         master.elements(), " elements of a flat fp32 group; its parameters cannot "
                                            "be told apart"));
    }
    out.push_back(found->second.front());
  }
  return out;
}

}  // namespace

std::vector<NamedShape> NativeReader::Candidates(uint32_t mp) const {
  std::vector<NamedShape> out;
  std::set<std::string> seen;
  const std::set<std::string> buffers = BufferNames(mp);
  for (const NamedTensor& entry : ModelOf(mp).module) {
    const std::string name = spellings_.Of(entry.name);
    if (aliases_.count(name) > 0 || buffers.count(name) > 0 || !seen.insert(name).second) continue;
    out.push_back(NamedShape{name, entry.tensor.shape()});
  }
  return out;
}

Result<GroupNames> NativeReader::NamesOfGroups(uint32_t mp,
                                               const UnshardedOptimizer& optimizer) const {
  if (optimizer.form == Form::kFused) return NamesOfFused(ModelOf(mp), optimizer);
  GroupNames given = optimizer.names;
  std::vector<std::vector<std::optional<Shape>>> shapes;
  bool named = true;
  for (size_t g = 0; g < optimizer.groups.size(); ++g) {
    const size_t members = optimizer.groups[g].members.size();
    named = named && g < given.size() && given[g].size() == members;
    shapes.emplace_back();
    for (size_t i = 0; i < members; ++i) shapes.back().push_back(ShapeOfState(optimizer, g, i));
  }
  if (named && !optimizer.groups.empty()) return given;
  auto matched = MatchStates(Candidates(mp), shapes);
  if (!matched) return Fail(std::move(matched).error().WithContext(ModelOf(mp).file));
  return matched;
}

Status NativeReader::NameUnsharded() {
  for (uint32_t mp = 0; mp < tp_ * pp_; ++mp) {
    const ModelStates& model = ModelOf(mp);
    if (!model.optimizer || options_.weights_only) continue;
    if (!model.has_module || !experts_.empty()) {
      assembler_.header().notes.push_back(
          StrCat(model.file, ": optimizer states without ZeRO of a ",
                 model.has_module ? "mixture of experts" : "pipeline",
                 " have no parameter names; weights only"));
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(unsharded_[mp], NamesOfGroups(mp, *model.optimizer));
    std::set<std::string> trained;
    for (const auto& group : unsharded_[mp]) trained.insert(group.begin(), group.end());
    for (const NamedShape& candidate : Candidates(mp)) {
      if (trained.count(candidate.name) == 0) known_.at(candidate.name).role = Role::kFrozen;
    }
  }
  if (!unsharded_.empty()) {
    assembler_.header().notes.push_back(
        "stage 0: the optimizer numbers its parameters; they were matched in model order");
  }
  return {};
}

Status NativeReader::PlaceWholeState(const std::string& name, uint32_t mp,
                                     const PartitionStates& state) {
  const Known& known = known_.at(name);
  const Shape& local = *known.shapes.at(mp / tp_)[mp % tp_];
  for (const NamedTensor& entry : state.flat) {
    if (entry.tensor.shape() == local) {
      CKPT_RETURN_IF_ERROR(
          PlaceTensor(name, entry.name, entry.tensor, known.slots.at(mp / tp_), mp % tp_));
      continue;
    }
    const std::string what = StrCat("optimizer state '", entry.name, "' of '", name, "'");
    if (!CanBeReduced(entry.name, entry.tensor.shape(), local)) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(ModelOf(mp).file, ": ", what, " has shape ",
                         ShapeToString(entry.tensor.shape()), ", the parameter ", ShapeToString(local)));
    }
    if (tp_ > 1) {
      assembler_.header().notes.push_back(StrCat(what, " has a shape of its own and is left out"));
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(
        const AtomIndex atom,
        assembler_.AddAtom(known.index, "", entry.name, entry.tensor.dtype(), entry.tensor.shape(),
                           Relation::kReduced));
    CKPT_ASSIGN_OR_RETURN(FileTensor::Held held, entry.tensor.As(WholeTensor(entry.tensor.shape())));
    const uint32_t index = assembler_.AddLocal(atom, 0, std::move(held.local));
    assembler_.AddFragment(atom, 0, index, held.fragment);
  }
  for (const std::string& opaque : state.opaque) {
    assembler_.header().notes.push_back(
        StrCat("optimizer state '", opaque, "' of '", name, "' is not a tensor and is left out"));
  }
  for (const NamedScalar& scalar : state.scalars) CKPT_RETURN_IF_ERROR(SetScalar(name, scalar));
  return {};
}

// Masters and states with the parameters' own shapes.
Status NativeReader::PlaceWhole(uint32_t mp, const UnshardedOptimizer& optimizer) {
  std::map<std::string, const FileTensor*> weights;
  for (const Weight& weight : weights_) {
    if (weight.tp == mp % tp_) weights.emplace(weight.name, &weight.tensor);
  }
  const GroupNames& names = unsharded_.at(mp);
  for (size_t g = 0; g < names.size(); ++g) {
    for (size_t i = 0; i < names[g].size(); ++i) {
      const std::string& name = names[g][i];
      const auto found = known_.find(name);
      const auto weight = weights.find(name);
      if (found == known_.end() || weight == weights.end()) {
        return Fail(ErrorCode::kInvalid, StrCat(ModelOf(mp).file, ": the optimizer's '", name,
                                                "' is no parameter of the module"));
      }
      const bool own = optimizer.form == Form::kUnfused && i < optimizer.parameter_masters[g].size();
      const FileTensor& master = own ? optimizer.parameter_masters[g][i] : *weight->second;
      const uint32_t slot = found->second.slots.at(mp / tp_);
      CKPT_RETURN_IF_ERROR(PlaceTensor(name, "master", master, slot, mp % tp_));
      static const PartitionStates kNone;
      const auto at = optimizer.states.find(optimizer.groups[g].members[i]);
      const PartitionStates& state = at == optimizer.states.end() ? kNone : at->second;
      CKPT_RETURN_IF_ERROR(CheckStates(name, ModelOf(mp).file, StateNames(state)));
      CKPT_RETURN_IF_ERROR(PlaceWholeState(name, mp, state));
    }
    MergeGroup(g, optimizer.groups[g].hyper_parameters, names[g]);
  }
  return {};
}

// One flat tensor per group and kind.
Status NativeReader::PlaceFused(uint32_t mp, const UnshardedOptimizer& optimizer) {
  const GroupNames& names = unsharded_.at(mp);
  for (size_t g = 0; g < names.size(); ++g) {
    const FileTensor& master = optimizer.flat_masters[g];
    static const PartitionStates kNone;
    const auto found = optimizer.states.find(static_cast<int64_t>(g));
    const PartitionStates& state = found == optimizer.states.end() ? kNone : found->second;
    std::vector<std::pair<std::string, const FileTensor*>> kinds{{"master", &master}};
    for (const NamedTensor& entry : state.flat) {
      if (entry.tensor.shape() != master.shape()) {
        return Fail(ErrorCode::kInvalid,
                    StrCat(ModelOf(mp).file, ": optimizer state '", entry.name, "' of group ", g,
                           " has shape ", ShapeToString(entry.tensor.shape()), ", its flat master ",
                           ShapeToString(master.shape())));
      }
      kinds.emplace_back(entry.name, &entry.tensor);
    }
    for (const std::string& name : names[g]) {
      CKPT_RETURN_IF_ERROR(CheckStates(name, ModelOf(mp).file, StateNames(state)));
    }
    std::vector<uint64_t> members;
    for (const std::string& name : names[g]) {
      members.push_back(*ElementCount(*known_.at(name).shapes.at(mp / tp_)[mp % tp_]));
    }
    for (const auto& [kind, tensor] : kinds) {
      Status outcome;
      const auto visit = [&, kind = kind, tensor = tensor](const ZeroSpan& span) {
        const std::string& name = names[g][span.member];
        auto place = PlaceIn(name, kind, tensor->dtype(), known_.at(name).slots.at(mp / tp_), mp % tp_);
        auto fragment = tensor->Slice(span.at, span.begin, span.end);
        if (!place || !fragment) {
          outcome = Fail(std::move(place ? fragment.error() : place.error())
                             .WithContext(StrCat(ModelOf(mp).file, ": '", kind, "' of group ", g)));
          return;
        }
        assembler_.AddFragment(place->atom, place->copy, place->local, *fragment);
      };
      CKPT_RETURN_IF_ERROR(VisitFlatGroup(members, {}, master.elements(), 1, visit));
      CKPT_RETURN_IF_ERROR(outcome);
    }
    for (const NamedScalar& scalar : state.scalars) {
      for (const std::string& name : names[g]) CKPT_RETURN_IF_ERROR(SetScalar(name, scalar));
    }
    MergeGroup(g, g < optimizer.groups.size() ? optimizer.groups[g].hyper_parameters : "", names[g]);
  }
  return {};
}

Status NativeReader::PlaceUnsharded() {
  for (const auto& [mp, names] : unsharded_) {
    const UnshardedOptimizer& optimizer = *ModelOf(mp).optimizer;
    CKPT_RETURN_IF_ERROR(optimizer.form == Form::kFused ? PlaceFused(mp, optimizer)
                                                        : PlaceWhole(mp, optimizer));
  }
  return {};
}

}  // namespace ckptfs::deepspeed
