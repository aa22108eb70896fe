// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/dist_keys.h"

#include <algorithm>

#include "core/base/strings.h"

namespace ckptfs::megatron {
namespace {

// Blocks of layers (transformer_block.py: sharded_state_dict).
constexpr std::string_view kBlocks[] = {"decoder.layers.", "encoder.layers."};

bool IsNumber(std::string_view word) { return !word.empty() && std::ranges::all_of(word, IsDigit); }

std::string_view FirstWord(std::string_view key) { return key.substr(0, key.find('.')); }

}  // namespace

std::string StackedName::OfLayer(uint64_t layer) const { return StrCat(before, layer, ".", after); }

std::optional<StackedName> StackedNameOf(std::string_view key) {
  for (const std::string_view block : kBlocks) {
    const size_t at = key.find(block);
    if (at == std::string_view::npos || (at > 0 && key[at - 1] != '.')) continue;
    const size_t end = at + block.size();
    if (end == key.size() || IsNumber(FirstWord(key.substr(end)))) return std::nullopt;
    return StackedName{key.substr(0, end), key.substr(end)};
  }
  return std::nullopt;
}

std::optional<OptimizerKey> OptimizerKeyOf(std::string_view key) {
  constexpr std::string_view kChained = "chained_";
  constexpr std::string_view kOptimizer = "optimizer.";
  constexpr std::string_view kState = "state.";
  OptimizerKey out;
  std::string_view rest = key;
  if (rest.starts_with(kChained)) {
    const std::string_view word = FirstWord(rest);
    if (!IsNumber(word.substr(kChained.size())) || word.size() == rest.size()) return std::nullopt;
    out.chain = rest.substr(0, word.size() + 1);
    rest.remove_prefix(out.chain.size());
  }
  if (!rest.starts_with(kOptimizer)) return std::nullopt;
  rest.remove_prefix(kOptimizer.size());
  if (!rest.starts_with(kState)) return out;
  rest.remove_prefix(kState.size());
  const size_t dot = rest.find('.');
  if (dot == std::string_view::npos || dot == 0 || dot + 1 == rest.size()) return out;
  out.kind = rest.substr(0, dot);
  out.tensor = rest.substr(dot + 1);
  return out;
}

std::string_view ObjectName(std::string_view key) { return key.substr(0, key.find("/shard_")); }

}  // namespace ckptfs::megatron
