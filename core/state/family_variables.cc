// SPDX-License-Identifier: Apache-2.0

#include "core/state/family_variables.h"

#include <string_view>
#include <utility>

namespace ckptfs {
namespace {

// Names under which families know sizes, for every spelling that args and
// config files use; the first that is there counts.
constexpr std::pair<std::string_view, std::string_view> kAliases[] = {
    {"heads", "num_attention_heads"},
    {"heads", "n_head"},
    {"kv_heads", "num_key_value_heads"},
    {"kv_heads", "num_query_groups"},
    {"head_dim", "kv_channels"},
    {"hidden", "hidden_size"},
    {"hidden", "n_embd"},
    {"ffn", "ffn_hidden_size"},
    {"ffn", "intermediate_size"},
    {"layers", "num_layers"},
    {"layers", "num_hidden_layers"},
    {"vocab", "vocab_size"},
    {"experts", "num_experts"},
    {"experts", "num_local_experts"},
    {"experts", "n_routed_experts"}};

}  // namespace

FamilyVariables WithCommonSpellings(FamilyVariables numbers) {
  // Megatron-LM says num_query_groups = 1 where it groups no queries.
  const auto grouped = numbers.find("group_query_attention");
  if (grouped != numbers.end() && grouped->second == 0) numbers.erase("num_query_groups");
  for (const auto& [a, b] : kAliases) {
    const auto first = numbers.find(std::string(a));
    const auto second = numbers.find(std::string(b));
    if (first == numbers.end() && second != numbers.end()) numbers.emplace(a, second->second);
    if (first != numbers.end() && second == numbers.end()) numbers.emplace(b, first->second);
  }
  return numbers;
}

FamilyVariables ModelSizes::All() const {
  FamilyVariables out = given;
  for (const FamilyVariables* less : {&recorded, &configured}) {
    out.insert(less->begin(), less->end());  // keeps what is there
  }
  return out;
}

}  // namespace ckptfs
