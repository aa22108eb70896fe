// SPDX-License-Identifier: Apache-2.0
//
// SettlePatterns compares what a rule says of a parameter with what the source's
// tensor-parallel ranks really held, so that the source's own degree is shown as
// it was: 6 heads on 4 ranks, 51 and 50 rows, a vocabulary padded otherwise, or
// a tensor that this source left whole and others cut.
//
// Thread safety: pure function.
// Units: elements.

#pragma once

#include <optional>
#include <span>

#include "core/model/pattern.h"

namespace ckptfs {

struct SourcePatterns {
  Pattern pattern;                // for any degree; kUnknown: nothing says how
  std::optional<Pattern> source;  // for the source's own, where `pattern` is not it
};

// `pattern` is the rule's, or kUnknown without one; `locals` are the ranks'
// tensors of an atom of `shape`.  A rule that knows a dim but no units (not
// `ruled`: lists of a checkpoint) says nothing of other degrees where the ranks
// were cut unevenly: in what units is what it does not know.  Neither is set
// where no pattern can say what the ranks held.
SourcePatterns SettlePatterns(Pattern pattern, bool ruled, const Shape& shape,
                              std::span<const LocalTensor> locals);

}  // namespace ckptfs
