// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/local_names.h"

#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "formats/megatron/dist_keys.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kExperts = "mlp.experts.";
constexpr std::string_view kLocalExperts = "mlp.experts.local_experts.";

// As the local specification of layers has them, and as they are saved.
constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kNorms = {
    std::pair("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    std::pair("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")};

std::optional<uint32_t> NumberOf(std::string_view text) {
  uint32_t number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) return std::nullopt;
  return std::to_string(number) == text ? std::optional(number) : std::nullopt;
}

// The rest of an expert's name, as all experts of a layer have it together.
void SetExpert(LocalName& out, std::string_view of, std::string_view rest) {
  out.second = rest.starts_with("linear_fc2.");
  out.bias = rest.ends_with(".bias");
  out.name = StrCat(of, kExperts, "experts.", rest);
}

// Returns what is behind "decoder.layers.N." of an expert's tensor; false if it is not one's.
bool ReadExpert(std::string_view of, std::string_view rest, LocalName& out) {
  if (rest.starts_with(kLocalExperts)) {
    std::string_view tail = rest.substr(kLocalExperts.size());
    const size_t dot = tail.find('.');
    const auto number = NumberOf(tail.substr(0, dot));
    if (!number || dot == std::string_view::npos) return false;
    out.form = LocalName::Form::kExpert;
    out.expert = *number;
    SetExpert(out, of, tail.substr(dot + 1));
    return true;
  }
  if (!rest.starts_with(kExperts)) return false;
  const std::string_view tail = rest.substr(kExperts.size());
  if (tail == "weight1" || tail == "weight2") {
    out.form = LocalName::Form::kGrouped;
    SetExpert(out, of, tail == "weight1" ? "linear_fc1.weight" : "linear_fc2.weight");
    return true;
  }
  if (tail == "linear_fc1._extra_state" || tail == "linear_fc2._extra_state") {
    out.form = LocalName::Form::kExpert;  // one of all local experts
    SetExpert(out, of, tail);
    return true;
  }
  for (const std::string_view what :
       {"linear_fc1.weight", "linear_fc2.weight", "linear_fc1.bias", "linear_fc2.bias"}) {
    if (!tail.starts_with(what)) continue;
    const auto number = NumberOf(tail.substr(what.size()));
    if (!number) return false;
    out.form = LocalName::Form::kExpert;
    out.expert = *number;
    SetExpert(out, of, what);
    return true;
  }
  return false;
}

std::vector<std::string_view> NamesOf(const RankChunk& chunk) {
  std::vector<std::string_view> names;
  for (const NamedTensor& one : chunk.tensors) names.push_back(one.name);
  return names;
}

}  // namespace

LocalNames::LocalNames(const RankChunk& chunk, uint64_t first_layer)
    : LocalNames(NamesOf(chunk), first_layer) {}

LocalNames::LocalNames(std::span<const std::string_view> tensors, uint64_t first_layer)
    : first_layer_(first_layer) {
  struct Seen {
    bool norm = false, fused = false, qkv = false;
  };
  std::map<uint64_t, Seen> layers;
  for (const std::string_view one : tensors) {
    const auto name = LayeredNameOf(one);
    if (!name) continue;
    Seen& seen = layers[name->layer];
    seen.norm |= name->after == "input_layernorm.weight";
    seen.fused |= name->after == "self_attention.linear_qkv.layer_norm_weight";
    seen.qkv |= name->after == "self_attention.linear_qkv.weight";
  }
  for (const auto& [layer, seen] : layers) {
    if (seen.norm && seen.qkv && !seen.fused) local_.insert(layer);
  }
}

LocalName LocalNames::Of(std::string_view name) const {
  LocalName out;
  const auto layered = LayeredNameOf(name);
  if (!layered) {
    out.name = name;
    return out;
  }
  const std::string of = StrCat(layered->before, first_layer_ + layered->layer, ".");
  if (ReadExpert(of, layered->after, out)) return out;
  if (local_.contains(layered->layer)) {
    for (const auto& [local, saved] : kNorms) {
      if (!layered->after.starts_with(local)) continue;
      out.name = StrCat(of, saved, layered->after.substr(local.size()));
      return out;
    }
  }
  out.name = StrCat(of, layered->after);
  return out;
}

}  // namespace ckptfs::megatron
