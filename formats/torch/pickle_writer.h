// SPDX-License-Identifier: Apache-2.0
//
// PickleBuilder makes trees; PrintPickle prints any tree as protocol 2, within
// the opcodes torch's weights_only unpickler accepts.  Shared nodes are
// memoised, so identity (and cycles) survive.
//
// Thread safety: none for a builder; PrintPickle is pure.

#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

class PickleBuilder {
 public:
  NodeId None();
  NodeId Bool(bool value);
  NodeId Int(int64_t value);
  NodeId Float(double value);
  NodeId String(std::string_view text);
  NodeId Tuple(std::vector<NodeId> items);
  NodeId List(std::vector<NodeId> items);
  NodeId Dict(const std::vector<std::pair<NodeId, NodeId>>& items);
  NodeId Global(std::string_view module, std::string_view name);
  NodeId Reduce(NodeId callee, NodeId arguments);
  // NEWOBJ with a BUILD state.
  NodeId Object(NodeId cls, NodeId arguments, std::optional<NodeId> state);
  NodeId OrderedDict(const std::vector<std::pair<NodeId, NodeId>>& items);
  NodeId Size(const Shape& shape);  // torch.Size
  NodeId Tensor(TensorNode tensor);
  // A deep copy of a value of another tree (sharing kept); its tensors keep
  // their nodes, with storage_key mapped by `rename` if given.
  NodeId Copy(PickleRef value,
              const std::function<std::string(const TensorNode&)>& rename = nullptr);
  PickleTree Finish(NodeId root) &&;

 private:
  NodeId Add(PickleNode node);
  PickleTree tree_;
};

// kInvalid if a node cannot be said in protocol 2.
Result<std::string> PrintPickle(const PickleTree& tree);

}  // namespace ckptfs
