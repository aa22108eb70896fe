// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/state_dict_names.h"

namespace ckptfs::deepspeed {
namespace {

constexpr std::string_view kWrapper = "_checkpoint_wrapped_module.";

}  // namespace

std::string InStateDict(std::string_view name) {
  std::string out(name);
  for (size_t at = 0; (at = out.find(kWrapper, at)) != std::string::npos;) {
    const bool component = at == 0 || out[at - 1] == '.';
    if (component) out.erase(at, kWrapper.size());
    if (!component) ++at;
  }
  return out;
}

void StateDictNames::Add(std::string_view name) {
  std::string spelled = InStateDict(name);
  if (spelled != name) wrapped_.emplace(std::move(spelled), name);
}

std::string StateDictNames::Of(std::string_view name) const {
  const auto found = wrapped_.find(name);
  return found == wrapped_.end() ? std::string(name) : found->second;
}

}  // namespace ckptfs::deepspeed
