// SPDX-License-Identifier: Apache-2.0
//
// ShownState is a step in a layout as names, weights, states and groups: all that the files of a
// layout have in common before a view format spells them.  It says how parameters are called, which
// atom is a parameter's weight and in which dtype, which atoms are states of an optimizer, and what
// the members of a group have.  Formats take their answers from it and decide only how a file says
// them.  Naming tokens end here; a format takes off only words that its reader does not know.
//
// It is made once per step and layout (ViewSet::Open), and is never refused as a whole: a format
// fails on what it asks for and the layout does not have (CheckNames, WeightOf).
//
// Thread safety: immutable; all methods may be called concurrently.
// Lifetime: keeps the step alive; references, spans and kinds live as long as it.
// Units: shapes are the step's own, in elements; bytes where said.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"

namespace ckptfs {

// The atom that a layout shows a weight from, and as what: as stored; where the layout asks for
// another dtype, from the master if there is one, so that nothing is rounded twice.  Buffers are
// never cast.
struct ShownWeight {
  AtomIndex atom{};
  DType dtype = DType::kF32;
  bool derived = false;  // not stored so by the source
};

struct ShownAtom {
  AtomIndex atom{};
  bool state = false;  // an optimizer's; false: a weight, a master or a gradient
  bool first = false;  // of its kind, which names it alone; others are a second optimizer's
};

// States of one parameter, by kind; those of the first optimizer.
using StatesByKind = std::map<std::string_view, AtomIndex>;

struct ShownGroup {
  const Group* recorded = nullptr;      // null: of the parameters that are in no group
  std::vector<ParameterIndex> members;  // those that are trained, in the group's order
  StatesByKind kinds;                   // that any of them has, each as the first that has it
};

class ShownState {
 public:
  static std::shared_ptr<const ShownState> Of(std::shared_ptr<const StepModel> step,
                                              const Layout& layout);

  const StepModel& step() const { return *step_; }
  const std::shared_ptr<const StepModel>& shared_step() const { return step_; }
  const Layout& layout() const { return layout_; }

  // The error (NamesFor) is the reason why the layout has no names for the parameters.
  Status CheckNames() const;
  // REQUIRES: CheckNames() succeeds; so do the aliases.
  const std::string& NameOf(ParameterIndex parameter) const;
  // Second names of tied parameters, in the step's order; those that the layout has.
  std::span<const Alias> aliases() const { return aliases_; }

  // Nothing if the step holds neither a weight nor a master.
  const std::optional<ShownWeight>& FindWeight(ParameterIndex parameter) const;
  // kUnsupported names the parameter that has none.
  Result<ShownWeight> WeightOf(ParameterIndex parameter) const;

  // All atoms of the parameter, by kind, then in the step's order.
  std::span<const ShownAtom> AtomsOf(ParameterIndex parameter) const;
  StatesByKind StatesOf(ParameterIndex parameter) const;
  // The states of the model's parameters, in the step's order.
  std::span<const AtomIndex> states() const { return states_; }

  // The step's groups, numbered as there.  Trained parameters that are in no group, but have
  // states, are the last one; all of them are, where the step has no groups.
  std::span<const ShownGroup> groups() const { return groups_; }

  // Heap bytes, the step itself apart.
  uint64_t MemoryBytes() const;

 private:
  ShownState(std::shared_ptr<const StepModel> step, const Layout& layout);
  void SetNames();
  void SetAtoms();
  void SetGroups();
  void AddGroup(const Group* recorded, std::vector<ParameterIndex> members);

  const std::shared_ptr<const StepModel> step_;
  const Layout layout_;
  std::optional<Error> nameless_;
  std::vector<std::string> names_;  // by parameter
  std::vector<Alias> aliases_;
  std::vector<std::optional<ShownWeight>> weights_;  // by parameter
  std::vector<uint32_t> begin_;                      // of a parameter's atoms, and the end
  std::vector<ShownAtom> atoms_;
  std::vector<AtomIndex> states_;
  std::vector<ShownGroup> groups_;
};

}  // namespace ckptfs
