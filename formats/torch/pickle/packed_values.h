// SPDX-License-Identifier: Apache-2.0
//
// PackedValues are a PickleMachine's values for pickles of many small objects of a few
// known classes, of which a tree would take a hundred times the pickle's own words.  A
// value is 8 bytes.  An object of a known class is told to a listener as soon as its state
// is set; then its state is forgotten, and the listener's number for it remains.  Values
// that no listener asks for (floats, sets, objects of other classes) are kOpaque.
//
// Nothing is imported or called: torch.Size(t) is t, _get_layout(s) is s, an empty
// OrderedDict a dict.
//
// Thread safety: none.
// Lifetime: schemas and listener must outlive it; views, until the next value is made.

#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/shape.h"

namespace ckptfs {

class PackedValue {
 public:
  enum class Kind : uint8_t {
    kAbsent,
    kNone,
    kBool,
    kInt,
    kString,
    kTuple,
    kList,
    kDict,
    kGlobal,
    kObject,
    kOpaque
  };
  PackedValue() = default;
  PackedValue(Kind kind, uint64_t word) : bits_(word << 4 | static_cast<uint64_t>(kind)) {}
  Kind kind() const { return static_cast<Kind>(bits_ & 15); }
  uint64_t word() const { return bits_ >> 4; }
  int64_t integer() const { return static_cast<int64_t>(bits_) >> 4; }

 private:
  uint64_t bits_ = 0;
};

// A class and the attributes that its state may have, in the order in which they are
// told; a state that is a tuple has them in this order, too.
struct PackedSchema {
  std::string_view module;
  std::string_view name;
  std::vector<std::string_view> fields;
  bool open = false;  // others are passed over; else they are refused
};

class PackedValues;

class PackedListener {
 public:
  virtual ~PackedListener() = default;
  // An object of schemas[schema] is whole; attributes that it lacks are kAbsent.  The
  // number stands for it from now on.
  virtual Result<uint32_t> Built(size_t schema, std::span<const PackedValue> fields,
                                 const PackedValues& values) = 0;
};

class PackedValues {
 public:
  using Value = PackedValue;
  static constexpr size_t kMaxMemo = size_t{1} << 27;

  PackedValues(std::span<const PackedSchema> schemas, PackedListener& listener);

  // The value as that type; nothing if it is something else.
  std::optional<int64_t> IntOf(PackedValue value) const;
  std::optional<std::string_view> StringOf(PackedValue value) const;
  // Equal strings, equal numbers.  REQUIRES: a kString.
  uint32_t StringNumber(PackedValue value) const { return static_cast<uint32_t>(value.word()); }
  std::optional<std::string_view> GlobalOf(PackedValue value) const;  // "module\nname"
  std::optional<std::span<const PackedValue>> SequenceOf(PackedValue value) const;
  // Key, value, ...
  std::optional<std::span<const PackedValue>> DictOf(PackedValue value) const;
  std::optional<uint32_t> ObjectOf(PackedValue value, size_t schema) const;
  std::optional<Shape> ShapeOf(PackedValue value) const;  // whole numbers >= 0

  // ---- For the machine ---------------------------------------------------------

  Result<PackedValue> None() { return PackedValue(PackedValue::Kind::kNone, 0); }
  Result<PackedValue> Bool(bool value) { return PackedValue(PackedValue::Kind::kBool, value); }
  Result<PackedValue> Int(int64_t value);
  Result<PackedValue> BigInt(std::string_view) { return Opaque(); }
  Result<PackedValue> Float(double) { return Opaque(); }
  Result<PackedValue> String(std::string_view text);
  Result<PackedValue> Bytes(std::string_view) { return Opaque(); }
  Result<PackedValue> ByteArray(std::string_view) { return Opaque(); }
  Result<PackedValue> Tuple(std::span<const PackedValue> items);
  Result<PackedValue> List() { return Container(PackedValue::Kind::kList); }
  Result<PackedValue> Dict() { return Container(PackedValue::Kind::kDict); }
  Result<PackedValue> Set() { return Opaque(); }
  Result<PackedValue> FrozenSet(std::span<const PackedValue>) { return Opaque(); }
  Result<PackedValue> Global(std::string_view module, std::string_view name);
  Result<std::pair<std::string, std::string>> NamesOf(PackedValue module, PackedValue name);
  Result<PackedValue> Reduce(PackedValue callee, PackedValue arguments);
  Result<PackedValue> Object(PackedValue cls, PackedValue arguments,
                             const PackedValue* keywords = nullptr);
  Result<PackedValue> Persistent(PackedValue) { return Opaque(); }

  Status Append(PackedValue list, std::span<const PackedValue> items);
  Status SetItems(PackedValue dict, std::span<const PackedValue> items);
  Status AddItems(PackedValue set, std::span<const PackedValue> items);
  Status Build(PackedValue object, PackedValue state);

 private:
  // Lists and dicts: a slot is used again when the state that was in it is forgotten;
  // the generation tells a value that still means the old one.
  struct Slot {
    std::vector<PackedValue> items;
    uint32_t generation = 0;
  };
  struct Made {
    uint32_t schema = 0;
    uint32_t number = kUnbuilt;
  };
  static constexpr uint32_t kUnbuilt = ~uint32_t{0};
  static constexpr uint32_t kMaxGeneration = (uint32_t{1} << 28) - 1;
  static constexpr size_t kMaxWords = size_t{1} << 27;

  static PackedValue Opaque() { return PackedValue(PackedValue::Kind::kOpaque, 0); }
  Result<PackedValue> Container(PackedValue::Kind kind);
  Result<uint32_t> Intern(std::string_view text);
  Status Charge(size_t words);
  const Slot* SlotOf(PackedValue value) const;
  Status SpreadDict(const PackedSchema& schema, std::span<const PackedValue> items);
  Status SpreadTuple(const PackedSchema& schema, std::span<const PackedValue> items);
  void Forget(PackedValue dict);

  std::span<const PackedSchema> schemas_;
  PackedListener& listener_;
  std::vector<PackedValue> tuples_;  // each: its length as a kInt, then its items
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::vector<Made> objects_;
  std::deque<std::string> strings_;
  std::unordered_map<std::string_view, uint32_t> numbers_;  // views into strings_
  std::unordered_map<uint32_t, uint32_t> classes_;          // string number -> schema
  std::vector<std::vector<uint32_t>> field_names_;          // string numbers, by schema
  std::vector<PackedValue> fields_;                         // of the object being told
  size_t words_ = 0;
};

}  // namespace ckptfs
