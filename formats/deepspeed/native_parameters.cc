// SPDX-License-Identifier: Apache-2.0
//
// NativeReader: which parameters there are, and which tensors hold them.

#include <algorithm>
#include <charconv>

#include "core/base/strings.h"
#include "formats/deepspeed/expert_names.h"
#include "formats/deepspeed/native_reader.h"

namespace ckptfs::deepspeed {
namespace {

constexpr std::string_view kTied = "tied_modules.";

bool IsPlaceholder(const FileTensor& tensor) { return tensor.shape() == Shape{0}; }

// "tied_modules.embed.weight" -> {"embed", "weight"}.
std::optional<std::pair<std::string, std::string>> SplitTied(std::string_view name) {
  if (!name.starts_with(kTied)) return std::nullopt;
  name.remove_prefix(kTied.size());
  const size_t dot = name.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  return std::pair(std::string(name.substr(0, dot)), std::string(name.substr(dot + 1)));
}

}  // namespace

Status NativeReader::AddKnown(const std::string& name, Role role, uint32_t stage, uint32_t tp,
                              const Shape& shape) {
  const auto [at, added] = known_.try_emplace(name);
  Known& known = at->second;
  if (added) {
    known.role = role;
    known.expert = ExpertOf(name);
    spellings_.Add(name);
  }
  auto& shapes = known.shapes[stage];
  shapes.resize(tp_);
  if (shapes[tp] && *shapes[tp] != shape) {
    return Fail(ErrorCode::kInvalid,
                StrCat("'", name, "' has shape ", ShapeToString(*shapes[tp]), " in one file and ",
                       ShapeToString(shape), " in another of the same rank"));
  }
  shapes[tp] = shape;
  return {};
}

Status NativeReader::NameExpertGroup(uint32_t mp, const std::vector<NamedShape>& group,
                                     uint32_t expert_ranks) {
  if (tp_ > 1) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(ModelOf(mp).file, ": native MoE together with tensor parallelism"));
  }
  const LocalExperts& locals = local_experts_.at(mp);
  for (uint32_t rank = 0; rank < expert_ranks; ++rank) {
    for (const NamedShape& entry : group) {
      CKPT_ASSIGN_OR_RETURN(const std::string global, locals.Global(entry.name, rank));
      CKPT_RETURN_IF_ERROR(AddKnown(global, Role::kTrainable, mp / tp_, mp % tp_, entry.shape));
    }
  }
  ep_ = std::max(ep_, expert_ranks);
  return {};
}

Status NativeReader::NameTrainable() {
  for (uint32_t mp = 0; mp < tp_ * pp_; ++mp) {
    const ModelStates& model = ModelOf(mp);
    local_experts_.emplace(mp, LocalExperts(model.groups));
    for (size_t g = 0; g < model.groups.size(); ++g) {
      if (stage_ != 3 && IsExpertGroup(mp, g)) {
        CKPT_RETURN_IF_ERROR(NameExpertGroup(mp, model.groups[g], ExpertRanks(mp, g)));
        continue;
      }
      for (const NamedShape& entry : model.groups[g]) {
        CKPT_RETURN_IF_ERROR(
            AddKnown(entry.name, Role::kTrainable, mp / tp_, mp % tp_, entry.shape));
      }
    }
  }
  for (const auto& [alias, stored] : ModelOf(0).shared) {
    if (known_.count(alias) > 0) continue;
    aliases_.emplace(alias, stored);
    spellings_.Add(alias);
  }
  return {};
}

std::set<std::string> NativeReader::BufferNames(uint32_t mp) const {
  std::set<std::string> out;
  for (const std::string& name : ModelOf(mp).buffers) {
    out.insert(name);
    out.insert(InStateDict(name));
  }
  return out;
}

Status NativeReader::AddWeight(const std::string& name, const FileTensor& tensor, uint32_t stage,
                               uint32_t tp, bool buffer) {
  auto known = known_.find(name);
  const bool named = known != known_.end() && known->second.role == Role::kTrainable;
  // Without param_shapes (stage 0) every parameter counts as trainable until the optimizer says.
  const Role role = buffer ? Role::kBuffer : (stage_ == 0 || named) ? Role::kTrainable : Role::kFrozen;
  if (!(named && known->second.expert)) {
    CKPT_RETURN_IF_ERROR(AddKnown(name, role, stage, tp, tensor.shape()));
    known = known_.find(name);
  } else if (known->second.shapes.begin()->second[tp] != tensor.shape()) {
    return Fail(ErrorCode::kInvalid, StrCat("'", name, "' has another shape in its expert file"));
  }
  order_.push_back(name);
  weights_.push_back(Weight{name, tensor, tp});
  return {};
}

Status NativeReader::NameModule(uint32_t mp) {
  const ModelStates& model = ModelOf(mp);
  const std::set<std::string> buffers = BufferNames(mp);
  std::map<std::pair<std::string, uint64_t>, const NamedTensor*> seen;  // storage, offset
  for (const NamedTensor& entry : model.module) {
    const std::string name = spellings_.Of(entry.name);
    if (aliases_.count(name) > 0) continue;
    const auto known = known_.find(name);
    if (IsPlaceholder(entry.tensor) && stage_ == 3 && buffers.count(name) == 0) {
      if (known != known_.end()) order_.push_back(name);
      continue;
    }
    if (entry.tensor.elements() > 0) {
      const auto [at, first] = seen.try_emplace(
          {entry.tensor.storage_key(), entry.tensor.storage_offset()}, &entry);
      if (!first && at->second->tensor.SameBytes(entry.tensor) && known == known_.end()) {
        aliases_.emplace(name, spellings_.Of(at->second->name));
        continue;
      }
    }
    auto added = AddWeight(name, entry.tensor, mp / tp_, mp % tp_, buffers.count(name) > 0);
    if (!added) return Fail(std::move(added).error().WithContext(model.file));
  }
  return {};
}

// Layers whose file holds a tied module: layer -> key, "" where two would fit.
std::map<uint32_t, std::string> NativeReader::MatchTiedLayers() {
  std::map<std::string, std::map<std::string, Shape>> modules;  // key -> local name -> shape
  for (const auto& [name, known] : known_) {
    const auto parts = SplitTied(name);
    const auto& shapes = known.shapes.begin()->second;
    if (parts && shapes[0]) modules[parts->first][parts->second] = *shapes[0];
  }
  std::map<uint32_t, std::string> matches;
  std::map<std::string, std::vector<uint32_t>> by_key;
  for (const auto& [key, dict] : layers_) {
    if (key.tp != 0) continue;
    const std::vector<NamedTensor>& tensors = dict.tensors;
    std::map<std::string, Shape> own;
    for (const NamedTensor& entry : tensors) {
      if (known_.count(spellings_.Of(StrCat(key.layer, ".", entry.name))) == 0) {
        own[entry.name] = entry.tensor.shape();
      }
    }
    if (own.size() != tensors.size() || own.empty()) continue;
    for (const auto& [tied, shapes] : modules) {
      const bool fits = std::all_of(shapes.begin(), shapes.end(), [&](const auto& entry) {
        const auto found = own.find(entry.first);
        return found != own.end() && found->second == entry.second;
      });
      if (fits) by_key[tied].push_back(key.layer);
    }
  }
  for (const auto& [tied, layers] : by_key) {
    for (uint32_t layer : layers) {
      const bool clear = layers.size() == 1 && matches.count(layer) == 0;
      matches[layer] = clear ? tied : "";
    }
  }
  return matches;
}

Status NativeReader::NameLayers() {
  const std::map<uint32_t, std::string> tied = MatchTiedLayers();
  std::set<std::string> buffers;
  for (uint32_t mp = 0; mp < tp_ * pp_; ++mp) buffers.merge(BufferNames(mp));
  for (const auto& [key, dict] : layers_) {
    const std::string& file = files_.layers.at(key);
    if (key.tp >= tp_) {
      return Fail(ErrorCode::kInvalid, StrCat(PathOf(file), ": a tensor-parallel rank beyond ", tp_));
    }
    const auto match = tied.find(key.layer);
    if (match != tied.end() && match->second.empty()) {
      assembler_.header().notes.push_back(
          StrCat(file, ": could be one of several tied modules; the weights shown are their masters "
                       "cast"));
      continue;
    }
    const std::string prefix =
        match == tied.end() ? StrCat(key.layer, ".") : StrCat(kTied, match->second, ".");
    for (const NamedTensor& entry : dict.tensors) {
      const std::string full = spellings_.Of(prefix + entry.name);
      const auto known = known_.find(full);
      const uint32_t stage =
          known == known_.end() || known->second.shapes.empty() ? 0 : known->second.shapes.begin()->first;
      auto added = AddWeight(full, entry.tensor, stage, key.tp, buffers.count(full) > 0);
      if (!added) return Fail(std::move(added).error().WithContext(PathOf(file)));
    }
  }
  return {};
}

Status NativeReader::NameExpertFiles() {
  for (const auto& [key, dict] : experts_) {
    const std::string& file = files_.experts.at(key);
    if (key.mp >= tp_ * pp_) {
      return Fail(ErrorCode::kInvalid, StrCat(PathOf(file), ": a model-parallel rank beyond ", tp_ * pp_));
    }
    for (const NamedTensor& entry : dict.tensors) {
      auto added = AddWeight(entry.name, entry.tensor, key.mp / tp_, key.mp % tp_, false);
      if (!added) return Fail(std::move(added).error().WithContext(PathOf(file)));
    }
  }
  return {};
}

Status NativeReader::NameFrozenFragments() {
  if (stage_ != 3) return {};
  for (uint32_t mp = 0; mp < tp_ * pp_; ++mp) {
    for (const NamedShape& entry : ModelOf(mp).frozen) {
      CKPT_RETURN_IF_ERROR(AddKnown(entry.name, Role::kFrozen, mp / tp_, mp % tp_, entry.shape));
    }
  }
  return {};
}

// Entries of modules that are no tensors at all; no view has a place for them.
void NativeReader::NoteLeftOut() {
  std::set<std::string> names;
  for (const auto& [key, model] : models_) names.insert(model.left_out.begin(), model.left_out.end());
  for (const auto& [key, dict] : layers_) {
    for (const std::string& name : dict.left_out) names.insert(StrCat(key.layer, ".", name));
  }
  for (const auto& [key, dict] : experts_) names.insert(dict.left_out.begin(), dict.left_out.end());
  AddLeftOutNote(names, assembler_.header());
}

Status NativeReader::NameParameters() {
  CKPT_RETURN_IF_ERROR(NameTrainable());
  CKPT_RETURN_IF_ERROR(NameFrozenFragments());
  for (uint32_t mp = 0; mp < tp_ * pp_; ++mp) CKPT_RETURN_IF_ERROR(NameModule(mp));
  CKPT_RETURN_IF_ERROR(NameLayers());
  CKPT_RETURN_IF_ERROR(NameExpertFiles());
  NoteLeftOut();
  std::set<std::string> ordered;
  std::vector<std::string> order;
  for (std::string& name : order_) {
    if (ordered.insert(name).second) order.push_back(std::move(name));
  }
  for (const auto& [name, known] : known_) {
    if (ordered.insert(name).second) order.push_back(name);
  }
  order_ = std::move(order);
  return stage_ == 0 ? NameUnsharded() : Status();
}

}  // namespace ckptfs::deepspeed
