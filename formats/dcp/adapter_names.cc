// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/adapter_names.h"

#include <algorithm>
#include <array>

#include "core/base/strings.h"

namespace ckptfs::dcp {
namespace {

// How the attributes begin in which PEFT's layers keep their adapters, by name.
constexpr auto kAdapterDicts = std::to_array<std::string_view>(
    {"lora_", "modules_to_save", "ia3_", "hada_", "lokr_", "oft_", "boft_", "vera_", "fourierft_",
     "adalora_", "trainable_tokens_"});
constexpr std::string_view kSavedWhole = "modules_to_save";  // goes with the adapter's name

bool IsAdapterDict(std::string_view word) {
  return std::ranges::any_of(kAdapterDicts,
                             [&](std::string_view begin) { return word.starts_with(begin); });
}

}  // namespace

std::optional<AdapterName> WithoutAdapter(std::string_view live,
                                          const std::function<bool(std::string_view)>& has) {
  size_t begin = 0;  // of the word before
  for (size_t dot = live.find('.'); dot != live.npos; dot = live.find('.', begin)) {
    const std::string_view word = live.substr(begin, dot - begin);
    const size_t end = std::min(live.find('.', dot + 1), live.size());
    if (IsAdapterDict(word)) {
      const std::string_view before =
          word == kSavedWhole ? live.substr(0, begin) : live.substr(0, dot + 1);
      std::string weight = StrCat(before, live.substr(std::min(end + 1, live.size())));
      if (weight.ends_with('.')) weight.pop_back();  // the adapter's name was the last
      if (has(weight))
        return AdapterName{std::move(weight), std::string(live.substr(dot + 1, end - dot - 1))};
    }
    begin = dot + 1;
  }
  return std::nullopt;
}

}  // namespace ckptfs::dcp
