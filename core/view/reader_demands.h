// SPDX-License-Identifier: Apache-2.0
//
// ReaderDemands says what the reader of a view does with the states of an optimizer: which it asks
// for by name, which it takes, and in which forms.  Each view format has its readers' rows beside
// it, and CheckDemands compares a step with one: a view whose reader would fail, or would go on
// without a state and say nothing, is refused.
//
// Thread safety: immutable values and pure functions.
// Lifetime: a row refers to constants.

#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/base/result.h"
#include "core/view/shown_state.h"

namespace ckptfs {

// A state that holds whole parameters where the reader expects a slice of them.  The words of its
// group's hyper-parameters tell it from a state of the same name.
struct WholeState {
  std::string_view kind;
  std::span<const std::string_view> words;
};

struct ReaderDemands {
  // How often the reader counts the steps of the optimizer.
  enum class Counts : uint8_t { kPerParameter, kPerGroup, kOnce };

  std::string_view reader;  // "a DeepSpeed engine at ZeRO-3"
  std::string_view remedy;  // where the states are instead
  // Kinds that every parameter of the optimizer must have.
  std::span<const std::string_view> asks = {};
  // Kinds that it takes; the reader loses all others.  Empty: any kind.
  std::span<const std::string_view> takes = {};
  // Kinds that the optimizer computes anew before it reads them: nothing is lost without them.
  std::span<const std::string_view> made_anew = {};
  std::span<const WholeState> whole = {};  // not taken at dp2 and above
  Counts counts = Counts::kPerParameter;
  bool flat = false;       // one vector of floats per group: no integers, no other shapes
  bool numbers = true;     // takes a state that is one number, besides `step`
  bool own_shapes = true;  // takes a state of another shape than the parameter's
  bool optimizers = true;  // takes states of several optimizers of one parameter
  // Elements that a data-parallel rank's slice of a group is a multiple of, for a reader that fails
  // on a rank whose slice has none of the group's; 0: it does not.
  uint32_t slice_unit = 0;
};

// True if optimizers begin the state with zeros, so that a parameter which never had a
// gradient may be given them.  Adagrad's sum and Rprop's step sizes begin elsewhere.
bool BeginsAsZeros(std::string_view kind);

// True if an optimizer has a state of the parameter: it had a gradient, and a state that it lacks
// was lost rather than not begun.
bool HasBegun(const ShownState& shown, ParameterIndex parameter);

// kUnsupported names the state, the first parameter that has or lacks it, and the remedy.
// Success where the step has no states and the reader asks for none, or where it has no optimizer.
// `layout`: that of the ranks which read; it need not be the one that is shown.
Status CheckDemands(const ShownState& shown, const ReaderDemands& reader, const Layout& layout);

}  // namespace ckptfs
