// SPDX-License-Identifier: Apache-2.0
//
// ParsePickle runs pickle protocols 0-5 as a virtual machine over opcodes as
// data.  Hostile input is bounded: nodes, stack and mark depth, memo entries,
// string and LONG lengths are all checked against the input's own size or a
// fixed limit, and nothing recurses.
//
// Thread safety: pure.

#pragma once

#include <string_view>

#include "core/base/result.h"
#include "formats/torch/pickle/opcodes.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

struct ParsedPickle {
  PickleTree tree;
  size_t length = 0;  // bytes consumed, STOP included
};

// kInvalid names the opcode, its offset and the rule.  More than `max_nodes` values are
// refused.
Result<ParsedPickle> ParsePickle(std::string_view bytes, size_t max_nodes = kMaxPickleNodes);

}  // namespace ckptfs
