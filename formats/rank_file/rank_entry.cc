// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_file/rank_entry.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "core/base/json_text.h"
#include "core/base/strings.h"
#include "core/records/records.h"
#include "core/state/rank_file.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

// Reads one JSON object; the first thing that is wrong is remembered, and all that
// is asked for afterwards is empty.
class EntryReader {
 public:
  EntryReader(const Json& json, const SafetensorsHeader& header) : json_(json) {
    for (const SafetensorsEntry& entry : header.entries) free_.emplace(entry.name, &entry);
  }
  const std::string& rule() const { return rule_; }

  uint64_t Number(const Json& of, const char* key) {
    const Json* value = Find(of, key);
    return AsNumber(value != nullptr ? *value : Json(), key);
  }
  uint64_t AsNumber(const Json& value, const char* what) {
    if (value.is_number_unsigned()) return value.get<uint64_t>();
    Refuse(StrCat("'", what, "' is not a number"));
    return 0;
  }
  std::vector<uint64_t> AsNumbers(const Json& value, const char* what) {
    std::vector<uint64_t> numbers;
    if (!value.is_array()) Refuse(StrCat("'", what, "' is not a list of numbers"));
    if (!value.is_array()) return numbers;
    for (const Json& number : value) numbers.push_back(AsNumber(number, what));
    return numbers;
  }
  // A [begin, end).
  std::array<uint64_t, 2> AsRange(const Json& value, const char* what) {
    const std::vector<uint64_t> numbers = AsNumbers(value, what);
    if (numbers.size() == 2) return {numbers[0], numbers[1]};
    Refuse(StrCat("'", what, "' is not a begin and an end"));
    return {};
  }
  std::string Text(const Json& of, const char* key) {
    const Json* value = Find(of, key);
    return value != nullptr ? AsText(*value, key) : AsText(Json(), key);
  }
  std::string AsText(const Json& value, const char* what) {
    if (value.is_string()) return value.get<std::string>();
    Refuse(StrCat("'", what, "' is not a text"));
    return {};
  }
  bool Flag(const Json& of, const char* key) {
    const Json* value = Find(of, key);
    if (value != nullptr && value->is_boolean()) return value->get<bool>();
    Refuse(StrCat("'", key, "' is not true or false"));
    return false;
  }
  std::vector<std::string> Texts(const Json& of, const char* key) {
    std::vector<std::string> texts;
    for (const Json& value : List(of, key)) texts.push_back(AsText(value, key));
    return texts;
  }
  // An absent list is empty.
  const Json& List(const Json& of, const char* key) {
    static const Json none = Json::array();
    const Json* value = Find(of, key);
    if (value == nullptr) return none;
    if (!value->is_array()) Refuse(StrCat("'", key, "' is not a list"));
    return value->is_array() ? *value : none;
  }
  // Adds a tensor that an earlier save has; `place` says where.
  void Keep(SafetensorsEntry entry, std::string place) {
    if (free_.contains(entry.name)) Refuse(StrCat("tensor '", entry.name, "' is mentioned twice"));
    std::string key = entry.name;
    kept_.emplace(std::move(key), std::pair(std::move(entry), std::move(place)));
  }
  const std::map<std::string, std::pair<SafetensorsEntry, std::string>>& kept() const {
    return kept_;
  }
  // The file's tensor of that key, which is nobody else's.
  SafetensorsEntry Take(const std::string& key) {
    const auto found = free_.find(key);
    if (found == free_.end()) {
      Refuse(StrCat("tensor '", key, "' is not there, or is mentioned twice"));
      return {};
    }
    SafetensorsEntry entry = *found->second;
    free_.erase(found);
    return entry;
  }
  SafetensorsEntry TakePickle(const Json& of) {
    SafetensorsEntry entry = Take(Text(of, "pickle"));
    if (entry.dtype != DType::kU8 || entry.shape.size() != 1) {
      Refuse(StrCat("pickle '", entry.name, "' is not a row of bytes"));
    }
    return entry;
  }
  // `of` has none but these fields.
  void Only(const Json& of, std::initializer_list<std::string_view> fields) {
    if (!of.is_object()) return Refuse("a value that must be an object is not one");
    for (const auto& [field, value] : of.items()) {
      if (std::find(fields.begin(), fields.end(), field) != fields.end()) continue;
      Refuse(StrCat("field '", field, "' is not understood"));
    }
  }
  void RefuseLeftOver() {
    if (!free_.empty()) Refuse(StrCat("nothing says what tensor '", free_.begin()->first, "' is"));
  }
  void Refuse(std::string rule) {
    if (rule_.empty()) rule_ = std::move(rule);
  }
  const Json& json() const { return json_; }
  static const Json* Find(const Json& of, const char* key) {
    if (!of.is_object()) return nullptr;
    const auto found = of.find(key);
    return found != of.end() ? &*found : nullptr;
  }

 private:
  const Json& json_;
  std::map<std::string_view, const SafetensorsEntry*> free_;
  std::map<std::string, std::pair<SafetensorsEntry, std::string>> kept_;  // by key
  std::string rule_;
};

StateBox ReadPiece(EntryReader& reader, const Json& piece) {
  reader.Only(piece, {"box", "at"});
  StateBox box;
  for (const Json& range : reader.List(piece, "box")) {
    const auto [begin, end] = reader.AsRange(range, "box");
    box.begin.push_back(begin);
    box.end.push_back(end);
  }
  const Json* at = EntryReader::Find(piece, "at");
  box.at = reader.AsNumbers(at != nullptr ? *at : Json(), "at");
  return box;
}

// Nothing of a tensor that is a whole state.
std::optional<StatePart> ReadPart(EntryReader& reader, const Json& tensor) {
  const Json* shape = EntryReader::Find(tensor, "shape");
  const Json* flat = EntryReader::Find(tensor, "flat");
  const Json* local_shape = EntryReader::Find(tensor, "local_shape");
  const Json* order = EntryReader::Find(tensor, "order");
  const bool part =
      flat != nullptr || local_shape != nullptr || order != nullptr || tensor.contains("pieces");
  if (shape == nullptr && !part) return std::nullopt;
  StatePart read;
  read.shape = reader.AsNumbers(shape != nullptr ? *shape : Json(), "shape");
  for (const Json& piece : reader.List(tensor, "pieces")) {
    read.pieces.push_back(ReadPiece(reader, piece));
  }
  if (flat != nullptr) read.flat = reader.AsRange(*flat, "flat");
  if (local_shape != nullptr) read.local_shape = reader.AsNumbers(*local_shape, "local_shape");
  if (order != nullptr) {
    read.order = reader.AsNumbers(*order, "order");
    if (read.order.empty()) reader.Refuse("'order' is empty");
  }
  return read;
}

StateTensor ReadTensor(EntryReader& reader, uint64_t version, const std::string& key,
                       const Json& tensor) {
  if (version == 1) {
    reader.Only(tensor, {"parameter", "kind", "optimizer", "number"});
  } else {
    reader.Only(tensor, {"parameter", "kind", "optimizer", "number", "shape", "pieces", "flat",
                         "local_shape", "order"});
  }
  if (version < kRankFileVersion && tensor.contains("order")) {
    reader.Refuse(StrCat("version ", version, " has no 'order'"));
  }
  const auto kept = reader.kept().find(key);
  const bool here = kept == reader.kept().end();
  StateTensor read{here ? reader.Take(key) : kept->second.first,
                   reader.Text(tensor, "parameter"),
                   reader.Text(tensor, "kind"),
                   reader.Text(tensor, "optimizer"),
                   reader.Flag(tensor, "number"),
                   {},
                   here ? "" : kept->second.second};
  if (tensor.is_object()) read.part = ReadPart(reader, tensor);
  return read;
}

// The path of one is the place and a file's name: nothing else.
bool IsPlace(std::string_view place) {
  return place.starts_with("snapshots/") && DigestNamed(place.substr(10)).has_value();
}

void ReadKept(EntryReader& reader) {
  const Json* const kept = EntryReader::Find(reader.json(), "kept");
  if (kept == nullptr) return;
  if (!kept->is_object()) return reader.Refuse("'kept' is not an object");
  for (const auto& [key, one] : kept->items()) {
    reader.Only(one, {"place", "dtype", "shape"});
    const auto dtype = DTypeFromSafetensors(reader.Text(one, "dtype"));
    const Json* const shape = EntryReader::Find(one, "shape");
    SafetensorsEntry entry{key, dtype.value_or(DType::kU8),
                           reader.AsNumbers(shape != nullptr ? *shape : Json(), "shape")};
    const auto bytes = ByteCount(entry.shape, entry.dtype);
    std::string place = reader.Text(one, "place");
    if (!dtype || !bytes)
      return reader.Refuse(StrCat("'", key, "' of 'kept' has no such type or shape"));
    if (!IsPlace(place))
      return reader.Refuse(StrCat("'", place, "' is not where a save's files lie"));
    entry.end = *bytes;
    reader.Keep(std::move(entry), std::move(place));
  }
}

void ReadTensors(EntryReader& reader, const SafetensorsHeader& header, uint64_t version,
                 RankEntry& out) {
  const auto tensors = reader.json().find("tensors");
  if (tensors == reader.json().end() || !tensors->is_object()) {
    return reader.Refuse("'tensors' is not an object");
  }
  for (const SafetensorsEntry& entry : header.entries) {
    const auto found = tensors->find(entry.name);
    if (found == tensors->end()) continue;
    out.tensors.push_back(ReadTensor(reader, version, entry.name, *found));
  }
  for (const auto& [key, kept] : reader.kept()) {
    const auto found = tensors->find(key);
    if (found == tensors->end())
      return reader.Refuse(StrCat("nothing says what tensor '", key, "' is"));
    out.tensors.push_back(ReadTensor(reader, version, key, *found));
  }
  if (out.tensors.size() != tensors->size()) {
    reader.Refuse("'tensors' mentions a tensor that is not in the file");
  }
}

Role RoleNamed(EntryReader& reader, const std::string& name) {
  if (name == "trainable") return Role::kTrainable;
  if (name == "frozen") return Role::kFrozen;
  if (name != "buffer") reader.Refuse(StrCat("'", name, "' is not a role"));
  return Role::kBuffer;
}

void ReadModel(EntryReader& reader, RankEntry& out) {
  const Json& json = reader.json();
  for (const Json& parameter : reader.List(json, "parameters")) {
    reader.Only(parameter, {"name", "role"});
    out.parameters.emplace_back(reader.Text(parameter, "name"),
                                RoleNamed(reader, reader.Text(parameter, "role")));
  }
  for (const Json& alias : reader.List(json, "aliases")) {
    if (!alias.is_array() || alias.size() != 2) return reader.Refuse("'aliases' are not pairs");
    out.aliases.emplace_back(reader.AsText(alias[0], "alias"), reader.AsText(alias[1], "alias"));
  }
  for (const Json& group : reader.List(json, "groups")) {
    reader.Only(group, {"optimizer", "parameters", "pickle"});
    out.groups.push_back({reader.Text(group, "optimizer"), reader.Texts(group, "parameters"),
                          reader.TakePickle(group)});
  }
  for (const Json& document : reader.List(json, "documents")) {
    reader.Only(document, {"key", "scope", "pickle", "tensors"});
    RankDocument read{reader.Text(document, "key"),
                      reader.Text(document, "scope"),
                      reader.TakePickle(document),
                      {}};
    for (const std::string& key : reader.Texts(document, "tensors")) {
      read.tensors.push_back(reader.Take(key));
    }
    out.documents.push_back(std::move(read));
  }
  for (const Json& alike : reader.List(json, "alike")) {
    if (!alike.is_array() || alike.size() != 2) return reader.Refuse("'alike' are not pairs");
    out.alike.emplace_back(reader.AsText(alike[0], "alike"), reader.AsNumber(alike[1], "alike"));
  }
}

}  // namespace

namespace {

Result<uint64_t> UnprovedOf(const SafetensorsHeader& header) {
  const auto text = header.metadata.find(kUnprovedKey);
  if (text == header.metadata.end()) return uint64_t{0};
  const std::string& digits = text->second;
  uint64_t bytes = 0;
  const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), bytes);
  if (read.ec == std::errc() && read.ptr == digits.data() + digits.size()) return bytes;
  return Refuse("'", kUnprovedKey, "' is not a number of bytes");
}

}  // namespace

Result<SafetensorsHeader> HeaderOf(const File& file) {
  if (file.size() < 8) return Refuse("safetensors: shorter than its length field");
  CKPT_ASSIGN_OR_RETURN(const std::string first, file.Read(0, 8, "the header's length"));
  CKPT_ASSIGN_OR_RETURN(const uint64_t length, SafetensorsHeaderLength(first, file.size()));
  CKPT_ASSIGN_OR_RETURN(const std::string head, file.Read(0, 8 + length, "the header"));
  return ParseSafetensorsHeader(head, file.size());
}

Result<RankEntry> ParseRankEntry(const SafetensorsHeader& header) {
  const auto text = header.metadata.find(kRankFileKey);
  if (text == header.metadata.end()) {
    return Refuse("not a rank file: its __metadata__ does not have '", kRankFileKey, "'");
  }
  const Json json = HasNul(text->second) ? Json() : Json::parse(text->second, nullptr, false);
  if (!json.is_object()) return Refuse("'", kRankFileKey, "' is not a JSON object");
  EntryReader reader(json, header);
  const uint64_t version = reader.Number(json, "version");
  if (reader.rule().empty() && (version == 0 || version > kRankFileVersion)) {
    return Refuse("a rank file of version ", version, ", this is version ", kRankFileVersion);
  }
  for (const char* later : {"layout", "alike"}) {
    if (version == 1 && json.contains(later))
      reader.Refuse(StrCat("version 1 has no '", later, "'"));
  }
  if (version < 3 && json.contains("kept")) reader.Refuse("only version 3 has 'kept'");
  reader.Only(json, {"version", "rank", "world", "step", "framework", "framework_version", "layout",
                     "tensors", "parameters", "aliases", "groups", "documents", "alike", "kept"});
  RankEntry entry;
  entry.rank = reader.Number(json, "rank");
  entry.world = reader.Number(json, "world");
  entry.step = reader.Number(json, "step");
  entry.framework = reader.Text(json, "framework");
  entry.framework_version = reader.Text(json, "framework_version");
  if (json.contains("layout")) entry.layout = reader.Text(json, "layout");
  entry.data_offset = header.data_offset;
  CKPT_ASSIGN_OR_RETURN(entry.unproved, UnprovedOf(header));
  ReadKept(reader);
  ReadTensors(reader, header, version, entry);
  ReadModel(reader, entry);
  reader.RefuseLeftOver();
  if (!reader.rule().empty()) return Refuse("'", kRankFileKey, "': ", reader.rule());
  return entry;
}

}  // namespace ckptfs
