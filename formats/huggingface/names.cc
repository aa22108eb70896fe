// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/names.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>

#include "core/base/strings.h"

namespace ckptfs::huggingface {
namespace {

// <begin>[.<variant>]<end>, in the order in which from_pretrained asks for them.
struct Form {
  std::string_view begin;
  std::string_view end;
  bool index;
};
constexpr std::array<Form, 5> kForms = {
    Form{"model", ".safetensors", false}, Form{"model.safetensors.index", ".json", true},
    Form{"pytorch_model", ".bin", false}, Form{"pytorch_model.bin.index", ".json", true},
    Form{"pytorch_model_fsdp", ".bin", false}};
constexpr std::array<std::string_view, 2> kAdapters = {"adapter_model.safetensors",
                                                       "adapter_model.bin"};

// The variant in a name of the form, "" for the plain one.
std::optional<std::string_view> VariantOf(const Form& form, std::string_view name) {
  if (name.size() < form.begin.size() + form.end.size() || !name.starts_with(form.begin) ||
      !name.ends_with(form.end)) {
    return std::nullopt;
  }
  std::string_view middle = name.substr(form.begin.size());
  middle.remove_suffix(form.end.size());
  if (middle.empty()) return middle;
  middle.remove_prefix(middle.front() == '.' ? 1 : 0);
  const auto word = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  };
  const bool named = !middle.empty() && name[form.begin.size()] == '.' &&
                     std::all_of(middle.begin(), middle.end(), word);
  return named ? std::optional(middle) : std::nullopt;
}

}  // namespace

bool IsAdapterFile(std::string_view name) {
  return std::ranges::find(kAdapters, name) != kAdapters.end();
}

Result<std::optional<WeightsName>> ChooseWeights(std::span<const std::string> names) {
  std::map<std::string, WeightsName> variants;  // the first form of each
  for (const Form& form : kForms) {
    for (const std::string& name : names) {
      const auto variant = VariantOf(form, name);
      if (!variant) continue;
      variants.try_emplace(std::string(*variant),
                           WeightsName{name, form.index, std::string(*variant), false});
    }
  }
  if (const auto plain = variants.find(""); plain != variants.end())
    return std::optional(plain->second);
  if (variants.size() > 1) {
    return Fail(Error{ErrorCode::kInvalid,
                      StrCat("weights of several variants (", variants.begin()->second.file, ", ",
                             variants.rbegin()->second.file, "), but none without a variant")}
                    .Needing("give the path of the file"));
  }
  if (!variants.empty()) return std::optional(variants.begin()->second);
  for (const std::string_view adapter : kAdapters) {
    if (std::find(names.begin(), names.end(), adapter) == names.end()) continue;
    return std::optional(WeightsName{std::string(adapter), false, "", true});
  }
  return std::optional<WeightsName>();
}

std::optional<ShardNumber> ShardNumberOf(std::string_view name) {
  constexpr std::string_view kOf = "-of-";
  constexpr size_t kDigits = 5;
  const auto number = [](std::string_view text) -> std::optional<uint64_t> {
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool digits =
        text.size() >= kDigits && error == std::errc() && end == text.data() + text.size();
    return digits ? std::optional(value) : std::nullopt;
  };
  const std::string_view stem = name.substr(0, name.rfind('.'));
  const size_t of = stem.rfind(kOf);
  if (of == std::string_view::npos) return std::nullopt;
  const std::string_view before = stem.substr(0, of);
  const auto shard = number(before.substr(before.rfind('-') + 1));
  const auto shards = number(stem.substr(of + kOf.size()));
  if (!shard || !shards || *shards < 2) return std::nullopt;
  return ShardNumber{*shard, *shards};
}

bool IsTorchName(std::string_view name) { return !name.ends_with(".safetensors"); }

std::optional<std::string> ShardPath(std::string_view named) {
  std::string out;
  if (named.empty() || named.front() == '/' || named.back() == '/' ||
      named.find('\0') != named.npos) {
    return std::nullopt;
  }
  while (!named.empty()) {
    const size_t end = std::min(named.find('/'), named.size());
    const std::string_view word = named.substr(0, end);
    if (word == "..") return std::nullopt;
    if (!word.empty() && word != ".") out += StrCat(out.empty() ? "" : "/", word);
    named.remove_prefix(std::min(end + 1, named.size()));
  }
  return out.empty() ? std::nullopt : std::optional(std::move(out));
}

}  // namespace ckptfs::huggingface
