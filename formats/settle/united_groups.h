// SPDX-License-Identifier: Apache-2.0
//
// UnitedGroups makes one list of the groups of an optimizer whose ranks each count their own.
// Each stage of a pipeline has an optimizer of its own: groups of one number whose
// hyper-parameters differ are kept apart, behind all others.  Empty hyper-parameters are those of
// the first.
//
// Thread safety: none; one thread builds one step.
// Lifetime: the assembler must outlive it.

#pragma once

#include <cstddef>
#include <deque>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"

namespace ckptfs {

class UnitedGroups {
 public:
  explicit UnitedGroups(Assembler& assembler) : assembler_(assembler) {}

  // Adds parameters to the group of a number.  A parameter is in a group once; kInvalid
  // if ranks put it under different hyper-parameters of one number.
  Status Add(size_t number, const std::string& hyper_parameters,
             std::span<const ParameterIndex> parameters);
  // Hands the groups to the assembler, as those of the optimizer of this label; where some were
  // kept apart, all have their numbers.
  void Finish(std::string_view label) &&;

 private:
  struct NumberedGroup {
    size_t number = 0;
    Group group;
    std::set<ParameterIndex> members;
  };
  Result<NumberedGroup*> GroupFor(size_t number, const std::string& hyper_parameters);

  Assembler& assembler_;
  std::vector<NumberedGroup> groups_;  // by number
  std::deque<NumberedGroup> apart_;
  std::string apart_by_;  // a hyper-parameter, if there are any
};

}  // namespace ckptfs
