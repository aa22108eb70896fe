// SPDX-License-Identifier: Apache-2.0
//
// PickleTreeValues are a PickleMachine's values as nodes of a PickleTree.  The size of
// what calls copy stays proportional to the pickle.
//
// Thread safety: none.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/result.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

class PickleTreeValues {
 public:
  using Value = NodeId;
  static constexpr size_t kMaxMemo = size_t{1} << 26;

  // More than `max_nodes` values are refused.
  PickleTreeValues(uint64_t pickle_bytes, size_t max_nodes);
  PickleTree Finish(NodeId root) &&;

  Result<NodeId> None() { return Shared(none_, PickleNode::Kind::kNone); }
  Result<NodeId> Bool(bool value);
  Result<NodeId> Int(int64_t value);
  Result<NodeId> BigInt(std::string_view little_endian);
  Result<NodeId> Float(double value);
  Result<NodeId> String(std::string_view text);
  Result<NodeId> Bytes(std::string_view text);
  Result<NodeId> ByteArray(std::string_view text);
  Result<NodeId> Tuple(std::span<const NodeId> items);
  Result<NodeId> List() { return Text(PickleNode::Kind::kList, ""); }
  Result<NodeId> Dict() { return Text(PickleNode::Kind::kDict, ""); }
  Result<NodeId> Set() { return Text(PickleNode::Kind::kSet, ""); }
  Result<NodeId> FrozenSet(std::span<const NodeId> items);
  Result<NodeId> Global(std::string_view module, std::string_view name);
  // The global that two strings name (STACK_GLOBAL).
  Result<std::pair<std::string, std::string>> NamesOf(NodeId module, NodeId name);
  Result<NodeId> Reduce(NodeId callee, NodeId arguments);
  Result<NodeId> Object(NodeId cls, NodeId arguments, const NodeId* keywords = nullptr);
  Result<NodeId> Persistent(NodeId id);

  Status Append(NodeId list, std::span<const NodeId> items);
  Status SetItems(NodeId dict, std::span<const NodeId> items);
  Status AddItems(NodeId set, std::span<const NodeId> items);
  Status Build(NodeId object, NodeId state);

 private:
  Result<NodeId> Add(PickleNode node);
  Result<NodeId> Text(PickleNode::Kind kind, std::string_view text);
  Result<NodeId> Shared(NodeId& shared, PickleNode::Kind kind, int64_t integer = 0);
  Status CheckRoom() const;
  Status Charge(const PickleNode& node);

  static constexpr NodeId kNoNode = ~NodeId{0};

  PickleTree tree_;
  uint64_t pickle_bytes_;
  size_t max_nodes_;
  uint64_t charged_ = 0;  // bytes that calls made nodes copy
  NodeId none_ = kNoNode;
  NodeId true_ = kNoNode;
  NodeId false_ = kNoNode;
  NodeId empty_tuple_ = kNoNode;
};

}  // namespace ckptfs
