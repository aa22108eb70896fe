// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/dist_keys.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs::megatron {
namespace {

// Blocks of layers (transformer_block.py: sharded_state_dict).
constexpr std::string_view kBlocks[] = {"decoder.layers.", "encoder.layers."};

bool IsNumber(std::string_view word) { return !word.empty() && std::ranges::all_of(word, IsDigit); }

std::string_view FirstWord(std::string_view key) { return key.substr(0, key.find('.')); }

}  // namespace

std::string StackedName::OfLayer(uint64_t layer) const { return StrCat(before, layer, ".", after); }

namespace {

// Where the name of a block ends in the key, that of its layers included; nothing outside of one.
std::optional<size_t> BlockEnd(std::string_view key) {
  for (const std::string_view block : kBlocks) {
    const size_t at = key.find(block);
    if (at == std::string_view::npos || (at > 0 && key[at - 1] != '.')) continue;
    return at + block.size();
  }
  return std::nullopt;
}

}  // namespace

std::optional<StackedName> StackedNameOf(std::string_view key) {
  const auto end = BlockEnd(key);
  if (!end || *end == key.size() || IsNumber(FirstWord(key.substr(*end)))) return std::nullopt;
  return StackedName{key.substr(0, *end), key.substr(*end)};
}

std::optional<LayeredName> LayeredNameOf(std::string_view name) {
  const auto end = BlockEnd(name);
  if (!end) return std::nullopt;
  const std::string_view number = FirstWord(name.substr(*end));
  LayeredName out{name.substr(0, *end), 0, {}};
  const auto parsed = std::from_chars(number.data(), number.data() + number.size(), out.layer);
  const bool all = parsed.ec == std::errc() && parsed.ptr == number.data() + number.size();
  if (!all || *end + number.size() + 1 >= name.size()) return std::nullopt;
  if (std::to_string(out.layer) != number) return std::nullopt;
  out.after = name.substr(*end + number.size() + 1);
  return out;
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

namespace {

constexpr std::string_view kShard = "/shard_";

}  // namespace

std::string_view ObjectName(std::string_view key) { return key.substr(0, key.find(kShard)); }

std::string_view ObjectPlace(std::string_view key) {
  const size_t at = key.find(kShard);
  return at == key.npos ? std::string_view() : key.substr(at + kShard.size());
}

std::vector<std::string> PlacesOf(const Shape& grid) {
  std::vector<std::string> places = {""};
  std::string all;
  for (const uint64_t size : grid) {
    std::vector<std::string> next;
    for (const std::string& place : places) {
      for (uint64_t i = 0; i < size; ++i) next.push_back(StrCat(place, all.empty() ? "" : ".", i));
    }
    places = std::move(next);
    all += StrCat(all.empty() ? "" : ".", size);
  }
  for (std::string& place : places) place += StrCat("_", all);
  return places;
}

ModuleOrder ModuleOrderOf(std::string_view name, int64_t layer) {
  const bool first = name.find("embedding") != std::string_view::npos;
  const int where = layer >= 0 ? 1 : first ? 0 : name.starts_with("output_layer") ? 3 : 2;
  const bool attention = name.find("self_attention") != std::string_view::npos ||
                         name.find("input_layernorm") != std::string_view::npos;
  return {where, layer, attention ? 0 : 1, name};
}

}  // namespace ckptfs::megatron
