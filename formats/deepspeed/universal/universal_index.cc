// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/universal_index.h"

#include <algorithm>
#include <unordered_map>

#include "core/base/strings.h"
#include "core/encoding/packed_tensor.h"
#include "core/view/shard.h"
#include "formats/deepspeed/universal/universal_cut.h"

namespace ckptfs::deepspeed {
namespace {

// The loader opens zero/<name>/, so a name must be a path component as it is.
Status CheckComponent(const std::string& name, std::string_view what) {
  if (name.empty() || name == "." || name == ".." || name.size() > 255 ||
      name.find('/') != std::string::npos || name.find('\0') != std::string::npos) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(what, " '", name.substr(0, 300),
                       "' cannot be the name of a directory, but the loader looks for such a "
                       "directory"));
  }
  return {};
}

// The states of every trained parameter, as far as universal files can say them.
class Collector {
 public:
  Collector(const ShownState& shown, UniversalIndex& index)
      : shown_(shown), step_(shown.step()), index_(index) {}

  Status Collect() {
    files_.resize(step_.parameters.size());
    for (uint32_t i = 0; i < step_.parameters.size(); ++i) {
      if (step_.parameters[i].role != Role::kTrainable) continue;
      CKPT_RETURN_IF_ERROR(Take(ParameterIndex{i}));
    }
    FillMissing();
    return {};
  }

  std::vector<UniversalState> Of(ParameterIndex parameter) const {
    std::vector<UniversalState> states;
    for (const auto& [file, atoms] : files_[static_cast<uint32_t>(parameter)]) {
      states.push_back(UniversalState{std::string(file), atoms});
    }
    return states;
  }

 private:
  using Files = std::map<std::string_view, std::vector<AtomIndex>>;

  Status Take(ParameterIndex parameter) {
    Files& files = files_[static_cast<uint32_t>(parameter)];
    const std::string& name = step_.parameter(parameter).name;
    CKPT_ASSIGN_OR_RETURN(const ShownWeight weight, shown_.WeightOf(parameter));
    files["fp32"] = {step_.FindAtom(parameter, "master").value_or(weight.atom)};
    for (const auto& [kind, index] : shown_.StatesOf(parameter)) {
      const Relation relation = step_.atom(index).relation;
      if (kind == "fp32" || (kind == "step" && relation != Relation::kScalar)) {
        return Fail(Error{ErrorCode::kUnsupported,
                          kind == "step"
                              ? std::string("the count of its steps is a tensor, and an "
                                            "engine takes a number")
                              : StrCat("optimizer state '", kind, "' has a reserved file name")}
                        .OfParameter(name));
      }
      // No reader asks for other states (CheckDemands), or its optimizer computes them anew.
      if (relation != Relation::kSame && kind != "step") continue;
      CKPT_RETURN_IF_ERROR(CheckComponent(StrCat(kind, ".pt"), "optimizer state"));
      files[kind] = {index};
    }
    return {};
  }

  // The loader wants the same files for every parameter of a group.  A group that has no states at
  // all begins anew.
  void FillMissing() {
    for (size_t g = 0; g < shown_.groups().size(); ++g) {
      const ShownGroup& group = shown_.groups()[g];
      Files missing;  // zeros, but for the step
      for (const ParameterIndex p : group.members) {
        for (const auto& [file, atoms] : files_[static_cast<uint32_t>(p)]) {
          missing.try_emplace(file, file == "step" ? atoms : std::vector<AtomIndex>());
        }
      }
      for (const ParameterIndex p : group.members) {
        files_[static_cast<uint32_t>(p)].insert(missing.begin(), missing.end());
      }
      if (shown_.states().empty() || group.members.empty() || !group.kinds.empty()) continue;
      index_.left_out.push_back(
          StrCat("states of group ", g, " ('", step_.parameter(group.members[0]).name,
                 group.members.size() > 1 ? "', ...)" : "')",
                 ", which the source does not have: an engine begins them anew"));
    }
  }

  const ShownState& shown_;
  const StepModel& step_;
  UniversalIndex& index_;
  std::vector<Files> files_;  // by parameter
};

// Experts of an engine with ep > 1: rank r's local expert j is the global one
// r * n + j, and every rank looks up the local name.  One file holds all ranks'
// j-th experts stacked along dim 0, which the loader cuts by ep rank.
class ExpertStacker {
 public:
  ExpertStacker(const ShownState& shown, const Collector& states)
      : shown_(shown), step_(shown.step()), states_(states), ep_(shown.layout().ep) {}

  Status Add(ParameterIndex index) {
    const Parameter& parameter = step_.parameter(index);
    const std::string family = WithExpert(parameter, shown_.NameOf(index), 0);
    if (family.empty()) {
      return Fail(
          Error{ErrorCode::kUnsupported, "the name does not say the expert's number"}.OfParameter(
              parameter.name));
    }
    experts_[family].emplace(*parameter.expert, index);
    return {};
  }

  Status Finish(UniversalIndex& out) const {
    for (const auto& [family, members] : experts_) {
      const uint64_t count = members.size();
      if (members.rbegin()->first + 1 != count || count % ep_ != 0) {
        return Fail(ErrorCode::kUnsupported,
                    StrCat("experts of '", family, "': ", count, " do not divide by ep ", ep_));
      }
      for (uint64_t j = 0; j < count / ep_; ++j) {
        CKPT_RETURN_IF_ERROR(Stack(members, j, count / ep_, out));
      }
    }
    return {};
  }

 private:
  using Members = std::map<uint32_t, ParameterIndex>;

  Status Stack(const Members& members, uint64_t local, uint64_t per_rank,
               UniversalIndex& out) const {
    const ParameterIndex first = members.at(static_cast<uint32_t>(local));
    const std::string& name = shown_.NameOf(first);
    UniversalParameter shown{name, first, states_.Of(first), ep_};
    if (step_.parameter(first).shape.empty()) {
      return Fail(Error{ErrorCode::kUnsupported,
                        "it is 0-d, which an expert's tensor must "
                        "not be"}
                      .OfParameter(name));
    }
    for (uint64_t rank = 1; rank < ep_; ++rank) {
      const ParameterIndex other = members.at(static_cast<uint32_t>(rank * per_rank + local));
      const auto states = states_.Of(other);
      if (step_.parameter(other).shape != step_.parameter(first).shape ||
          states.size() != shown.states.size()) {
        return Fail(
            Error{ErrorCode::kUnsupported, StrCat("differs from expert '", name, "'")}.OfParameter(
                shown_.NameOf(other)));
      }
      for (size_t s = 0; s < states.size(); ++s) {
        if (states[s].file == "step") continue;
        if (states[s].atoms.empty() != shown.states[s].atoms.empty()) {
          return Fail(Error{ErrorCode::kUnsupported,
                            StrCat("state '", states[s].file, "' is missing for some experts")}
                          .OfParameter(shown_.NameOf(other)));
        }
        auto& atoms = shown.states[s].atoms;
        atoms.insert(atoms.end(), states[s].atoms.begin(), states[s].atoms.end());
      }
    }
    out.parameters.push_back(std::move(shown));
    return {};
  }

  const ShownState& shown_;
  const StepModel& step_;
  const Collector& states_;
  const uint64_t ep_;
  std::map<std::string, Members> experts_;  // by the name with expert 0
};

Status AddLinks(const ShownState& shown, UniversalIndex& index) {
  for (const Alias& alias : shown.aliases()) {
    if (shown.step().parameter(alias.parameter).role != Role::kTrainable) continue;
    CKPT_RETURN_IF_ERROR(CheckComponent(alias.name, "alias"));
    if (index.Find(alias.name) != nullptr) continue;
    index.links.emplace(alias.name, shown.NameOf(alias.parameter));
  }
  return {};
}

// Success if the loader can cut every parameter for this tensor-parallel degree.
// Pipeline stages are the engine's own business: files go by name.
Status CheckCuts(const StepModel& step, const Layout& layout) {
  CKPT_RETURN_IF_ERROR(CheckDegrees(step, layout));
  Layout cut;
  cut.tp = layout.tp;
  CKPT_RETURN_IF_ERROR(CheckLayout(step, cut, /*trainable_only=*/true));
  for (const Parameter& parameter : step.parameters) {
    if (layout.tp == 1 || parameter.role != Role::kTrainable || parameter.expert) continue;
    CKPT_RETURN_IF_ERROR(CutOf(parameter));
  }
  return {};
}

Status CheckNotPacked(const StepModel& step) {
  auto packed = FindPackedTensor(step);
  // Whatever their scales are called: nobody trains weights of 8 bits.
  if (!packed) packed = FindByteFloats(step);
  if (!packed) return {};
  return Fail(Error{ErrorCode::kUnsupported,
                    "its elements are packed, and an engine takes them for the weight"}
                  .OfParameter(*packed));
}

}  // namespace

const UniversalParameter* UniversalIndex::Find(std::string_view name) const {
  auto at = std::lower_bound(
      parameters.begin(), parameters.end(), name,
      [](const UniversalParameter& p, std::string_view text) { return p.name < text; });
  return at != parameters.end() && at->name == name ? &*at : nullptr;
}

uint64_t UniversalIndex::MemoryBytes() const {
  constexpr uint64_t kMapNode = 4 * sizeof(void*);
  uint64_t bytes = 0;
  for (const UniversalParameter& parameter : parameters) {
    bytes += sizeof(parameter) + parameter.name.capacity();
    for (const UniversalState& state : parameter.states) {
      bytes += sizeof(state) + state.atoms.capacity() * sizeof(AtomIndex);
    }
  }
  for (const auto& [alias, name] : links) {
    bytes += kMapNode + 2 * sizeof(std::string) + alias.capacity() + name.capacity();
  }
  for (const std::string& name : left_out) {
    bytes += sizeof(std::string) + name.capacity();
  }
  return bytes;
}

Result<UniversalIndex> BuildUniversalIndex(const ShownState& shown) {
  const StepModel& step = shown.step();
  const Layout& layout = shown.layout();
  UniversalIndex index;
  index.tag = step.id;
  index.model_files = layout.tp * layout.pp;
  CKPT_RETURN_IF_ERROR(CheckComponent(index.tag, "tag"));
  CKPT_RETURN_IF_ERROR(CheckNotPacked(step));
  CKPT_RETURN_IF_ERROR(CheckCuts(step, layout));
  CKPT_RETURN_IF_ERROR(shown.CheckNames());
  Collector states(shown, index);
  CKPT_RETURN_IF_ERROR(states.Collect());
  ExpertStacker experts(shown, states);
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    const ParameterIndex parameter{i};
    if (step.parameters[i].role != Role::kTrainable) continue;
    CKPT_RETURN_IF_ERROR(CheckComponent(shown.NameOf(parameter), "parameter"));
    if (step.parameters[i].expert && layout.ep > 1) {
      CKPT_RETURN_IF_ERROR(experts.Add(parameter));
      continue;
    }
    index.parameters.push_back({shown.NameOf(parameter), parameter, states.Of(parameter), 0});
  }
  CKPT_RETURN_IF_ERROR(experts.Finish(index));
  std::sort(index.parameters.begin(), index.parameters.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  CKPT_RETURN_IF_ERROR(AddLinks(shown, index));
  return index;
}

}  // namespace ckptfs::deepspeed
