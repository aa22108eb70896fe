// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/source_form.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "formats/megatron/dist_keys.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kLayers = "layers";
constexpr std::string_view kApart = "apart";
constexpr std::string_view kObjects = "objects";
constexpr uint64_t kMaxParts = uint64_t{1} << 20;

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
    if (!whole || size == 0 || size > kMaxParts / parts) return std::nullopt;
    parts *= size;
    grid.push_back(size);
    all.remove_prefix(word.size());
  }
  return grid.empty() ? std::nullopt : std::optional(grid);
}

}  // namespace

SourceForm FormOf(const dcp::DcpMetadata& metadata) {
  SourceForm form;
  for (const dcp::TensorEntry& tensor : metadata.tensors) {
    if (!OptimizerKeyOf(tensor.name) && LayeredNameOf(tensor.name)) form.stacked = false;
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
    if (whole) form.objects.emplace(name, *grid);
  }
  return form;
}

Document DocumentOf(const SourceForm& form) {
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> objects;
  for (const auto& [name, grid] : form.objects) {
    std::vector<NodeId> sizes;
    for (const uint64_t size : grid) sizes.push_back(builder.Int(static_cast<int64_t>(size)));
    const NodeId key = builder.String(name);
    objects.emplace_back(key, builder.List(std::move(sizes)));
  }
  std::vector<std::pair<NodeId, NodeId>> items;
  const NodeId layers = builder.String(kLayers);
  items.emplace_back(layers, builder.String(form.stacked ? "stacked" : kApart));
  const NodeId key = builder.String(kObjects);
  items.emplace_back(key, builder.Dict(objects));
  const NodeId root = builder.Dict(items);
  auto pickle = PrintPickle(std::move(builder).Finish(root));
  CKPT_CHECK(pickle.has_value());
  return {
      .key = std::string(kFormDocument), .scope = "", .pickle = *std::move(pickle), .tensors = {}};
}

Result<std::optional<SourceForm>> SourceFormOf(const StepModel& step) {
  const Document* document = step.FindDocument(kFormDocument);
  if (document == nullptr) return std::optional<SourceForm>();
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
  const PickleRef root = RootOf(tree);
  SourceForm form;
  form.stacked = root[kLayers].String() != kApart;
  for (const auto& [name, sizes] : root[kObjects].Items()) {
    const auto grid = sizes.AsShape();
    const auto parts = grid ? ElementCount(*grid) : Result<uint64_t>(0);
    if (!name.String() || !parts || *parts == 0 || *parts > kMaxParts) {
      return Refuse("the document '", kFormDocument, "' has an object that is not one");
    }
    form.objects.emplace(*name.String(), *grid);
  }
  return std::optional(std::move(form));
}

}  // namespace ckptfs::megatron
