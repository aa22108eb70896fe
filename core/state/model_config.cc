// SPDX-License-Identifier: Apache-2.0

#include "core/state/model_config.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/device_error.h"
#include "core/base/json_text.h"
#include "core/base/strings.h"
#include "core/io/root.h"

namespace ckptfs {
namespace {

constexpr uint64_t kMaxFile = 4 << 20;  // label maps make them long
constexpr uint64_t kMaxSize = uint64_t{1} << 31;
constexpr size_t kMaxDepth = 64;
constexpr int kDirectories = 3;

// The families' names; of two spellings in one file the first counts.
constexpr std::pair<std::string_view, std::string_view> kKeys[] = {
    {"num_attention_heads", "heads"},    {"n_head", "heads"},
    {"num_key_value_heads", "kv_heads"}, {"head_dim", "head_dim"},
    {"hidden_size", "hidden"},           {"n_embd", "hidden"},
    {"num_experts", "experts"},          {"num_local_experts", "experts"},
    {"n_routed_experts", "experts"}};

// Reads event by event, so that no tree is built of what nobody asked for.
class ConfigEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  FamilyVariables Sizes() const {
    const auto& numbers = top_.empty() ? text_ : top_;
    FamilyVariables sizes;
    for (const auto& [key, name] : kKeys) {
      const auto found = numbers.find(std::string(key));
      if (found != numbers.end()) sizes.emplace(name, found->second);
    }
    return sizes;
  }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool number_unsigned(number_unsigned_t value) override {
    if (value == 0 || value >= kMaxSize || key_ == nullptr) return true;
    if (depth_ == 1) top_[std::string(key_)] = static_cast<int64_t>(value);
    if (depth_ == 2 && in_text_) text_[std::string(key_)] = static_cast<int64_t>(value);
    return true;
  }
  bool start_object(size_t) override { return Enter(true); }
  bool start_array(size_t) override { return Enter(false); }
  bool end_object() override { return Leave(); }
  bool end_array() override { return Leave(); }
  bool key(string_t& value) override {
    key_ = nullptr;
    for (const auto& [key, name] : kKeys) {
      if (value == key) key_ = key.data();
    }
    if (depth_ == 1) text_next_ = value == "text_config";
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  bool Enter(bool object) {
    if (depth_ == 0 && !object) return false;
    ++depth_;
    if (depth_ == 2) in_text_ = object && text_next_;
    key_ = nullptr;
    return depth_ <= kMaxDepth;
  }
  bool Leave() {
    --depth_;
    key_ = nullptr;
    return true;
  }

  size_t depth_ = 0;
  const char* key_ = nullptr;  // of the value that comes next, if it is one of kKeys
  bool text_next_ = false;
  bool in_text_ = false;
  FamilyVariables top_;
  FamilyVariables text_;
};

// The bytes of a regular file that we may read and that is not too long.
Result<std::optional<std::string>> ReadSmallFile(const Root& root, const std::string& path) {
  auto text = ReadWhole(root, path, kMaxFile);
  if (text) return std::optional(*std::move(text));
  if (IsOfDevice(text.error())) return Fail(std::move(text).error());
  return std::optional<std::string>();  // kDataLoss, too: it is being written
}

}  // namespace

Result<FamilyVariables> ParseModelConfig(std::string_view config) {
  ConfigEvents events;
  const std::string json = StrictJson(config);
  const size_t first = json.find_first_not_of(" \t\r\n");
  const bool object = first != std::string_view::npos && json[first] == '{' && !HasNul(json);
  if (!object || !nlohmann::json::sax_parse(json.begin(), json.end(), &events)) {
    return Fail(ErrorCode::kInvalid, "not a JSON object");
  }
  return events.Sizes();
}

Result<std::optional<ModelConfig>> FindModelConfig(const Root& root, const std::string& directory) {
  std::string at = directory;
  for (int i = 0; i < kDirectories; ++i) {
    const std::string path = JoinPath(at, "config.json");
    CKPT_ASSIGN_OR_RETURN(const std::optional<std::string> text, ReadSmallFile(root, path));
    if (text) {
      auto sizes = ParseModelConfig(*text);
      if (sizes && !sizes->empty()) {
        return std::optional(ModelConfig{root.PathOf(path), *std::move(sizes)});
      }
    }
    if (at.empty()) break;
    at = ParentPath(at);
  }
  return std::optional<ModelConfig>();
}

Result<ModelSizes> SizesOf(const FamilyVariables& args, const SourceOptions& options,
                           const StepCandidate& step) {
  ModelSizes out{WithCommonSpellings(options.variables), WithCommonSpellings(args),
                 options.configured, options.config};
  CKPT_ASSIGN_OR_RETURN(std::optional<ModelConfig> config,
                        FindModelConfig(*step.root, step.directory));
  if (config) {
    out.configured = std::move(config->sizes);
    out.config = std::move(config->path);
  }
  return out;
}

}  // namespace ckptfs
