// SPDX-License-Identifier: Apache-2.0
//
// Entries are what a step is as a state dict of torch.distributed.checkpoint: every
// tensor and object by its key, which is its path in the dict joined by dots, as
// flatten_state_dict (torch 2.13, checkpoint/_nested_dict.py) spells it.
//
//   <model>.<parameter>                            weights, frozen ones and buffers too
//   <optim>.state.<parameter>.<kind>               step, exp_avg, exp_avg_sq, ...
//   <optim>.param_groups.<i>.<hyper-parameter>     one object each, and `params`
//   <document>...                                  client state, flattened likewise
//
// A snapshot that DCP saved, and any step by a layout token, has other keys (KeyShape).
// With flat optimizer keys (flatten_optimizer_state_dict) hyper-parameters are by
// parameter, <optim>.param_groups.<parameter>.<hyper-parameter>.
//
// Thread safety: immutable values; the functions are pure.
// Lifetime: refers to the step's atoms and blobs by index.
// Units: bytes where said.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "formats/dcp/key_shape.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs::dcp {

// Elements that no source holds: where an optimizer starts.
struct Zeros {};
// Little-endian elements.
struct ShortTensor {
  std::string bytes;
};
// A whole archive without tensors; entries of one value share it.
using ObjectBytes = std::shared_ptr<const std::string>;
// An archive that holds tensors of a document.
using Content = std::shared_ptr<const ArchiveContent>;

struct Entry {
  std::string key;
  std::vector<PathStep> path;
  // An object has neither dtype nor shape.
  bool tensor = false;
  DType dtype = DType::kF32;
  Shape shape;
  // The dim along which tensor parallelism cuts it, if it does.
  std::optional<uint32_t> tp_dim;
  std::variant<AtomIndex, Zeros, ShortTensor, ObjectBytes, Content> body;
};

// kUnsupported names the parameter that cannot be shown or the key that two would
// have.
// REQUIRES: CheckNames() succeeds.
Result<std::vector<Entry>> EntriesOf(const ShownState& shown, const KeyShape& keys);

}  // namespace ckptfs::dcp
