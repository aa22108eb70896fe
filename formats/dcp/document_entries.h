// SPDX-License-Identifier: Apache-2.0
//
// Documents as entries: the values of a step that are not a parameter's, flattened as
// DCP flattens a state dict (torch 2.13, checkpoint/_traverse.py): dicts always, by
// str(key); lists if a tensor or a dict is in them; all else is one value.
//
// Thread safety: pure functions.
// Lifetime: refers to the step's blobs by index.

#pragma once

#include <functional>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/dcp/entries.h"
#include "formats/dcp/object_archives.h"

namespace ckptfs::dcp {

// Appends the entries of one document below `path`.  Values of classes are left out
// where they are not `trusted`, that is where torch would not have loaded them from
// the source as objects anyway.
Status AppendDocument(const Document& document, std::vector<PathStep> path, bool trusted,
                      ObjectArchives& objects, std::vector<Entry>& entries);
// The same of one value of the document's tree (ParseDocument).
Status AppendValue(const Document& document, PickleRef value, std::vector<PathStep> path,
                   bool trusted, ObjectArchives& objects, std::vector<Entry>& entries);

// Calls `leaf` for each value that DCP saves by itself, of a value at `path`, until it fails.
using Leaf = std::function<Status(const std::vector<PathStep>& path, PickleRef value)>;
Status ForEachLeaf(PickleRef value, std::vector<PathStep> path, const Leaf& leaf);

}  // namespace ckptfs::dcp
