// SPDX-License-Identifier: Apache-2.0
//
// PrintValue prints a value of a tree where it stands, as PrintPickle would print a tree
// of its own, but for one thing: equal strings are one.  Whether two of them are one
// object depends on the Python that wrote the file, and not on what it wrote.  So equal
// values are equal texts, which is what it is for.
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
