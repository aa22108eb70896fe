// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle/packed_values.h"

#include <algorithm>

#include "core/base/strings.h"

namespace ckptfs {

using PackedKind = PackedValue::Kind;

PackedValues::PackedValues(std::span<const PackedSchema> schemas, PackedListener& listener)
    : schemas_(schemas), listener_(listener) {
  for (const PackedSchema& schema : schemas_) {
    const auto cls = Intern(StrCat(schema.module, '\n', schema.name));
    CKPT_CHECK(cls.has_value());
    classes_.emplace(*cls, static_cast<uint32_t>(field_names_.size()));
    auto& names = field_names_.emplace_back();
    for (const std::string_view field : schema.fields) names.push_back(*Intern(field));
  }
}

// ---- looking ------------------------------------------------------------------

std::optional<int64_t> PackedValues::IntOf(PackedValue value) const {
  if (value.kind() != PackedKind::kInt) return std::nullopt;
  return value.integer();
}

std::optional<std::string_view> PackedValues::StringOf(PackedValue value) const {
  if (value.kind() != PackedKind::kString) return std::nullopt;
  return strings_[value.word()];
}

std::optional<std::string_view> PackedValues::GlobalOf(PackedValue value) const {
  if (value.kind() != PackedKind::kGlobal) return std::nullopt;
  return strings_[value.word()];
}

const PackedValues::Slot* PackedValues::SlotOf(PackedValue value) const {
  if (value.kind() != PackedKind::kList && value.kind() != PackedKind::kDict) return nullptr;
  const Slot& slot = slots_[static_cast<uint32_t>(value.word())];
  return slot.generation == value.word() >> 32 ? &slot : nullptr;
}

std::optional<std::span<const PackedValue>> PackedValues::SequenceOf(PackedValue value) const {
  if (value.kind() == PackedKind::kTuple) {
    const size_t at = value.word();
    return std::span(tuples_).subspan(at + 1, static_cast<size_t>(tuples_[at].integer()));
  }
  const Slot* slot = value.kind() == PackedKind::kList ? SlotOf(value) : nullptr;
  if (slot == nullptr) return std::nullopt;
  return std::span(slot->items);
}

std::optional<std::span<const PackedValue>> PackedValues::DictOf(PackedValue value) const {
  const Slot* slot = value.kind() == PackedKind::kDict ? SlotOf(value) : nullptr;
  if (slot == nullptr) return std::nullopt;
  return std::span(slot->items);
}

std::optional<uint32_t> PackedValues::ObjectOf(PackedValue value, size_t schema) const {
  if (value.kind() != PackedKind::kObject) return std::nullopt;
  const Made& made = objects_[value.word()];
  if (made.schema != schema || made.number == kUnbuilt) return std::nullopt;
  return made.number;
}

std::optional<Shape> PackedValues::ShapeOf(PackedValue value) const {
  const auto items = SequenceOf(value);
  if (!items || items->size() > kMaxDimensions) return std::nullopt;
  Shape shape;
  for (const PackedValue item : *items) {
    if (item.kind() != PackedKind::kInt || item.integer() < 0) return std::nullopt;
    shape.push_back(static_cast<uint64_t>(item.integer()));
  }
  return shape;
}

// ---- making -------------------------------------------------------------------

Status PackedValues::Charge(size_t words) {
  words_ += words;
  if (words_ <= kMaxWords) return {};
  return Refuse("more than ", kMaxWords, " values");
}

Result<PackedValue> PackedValues::Int(int64_t value) {
  const PackedValue packed(PackedKind::kInt, static_cast<uint64_t>(value));
  return packed.integer() == value ? packed : Opaque();
}

Result<uint32_t> PackedValues::Intern(std::string_view text) {
  const auto known = numbers_.find(text);
  if (known != numbers_.end()) return known->second;
  CKPT_RETURN_IF_ERROR(Charge(16 + text.size() / sizeof(PackedValue)));
  const auto number = static_cast<uint32_t>(strings_.size());
  numbers_.emplace(strings_.emplace_back(text), number);
  return number;
}

Result<PackedValue> PackedValues::String(std::string_view text) {
  CKPT_ASSIGN_OR_RETURN(const uint32_t number, Intern(text));
  return PackedValue(PackedKind::kString, number);
}

Result<PackedValue> PackedValues::Tuple(std::span<const PackedValue> items) {
  CKPT_RETURN_IF_ERROR(Charge(items.size() + 1));
  const PackedValue tuple(PackedKind::kTuple, tuples_.size());
  tuples_.emplace_back(PackedKind::kInt, items.size());
  tuples_.insert(tuples_.end(), items.begin(), items.end());
  return tuple;
}

Result<PackedValue> PackedValues::Container(PackedValue::Kind kind) {
  if (free_.empty()) {
    CKPT_RETURN_IF_ERROR(Charge(sizeof(Slot) / sizeof(PackedValue)));
    free_.push_back(static_cast<uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  const uint32_t slot = free_.back();
  free_.pop_back();
  return PackedValue(kind, uint64_t{slots_[slot].generation} << 32 | slot);
}

void PackedValues::Forget(PackedValue dict) {
  const auto number = static_cast<uint32_t>(dict.word());
  Slot& slot = slots_[number];
  words_ -= slot.items.size();
  slot.items.clear();
  if (slot.items.capacity() > 64) slot.items.shrink_to_fit();
  if (++slot.generation < kMaxGeneration) free_.push_back(number);
}

Result<PackedValue> PackedValues::Global(std::string_view module, std::string_view name) {
  CKPT_ASSIGN_OR_RETURN(const uint32_t number, Intern(StrCat(module, '\n', name)));
  return PackedValue(PackedKind::kGlobal, number);
}

Result<std::pair<std::string, std::string>> PackedValues::NamesOf(PackedValue module,
                                                                  PackedValue name) {
  const auto of = StringOf(module);
  const auto called = StringOf(name);
  if (!of || !called) return Refuse("the names of a global are not strings");
  if (of->size() + called->size() > 4096) return Refuse("the name of a global is too long");
  return std::pair(std::string(*of), std::string(*called));
}

Result<PackedValue> PackedValues::Reduce(PackedValue callee, PackedValue arguments) {
  if (arguments.kind() != PackedKind::kTuple) {
    return Refuse("the arguments of a call are not a tuple");
  }
  const auto name = GlobalOf(callee);
  const auto given = SequenceOf(arguments);
  if (!name) return Opaque();
  if (*name == "collections\nOrderedDict" && given->empty()) return Dict();
  if (given->size() != 1) return Opaque();
  const PackedValue only = given->front();
  if (*name == "torch\nSize" && SequenceOf(only)) return only;
  if (*name == "torch.serialization\n_get_layout" && StringOf(only)) return only;
  return Opaque();
}

Result<PackedValue> PackedValues::Object(PackedValue cls, PackedValue arguments,
                                         const PackedValue* keywords) {
  if (arguments.kind() != PackedKind::kTuple) {
    return Refuse("the arguments of a class are not a tuple");
  }
  const auto known = cls.kind() == PackedKind::kGlobal
                         ? classes_.find(static_cast<uint32_t>(cls.word()))
                         : classes_.end();
  if (known == classes_.end()) return Opaque();
  if (!SequenceOf(arguments)->empty() || keywords != nullptr) {
    return Refuse("a ", schemas_[known->second].name, " is made with arguments");
  }
  CKPT_RETURN_IF_ERROR(Charge(1));
  // Python leaves out a state that has nothing.
  const bool whole = schemas_[known->second].fields.empty();
  objects_.push_back(Made{known->second, whole ? 0 : kUnbuilt});
  return PackedValue(PackedKind::kObject, objects_.size() - 1);
}

Status PackedValues::Append(PackedValue list, std::span<const PackedValue> items) {
  if (list.kind() == PackedKind::kOpaque) return {};
  if (list.kind() != PackedKind::kList) return Refuse("appends to a value that is not a list");
  CKPT_RETURN_IF_ERROR(Charge(items.size()));
  auto& to = slots_[static_cast<uint32_t>(list.word())].items;
  to.insert(to.end(), items.begin(), items.end());
  return {};
}

Status PackedValues::SetItems(PackedValue dict, std::span<const PackedValue> items) {
  if (dict.kind() == PackedKind::kOpaque) return {};
  if (dict.kind() != PackedKind::kDict) return Refuse("sets items of a value that is not a dict");
  if (SlotOf(dict) == nullptr) return Refuse("uses the state of an object a second time");
  CKPT_RETURN_IF_ERROR(Charge(items.size()));
  auto& to = slots_[static_cast<uint32_t>(dict.word())].items;
  to.insert(to.end(), items.begin(), items.end());
  return {};
}

Status PackedValues::AddItems(PackedValue set, std::span<const PackedValue>) {
  if (set.kind() == PackedKind::kOpaque) return {};
  return Refuse("adds items to a value that is not a set");
}

// ---- telling ------------------------------------------------------------------

Status PackedValues::SpreadDict(const PackedSchema& schema, std::span<const PackedValue> items) {
  const auto& names = field_names_[static_cast<size_t>(&schema - schemas_.data())];
  for (size_t i = 0; i < items.size(); i += 2) {
    if (items[i].kind() != PackedKind::kString) {
      return Refuse("an attribute of a ", schema.name, " does not have a name");
    }
    const auto field = std::find(names.begin(), names.end(), StringNumber(items[i]));
    if (field == names.end()) {
      if (schema.open) continue;
      return Refuse("a ", schema.name, " has the attribute '", *StringOf(items[i]),
                    "', which is not known");
    }
    PackedValue& to = fields_[static_cast<size_t>(field - names.begin())];
    if (to.kind() != PackedKind::kAbsent)
      return Refuse("a ", schema.name,
                    " has an attribute "
                    "twice");
    to = items[i + 1];
  }
  return {};
}

Status PackedValues::SpreadTuple(const PackedSchema& schema, std::span<const PackedValue> items) {
  if (items.size() != fields_.size()) {
    return Refuse("a ", schema.name, " has a state of ", items.size(), " values");
  }
  std::copy(items.begin(), items.end(), fields_.begin());
  return {};
}

Status PackedValues::Build(PackedValue object, PackedValue state) {
  if (object.kind() == PackedKind::kOpaque) return {};
  if (object.kind() != PackedKind::kObject) {
    return Refuse("sets the state of a value that is not an object");
  }
  Made& made = objects_[object.word()];
  const PackedSchema& schema = schemas_[made.schema];
  const bool built = made.number != kUnbuilt && !schema.fields.empty();
  if (built) return Refuse("sets the state of an object twice");
  fields_.assign(schema.fields.size(), PackedValue());
  if (const auto items = DictOf(state)) {
    CKPT_RETURN_IF_ERROR(SpreadDict(schema, *items));
    Forget(state);
  } else if (state.kind() == PackedKind::kTuple) {
    CKPT_RETURN_IF_ERROR(SpreadTuple(schema, *SequenceOf(state)));
  } else {
    return Refuse("the state of a ", schema.name, " is neither a dict nor a tuple");
  }
  if (schema.fields.empty()) return {};
  CKPT_ASSIGN_OR_RETURN(made.number, listener_.Built(made.schema, fields_, *this));
  CKPT_CHECK(made.number != kUnbuilt);
  return {};
}

}  // namespace ckptfs
