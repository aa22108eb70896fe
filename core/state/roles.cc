// SPDX-License-Identifier: Apache-2.0

#include "core/state/roles.h"

#include <algorithm>
#include <array>
#include <string>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

// Last words of buffers: every nn.Buffer and register_buffer of torch 2.13 (nn, ao.quantization)
// and transformers 5.23 whose name says it alone, and names of older releases.  Integers need no
// name.  Names that parameters have as well (bias, weight, scale, mean, freqs, pe, embed) are not
// here.
constexpr auto kBufferWords = std::to_array<std::string_view>(
    {// torch
     "running_mean", "running_var", "num_batches_tracked", "_random_samples", "pos_weight",
     "min_val", "max_val", "fake_quant_enabled", "observer_enabled", "empty_weight",
     // rotary and other fixed positions
     "inv_freq", "original_inv_freq", "inv_timescales", "sinusoid_freq", "cos_cached", "sin_cached",
     "freqs_cis", "freqs_ci", "embed_positions", "position_ids", "relative_coords_table",
     // masks and constants of attention
     "masked_bias", "causal_mask", "attn_mask_probs", "local_causal_valid_mask", "softcap",
     "slope_rate", "query_decay", "key_decay", "diagonal_decay", "mup_vector", "embed_scale",
     "gradient_clipping", "layer_scalar", "final_logits_bias",
     // what routers count
     "e_score_correction_bias", "expert_bias", "balancing_biases",
     // codebooks that averages fill
     "cluster_size", "cluster_usage", "embed_avg", "embed_sum",
     // statistics of inputs
     "latent_mean", "latent_std", "norm_mean", "norm_std", "pixel_mean", "pixel_std", "global_mean",
     "global_invstd", "input_min", "input_max", "output_min", "output_max"});

// Last two words: the rotary frequencies in Meta's own files of a Llama.
constexpr auto kBufferPairs = std::to_array<std::string_view>({"rope.freqs"});

// Buffers of a module that something is done to, by what stands beside them: spectral_norm keeps
// <x>_orig, <x>_u and <x>_v (weight_norm's <x>_v is a parameter, beside <x>_g), prune <x>_orig and
// <x>_mask.
constexpr auto kBesideOriginal = std::to_array<std::string_view>({"_u", "_v", "_mask"});

std::string_view LastWord(std::string_view name) { return name.substr(name.rfind('.') + 1); }

bool IsWholeNumber(DType dtype) {
  switch (dtype) {
    case DType::kI64:
    case DType::kI32:
    case DType::kI16:
    case DType::kI8:
    case DType::kU64:
    case DType::kU32:
    case DType::kU16:
    case DType::kU8:
    case DType::kBool: return true;
    default: return false;
  }
}

// "h.0.attn.bias", "layers.0.attention.bias" of one causal mask: GPT-2, GPT-J, GPT-NeoX, nanoGPT.
bool IsCausalMask(std::string_view name, const Shape& shape) {
  if (LastWord(name) != "bias" || shape.size() != 4) return false;
  const std::string_view module = name.substr(0, name.size() - std::min<size_t>(name.size(), 5));
  return LastWord(module).find("att") != std::string_view::npos && shape[0] == 1 && shape[1] == 1 &&
         shape[2] == shape[3] && shape[2] > 1;
}

bool IsBesideOriginal(std::string_view name, const HasTensor& has) {
  return std::ranges::any_of(kBesideOriginal, [&](std::string_view end) {
    if (!name.ends_with(end) || name.size() == end.size()) return false;
    return has && has(StrCat(name.substr(0, name.size() - end.size()), "_orig"));
  });
}

// torch.nn.utils.parametrizations.spectral_norm: "conv.parametrizations.weight.0._u".
bool IsParametrization(std::string_view name) {
  return (name.ends_with("._u") || name.ends_with("._v")) &&
         name.find("parametrizations.") != std::string_view::npos;
}

}  // namespace

bool LooksLikeBuffer(std::string_view name, DType dtype, const Shape& shape, const HasTensor& has) {
  if (IsWholeNumber(dtype)) return true;
  const auto ends = [&](std::string_view pair) {
    return name == pair || (name.ends_with(pair) && name[name.size() - pair.size() - 1] == '.');
  };
  return std::ranges::find(kBufferWords, LastWord(name)) != kBufferWords.end() ||
         std::ranges::any_of(kBufferPairs, ends) || name.ends_with("_inv_freq") ||
         IsCausalMask(name, shape) || IsParametrization(name) || IsBesideOriginal(name, has);
}

Role RoleOf(std::string_view name, DType dtype, const Shape& shape, Trained trained,
            const HasTensor& has) {
  if (trained == Trained::kYes) return Role::kTrainable;
  if (LooksLikeBuffer(name, dtype, shape, has)) return Role::kBuffer;
  return trained == Trained::kNo ? Role::kFrozen : Role::kTrainable;
}

}  // namespace ckptfs
