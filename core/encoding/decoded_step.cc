// SPDX-License-Identifier: Apache-2.0

#include "core/encoding/decoded_step.h"

#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/encoding/encoded_patterns.h"

namespace ckptfs {
namespace {

tl::unexpected<Error> Cannot(std::string why, std::string_view parameter) {
  return Fail(Error{ErrorCode::kUnsupported, std::move(why)}.OfParameter(parameter));
}

// The only place in which all of a weight lies as it is.
Result<FragmentSeries> WholeFragment(const StepModel& step, ParameterIndex parameter) {
  const Parameter& described = step.parameter(parameter);
  const Atom& atom = step.atom(*step.FindAtom(parameter, "weight"));
  const Gather* gather = GatherCopied(atom.source);
  const auto elements = ElementCount(atom.shape);
  const bool whole = gather != nullptr && elements && gather->locals.size() == 1 &&
                     gather->locals[0] == WholeTensor(atom.shape) && gather->series.size() == 1 &&
                     gather->series[0].count == 1 && gather->series[0].flat_begin == 0 &&
                     gather->series[0].elements == *elements &&
                     gather->series[0].dtype == atom.dtype;
  if (!whole) {
    return Fail(Error{ErrorCode::kUnsupported, "its values or scales lie in several pieces"}
                    .Needing("compact the step first")
                    .OfParameter(described.name));
  }
  return gather->series[0];
}

class Decoder {
 public:
  Decoder(const StepModel& from, const EncodingConfig& config,
          const std::vector<EncodedWeight>& weights)
      : from_(from), config_(config), atom_count_(from.parameters.size(), 0) {
    for (const Atom& atom : from.atoms) ++atom_count_[static_cast<uint32_t>(atom.parameter)];
    for (const EncodedWeight& weight : weights) {
      by_values_.emplace(static_cast<uint32_t>(weight.values), &weight);
      scales_.emplace(static_cast<uint32_t>(weight.scales), &weight);
    }
  }

  Result<StepModel> Make(const FamilyVariables& sizes, const FamilySet& families) && {
    static_cast<StepHeader&>(to_) = from_;
    to_.facts.safetensors.clear();
    to_.documents = from_.documents;
    AddParameters();
    SetPatterns(sizes, families);
    CKPT_RETURN_IF_ERROR(AddAtoms());
    CKPT_RETURN_IF_ERROR(AddReferences());
    to_.BuildIndex();
    return std::move(to_);
  }

 private:
  const EncodedWeight* ValuesOf(uint32_t parameter) const {
    const auto found = by_values_.find(parameter);
    return found == by_values_.end() ? nullptr : found->second;
  }

  void AddParameters() {
    for (uint32_t i = 0; i < from_.parameters.size(); ++i) {
      if (scales_.contains(i)) continue;
      numbers_.emplace(i, static_cast<uint32_t>(to_.parameters.size()));
      Parameter parameter = from_.parameters[i];
      if (const EncodedWeight* weight = ValuesOf(i)) {
        parameter.name = weight->name;
        parameter.shape = weight->shape;
        parameter.role = Role::kTrainable;
        parameter.pattern = {};
        parameter.source_pattern.reset();
      }
      to_.parameters.push_back(std::move(parameter));
    }
  }

  void SetPatterns(const FamilyVariables& sizes, const FamilySet& families) {
    std::vector<std::string> names;
    std::vector<Shape> shapes;
    for (const Parameter& parameter : to_.parameters) {
      names.push_back(parameter.name);
      shapes.push_back(parameter.shape);
    }
    const DecodedRules rules(names, shapes, sizes, families);
    for (const auto& [old, number] : numbers_) {
      Parameter& parameter = to_.parameters[number];
      const auto match = rules.Of(parameter.name);
      if (!match) continue;
      SetOpenPattern(*match, parameter);
      if (ValuesOf(old) == nullptr) continue;
      parameter.stage = match->stage;
      parameter.layer = match->layer.value_or(0);
    }
  }

  Status AddAtoms() {
    for (uint32_t a = 0; a < from_.atoms.size(); ++a) {
      const auto parameter = static_cast<uint32_t>(from_.atoms[a].parameter);
      if (scales_.contains(parameter)) continue;
      atoms_.emplace(a, static_cast<uint32_t>(to_.atoms.size()));
      const EncodedWeight* weight = ValuesOf(parameter);
      if (weight == nullptr) {
        to_.atoms.push_back(from_.atoms[a]);
      } else {
        CKPT_ASSIGN_OR_RETURN(Atom atom, DecodedAtom(*weight));
        to_.atoms.push_back(std::move(atom));
      }
      to_.atoms.back().parameter = ParameterIndex{numbers_.at(parameter)};
    }
    for (Atom& atom : to_.atoms) {
      const auto of = DerivedFrom(atom.source);
      if (!of) continue;
      const auto found = atoms_.find(static_cast<uint32_t>(*of));
      if (found == atoms_.end()) {
        return Cannot("it is a cast of scales", to_.parameter(atom.parameter).name);
      }
      atom.source.of = AtomIndex{found->second};
    }
    return {};
  }

  Result<Atom> DecodedAtom(const EncodedWeight& weight) const {
    for (const ParameterIndex p : {weight.values, weight.scales}) {
      if (atom_count_[static_cast<uint32_t>(p)] == 1) continue;
      return Cannot("it has an optimizer's states", from_.parameter(p).name);
    }
    CKPT_ASSIGN_OR_RETURN(FragmentSeries values, WholeFragment(from_, weight.values));
    CKPT_ASSIGN_OR_RETURN(FragmentSeries scales, WholeFragment(from_, weight.scales));
    if (scales.dtype == DType::kU8) scales.dtype = DType::kF8E8M0;
    LocalTensor local = WholeTensor(weight.shape);
    if (config_.method == EncodingMethod::kMxfp4) {
      const auto [experts, columns, rows] =
          std::tuple(weight.shape[0], weight.shape[1], weight.shape[2]);
      local.shape = {experts, rows, columns};
      local.pieces[0].local_strides = {rows * columns, 1, columns};
      values.dtype = DType::kF4;
      values.elements = experts * rows * columns;
    }
    Atom atom;
    atom.kind = "weight";
    atom.dtype = DType::kF32;
    atom.shape = weight.shape;
    atom.source = ScaledSource(
        Gather{{std::move(local)}, {values}},
        Gather{{LocalTensor{from_.parameter(weight.scales).shape, {}}}, {scales}}, config_.block);
    if (Status sound = CheckSource(to_, atom); !sound) {
      return Fail(std::move(sound).error().OfParameter(weight.name));
    }
    return atom;
  }

  // All that refers to parameters and atoms by number.
  Status AddReferences() {
    for (const Alias& alias : from_.aliases) {
      const auto parameter = static_cast<uint32_t>(alias.parameter);
      if (!numbers_.contains(parameter) || ValuesOf(parameter) != nullptr) {
        return Cannot("it is tied, and stored with scales per block", alias.name);
      }
      to_.aliases.push_back({alias.name, ParameterIndex{numbers_.at(parameter)}});
    }
    for (Group group : from_.groups) {
      std::erase_if(group.parameters,
                    [&](ParameterIndex p) { return scales_.contains(static_cast<uint32_t>(p)); });
      for (ParameterIndex& p : group.parameters) {
        p = ParameterIndex{numbers_.at(static_cast<uint32_t>(p))};
      }
      to_.groups.push_back(std::move(group));
    }
    for (Document& document : to_.documents) {
      for (StoredTensor& tensor : document.tensors) {
        if (!tensor.atom) continue;
        const auto found = atoms_.find(static_cast<uint32_t>(*tensor.atom));
        if (found == atoms_.end()) {
          return Fail(ErrorCode::kUnsupported,
                      StrCat("document '", document.key, "' mentions scales of the model"));
        }
        tensor.atom = AtomIndex{found->second};
      }
    }
    return {};
  }

  const StepModel& from_;
  const EncodingConfig& config_;
  std::vector<uint32_t> atom_count_;                             // by the step's parameters
  std::map<uint32_t, const EncodedWeight*> by_values_, scales_;  // by the step's parameters
  std::map<uint32_t, uint32_t> numbers_;                         // parameters, old to new
  std::map<uint32_t, uint32_t> atoms_;                           // atoms, old to new
  StepModel to_;
};

}  // namespace

Result<StepModel> Decode(const StepModel& step, const EncodingConfig& config,
                         const FamilyVariables& sizes, const FamilySet& families) {
  CKPT_ASSIGN_OR_RETURN(const auto weights, FindEncodedWeights(step, config));
  return Decoder(step, config, weights).Make(sizes, families);
}

}  // namespace ckptfs
