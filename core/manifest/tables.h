// SPDX-License-Identifier: Apache-2.0
//
// How tables of the manifest's schema are read and built.  FlatBuffers' verifier has proved the
// structure of what is read; indices, enums and products it cannot know.
//
// Thread safety: pure functions; none for a builder.
// Lifetime: what is read is copied; offsets are the builder's.

#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/base/strings.h"
#include "core/manifest/manifest_generated.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shape.h"

namespace ckptfs {

inline std::string Text(const flatbuffers::Vector<uint8_t>* bytes) {
  if (bytes == nullptr) return {};
  return std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size());
}

// The verifier does not look at the alignment of elements: they are copied as bytes.
template <class T>
std::vector<T> Vector(const flatbuffers::Vector<T>* values) {
  if (values == nullptr || values->size() == 0) return {};
  std::vector<T> copy(values->size());
  std::memcpy(copy.data(), values->Data(), values->size() * sizeof(T));
  return copy;
}

inline std::vector<std::string> Texts(
    const flatbuffers::Vector<flatbuffers::Offset<fb::Text>>* texts) {
  std::vector<std::string> result;
  if (texts == nullptr) return result;
  for (const fb::Text* text : *texts) result.push_back(Text(text->bytes()));
  return result;
}

// Enum of a stored number; the greatest known value is `last`.
template <class Enum>
Result<Enum> KnownEnum(uint64_t value, Enum last, std::string_view what) {
  if (value > static_cast<uint64_t>(last)) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(what, " ", value, " is unknown to this build (a newer one wrote it?)"));
  }
  return static_cast<Enum>(value);
}

inline Result<DType> KnownDType(uint64_t value) {
  return KnownEnum(value, static_cast<DType>(kDTypeCount - 1), "dtype");
}

inline Result<std::optional<DType>> OptionalDType(int16_t value) {
  if (value == -1) return std::optional<DType>();
  CKPT_ASSIGN_OR_RETURN(const DType dtype, KnownDType(static_cast<uint16_t>(value)));
  return std::optional<DType>(dtype);
}

inline Result<Shape> ReadShape(const flatbuffers::Vector<uint64_t>* values) {
  if (values != nullptr && values->size() > kMaxDimensions) return Refuse("more than 64 dims");
  Shape shape = Vector(values);
  CKPT_RETURN_IF_ERROR(ElementCount(shape));
  return shape;
}

// Appends what `read` makes of every table of a vector, with its place in the error.
template <class Table, class Item, class Function>
Status ReadAll(const flatbuffers::Vector<flatbuffers::Offset<Table>>* tables,
               std::vector<Item>& items, std::string_view what, Function read) {
  if (tables == nullptr) return {};
  items.reserve(tables->size());
  for (uint32_t i = 0; i < tables->size(); ++i) {
    auto item = read(*tables->Get(i));
    if (!item) return Fail(std::move(item).error().WithContext(StrCat(what, " ", i)));
    items.push_back(*std::move(item));
  }
  return {};
}

template <class T>
using Offset = flatbuffers::Offset<T>;
template <class T>
using VectorOffset = Offset<flatbuffers::Vector<T>>;

class TableBuilder {
 public:
  // `bound`: no fewer bytes than it takes, so that nothing is ever copied to grow; what is
  // not written costs no memory.
  explicit TableBuilder(uint64_t bound) : builder_(bound) {}

  // Absent when empty: an absent vector reads back as an empty one.
  template <class T>
  VectorOffset<T> Vector(const std::vector<T>& values) {
    if (values.empty()) return 0;
    return builder_.CreateVector(values);
  }
  VectorOffset<uint8_t> Bytes(std::string_view text) {
    if (text.empty()) return 0;
    return builder_.CreateVector(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  }
  template <class T, class Items, class Function>
  VectorOffset<Offset<T>> Tables(const Items& items, Function function) {
    if (items.empty()) return 0;
    std::vector<Offset<T>> offsets;
    offsets.reserve(items.size());
    for (const auto& item : items) offsets.push_back(function(item));
    return builder_.CreateVector(offsets);
  }
  VectorOffset<Offset<fb::Text>> Texts(const std::vector<std::string>& texts) {
    return Tables<fb::Text>(
        texts, [this](const std::string& text) { return fb::CreateText(builder_, Bytes(text)); });
  }

  flatbuffers::FlatBufferBuilder& fb() { return builder_; }

 protected:
  flatbuffers::FlatBufferBuilder builder_;
};

}  // namespace ckptfs
