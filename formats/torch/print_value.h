// SPDX-License-Identifier: Apache-2.0
//
// PrintValue prints a value of a tree where it stands, as PrintPickle would print a tree
// of its own, with one difference: equal strings are one object.  In a file two equal
// strings are one object or two, depending on the Python that wrote it.  So equal values
// print as equal texts, which callers compare.
//
// Thread safety: pure.

#pragma once

#include <string>

#include "core/base/result.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

// kInvalid if a node cannot be said in protocol 2.
Result<std::string> PrintValue(PickleRef value);

}  // namespace ckptfs
