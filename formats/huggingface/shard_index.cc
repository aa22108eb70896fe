// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/shard_index.h"

#include <nlohmann/json.hpp>

#include "core/base/json_text.h"
#include "core/base/strings.h"
#include "formats/huggingface/names.h"

namespace ckptfs::huggingface {
namespace {

constexpr size_t kMaxDepth = 900;  // Python's json goes to about 1,000

// Reads event by event, and keeps nothing but the weight_map and total_size.
// It takes the last of equal keys, as from_pretrained does.
class IndexEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  WeightMap map;
  std::string rule;
  bool found = false;  // a weight_map
  std::optional<uint64_t> total_size;

  bool null() override { return Value(); }
  bool boolean(bool) override { return Value(); }
  bool number_integer(number_integer_t) override { return Value(); }
  bool number_unsigned(number_unsigned_t value) override {
    if (in_metadata_ && depth_ == 2 && key_ == "total_size") total_size = value;
    return Value();
  }
  bool number_float(number_float_t, const string_t&) override { return Value(); }
  bool binary(binary_t&) override { return Value(); }
  bool string(string_t& value) override {
    if (!inside()) return Value();
    auto path = ShardPath(value);
    if (!path) {
      return Refuse(StrCat("tensor '", key_, "' is in '", value,
                           "', which is not the name of a file in the same directory or below it"));
    }
    map.insert_or_assign(key_, *std::move(path));
    return true;
  }
  bool start_object(size_t) override {
    if (depth_ == 1) in_metadata_ = key_ == "metadata";
    if (depth_ == 1 && key_ == "weight_map") {
      map.clear();
      found = in_map_ = true;
    } else if (!Value()) {
      return false;
    }
    return Enter();
  }
  bool start_array(size_t) override { return depth_ > 0 && Value() && Enter(); }
  bool end_object() override { return Leave(); }
  bool end_array() override { return Leave(); }
  bool key(string_t& value) override {
    key_ = value;
    return true;
  }
  bool parse_error(size_t at, const std::string&, const nlohmann::detail::exception&) override {
    return Refuse(StrCat("it is not JSON at byte ", at));
  }

 private:
  bool inside() const { return in_map_ && depth_ == 2; }
  bool Refuse(std::string why) {
    if (rule.empty()) rule = std::move(why);
    return false;
  }
  // Any value but the name of a file.
  bool Value() {
    if (depth_ == 1 && key_ == "weight_map") return Refuse("weight_map is not an object");
    return inside() ? Refuse(StrCat("tensor '", key_, "' does not have the name of a file")) : true;
  }
  bool Enter() { return ++depth_ <= kMaxDepth || Refuse("it is nested too deeply"); }
  bool Leave() {
    if (--depth_ == 1) in_map_ = in_metadata_ = false;
    return true;
  }

  size_t depth_ = 0;
  bool in_map_ = false;
  bool in_metadata_ = false;
  std::string key_;
};

Status Parse(std::string_view json, IndexEvents& events) {
  if (HasNul(json)) return Fail(ErrorCode::kInvalid, "it holds a NUL byte");
  if (HasByteOrderMark(json)) return Fail(ErrorCode::kInvalid, "not JSON: a byte-order mark");
  const std::string strict = StrictJson(json);
  const bool parsed = nlohmann::json::sax_parse(strict.begin(), strict.end(), &events);
  if (parsed && events.found && !events.map.empty()) return {};
  if (events.rule.empty())
    events.rule = events.found ? "its weight_map is "
                                 "empty"
                               : "its weight_map is missing";
  return Fail(ErrorCode::kInvalid, std::move(events.rule));
}

}  // namespace

Result<WeightMap> ParseShardIndex(std::string_view json) {
  IndexEvents events;
  CKPT_RETURN_IF_ERROR(Parse(json, events));
  return std::move(events.map);
}

Result<std::optional<uint64_t>> ReadTotalSize(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const std::string text, ReadWhole(root, path, kMaxIndexBytes));
  IndexEvents events;
  const Status parsed = Parse(text, events);
  return parsed ? events.total_size : std::nullopt;
}

Result<WeightMap> ReadShardIndex(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const std::string text, ReadWhole(root, path, kMaxIndexBytes));
  auto map = ParseShardIndex(text);
  if (!map) return Fail(std::move(map).error().WithContext(root.PathOf(path)));
  return map;
}

std::vector<size_t> SplitShards(std::span<const uint64_t> sizes, uint64_t limit) {
  std::vector<size_t> whole;
  size_t open = 0;
  uint64_t bytes = 0;
  for (const uint64_t size : sizes) {
    if (open > 0 && (size > limit || bytes + size > limit)) {
      whole.push_back(open);
      open = 0;
      bytes = 0;
    }
    if (size > limit) {
      whole.push_back(1);
      continue;
    }
    ++open;
    bytes += size;
  }
  if (open > 0) whole.push_back(open);
  return whole;
}

std::string ShardName(size_t shard, size_t shards) {
  if (shards < 2) return "model.safetensors";
  const auto five = [](size_t number) {
    const std::string digits = std::to_string(number);
    return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
  };
  return StrCat("model-", five(shard + 1), "-of-", five(shards), ".safetensors");
}

Result<std::string> PrintShardIndex(const WeightMap& map, uint64_t total_size,
                                    uint64_t total_parameters) {
  nlohmann::json index;  // sorted by key
  index["metadata"] = {{"total_parameters", total_parameters}, {"total_size", total_size}};
  index["weight_map"] = map;
  try {
    return index.dump(2) + "\n";
  } catch (const nlohmann::json::exception&) {
    return Fail(ErrorCode::kUnsupported, "a tensor's name is not UTF-8, which an index has to be");
  }
}

}  // namespace ckptfs::huggingface
