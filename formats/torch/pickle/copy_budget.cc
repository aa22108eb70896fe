// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle/copy_budget.h"

namespace ckptfs {
namespace {

uint64_t WordsOf(const PickleTree& tree, const PickleNode& node) {
  const PickleExtra& extra = tree.ExtraOf(node);
  uint64_t words =
      1 + node.children.size() + extra.appended.size() + extra.items.size() + node.text.size();
  if (node.kind == PickleNode::Kind::kTensor) {
    const TensorNode& tensor = tree.TensorOf(node);
    words += tensor.storage_class.size() + tensor.storage_key.size() + tensor.shape.size() +
             tensor.strides.size();
  }
  return words;
}

uint64_t WordsOf(const PickleTree& tree) {
  uint64_t words = 0;
  for (const PickleNode& node : tree.nodes) words += WordsOf(tree, node);
  return words;
}

}  // namespace

CopyBudget::CopyBudget(const PickleTree& tree) : left_(kTimes * WordsOf(tree) + kAlways) {}

Status CopyBudget::Charge(uint64_t words) {
  if (words > left_) {
    return Refuse("values that are mentioned often would be copied to more than ", kTimes,
                  " times the file's pickle");
  }
  left_ -= words;
  return {};
}

Status CopyBudget::ChargeDeep(PickleRef value) {
  if (!value) return {};
  uint64_t words = 0;
  AnyNode(value, [&](const PickleNode& node) {
    words += WordsOf(value.tree(), node);
    return words > left_;
  });
  return Charge(words);
}

Status CopyBudget::ChargeText(PickleRef text) {
  return Charge(text ? text.String().value_or("").size() : 0);
}

}  // namespace ckptfs
