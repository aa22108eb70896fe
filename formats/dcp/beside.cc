// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/beside.h"

#include <utility>

#include "core/base/strings.h"

namespace ckptfs::dcp {
namespace {

// From here on a view cuts a tensor for its mesh (directory_index.h), which it cannot do with a
// part of a document.
constexpr uint64_t kLarge = 1 << 20;

}  // namespace

bool BesideTensors::Wants(size_t tensor) const {
  const TensorEntry& entry = state_.metadata().tensors[tensor];
  if (ByteWidth(entry.dtype) == 0) return false;
  const bool whole = state_.Whole(tensor).has_value();
  const auto bytes = ByteCount(entry.shape, entry.dtype);
  return !whole || (bytes && *bytes >= kLarge && !state_.HasCopies(tensor));
}

bool BesideTensors::IsComplete(size_t tensor) const {
  const TensorEntry& entry = state_.metadata().tensors[tensor];
  if (state_.HasCopies(tensor)) return true;
  uint64_t held = 0;
  for (size_t chunk = 0; chunk < entry.chunk_count; ++chunk) {
    uint64_t volume = 1;
    for (const uint64_t size : state_.metadata().SizesOf(entry, chunk)) volume *= size;
    held += volume;
  }
  const auto elements = ElementCount(entry.shape);
  return elements && held == *elements;
}

// A copy of the weights is cut as they are: the weight whose name the key ends with, if it has
// the same shape.
Pattern BesideTensors::PatternOf(const TensorEntry& tensor) const {
  const std::string_view key = tensor.name;
  for (size_t dot = key.find('.'); dot != key.npos; dot = key.find('.', dot + 1)) {
    const auto weight = parameters_.find(key.substr(dot + 1));
    if (weight == parameters_.end()) continue;
    const Parameter& parameter = assembler_.parameter(weight->second);
    return parameter.shape == tensor.shape ? parameter.pattern : Pattern{};
  }
  return {};
}

Result<AtomIndex> BesideTensors::Add(size_t tensor) {
  const TensorEntry& entry = state_.metadata().tensors[tensor];
  Parameter parameter;
  parameter.name = entry.name;
  // A key beside the model may be the name of a weight in it ("ema.w" of "model.ema.w").
  while (parameters_.contains(parameter.name)) parameter.name.insert(0, "beside:");
  parameter.shape = entry.shape;
  parameter.role = Role::kBeside;
  parameter.pattern = PatternOf(entry);
  CKPT_ASSIGN_OR_RETURN(const ParameterIndex index, assembler_.AddParameter(std::move(parameter)));
  CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                        assembler_.AddAtom(index, "", kBesideKind, entry.dtype, entry.shape));
  CKPT_RETURN_IF_ERROR(state_.AddFragments(tensor, atom));
  return atom;
}

}  // namespace ckptfs::dcp
