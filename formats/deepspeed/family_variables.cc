// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/family_variables.h"

#include <string_view>
#include <utility>

namespace ckptfs::deepspeed {
namespace {

// Names under which families know sizes, for every spelling that args use.
constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
    {"heads", "num_attention_heads"},      {"kv_heads", "num_key_value_heads"},
    {"kv_heads", "num_query_groups"},      {"head_dim", "kv_channels"},
    {"hidden", "hidden_size"},             {"ffn", "ffn_hidden_size"},
    {"ffn", "intermediate_size"},          {"layers", "num_layers"},
    {"layers", "num_hidden_layers"},       {"vocab", "vocab_size"},
    {"experts", "num_experts"}};

}  // namespace

FamilyVariables FamilyVariablesOf(const std::map<std::string, int64_t>& args,
                                  const FamilyVariables& given) {
  FamilyVariables out(args.begin(), args.end());
  for (const auto& [a, b] : kAliases) {
    const auto first = out.find(std::string(a));
    const auto second = out.find(std::string(b));
    if (first == out.end() && second != out.end()) out.emplace(a, second->second);
    if (first != out.end() && second == out.end()) out.emplace(b, first->second);
  }
  for (const auto& [name, value] : given) out[name] = value;
  return out;
}

}  // namespace ckptfs::deepspeed
