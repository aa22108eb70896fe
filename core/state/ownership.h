// SPDX-License-Identifier: Apache-2.0
//
// Ownership decides whose the numbered states of an optimizer are.  An optimizer numbers its
// states group by group, in the order in which it was given its parameters, and nobody knows that
// order but the script.  So a number counts only where it is proved; the proofs, strongest first:
//
//   kName    the file names the member (`param_names`, keys that are names), as the model does,
//            with one part more (JoinNames), or without the part that stands before all of them
//   kRule    the tool that wrote the file builds its optimizers by a known rule (ToolRule): it is
//            computed again, and the shapes of all members of all groups fit it in one way and
//            no order that a script would choose (ForEachRivalOrder)
//   kMaster  the member's fp32 master, cast, is the weight, and is that of no other weight
//   kShape   no other parameter has the shape of the member's states, nor a tensor of another
//            module that the optimizer may train (core/state/trained_module.h), and no other member
//   kOrder   the user says the order, and every member's shapes and master fit it
//
// Members without a name are proved together or not at all: an optimizer that lacks a part of its
// moments would begin these from zero.  A member whose name the model does not have is left
// out alone.  A shape counts where a state must have its parameter's (core/state/state_fit.h).
//
// Thread safety: values; pure but for `masters`.
// Lifetime: the spans must outlive the call.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/shape.h"

namespace ckptfs {

// A parameter of the model, which an optimizer may have: not a buffer, not a second name.
struct OwnableParameter {
  std::string name;
  Shape shape;
};

struct MemberState {
  std::string kind;
  Shape shape;  // of a number: none
};

struct OptimizerMember {
  std::string name;  // as the file says it; "" where it does not
  std::vector<MemberState> states;
  std::optional<Shape> master;
};

// How a tool gives the parameters of a model to its optimizer: each group has its members in the
// model's order.  `groups`, by parameter: bit g if the rule may put it into group g.
struct ToolRule {
  std::string tool;  // for messages
  std::vector<uint64_t> groups;
};

// Texts that are equal where a master, cast, is a weight.  Nothing of a tensor that is not told.
struct MasterPrints {
  std::vector<std::vector<std::optional<std::string>>> members;  // by group
  std::vector<std::optional<std::string>> parameters;
};

struct OwnershipQuestion {
  std::span<const OwnableParameter> parameters;  // with a rule: in the model's order
  std::span<const std::vector<OptimizerMember>> groups;
  std::map<std::string, std::string, std::less<>> second_names;  // of the parameters
  std::span<const std::string> order;  // --parameter-order: the optimizer's, group by group
  std::optional<ToolRule> rule;
  std::function<Result<MasterPrints>()> masters;     // where the file has masters
  std::span<const OwnableParameter> elsewhere = {};  // of other modules that it may train
};

enum class Evidence : uint8_t { kNone, kName, kRule, kMaster, kShape, kOrder };

// The parameter that a member belongs to, and how that is known.
struct Owner {
  std::optional<size_t> parameter;
  Evidence evidence = Evidence::kNone;
  std::string why;  // of a member whose name is not the model's
};

struct StateOwners {
  std::vector<std::vector<Owner>> groups;
  std::string why;     // nothing proves the members without names; else empty
  std::string remedy;  // says what the user can do about it
};

// The number that a text is.  Scripts write an optimizer's numbers as texts, and parameters may be
// called "0", "1": where all texts that mean an optimizer's members are numbers, none is a name.
std::optional<int64_t> MemberNumber(std::string_view text);

// Errors are those of `masters`.
Result<StateOwners> DecideOwners(const OwnershipQuestion& question);

}  // namespace ckptfs
