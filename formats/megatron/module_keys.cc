// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/module_keys.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>
#include <vector>

#include "formats/megatron/dist_keys.h"

namespace ckptfs::megatron {
namespace {

// The grid of a place, "2.0_4.4": 4 x 4.  Nothing if it is not one.
std::optional<Shape> GridOf(std::string_view place) {
  std::string_view all = place.substr(std::min(place.find('_'), place.size()));
  Shape grid;
  uint64_t parts = 1;
  while (!all.empty()) {
    all.remove_prefix(1);
    const std::string_view word = all.substr(0, all.find('.'));
    uint64_t size = 0;
    const auto parsed = std::from_chars(word.data(), word.data() + word.size(), size);
    const bool whole = parsed.ec == std::errc() && parsed.ptr == word.data() + word.size();
    if (!whole || size == 0 || size > kMaxObjectParts / parts) return std::nullopt;
    parts *= size;
    grid.push_back(size);
    all.remove_prefix(word.size());
  }
  return grid.empty() ? std::nullopt : std::optional(grid);
}

}  // namespace

ModuleKeys ModuleKeysOf(const dcp::DcpMetadata& metadata) {
  ModuleKeys keys;
  for (const dcp::TensorEntry& tensor : metadata.tensors) {
    if (!OptimizerKeyOf(tensor.name) && LayeredNameOf(tensor.name)) keys.stacked = false;
  }
  std::map<std::string, std::set<std::string, std::less<>>> places;
  for (const dcp::ObjectEntry& object : metadata.objects) {
    const std::string_view name = ObjectName(object.name);
    if (!name.ends_with(kExtraState) || OptimizerKeyOf(name)) continue;
    places[std::string(name)].emplace(ObjectPlace(object.name));
  }
  for (const auto& [name, found] : places) {
    const auto grid = GridOf(*found.begin());
    if (!grid) continue;
    const std::vector<std::string> all = PlacesOf(*grid);
    const bool whole = found.size() == all.size() && std::ranges::all_of(all, [&](const auto& one) {
                         return found.contains(one);
                       });
    if (whole) keys.objects.emplace(name, *grid);
  }
  return keys;
}

}  // namespace ckptfs::megatron
