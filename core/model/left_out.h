// SPDX-License-Identifier: Apache-2.0
//
// LeftOut says what of a checkpoint a step does not have, though it was there: whose optimizer
// state nobody can prove, a document that is not understood, a tensor of no known kind.  The rest
// of the step is taken.  `adopt` prints each one, `info`, `explain` and README.txt show them, and
// `adopt --require optimizer` refuses a step that has one of an optimizer.
//
// Thread safety: values; pure functions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ckptfs {

struct StepModel;

// The numbers are stored in manifests.
enum class LeftOutPart : uint8_t {
  kModel = 0,      // tensors or other entries of the model's own state dict
  kOptimizer = 1,  // states, groups, or a whole optimizer
  kDocument = 2,   // everything else: schedulers, random states, files
};
inline constexpr LeftOutPart kLastLeftOutPart = LeftOutPart::kDocument;

// "model", "optimizer", "document".
std::string_view LeftOutPartName(LeftOutPart part);

struct LeftOut {
  LeftOutPart part = LeftOutPart::kDocument;
  std::string what;    // a name that the user knows: "optimizer state 'exp_avg' of 'a.weight'"
  std::string why;     // the rule: "nothing proves which parameter has number 3"
  std::string remedy;  // what the user can do: "give --parameter-order"; "" where nothing helps
  uint64_t more = 0;   // how many others have the same part, reason, remedy and optimizer
  // The label of the optimizer that lacks it (Atom::optimizer); nothing: nobody knows which.
  std::optional<std::string> optimizer = {};
  bool operator==(const LeftOut&) const = default;
};

// A part has at most so many entries.  If there are more reasons, the last entry counts all that
// the others do not, and says that they have different ones.
inline constexpr size_t kMaxLeftOutReasons = 32;
inline constexpr std::string_view kManyReasons = "they have different reasons, too many to list";

// Adds one; others with the same part, reason, remedy and optimizer are counted (`more`).
void LeaveOut(StepModel& step, LeftOut one);

// The first with which a state of the optimizer of this label may have gone; null if none was left
// out.
const LeftOut* FindLostState(const StepModel& step, std::string_view optimizer);

// "left out: WHAT and 3 more: WHY; REMEDY"
std::string LeftOutText(const LeftOut& one);

}  // namespace ckptfs
