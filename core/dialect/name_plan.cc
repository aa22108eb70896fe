// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/name_plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>

#include "core/base/strings.h"
#include "core/model/name_normaliser.h"

namespace ckptfs {
namespace {

constexpr uint64_t kMaxTensors = uint64_t{1} << 20;
constexpr uint64_t kMaxMaps = uint64_t{1} << 22;

// The prefix before the name that rules see: a wrapper around all of the model adds it.
std::string_view HeadOf(std::string_view name, std::string_view normalised) {
  return name.ends_with(normalised) ? name.substr(0, name.size() - normalised.size()) : "";
}

std::string NumberText(const MapRule& rule, uint64_t number) {
  return StrCat(rule.stack == Stack::kLayer ? "layer " : "expert ", number);
}

class Planner {
 public:
  Planner(const StepModel& step, std::span<const MapRule* const> rules,
          const FamilyVariables& sizes, bool from_files)
      : step_(step), rules_(rules), sizes_(sizes), from_files_(from_files) {
    plan_.of_parameter.resize(step.parameters.size());
  }

  Result<NamePlan> Make() && {
    for (uint32_t p = 0; p < step_.parameters.size(); ++p) {
      CKPT_RETURN_IF_ERROR(Add(ParameterIndex{p}));
    }
    for (const auto& [tensor, join] : joins_) CKPT_RETURN_IF_ERROR(Finish(tensor, join));
    CKPT_RETURN_IF_ERROR(CheckNames());
    for (const Alias& alias : step_.aliases) plan_.aliases.push_back(AliasName(alias.name));
    return std::move(plan_);
  }

 private:
  // The parts of a tensor that is put together: (number in the stack, part) of each of `parts`.
  struct Join {
    std::vector<FilePart> places;
    uint64_t stacked = 1;
  };

  std::optional<RuleSide> Find(const std::string& normalised) const {
    for (RuleSide& side : SidesOf(rules_, normalised)) {
      if (side.file == from_files_) return std::move(side);
    }
    return std::nullopt;
  }

  uint32_t Push(RenamedTensor tensor) {
    const auto number = static_cast<uint32_t>(plan_.tensors.size());
    for (const ParameterIndex p : tensor.parts) Mark(p, number);
    plan_.tensors.push_back(std::move(tensor));
    return number;
  }
  void Mark(ParameterIndex p, uint32_t tensor) {
    plan_.of_parameter[static_cast<uint32_t>(p)].push_back(tensor);
  }

  Status Add(ParameterIndex p) {
    const Parameter& parameter = step_.parameter(p);
    const std::string normalised = NormaliseName(parameter.name);
    std::optional<RuleSide> side;
    if (IsOfModel(parameter)) side = Find(normalised);
    if (!side) {
      Push({parameter.name, parameter.shape, {p}, {}, nullptr, 0, {}});
      return {};
    }
    const std::string head(HeadOf(parameter.name, normalised));
    CKPT_ASSIGN_OR_RETURN(const bool whole, IsWholeHere(p, *side));
    if (whole) return Rename(p, *side, head);
    auto done = from_files_ ? Collect(p, *side, head) : Split(p, *side, head);
    if (!done) return Fail(std::move(done).error().OfParameter(parameter.name));
    return {};
  }

  Result<const RuleSizes*> SizesOf(const MapRule& rule) {
    const auto found = sizes_of_.find(&rule);
    if (found != sizes_of_.end()) return &found->second;
    CKPT_ASSIGN_OR_RETURN(RuleSizes sizes, SizesOfRule(rule, sizes_));
    return &sizes_of_.emplace(&rule, std::move(sizes)).first->second;
  }

  // A tensor that the model does not say to be padded only changes its name.
  Result<bool> IsWholeHere(ParameterIndex p, const RuleSide& side) {
    if (!side.rule->rows) return side.rule->IsWhole();
    if (from_files_) return true;
    CKPT_ASSIGN_OR_RETURN(const RuleSizes* sizes, SizesOf(*side.rule));
    const Shape& shape = step_.parameter(p).shape;
    return !sizes->rows || (!shape.empty() && shape[0] == *sizes->rows);
  }

  Status Charge(size_t maps) {
    maps_ += maps;
    if (maps_ <= kMaxMaps) return {};
    return Fail(ErrorCode::kExhausted,
                StrCat("its tensors would consist of more than ", kMaxMaps, " boxes"));
  }

  // The name on the other side, of a rule that changes nothing else.
  std::string OtherName(const RuleSide& side, std::string_view head) const {
    const NameTemplate& to = from_files_ ? *side.rule->to : side.rule->from.front();
    return StrCat(head, *to.Render(side.holes, std::nullopt));
  }

  Status Rename(ParameterIndex p, const RuleSide& side, const std::string& head) {
    RenamedTensor tensor{OtherName(side, head), step_.parameter(p).shape, {p}, {}, side.rule, 0,
                         side.holes.expert};
    Push(std::move(tensor));
    return {};
  }

  // A tensor of the dialect into those of the files.
  Status Split(ParameterIndex p, const RuleSide& side, const std::string& head) {
    const MapRule& rule = *side.rule;
    CKPT_ASSIGN_OR_RETURN(const RuleSizes* sizes, SizesOf(rule));
    CKPT_ASSIGN_OR_RETURN(const FileShapes file,
                          FileShapesOf(rule, *sizes, step_.parameter(p).shape));
    // A checkpoint may claim any number, of tensors without elements.
    if (file.stacked > kMaxTensors ||
        plan_.tensors.size() + file.stacked * rule.from.size() > kMaxTensors) {
      return Refuse("the step would have more than ", kMaxTensors, " tensors");
    }
    for (uint64_t number = 0; number < file.stacked; ++number) {
      NameHoles holes = side.holes;
      if (rule.stack == Stack::kExpert) holes.expert = static_cast<uint32_t>(number);
      if (rule.stack == Stack::kLayer) holes.layer = static_cast<uint32_t>(number);
      for (uint32_t part = 0; part < rule.from.size(); ++part) {
        std::vector<BoxMap> maps = MapsToPart(rule, *sizes, file.parts[part], {part, number}, 0);
        CKPT_RETURN_IF_ERROR(Charge(maps.size()));
        Push({StrCat(head, *rule.from[part].Render(holes, std::nullopt)),
              file.parts[part],
              {p},
              std::move(maps),
              &rule,
              part,
              holes.expert});
      }
    }
    return {};
  }

  // A tensor of the files to the one of the dialect that it is a part of.
  Status Collect(ParameterIndex p, const RuleSide& side, const std::string& head) {
    const MapRule& rule = *side.rule;
    NameHoles holes = side.holes;
    uint64_t number = 0;
    if (rule.stack == Stack::kExpert) number = *std::exchange(holes.expert, std::nullopt);
    if (rule.stack == Stack::kLayer) number = *std::exchange(holes.layer, std::nullopt);
    const std::string name = StrCat(head, *rule.to->Render(holes, std::nullopt));
    const auto [found, fresh] = by_name_.emplace(name, plan_.tensors.size());
    if (fresh) {
      Push({name, {}, {p}, {}, &rule, 0, holes.expert});
    } else {
      plan_.tensors[found->second].parts.push_back(p);
      Mark(p, found->second);
    }
    Join& join = joins_[found->second];
    join.places.push_back({side.part, number});
    join.stacked = std::max(join.stacked, number + 1);
    return {};
  }

  Status Finish(uint32_t number, const Join& join) {
    RenamedTensor& tensor = plan_.tensors[number];
    const MapRule& rule = *tensor.rule;
    const uint64_t wanted = join.stacked * rule.from.size();
    if (join.places.size() != wanted) {
      return Fail(Error{ErrorCode::kInvalid,
                        StrCat(join.places.size(), " of its ", wanted, " parts are there, up to ",
                               NumberText(rule, join.stacked - 1))}
                      .OfParameter(tensor.name));
    }
    CKPT_ASSIGN_OR_RETURN(const RuleSizes* sizes, SizesOf(rule));
    CKPT_ASSIGN_OR_RETURN(FileShapes file, ShapesOf(tensor, join));
    auto shape = DialectShapeOf(rule, *sizes, file);
    if (!shape) return Fail(std::move(shape).error().OfParameter(tensor.name));
    tensor.shape = *std::move(shape);
    for (size_t i = 0; i < tensor.parts.size(); ++i) {
      const FilePart& place = join.places[i];
      auto maps = MapsOfPart(rule, *sizes, file.parts[place.part], place, static_cast<uint32_t>(i));
      CKPT_RETURN_IF_ERROR(Charge(maps.size()));
      std::ranges::move(maps, std::back_inserter(tensor.maps));
    }
    return {};
  }

  // One shape for each part of the rule, that of all in the stack.
  Result<FileShapes> ShapesOf(const RenamedTensor& tensor, const Join& join) const {
    std::vector<const Parameter*> first(tensor.rule->from.size());
    FileShapes file{std::vector<Shape>(first.size()), join.stacked};
    for (size_t i = 0; i < tensor.parts.size(); ++i) {
      const Parameter& part = step_.parameter(tensor.parts[i]);
      const Parameter*& known = first[join.places[i].part];
      if (known == nullptr) {
        known = &part;
        file.parts[join.places[i].part] = part.shape;
      } else if (part.shape != known->shape) {
        return Fail(Error{ErrorCode::kInvalid,
                          StrCat("'", known->name, "' has the shape ", ShapeToString(known->shape),
                                 ", but '", part.name, "' has ", ShapeToString(part.shape))}
                        .OfParameter(tensor.name));
      }
    }
    return file;
  }

  Status CheckNames() const {
    std::unordered_map<std::string_view, const RenamedTensor*> taken;
    for (const RenamedTensor& tensor : plan_.tensors) {
      const auto [other, fresh] = taken.emplace(tensor.name, &tensor);
      const bool changed = tensor.rule != nullptr || other->second->rule != nullptr;
      if (fresh || !changed) continue;
      return Fail(ErrorCode::kUnsupported,
                  StrCat("parameters '", step_.parameter(other->second->parts.front()).name,
                         "' and '", step_.parameter(tensor.parts.front()).name,
                         "' would both be named '", tensor.name, "'"));
    }
    return {};
  }

  std::string AliasName(const std::string& alias) const {
    const std::string normalised = NormaliseName(alias);
    const auto side = Find(normalised);
    if (!side || !(side->rule->IsWhole() || side->rule->rows)) return alias;
    return OtherName(*side, HeadOf(alias, normalised));
  }

  const StepModel& step_;
  const std::span<const MapRule* const> rules_;
  const FamilyVariables& sizes_;
  const bool from_files_;
  std::map<const MapRule*, RuleSizes> sizes_of_;
  uint64_t maps_ = 0;
  NamePlan plan_;
  std::unordered_map<std::string, uint32_t> by_name_;  // of tensors that are put together
  std::map<uint32_t, Join> joins_;                     // by tensor
};

}  // namespace

std::vector<RuleSide> SidesOf(std::span<const MapRule* const> rules, std::string_view name) {
  std::vector<RuleSide> sides;
  for (const MapRule* rule : rules) {
    if (auto holes = rule->to->Match(name, std::nullopt)) sides.push_back({rule, false, 0, *holes});
    for (uint32_t part = 0; part < rule->from.size(); ++part) {
      if (auto holes = rule->from[part].Match(name, std::nullopt)) {
        sides.push_back({rule, true, part, *holes});
      }
    }
  }
  return sides;
}

Result<NamePlan> MakeNamePlan(const StepModel& step, std::span<const MapRule* const> rules,
                              const FamilyVariables& sizes, bool from_files) {
  return Planner(step, rules, sizes, from_files).Make();
}

uint64_t HeapBytesOf(const NamePlan& plan) {
  constexpr uint64_t kMapBytes = sizeof(BoxMap) + 4 * 4 * sizeof(uint64_t);
  uint64_t bytes = 32 * (plan.of_parameter.size() + plan.aliases.size());
  for (const RenamedTensor& tensor : plan.tensors) {
    bytes += sizeof(tensor) + tensor.name.size() + tensor.maps.size() * kMapBytes +
             8 * (tensor.shape.size() + tensor.parts.size());
  }
  for (const std::string& alias : plan.aliases) bytes += alias.size();
  return bytes;
}

}  // namespace ckptfs
