// SPDX-License-Identifier: Apache-2.0

#include "formats/rank/rank_tensors.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/state/state_fit.h"
#include "core/view/shard.h"
#include "formats/tools/source_traits.h"

namespace ckptfs {
namespace {

bool IsWhole(const LocalTensor& local, const Shape& atom) {
  return local.shape == atom && local.pieces.size() == 1 && local.pieces[0].shape == atom &&
         local.pieces[0].scale == 1.0 && local.pieces[0].local_strides == RowMajorStrides(atom);
}

bool IsScaled(const LocalTensor& local) {
  return std::any_of(local.pieces.begin(), local.pieces.end(),
                     [](const Piece& piece) { return piece.scale != 1.0; });
}

bool SameDegrees(const Layout& a, const Layout& b) {
  return a.tp == b.tp && a.pp == b.pp && a.dp == b.dp && a.ep == b.ep && a.etp == b.etp &&
         a.cp == b.cp && a.vpp == b.vpp && a.zero == b.zero;
}

class Builder {
 public:
  Builder(const ShownState& shown, const RankCoordinate& rank)
      : shown_(shown), step_(shown.step()), layout_(shown.layout()), rank_(rank) {}

  Result<RankTensors> Build() && {
    CKPT_RETURN_IF_ERROR(FindLocals());
    for (uint32_t i = 0; i < locals_.size(); ++i) {
      if (!locals_[i]) continue;
      CKPT_RETURN_IF_ERROR(AddWeight(ParameterIndex{i}));
      CKPT_RETURN_IF_ERROR(AddStates(ParameterIndex{i}));
    }
    AddAliases();
    for (auto* tensors : {&out_.model, &out_.optimizer}) {
      std::sort(tensors->begin(), tensors->end(), [](const RankTensor& a, const RankTensor& b) {
        const uint32_t wide_a = ByteWidth(a.dtype), wide_b = ByteWidth(b.dtype);
        return wide_a != wide_b ? wide_a > wide_b : a.key < b.key;
      });
    }
    return std::move(out_);
  }

 private:
  Status FindLocals() {
    locals_.resize(step_.parameters.size());
    for (size_t i = 0; i < step_.parameters.size(); ++i) {
      const Parameter& parameter = step_.parameters[i];
      CKPT_ASSIGN_OR_RETURN(const bool held, Holds(step_, layout_, rank_, parameter));
      if (!held) continue;
      CKPT_ASSIGN_OR_RETURN(locals_[i], LocalOf(step_, layout_, rank_, parameter));
    }
    return {};
  }

  void LeaveOut(const std::string& key, std::string_view why) {
    out_.left_out.push_back(StrCat(key, ": ", why));
  }

  // False, and named, if no file of ours can hold it.
  bool CanShow(const std::string& key, DType dtype) {
    if (ByteWidth(dtype) > 0 && !TorchName(dtype).empty()) return true;
    LeaveOut(key, StrCat("torch has no dtype ", DTypeName(dtype), " of whole bytes"));
    return false;
  }

  Status AddWeight(ParameterIndex index) {
    const std::string& name = shown_.NameOf(index);
    const auto& choice = shown_.FindWeight(index);
    if (!choice) {
      LeaveOut(name, "the step holds neither a weight nor a master");
      return {};
    }
    if (!CanShow(name, choice->dtype)) return {};
    RankTensor tensor;
    tensor.key = name;
    tensor.parameter = index;
    tensor.atom = choice->atom;
    tensor.dtype = choice->dtype;
    tensor.derived = choice->derived;
    tensor.local = locals_[static_cast<uint32_t>(index)];
    tensor.shape = tensor.local->shape;
    CKPT_ASSIGN_OR_RETURN(tensor.elements, ElementCount(tensor.shape));
    out_.model.push_back(std::move(tensor));
    return {};
  }

  Status AddStates(ParameterIndex parameter) {
    for (const ShownAtom& atom : shown_.AtomsOf(parameter)) {
      if (step_.atom(atom.atom).kind == "weight") continue;
      CKPT_RETURN_IF_ERROR(AddState(atom.atom, atom.first));
    }
    return {};
  }

  Status AddState(AtomIndex index, bool first) {
    const Atom& atom = step_.atom(index);
    const auto& local = locals_[static_cast<uint32_t>(atom.parameter)];
    RankTensor tensor;
    tensor.key = StrCat(atom.kind, "/", shown_.NameOf(atom.parameter));
    if (!first) tensor.key = StrCat(atom.optimizer, "/", tensor.key);
    tensor.parameter = atom.parameter;
    tensor.atom = index;
    tensor.dtype = atom.dtype;
    tensor.derived = atom.derived;
    if (!CanShow(tensor.key, atom.dtype) || !Fits(atom, *local, tensor.key)) return {};
    const bool same = atom.relation == Relation::kSame;
    const bool cut = atom.relation == Relation::kReduced &&
                     !IsWhole(*local, step_.parameter(atom.parameter).shape);
    if (cut) {
      CKPT_ASSIGN_OR_RETURN(tensor.local, CutReduced(atom, tensor.key));
      if (!tensor.local) return {};
    } else {
      tensor.local = same ? local : std::make_shared<const LocalTensor>(WholeTensor(atom.shape));
    }
    tensor.shape = tensor.local->shape;
    CKPT_ASSIGN_OR_RETURN(tensor.elements, ElementCount(tensor.shape));
    if (same && layout_.zero > 0) Slice(step_.parameter(atom.parameter), tensor);
    out_.optimizer.push_back(std::move(tensor));
    return {};
  }

  // True if the state can be cut as its parameter is.
  bool Fits(const Atom& atom, const LocalTensor& local, const std::string& key) {
    switch (atom.relation) {
      case Relation::kScalar: return true;
      case Relation::kSame:
        if (atom.kind == "master" || !IsScaled(local)) return true;
        LeaveOut(key,
                 "the parameter is stored as a multiple, and nothing tells how this state "
                 "scales with it");
        return false;
      case Relation::kReduced: return true;  // CutReduced says it
      case Relation::kOpaque:
        if (SameDegrees(layout_, step_.layout)) return true;
        LeaveOut(key, "an opaque state is only shown in the source's own layout");
        return false;
    }
    return false;
  }

  // A factored state is cut with its parameter along a dimension that both have, and is whole on
  // every rank where it has none of it.  Nothing, and named, if that does not say what a rank has.
  Result<std::shared_ptr<const LocalTensor>> CutReduced(const Atom& atom, const std::string& key) {
    Parameter parameter = step_.parameter(atom.parameter);
    const auto dims = DimensionsOf(atom.kind, atom.shape, parameter.shape);
    const bool expert = parameter.expert || parameter.stacked_experts > 0;
    bool cut = dims && !expert && atom.shape != parameter.shape;
    if (cut && parameter.source_pattern) {
      cut = CutAlong(*dims, atom.shape, parameter.shape, *parameter.source_pattern);
    }
    cut = cut && CutAlong(*dims, atom.shape, parameter.shape, parameter.pattern);
    if (!cut) {
      LeaveOut(key, "a reduced state is not cut with its parameter");
      return std::shared_ptr<const LocalTensor>();
    }
    parameter.shape = atom.shape;
    return LocalOf(step_, layout_, rank_, parameter);
  }

  // Makes a parameter's pattern that of a state with these dimensions of it; false if it is
  // not one cut.
  static bool CutAlong(const std::vector<uint32_t>& dims, const Shape& state,
                       const Shape& parameter, Pattern& pattern) {
    if (!IsOneCut(pattern) || pattern.bias_scaled) return false;
    const uint32_t dim = pattern.cuts[0].dim;
    const auto found = std::ranges::find(dims, dim);
    const auto at = static_cast<size_t>(found - dims.begin());
    if (found == dims.end() || state[at] != parameter[dim]) {
      pattern = Pattern::Replicate();
    } else {
      pattern.cuts[0].dim = static_cast<uint32_t>(at);
    }
    return true;
  }

  // The flat slices of one data-parallel group.
  void Slice(const Parameter& parameter, RankTensor& tensor) const {
    // DeepSpeed's engines know no experts in transformers' modules: stacked ones are as any other
    // parameter there.
    const bool plain = parameter.stacked_experts > 0 && TraitsOf(step_).engine &&
                       SameDegrees(layout_, step_.layout);
    tensor.expert = !plain && (parameter.expert || parameter.stacked_experts > 0);
    tensor.degree = plain ? layout_.dp : ZeroSliceOf(layout_, rank_, parameter).degree;
    tensor.flat = true;
    tensor.slice = CeilDiv(tensor.elements, tensor.degree);
    tensor.shape = {tensor.slice};
  }

  void AddAliases() {
    std::set<std::string_view> keys;
    for (const RankTensor& tensor : out_.model) keys.insert(tensor.key);
    for (const Alias& alias : shown_.aliases()) {
      const std::string& name = shown_.NameOf(alias.parameter);
      if (keys.contains(name) && !keys.contains(alias.name)) {
        out_.aliases.emplace_back(alias.name, name);
      }
    }
    std::sort(out_.aliases.begin(), out_.aliases.end());
  }

  const ShownState& shown_;
  const StepModel& step_;
  const Layout& layout_;
  const RankCoordinate& rank_;
  std::vector<std::shared_ptr<const LocalTensor>> locals_;  // by parameter; null: not held
  RankTensors out_;
};

}  // namespace

std::pair<uint64_t, uint64_t> RankTensor::RangeOf(const RankCoordinate& rank) const {
  const auto [begin, end] = ZeroRange(elements, SliceOf(rank), degree);
  return {std::min(begin, elements), std::min(end, elements)};
}

uint64_t RankTensor::ByteLength() const {
  uint64_t count = ByteWidth(dtype);
  for (uint64_t dim : shape) count *= dim;
  return count;
}

AtomSegment RankTensor::SegmentOf(const RankCoordinate& rank) const {
  if (!flat) return AtomSegment{atom, local, 0, elements, dtype};
  const auto [begin, end] = ZeroRange(elements, SliceOf(rank), degree);
  return AtomSegment{atom, local, begin, end, dtype};
}

Result<RankTensors> BuildRankTensors(const ShownState& shown, const RankCoordinate& rank) {
  return Builder(shown, rank).Build();
}

}  // namespace ckptfs
