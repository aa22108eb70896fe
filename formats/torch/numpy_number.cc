// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/numpy_number.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
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

constexpr std::array<std::pair<std::string_view, DType>, 12> kNumpyTypes = {{
    {"b1", DType::kBool},
    {"f8", DType::kF64},
    {"f4", DType::kF32},
    {"f2", DType::kF16},
    {"i8", DType::kI64},
    {"i4", DType::kI32},
    {"i2", DType::kI16},
    {"i1", DType::kI8},
    {"u8", DType::kU64},
    {"u4", DType::kU32},
    {"u2", DType::kU16},
    {"u1", DType::kU8},
}};

template <class T>
T As(std::string_view bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

// A float of another width than C++ has.
std::optional<PythonNumber> OfFloat(DType dtype, std::string_view bytes) {
  const CastFunction cast = FindCast(dtype, DType::kF64);
  if (cast == nullptr) return std::nullopt;
  double wide = 0;
  cast(std::as_bytes(std::span(bytes)).data(), std::as_writable_bytes(std::span(&wide, 1)).data(),
       1);
  return PythonNumber(wide);
}

}  // namespace

std::optional<PythonNumber> PythonNumberOf(DType dtype, std::string_view bytes) {
  if (bytes.size() != ByteWidth(dtype)) return std::nullopt;
  switch (dtype) {
    case DType::kBool: return PythonNumber(bytes[0] != 0);
    case DType::kF64: return PythonNumber(As<double>(bytes));
    case DType::kF32: return PythonNumber(static_cast<double>(As<float>(bytes)));
    case DType::kI64: return PythonNumber(As<int64_t>(bytes));
    case DType::kI32: return PythonNumber(int64_t{As<int32_t>(bytes)});
    case DType::kI16: return PythonNumber(int64_t{As<int16_t>(bytes)});
    case DType::kI8: return PythonNumber(int64_t{As<int8_t>(bytes)});
    case DType::kU32: return PythonNumber(int64_t{As<uint32_t>(bytes)});
    case DType::kU16: return PythonNumber(int64_t{As<uint16_t>(bytes)});
    case DType::kU8: return PythonNumber(int64_t{As<uint8_t>(bytes)});
    case DType::kU64: break;
    default: return OfFloat(dtype, bytes);
  }
  const auto value = As<uint64_t>(bytes);
  if (!std::in_range<int64_t>(value)) return std::nullopt;
  return PythonNumber(static_cast<int64_t>(value));
}

std::optional<PythonNumber> NumpyNumberOf(const PickleTree& tree, const PickleNode& node) {
  const auto* arguments =
      ArgumentsOf(tree, node, "scalar", {"numpy.core.multiarray", "numpy._core.multiarray"});
  if (arguments == nullptr || arguments->size() != 2) return std::nullopt;
  const std::string_view name = DTypeOf(tree, tree.nodes[(*arguments)[0]]);
  const auto type =
      std::ranges::find(kNumpyTypes, name, &std::pair<std::string_view, DType>::first);
  const PickleNode& held = tree.nodes[(*arguments)[1]];
  if (type == kNumpyTypes.end() || held.kind != Kind::kBytes) return std::nullopt;
  return PythonNumberOf(type->second, held.text);
}

}  // namespace ckptfs
