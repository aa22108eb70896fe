// SPDX-License-Identifier: Apache-2.0

#include "core/model/name_normaliser.h"

#include <array>

namespace ckptfs {
namespace {

constexpr std::array<std::string_view, 6> kAnywhere = {
    "_orig_mod.",  "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.",
    "base_layer.", "original_module.",      "modules_to_save.default."};
constexpr std::array<std::string_view, 2> kLeading = {"module.", "base_model.model."};

// Removes `component` (which ends in '.') where it starts a path component.
void RemoveComponent(std::string& name, std::string_view component) {
  for (size_t at = name.find(component); at != std::string::npos; at = name.find(component, at)) {
    const bool starts = at == 0 || name[at - 1] == '.';
    if (starts && name.size() > component.size()) {
      name.erase(at, component.size());
    } else {
      ++at;
    }
  }
}

}  // namespace

std::string NormaliseName(std::string_view name) {
  std::string out(name);
  for (std::string_view component : kAnywhere) RemoveComponent(out, component);
  for (bool again = true; again;) {
    again = false;
    for (std::string_view prefix : kLeading) {
      if (out.size() > prefix.size() && out.starts_with(prefix)) {
        out.erase(0, prefix.size());
        again = true;
      }
    }
  }
  return out;
}

}  // namespace ckptfs
