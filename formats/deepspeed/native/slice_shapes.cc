// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native/slice_shapes.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "formats/deepspeed/state_dict_names.h"

namespace ckptfs::deepspeed::native {
namespace {

// ZeRO writes slices, too, which are wrong where it deals gradients out in turns.
bool IsUnsharded(const OptimizerStates& states) { return !states.trimmed && states.stage == 1; }

// A parameter and its elements on all data-parallel ranks together, in the order of the group.
using SlicedGroup = std::vector<std::pair<std::string, uint64_t>>;

bool HasSlices(const Parsed& parsed, uint32_t mp) {
  const auto found = parsed.optimizers.find(RankKey{mp, 0});
  return found != parsed.optimizers.end() && !found->second.slices.empty() &&
         IsUnsharded(found->second);
}

Result<SlicedGroup> ReadSlicedGroup(const Parsed& parsed, uint32_t mp, size_t group) {
  SlicedGroup out;
  std::set<std::string_view> known;
  for (uint32_t dp = 0; dp < parsed.dp; ++dp) {
    const OptimizerStates& rank = parsed.optimizers.at(RankKey{mp, dp});
    if (group >= rank.slices.size()) {
      return Refuse(rank.file, ": no param_slice_mappings of group ", group);
    }
    uint64_t at = 0;
    for (const ParameterSlice& slice : rank.slices[group]) {
      // A parameter that begins on the rank before may end here.
      const bool goes_on = at == 0 && !out.empty() && out.back().first == slice.name;
      if (slice.start != at || (!goes_on && !known.insert(slice.name).second)) {
        return Refuse(rank.file, ": param_slice_mappings of group ", group, " put '", slice.name,
                      "' where nothing follows what is before it");
      }
      at += slice.elements;
      if (!goes_on) out.emplace_back(slice.name, 0);
      out.back().second += slice.elements;
    }
  }
  return out;
}

// The shapes of a model-parallel rank's weights, by the names of parameters.
class WeightShapes {
 public:
  WeightShapes(const Parsed& parsed, uint32_t mp, const std::vector<SlicedGroup>& groups) {
    for (const NamedTensor& entry : parsed.model(mp).module) {
      shapes_.emplace(entry.name, entry.tensor.shape());
    }
    std::set<uint32_t> numbered;  // layers that a parameter's name has
    for (const SlicedGroup& group : groups) {
      for (const auto& [name, elements] : group) {
        if (name.starts_with(kTiedModules)) AddTied(name, elements);
        if (const auto layer = LayerOf(name)) numbered.insert(*layer);
      }
    }
    for (const auto& [key, dict] : parsed.layers) {
      if (key.tp != mp % parsed.tp) continue;
      for (const NamedTensor& entry : dict.tensors) {
        shapes_.emplace(StrCat(key.layer, ".", entry.name), entry.tensor.shape());
      }
      if (!numbered.contains(key.layer)) FitTied(dict);
    }
  }

  // Nothing if no weight has the name, or several that differ may be it.
  std::optional<Shape> Of(const std::string& name) const {
    for (const std::string& spelled : {name, InStateDict(name)}) {
      const auto found = shapes_.find(spelled);
      if (found != shapes_.end()) return found->second;
    }
    const auto tied = tied_shapes_.find(name);
    const bool one = tied != tied_shapes_.end() && tied->second.size() == 1;
    return one ? std::optional(*tied->second.begin()) : std::nullopt;
  }

 private:
  static std::optional<uint32_t> LayerOf(std::string_view name) {
    uint32_t layer = 0;
    size_t digits = 0;
    for (; digits < name.size() && IsDigit(name[digits]) && digits < 9; ++digits) {
      layer = layer * 10 + static_cast<uint32_t>(name[digits] - '0');
    }
    const bool ends = digits > 0 && digits < name.size() && name[digits] == '.';
    return ends ? std::optional(layer) : std::nullopt;
  }

  // "tied_modules.embed.weight": {"embed": {"weight": elements}}.
  void AddTied(std::string_view name, uint64_t elements) {
    const size_t dot = name.find('.', kTiedModules.size());
    if (dot == name.npos) return;
    tied_[std::string(name.substr(0, dot + 1))][std::string(name.substr(dot + 1))] = elements;
  }

  // A layer's file holds a tied module if it has all that the module is named with.
  void FitTied(const TensorDict& dict) {
    std::map<std::string_view, const FileTensor*> own;
    for (const NamedTensor& entry : dict.tensors) own.emplace(entry.name, &entry.tensor);
    for (const auto& [prefix, parameters] : tied_) {
      const bool fits = std::ranges::all_of(parameters, [&](const auto& entry) {
        const auto found = own.find(entry.first);
        return found != own.end() && found->second->elements() == entry.second;
      });
      if (!fits) continue;
      for (const auto& [name, elements] : parameters) {
        tied_shapes_[prefix + name].insert(own.at(name)->shape());
      }
    }
  }

  std::map<std::string, Shape> shapes_;
  std::map<std::string, std::map<std::string, uint64_t>> tied_;  // by prefix
  std::map<std::string, std::set<Shape>> tied_shapes_;           // of files that may hold it
};

}  // namespace

Status TakeShapesFromSlices(Parsed& parsed) {
  for (uint32_t mp = 0; mp < parsed.model_ranks(); ++mp) {
    ModelStates& model = parsed.models.at(RankKey{mp, 0});
    if (model.has_shapes || !HasSlices(parsed, mp)) continue;
    const OptimizerStates& first = parsed.optimizers.at(RankKey{mp, 0});
    std::vector<SlicedGroup> groups;
    for (size_t g = 0; g < first.slices.size(); ++g) {
      CKPT_ASSIGN_OR_RETURN(SlicedGroup group, ReadSlicedGroup(parsed, mp, g));
      groups.push_back(std::move(group));
    }
    const WeightShapes shapes(parsed, mp, groups);
    for (const SlicedGroup& group : groups) {
      auto& out = model.groups.emplace_back();
      for (const auto& [name, elements] : group) {
        auto shape = shapes.Of(name);
        const auto whole = shape ? ElementCount(*shape) : Result<uint64_t>(0);
        if (!shape || !whole || *whole != elements) {
          return Fail(Error{ErrorCode::kUnsupported,
                            StrCat(model.file,
                                   ": no param_shapes, and no weight tells the shape of this "
                                   "parameter of ",
                                   elements, " elements")}
                          .OfParameter(name));
        }
        out.push_back({name, *std::move(shape)});
      }
    }
    model.has_shapes = true;
  }
  return {};
}

}  // namespace ckptfs::deepspeed::native
