// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/universal_index.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include "core/base/strings.h"
#include "core/dialect/shown_names.h"
#include "core/view/reader_demands.h"
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

// The file name of an optimizer state; empty: not shown.
std::string FileOf(const Atom& atom) {
  if (atom.kind == "master") return "fp32";
  if (atom.kind == "weight" || atom.kind == "grad") return "";
  return atom.kind;
}

// The states of every parameter, as far as universal files can say them.
class Collector {
 public:
  Collector(const StepModel& step, UniversalIndex& index) : step_(step), index_(index) {}

  Status Collect() {
    states_.resize(step_.parameters.size());
    for (uint32_t i = 0; i < step_.atoms.size(); ++i) {
      CKPT_RETURN_IF_ERROR(Take(AtomIndex{i}));
    }
    CKPT_RETURN_IF_ERROR(FillWeights());
    FillMissing();
    return {};
  }

  std::vector<UniversalState> Of(ParameterIndex parameter) {
    std::vector<UniversalState> states;
    for (auto& [file, atoms] : states_[static_cast<uint32_t>(parameter)]) {
      states.push_back(UniversalState{file, atoms});
    }
    return states;
  }

 private:
  Status Take(AtomIndex index) {
    const Atom& atom = step_.atom(index);
    const Parameter& parameter = step_.parameter(atom.parameter);
    const std::string file = FileOf(atom);
    if (parameter.role != Role::kTrainable || file.empty()) return {};
    if ((atom.kind == "fp32") || (file == "step" && atom.relation != Relation::kScalar)) {
      return Fail(Error{ErrorCode::kUnsupported,
                        StrCat("optimizer state '", atom.kind, "' has a reserved file name")}
                      .OfParameter(parameter.name));
    }
    // No reader asks for other states (CheckDemands), or its optimizer computes them anew.
    if (atom.relation != Relation::kSame && file != "step") return {};
    CKPT_RETURN_IF_ERROR(CheckComponent(file + ".pt", "optimizer state"));
    auto& mine = states_[static_cast<uint32_t>(atom.parameter)];
    mine.emplace(file, std::vector<AtomIndex>{index});  // the first optimizer's
    return {};
  }

  Status FillWeights() {
    for (uint32_t i = 0; i < step_.parameters.size(); ++i) {
      if (step_.parameters[i].role != Role::kTrainable || states_[i].contains("fp32")) continue;
      auto weight = step_.FindAtom(ParameterIndex{i}, "weight");
      if (!weight) {
        return Fail(Error{ErrorCode::kUnsupported, "neither a weight nor a master"}.OfParameter(
            step_.parameters[i].name));
      }
      states_[i].emplace("fp32", std::vector<AtomIndex>{*weight});
    }
    return {};
  }

  // The loader wants the same files for every parameter of a group.  A group that has no states at
  // all begins anew.
  void FillMissing() {
    const GroupedStates grouped = GroupStates(step_);
    const bool any = HasStates(step_);
    for (size_t g = 0; g < grouped.members.size(); ++g) {
      const std::vector<ParameterIndex>& members = grouped.members[g];
      std::set<std::string> files;
      std::vector<AtomIndex> step_of_any;
      for (const ParameterIndex p : members) {
        for (const auto& [file, atoms] : states_[static_cast<uint32_t>(p)]) {
          if (file == "step" && step_of_any.empty()) step_of_any = atoms;
          files.insert(file);
        }
      }
      for (const ParameterIndex p : members) {
        auto& mine = states_[static_cast<uint32_t>(p)];
        for (const std::string& file : files) {
          mine.try_emplace(file, file == "step" ? step_of_any : std::vector<AtomIndex>{});
        }
      }
      if (any && !members.empty() && grouped.kinds[g].empty()) {
        index_.left_out.push_back(
            StrCat("states of group ", g, " ('", step_.parameter(members[0]).name,
                   members.size() > 1 ? "', ...)" : "')",
                   ", which the source does not have: an engine begins them anew"));
      }
    }
  }

  const StepModel& step_;
  UniversalIndex& index_;
  std::vector<std::map<std::string, std::vector<AtomIndex>>> states_;  // by parameter, file
};

// Experts of an engine with ep > 1: rank r's local expert j is the global one
// r * n + j, and every rank looks up the local name.  One file holds all ranks'
// j-th experts stacked along dim 0, which the loader cuts by ep rank.
class ExpertStacker {
 public:
  ExpertStacker(const StepModel& step, const ShownNames& names, Collector& states, uint64_t ep)
      : step_(step), names_(names), states_(states), ep_(ep) {}

  Status Add(ParameterIndex index) {
    const Parameter& parameter = step_.parameter(index);
    const std::string family = WithExpert(parameter, Name(index), 0);
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

  const std::string& Name(ParameterIndex index) const {
    return names_.parameters[static_cast<uint32_t>(index)];
  }

  Status Stack(const Members& members, uint64_t local, uint64_t per_rank,
               UniversalIndex& out) const {
    const ParameterIndex first = members.at(static_cast<uint32_t>(local));
    UniversalParameter shown{Name(first), first, states_.Of(first), ep_};
    if (step_.parameter(first).shape.empty()) {
      return Fail(Error{ErrorCode::kUnsupported,
                        "it is 0-d, which an expert's tensor must "
                        "not be"}
                      .OfParameter(Name(first)));
    }
    for (uint64_t rank = 1; rank < ep_; ++rank) {
      const ParameterIndex other = members.at(static_cast<uint32_t>(rank * per_rank + local));
      const auto states = states_.Of(other);
      if (step_.parameter(other).shape != step_.parameter(first).shape ||
          states.size() != shown.states.size()) {
        return Fail(
            Error{ErrorCode::kUnsupported, StrCat("differs from expert '", Name(first), "'")}
                .OfParameter(Name(other)));
      }
      for (size_t s = 0; s < states.size(); ++s) {
        if (states[s].file == "step") continue;
        if (states[s].atoms.empty() != shown.states[s].atoms.empty()) {
          return Fail(Error{ErrorCode::kUnsupported,
                            StrCat("state '", states[s].file, "' is missing for some experts")}
                          .OfParameter(Name(other)));
        }
        auto& atoms = shown.states[s].atoms;
        atoms.insert(atoms.end(), states[s].atoms.begin(), states[s].atoms.end());
      }
    }
    out.parameters.push_back(std::move(shown));
    return {};
  }

  const StepModel& step_;
  const ShownNames& names_;
  Collector& states_;
  const uint64_t ep_;
  std::map<std::string, Members> experts_;  // by the name with expert 0
};

Status AddLinks(const StepModel& step, const ShownNames& names, UniversalIndex& index) {
  for (size_t i = 0; i < step.aliases.size(); ++i) {
    const Alias& alias = step.aliases[i];
    if (names.aliases[i].empty() || step.parameter(alias.parameter).role != Role::kTrainable) {
      continue;
    }
    CKPT_RETURN_IF_ERROR(CheckComponent(names.aliases[i], "alias"));
    if (index.Find(names.aliases[i]) != nullptr) continue;
    index.links.emplace(names.aliases[i], names.parameters[static_cast<uint32_t>(alias.parameter)]);
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

Result<UniversalIndex> BuildUniversalIndex(const StepModel& step, const Layout& layout,
                                           const FamilySet* families) {
  UniversalIndex index;
  index.tag = step.id;
  index.model_files = layout.tp * layout.pp;
  CKPT_RETURN_IF_ERROR(CheckComponent(index.tag, "tag"));
  CKPT_RETURN_IF_ERROR(CheckCuts(step, layout));
  CKPT_ASSIGN_OR_RETURN(const ShownNames names, NamesFor(step, layout, families));
  Collector states(step, index);
  CKPT_RETURN_IF_ERROR(states.Collect());
  ExpertStacker experts(step, names, states, layout.ep);
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    const ParameterIndex parameter{i};
    if (step.parameters[i].role != Role::kTrainable) continue;
    CKPT_RETURN_IF_ERROR(CheckComponent(names.parameters[i], "parameter"));
    if (step.parameters[i].expert && layout.ep > 1) {
      CKPT_RETURN_IF_ERROR(experts.Add(parameter));
      continue;
    }
    index.parameters.push_back({names.parameters[i], parameter, states.Of(parameter), 0});
  }
  CKPT_RETURN_IF_ERROR(experts.Finish(index));
  std::sort(index.parameters.begin(), index.parameters.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  CKPT_RETURN_IF_ERROR(AddLinks(step, names, index));
  return index;
}

}  // namespace ckptfs::deepspeed
