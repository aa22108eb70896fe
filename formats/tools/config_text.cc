// SPDX-License-Identifier: Apache-2.0

#include "formats/tools/config_text.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <utility>

#include "core/base/json_text.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

using nlohmann::json;

std::string TextAt(const json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

// A discarded value for what is not JSON.
json Parsed(std::string_view text) {
  if (HasNul(text)) return json(json::value_t::discarded);
  return json::parse(StrictJson(text), nullptr, /*allow_exceptions=*/false);
}

// Walks over JSON that is known to be well-formed and finds the texts that stand
// under keys, with the keys above them.
class TextValues {
 public:
  struct Found {
    std::string_view key;
    std::string_view above;  // the key of the object it stands in; "" at the top
    size_t begin = 0;        // of what is between the quotes
    size_t end = 0;
    size_t depth = 0;  // 1: of the top object
  };

  explicit TextValues(std::string_view text) : json_(text) {}

  // The next text value; false at the end.
  bool Next(Found& found) {
    for (; at_ < json_.size(); ++at_) {
      const char c = json_[at_];
      if (c == '{' || c == '[') levels_.push_back({"", c == '['});
      if (c == '}' || c == ']') levels_.pop_back();
      if (c == '{' || c == ',') key_next_ = !levels_.back().list;
      if (c == '[' || c == ':') key_next_ = false;
      if (c != '"') continue;
      const size_t begin = ++at_;
      while (json_[at_] != '"') at_ += json_[at_] == '\\' ? 2 : 1;
      if (key_next_) {
        levels_.back().key = json_.substr(begin, at_ - begin);
        continue;
      }
      const size_t depth = levels_.size();
      found = Found{levels_.back().key, depth > 1 ? levels_[depth - 2].key : "", begin, at_, depth};
      ++at_;
      return true;
    }
    return false;
  }

 private:
  struct Level {
    std::string_view key;  // of the value that comes next; "" in a list
    bool list = false;
  };
  std::string_view json_;
  size_t at_ = 0;
  bool key_next_ = false;
  std::vector<Level> levels_;
};

// Where an object's closing brace stands.
struct ObjectEnd {
  std::string_view key;  // under which it stands at the top; "" for the top itself
  size_t at = 0;
};

// The first of the keys that is a number.
std::optional<uint64_t> NumberAt(const json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    const auto found = object.find(key);
    if (found != object.end() && found->is_number_unsigned()) return found->get<uint64_t>();
  }
  return std::nullopt;
}

void AddNulls(const json& object, std::set<std::string, std::less<>>& out) {
  if (!object.is_object()) return;
  for (const auto& [key, value] : object.items()) {
    if (value.is_null()) out.insert(key);
  }
}

// A config of a part (text_config), not of how weights are packed.
bool IsPart(std::string_view key) {
  return key.ends_with("_config") && key != "quantization_config";
}

// The ends of the config and of its parts, in the order of the text.
// REQUIRES: well-formed JSON.
std::vector<ObjectEnd> ConfigEnds(std::string_view text) {
  std::vector<ObjectEnd> ends;
  std::vector<bool> lists;
  std::string_view last, key;  // the last text; the last one of depth 1 before a colon
  for (size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (c == '"') {
      const size_t begin = ++at;
      while (text[at] != '"') at += text[at] == '\\' ? 2 : 1;
      last = text.substr(begin, at - begin);
    }
    if (c == ':' && lists.size() == 1) key = last;
    if (c == '{' || c == '[') lists.push_back(c == '[');
    if (c != '}' && c != ']') continue;
    const bool part = lists.size() == 2 && !lists[0] && c == '}' && IsPart(key);
    if (lists.size() == 1 && c == '}') ends.push_back({"", at});
    if (part) ends.push_back({key, at});
    lists.pop_back();
  }
  return ends;
}

// A key of transformers 4 for a value that transformers 5 writes under another one.
struct OlderKey {
  std::string_view model_type;  // "" for any
  const char* older;
  const char* newer;
};
// Those inside of rope_parameters.
constexpr OlderKey kOlderRopeKeys[] = {
    {"", "rope_theta", "rope_theta"},
    {"", "partial_rotary_factor", "partial_rotary_factor"},
    {"gpt_neox", "rotary_emb_base", "rope_theta"},
    {"gpt_neox", "rotary_pct", "partial_rotary_factor"},
};
constexpr OlderKey kOlderKeys[] = {{"qwen3_moe", "num_experts", "num_local_experts"}};

// A member of the top object: from its key's quote to the end of its value, and the comma before
// it where there is one.
struct Member {
  size_t begin = 0;
  size_t end = 0;
  std::optional<size_t> comma;  // before
  bool last = false;            // no comma is behind it
};

// The members of a name.  REQUIRES: well-formed JSON.
std::vector<Member> MembersOf(std::string_view text, std::string_view name) {
  std::vector<Member> out;
  std::optional<Member> now;
  size_t depth = 0;
  bool key_next = false;
  std::optional<size_t> comma;
  for (size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    const bool top = depth == 1;
    if (c == '"') {
      const size_t begin = at++;
      while (text[at] != '"') at += text[at] == '\\' ? 2 : 1;
      const bool found = top && key_next && text.substr(begin + 1, at - begin - 1) == name;
      if (found) now = Member{begin, 0, comma, false};
      key_next = false;
      continue;
    }
    if (top && (c == ',' || c == '}') && now) {
      now->end = at;
      now->last = c == '}';
      out.push_back(*now);
      now.reset();
    }
    if (top && c == ',') comma = at;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if ((c == '{' && depth == 1) || (c == ',' && depth == 1)) key_next = true;
  }
  return out;
}

using Additions = std::vector<std::pair<std::string, json>>;

void AddOlder(std::span<const OlderKey> rows, const json& config, const json& values,
              Additions& out) {
  const std::string type = TextAt(config, "model_type");
  for (const auto& [model_type, older, newer] : rows) {
    const auto value = values.find(newer);
    const bool known = value != values.end() && value->is_number() && !config.contains(older);
    if (known && (model_type.empty() || model_type == type)) out.emplace_back(older, *value);
  }
}

// The config lacks these for a reader of transformers 4.
Additions OlderKeysOf(const json& config) {
  Additions out;
  AddOlder(kOlderKeys, config, config, out);
  const auto rope = config.find("rope_parameters");
  if (rope == config.end() || !rope->is_object()) return out;
  AddOlder(kOlderRopeKeys, config, *rope, out);
  const std::string type = TextAt(*rope, "rope_type");
  if (type.empty() || type == "default" || config.contains("rope_scaling")) return out;
  json scaling = *rope;
  scaling.erase("rope_theta");
  scaling.erase("partial_rotary_factor");
  out.emplace_back("rope_scaling", std::move(scaling));
  return out;
}

}  // namespace

Result<ConfigFacts> ReadConfigFacts(std::string_view config) {
  const json parsed = Parsed(config);
  if (!parsed.is_object()) return Fail(ErrorCode::kInvalid, "not a JSON object");
  ConfigFacts facts;
  facts.model_type = TextAt(parsed, "model_type");
  facts.version = TextAt(parsed, "transformers_version");
  facts.weights = TextAt(parsed, "transformers_weights");
  const auto tied = parsed.find("tie_word_embeddings");
  if (tied != parsed.end() && tied->is_boolean()) facts.tied = tied->get<bool>();
  facts.predictors = NumberAt(parsed, {"num_nextn_predict_layers"}).value_or(0);
  facts.layers = NumberAt(parsed, {"num_hidden_layers", "n_layer", "n_layers", "num_layers"});
  facts.vocabulary = NumberAt(parsed, {"vocab_size"});
  facts.hidden = NumberAt(parsed, {"hidden_size", "n_embd"});
  AddNulls(parsed, facts.nulls);
  if (const auto text = parsed.find("text_config"); text != parsed.end()) {
    AddNulls(*text, facts.nulls);
  }
  const auto names = parsed.find("architectures");
  for (size_t i = 0; names != parsed.end() && names->is_array() && i < names->size(); ++i) {
    if ((*names)[i].is_string()) facts.architectures.push_back((*names)[i].get<std::string>());
  }
  const auto packed = parsed.find("quantization_config");
  if (packed != parsed.end() && packed->is_object()) {
    facts.quantisation = TextAt(*packed, "quant_method");
    if (facts.quantisation.empty()) facts.quantisation = "unknown";
    const auto block = packed->find("weight_block_size");
    const std::string activations = TextAt(*packed, "activation_scheme");
    const bool plain = activations.empty() || activations == "dynamic";
    if (plain && block != packed->end() && block->is_array() && block->size() == 2 &&
        (*block)[0].is_number_unsigned() && (*block)[1].is_number_unsigned()) {
      facts.quantised_block = {(*block)[0].get<uint64_t>(), (*block)[1].get<uint64_t>()};
    }
  }
  return facts;
}

std::optional<uint64_t> ReadTrainerStep(std::string_view state) {
  const json parsed = Parsed(state);
  return parsed.is_object() ? NumberAt(parsed, {"global_step"}) : std::nullopt;
}

std::vector<std::string> ReadModuleFolders(std::string_view modules) {
  const json parsed = Parsed(modules);
  std::vector<std::string> folders;
  for (size_t i = 0; parsed.is_array() && i < parsed.size(); ++i) {
    std::string path = parsed[i].is_object() ? TextAt(parsed[i], "path") : "";
    if (!path.empty()) folders.push_back(std::move(path));
  }
  return folders;
}

std::string WithDType(std::string_view config, DType shown) {
  std::string out;
  size_t copied = 0;
  TextValues texts(config);
  for (TextValues::Found found; texts.Next(found);) {
    const bool named = found.key == "dtype" || found.key == "torch_dtype";
    const bool ours = found.depth == 1 || (found.depth == 2 && IsPart(found.above));
    if (!named || !ours) continue;
    const auto dtype = DTypeFromTorch(config.substr(found.begin, found.end - found.begin));
    if (!dtype || !IsFloat(*dtype) || *dtype == shown) continue;
    out += config.substr(copied, found.begin - copied);
    out += TorchName(shown);
    copied = found.end;
  }
  out += config.substr(copied);
  return out;
}

std::string WithoutQuantisation(std::string_view config) {
  std::string out;
  size_t copied = 0;
  for (const Member& member : MembersOf(config, "quantization_config")) {
    // It takes the comma before it along, or the one behind it where there is none.
    const bool before = member.comma && *member.comma >= copied;
    const size_t begin = before ? *member.comma : member.begin;
    out += config.substr(copied, begin - copied);
    copied = before || member.last ? config.find_last_not_of(" \t\r\n", member.end - 1) + 1
                                   : config.find_first_not_of(" \t\r\n", member.end + 1);
  }
  out += config.substr(copied);
  return out;
}

std::string WithOlderKeys(std::string_view config) {
  const json parsed = Parsed(config);
  std::string out;
  size_t copied = 0;
  for (const ObjectEnd& end : ConfigEnds(config)) {
    const auto part = end.key.empty() ? parsed.end() : parsed.find(end.key);
    const json& object = part == parsed.end() ? parsed : *part;
    const bool missing = !end.key.empty() && part == parsed.end();  // an escaped key
    if (missing || !object.is_object() || object.empty()) continue;
    const size_t text_end = config.find_last_not_of(" \t\r\n", end.at - 1) + 1;
    out += config.substr(copied, text_end - copied);
    for (const auto& [key, value] : OlderKeysOf(object)) {
      out += StrCat(",\n  ", json(key).dump(), ": ", value.dump());
    }
    copied = text_end;
  }
  out += config.substr(copied);
  return out;
}

}  // namespace ckptfs
