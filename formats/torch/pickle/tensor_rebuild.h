// SPDX-License-Identifier: Apache-2.0
//
// These functions recognise pickled calls beyond plain opcodes: storages named by
// persistent ids, torch's rebuild functions over them, and the calls by which
// older protocols spell bytes, sets and nested classes.  Anything that does
// not fit exactly stays the opaque node it was.
//
// Thread safety: pure functions on the tree they are given.

#pragma once

#include <optional>

#include "formats/torch/pickle_value.h"

namespace ckptfs {

// The node for callee(*arguments), or nothing if it stays a kReduce.  May add
// to tree.tensors and tree.nodes.
std::optional<PickleNode> RecogniseReduce(PickleTree& tree, NodeId callee, NodeId arguments);

// The node for a persistent id, or nothing if it stays a kPersistent.
//   ("storage", class, key, location, elements[, None | (view key, offset, elements)])
//   ("module", class, source file, source): the class (legacy files)
std::optional<PickleNode> RecognisePersistent(PickleTree& tree, NodeId id);

}  // namespace ckptfs
