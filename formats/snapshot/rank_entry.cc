// SPDX-License-Identifier: Apache-2.0

#include "formats/snapshot/rank_entry.h"

#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/ingest/rank_file.h"

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
    if (value != nullptr && value->is_number_unsigned()) return value->get<uint64_t>();
    Refuse(StrCat("'", key, "' is not a number"));
    return 0;
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
    static const Json kNone = Json::array();
    const Json* value = Find(of, key);
    if (value == nullptr) return kNone;
    if (!value->is_array()) Refuse(StrCat("'", key, "' is not a list"));
    return value->is_array() ? *value : kNone;
  }
  // The file's tensor of that key, which is nobody else's.
  SafetensorsEntry Take(const std::string& key) {
    const auto found = free_.find(key);
    if (found == free_.end()) {
      Refuse(StrCat("tensor '", key, "' is not there, or is mentioned twice"));
      return {};
    }
    const SafetensorsEntry entry = *found->second;
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
  void RefuseLeftOver() {
    if (!free_.empty()) Refuse(StrCat("nothing says what tensor '", free_.begin()->first, "' is"));
  }
  void Refuse(std::string rule) {
    if (rule_.empty()) rule_ = std::move(rule);
  }
  const Json& json() const { return json_; }

 private:
  static const Json* Find(const Json& of, const char* key) {
    if (!of.is_object()) return nullptr;
    const auto found = of.find(key);
    return found != of.end() ? &*found : nullptr;
  }
  const Json& json_;
  std::map<std::string_view, const SafetensorsEntry*> free_;
  std::string rule_;
};

void ReadTensors(EntryReader& reader, const SafetensorsHeader& header, RankEntry& out) {
  const auto tensors = reader.json().find("tensors");
  if (tensors == reader.json().end() || !tensors->is_object()) {
    return reader.Refuse("'tensors' is not an object");
  }
  for (const SafetensorsEntry& entry : header.entries) {
    const auto found = tensors->find(entry.name);
    if (found == tensors->end()) continue;
    out.tensors.push_back({reader.Take(entry.name), reader.Text(*found, "parameter"),
                           reader.Text(*found, "kind"), reader.Text(*found, "optimizer"),
                           reader.Flag(*found, "number")});
  }
  if (out.tensors.size() != tensors->size()) {
    reader.Refuse("'tensors' mentions what is not in the file");
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
    out.parameters.emplace_back(reader.Text(parameter, "name"),
                                RoleNamed(reader, reader.Text(parameter, "role")));
  }
  for (const Json& alias : reader.List(json, "aliases")) {
    if (!alias.is_array() || alias.size() != 2) return reader.Refuse("'aliases' are not pairs");
    out.aliases.emplace_back(reader.AsText(alias[0], "alias"), reader.AsText(alias[1], "alias"));
  }
  for (const Json& group : reader.List(json, "groups")) {
    out.groups.push_back({reader.Text(group, "optimizer"), reader.Texts(group, "parameters"),
                          reader.TakePickle(group)});
  }
  for (const Json& document : reader.List(json, "documents")) {
    RankDocument read{reader.Text(document, "key"),
                      reader.Text(document, "scope"),
                      reader.TakePickle(document),
                      {}};
    for (const std::string& key : reader.Texts(document, "tensors")) {
      read.tensors.push_back(reader.Take(key));
    }
    out.documents.push_back(std::move(read));
  }
}

}  // namespace

Result<RankEntry> ParseRankEntry(const SafetensorsHeader& header) {
  const auto text = header.metadata.find(kRankFileKey);
  if (text == header.metadata.end()) {
    return Refuse("not a rank file: its __metadata__ does not have '", kRankFileKey, "'");
  }
  const Json json = Json::parse(text->second, nullptr, false);
  if (!json.is_object()) return Refuse("'", kRankFileKey, "' is not a JSON object");
  EntryReader reader(json, header);
  if (const uint64_t version = reader.Number(json, "version");
      reader.rule().empty() && version != kRankFileVersion) {
    return Refuse("a rank file of version ", version, ", this is version ", kRankFileVersion);
  }
  RankEntry entry;
  entry.rank = reader.Number(json, "rank");
  entry.world = reader.Number(json, "world");
  entry.step = reader.Number(json, "step");
  entry.framework = reader.Text(json, "framework");
  entry.framework_version = reader.Text(json, "framework_version");
  entry.data_offset = header.data_offset;
  ReadTensors(reader, header, entry);
  ReadModel(reader, entry);
  reader.RefuseLeftOver();
  if (!reader.rule().empty()) return Refuse("'", kRankFileKey, "': ", reader.rule());
  return entry;
}

}  // namespace ckptfs
