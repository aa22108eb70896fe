// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/expert_names.h"

#include <algorithm>
#include <charconv>

#include "core/base/strings.h"

namespace ckptfs::deepspeed {
namespace {

constexpr std::string_view kExperts = ".deepspeed_experts.";
constexpr uint32_t kMaxExperts = 1u << 20;

struct ExpertName {
  std::string_view before;  // up to and with kExperts
  uint32_t number = 0;
  std::string_view after;  // from the '.' on
};

std::optional<ExpertName> SplitExpertName(std::string_view name) {
  const size_t at = name.find(kExperts);
  if (at == std::string_view::npos) return std::nullopt;
  ExpertName out;
  out.before = name.substr(0, at + kExperts.size());
  const char* begin = name.data() + out.before.size();
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), out.number);
  if (error != std::errc() || out.number >= kMaxExperts) return std::nullopt;
  out.after = name.substr(static_cast<size_t>(end - name.data()));
  if (!out.after.starts_with('.')) return std::nullopt;
  return out;
}

}  // namespace

std::optional<ExpertNumber> ExpertOf(std::string_view name) {
  const auto split = SplitExpertName(name);
  if (!split) return std::nullopt;
  return ExpertNumber{split->number, static_cast<uint32_t>(split->before.size())};
}

LocalExperts::LocalExperts(std::span<const std::vector<NamedShape>> groups) {
  for (const auto& group : groups) {
    for (const NamedShape& entry : group) {
      const auto split = SplitExpertName(entry.name);
      if (!split) continue;
      uint32_t& count = counts_[std::string(split->before)];
      count = std::max(count, split->number + 1);
    }
  }
}

Result<std::string> LocalExperts::Global(std::string_view local_name, uint32_t expert_rank) const {
  const auto split = SplitExpertName(local_name);
  if (!split) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("'", local_name, "' is in an expert group but has no expert number"));
  }
  const auto count = counts_.find(split->before);
  CKPT_CHECK(count != counts_.end());  // of a name that the constructor was not given
  const uint64_t global = uint64_t{expert_rank} * count->second + split->number;
  return StrCat(split->before, global, split->after);
}

}  // namespace ckptfs::deepspeed
