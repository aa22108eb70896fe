// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/numpy_number.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor/cast.h"

namespace ckptfs {
namespace {

using Kind = PickleNode::Kind;

static_assert(std::endian::native == std::endian::little);

// The items of a call's arguments; null for other nodes, and for a call of something else.
const std::vector<NodeId>* ArgumentsOf(const PickleTree& tree, const PickleNode& node,
                                       std::string_view name,
                                       std::initializer_list<std::string_view> modules) {
  if (node.kind != Kind::kReduce || node.children.size() < 2) return nullptr;
  const PickleNode& callee = tree.nodes[node.children[0]];
  const PickleNode& arguments = tree.nodes[node.children[1]];
  if (callee.kind != Kind::kGlobal || GlobalName(callee) != name) return nullptr;
  if (std::ranges::find(modules, GlobalModule(callee)) == modules.end()) return nullptr;
  return arguments.kind == Kind::kTuple ? &arguments.children : nullptr;
}

// "f8" of numpy.dtype('f8', False, True) whose state says little-endian, or of one byte.
std::string_view DTypeOf(const PickleTree& tree, const PickleNode& node) {
  const auto* arguments = ArgumentsOf(tree, node, "dtype", {"numpy"});
  if (arguments == nullptr || arguments->empty()) return {};
  const PickleNode& name = tree.nodes[arguments->front()];
  const auto& state = tree.ExtraOf(node).state;
  if (name.kind != Kind::kString || !state) return {};
  const PickleNode& fields = tree.nodes[*state];
  if (fields.kind != Kind::kTuple || fields.children.size() < 2) return {};
  const PickleNode& order = tree.nodes[fields.children[1]];
  const bool little = order.kind == Kind::kString && (order.text == "<" || order.text == "|");
  return little ? std::string_view(name.text) : std::string_view();
}

template <class T>
T As(std::string_view bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

double OfHalf(std::string_view bytes) {
  double wide = 0;
  FindCast(DType::kF16, DType::kF64)(std::as_bytes(std::span(bytes)).data(),
                                     std::as_writable_bytes(std::span(&wide, 1)).data(), 1);
  return wide;
}

}  // namespace

std::optional<NumpyNumber> NumpyNumberOf(const PickleTree& tree, const PickleNode& node) {
  const auto* arguments =
      ArgumentsOf(tree, node, "scalar", {"numpy.core.multiarray", "numpy._core.multiarray"});
  if (arguments == nullptr || arguments->size() != 2) return std::nullopt;
  const std::string_view type = DTypeOf(tree, tree.nodes[(*arguments)[0]]);
  const PickleNode& held = tree.nodes[(*arguments)[1]];
  if (type.size() != 2 || held.kind != Kind::kBytes) return std::nullopt;
  const std::string_view bytes = held.text;
  if (bytes.size() != static_cast<size_t>(type[1] - '0')) return std::nullopt;
  if (type == "b1") return NumpyNumber(bytes[0] != 0);
  if (type == "f8") return NumpyNumber(As<double>(bytes));
  if (type == "f4") return NumpyNumber(static_cast<double>(As<float>(bytes)));
  if (type == "f2") return NumpyNumber(OfHalf(bytes));
  if (type == "i8") return NumpyNumber(As<int64_t>(bytes));
  if (type == "i4") return NumpyNumber(int64_t{As<int32_t>(bytes)});
  if (type == "i2") return NumpyNumber(int64_t{As<int16_t>(bytes)});
  if (type == "i1") return NumpyNumber(int64_t{As<int8_t>(bytes)});
  if (type == "u4") return NumpyNumber(int64_t{As<uint32_t>(bytes)});
  if (type == "u2") return NumpyNumber(int64_t{As<uint16_t>(bytes)});
  if (type == "u1") return NumpyNumber(int64_t{As<uint8_t>(bytes)});
  if (type != "u8") return std::nullopt;
  const auto value = As<uint64_t>(bytes);
  if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  return NumpyNumber(static_cast<int64_t>(value));
}

}  // namespace ckptfs
