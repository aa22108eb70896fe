// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/buckets/bucket_order.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs::megatron {
namespace {

constexpr uint32_t kNone = ~uint32_t{0};

// A layer of one structure, in one buffer.
struct Instance {
  uint32_t buffer = 0;
  uint32_t layer = 0;
  uint32_t structure = 0;
  std::map<uint32_t, uint32_t> decided;  // places by name
};

class Orders {
 public:
  using Namer = std::function<std::string(uint32_t, uint32_t)>;
  Orders(std::span<const std::vector<OrderedParameter>> ranks,
         std::span<const OrderedBuffer> buffers, const Namer& name_of)
      : ranks_(ranks), buffers_(buffers), name_of_(name_of) {
    for (const OrderedBuffer& buffer : buffers) owners_.emplace_back(buffer.places.size(), kNone);
  }

  Result<std::vector<std::vector<uint32_t>>> Decide() && {
    ByValues();
    CKPT_RETURN_IF_ERROR(FindLayers());
    ByValues();
    CKPT_RETURN_IF_ERROR(FindLayers());
    CKPT_RETURN_IF_ERROR(ByOrder());
    ByRest();
    CKPT_RETURN_IF_ERROR(CheckAll());
    CKPT_RETURN_IF_ERROR(CheckLayers());
    CKPT_RETURN_IF_ERROR(CheckLines());
    return std::move(owners_);
  }

 private:
  using Few = std::pair<uint32_t, uint32_t>;  // how many, and one of them
  using Key = std::pair<uint32_t, uint32_t>;

  const OrderedParameter& ParameterOf(uint32_t buffer, uint32_t parameter) const {
    return ranks_[buffers_[buffer].rank][parameter];
  }
  std::string NameOf(uint32_t buffer, uint32_t parameter) const {
    return StrCat("'", name_of_(buffers_[buffer].rank, parameter), "'");
  }
  // The buffer that a layer of the rank lies in; kNone where nobody knows.
  uint32_t BufferOf(uint32_t rank, const OrderedParameter& parameter) const {
    const auto found = layers_.find({rank, *parameter.layer});
    return found == layers_.end() ? kNone : found->second;
  }

  // ---- values and layers --------------------------------------------------------------

  // Decides places whose values only one parameter has, of those that may lie in the buffer.
  void ByValues() {
    std::map<std::pair<uint32_t, Key>, Few> few;  // by buffer (or none), rank and values
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      for (uint32_t p = 0; p < ranks_[rank].size(); ++p) {
        const OrderedParameter& one = ranks_[rank][p];
        auto& [count, which] = few[{one.layer ? BufferOf(rank, one) : kNone, {rank, one.values}}];
        ++count;
        which = p;
      }
    }
    for (uint32_t b = 0; b < buffers_.size(); ++b) {
      for (size_t i = 0; i < owners_[b].size(); ++i) {
        const Key key = {buffers_[b].rank, buffers_[b].places[i]};
        const auto here = few.find({b, key});
        const auto anywhere = few.find({kNone, key});
        const uint32_t count = (here == few.end() ? 0 : here->second.first) +
                               (anywhere == few.end() ? 0 : anywhere->second.first);
        if (count != 1) continue;
        owners_[b][i] = here == few.end() ? anywhere->second.second : here->second.second;
      }
    }
  }

  Status FindLayers() {
    for (uint32_t b = 0; b < buffers_.size(); ++b) {
      for (const uint32_t owner : owners_[b]) {
        if (owner == kNone || !ParameterOf(b, owner).layer) continue;
        const auto [at, fresh] =
            layers_.try_emplace({buffers_[b].rank, *ParameterOf(b, owner).layer}, b);
        if (!fresh && at->second != b) {
          return Refuse("the layer of ", NameOf(b, owner), " lies in two buffers of a rank");
        }
      }
    }
    return {};
  }

  // ---- order --------------------------------------------------------------------------

  // The structure of each layer of each rank: its names.
  std::map<Key, uint32_t> Structures() {
    std::map<Key, std::vector<uint32_t>> names;
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      for (uint32_t p = 0; p < ranks_[rank].size(); ++p) {
        const OrderedParameter& one = ranks_[rank][p];
        if (!one.layer) continue;
        names[{rank, *one.layer}].push_back(one.name);
        numbers_[{rank, *one.layer}][one.name] = p;
      }
    }
    std::map<std::vector<uint32_t>, uint32_t> structures;
    std::map<Key, uint32_t> out;
    for (auto& [key, all] : names) {
      std::ranges::sort(all);
      const auto next = static_cast<uint32_t>(structures.size());
      out[key] = structures.try_emplace(std::move(all), next).first->second;
    }
    return out;
  }

  std::vector<Instance> Instances() {
    const std::map<Key, uint32_t> structures = Structures();
    std::map<Key, Instance> found;  // by buffer and layer
    for (uint32_t b = 0; b < buffers_.size(); ++b) {
      for (uint32_t i = 0; i < owners_[b].size(); ++i) {
        if (owners_[b][i] == kNone) continue;
        const OrderedParameter& one = ParameterOf(b, owners_[b][i]);
        if (!one.layer) continue;
        Instance& instance = found[{b, *one.layer}];
        instance.buffer = b;
        instance.layer = *one.layer;
        instance.structure = structures.at({buffers_[b].rank, *one.layer});
        instance.decided.emplace(one.name, i);
      }
    }
    std::vector<Instance> out;
    for (auto& [key, instance] : found) out.push_back(std::move(instance));
    return out;
  }

  // The name that values decide in all instances of a structure; nothing if none is.
  static std::optional<uint32_t> AnchorOf(std::span<const Instance* const> instances) {
    std::map<uint32_t, size_t> times;
    for (const Instance* instance : instances) {
      for (const auto& [name, place] : instance->decided) ++times[name];
    }
    for (const auto& [name, count] : times) {
      if (count == instances.size()) return name;
    }
    return std::nullopt;
  }

  Status ByOrder() {
    const std::vector<Instance> all = Instances();
    std::map<uint32_t, std::vector<const Instance*>> by_structure;
    for (const Instance& instance : all) by_structure[instance.structure].push_back(&instance);
    for (const auto& [structure, instances] : by_structure) {
      const auto anchor = AnchorOf(instances);
      if (!anchor) {
        return Refuse("in some layer no parameter is told by its values that is told in others");
      }
      std::map<uint32_t, int64_t> distances;  // as the first instance has them
      for (const Instance* instance : instances) {
        const int64_t base = instance->decided.at(*anchor);
        for (const auto& [name, place] : instance->decided) {
          distances.try_emplace(name, int64_t{place} - base);
        }
      }
      for (const Instance* instance : instances) {
        CKPT_RETURN_IF_ERROR(Fill(*instance, distances, instance->decided.at(*anchor)));
      }
    }
    return {};
  }

  // Gives the places of an instance to the parameters that stand there in others, all of which
  // must have the values of these places.
  Status Fill(const Instance& instance, const std::map<uint32_t, int64_t>& distances,
              int64_t base) {
    const uint32_t b = instance.buffer;
    const auto& numbers = numbers_.at({buffers_[b].rank, instance.layer});
    for (const auto& [name, distance] : distances) {
      const int64_t place = base + distance;
      const uint32_t parameter = numbers.at(name);
      const bool there = place >= 0 && place < std::ssize(owners_[b]);
      if (!there ||
          buffers_[b].places[static_cast<size_t>(place)] != ParameterOf(b, parameter).values) {
        return Refuse(NameOf(b, parameter), " does not stand where it stands in other layers");
      }
      uint32_t& owner = owners_[b][static_cast<size_t>(place)];
      if (owner != kNone && owner != parameter) {
        return Refuse("the place of ", NameOf(b, parameter), " is that of ", NameOf(b, owner));
      }
      owner = parameter;
    }
    return {};
  }

  // ---- rest ---------------------------------------------------------------------------

  void ByRest() {
    std::map<Key, Few> places, unused;  // by rank and values
    std::set<Key> taken;                // rank, parameter
    for (uint32_t b = 0; b < buffers_.size(); ++b) {
      for (uint32_t i = 0; i < owners_[b].size(); ++i) {
        if (owners_[b][i] == kNone)
          ++places[{buffers_[b].rank, buffers_[b].places[i]}].first;
        else
          taken.emplace(buffers_[b].rank, owners_[b][i]);
      }
    }
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      for (uint32_t p = 0; p < ranks_[rank].size(); ++p) {
        if (taken.contains({rank, p})) continue;
        auto& [count, which] = unused[{rank, ranks_[rank][p].values}];
        ++count;
        which = p;
      }
    }
    for (uint32_t b = 0; b < buffers_.size(); ++b) {
      for (uint32_t i = 0; i < owners_[b].size(); ++i) {
        if (owners_[b][i] != kNone) continue;
        const Key key = {buffers_[b].rank, buffers_[b].places[i]};
        const auto left = unused.find(key);
        if (left == unused.end() || left->second.first != 1 || places[key].first != 1) continue;
        if (!ParameterOf(b, left->second.second).layer) owners_[b][i] = left->second.second;
      }
    }
  }

  // ---- what must be so ----------------------------------------------------------------

  Status CheckAll() const {
    for (uint32_t b = 0; b < buffers_.size(); ++b) {
      for (uint32_t i = 0; i < owners_[b].size(); ++i) {
        if (owners_[b][i] == kNone) return Undecided(b, buffers_[b].places[i]);
      }
    }
    return {};
  }
  Status Undecided(uint32_t b, uint32_t values) const {
    std::string names;
    size_t count = 0;
    const auto& parameters = ranks_[buffers_[b].rank];
    for (uint32_t p = 0; p < parameters.size(); ++p) {
      if (parameters[p].values != values || ++count > 2) continue;
      names += StrCat(count == 1 ? "" : " and ", NameOf(b, p));
    }
    return Refuse(names, count > 2 ? " and others" : "",
                  " have the same values, and nothing else tells whose masters are whose");
  }

  // Layers ascend, each in one piece.
  Status CheckLayers() const {
    for (uint32_t b = 0; b < buffers_.size(); ++b) {
      std::optional<uint32_t> last;
      std::optional<uint32_t> before;  // nothing behind a parameter without a layer
      for (const uint32_t owner : owners_[b]) {
        const auto layer = ParameterOf(b, owner).layer;
        const bool fine = !layer || !last || *layer > *last || layer == before;
        if (!fine) return Refuse(NameOf(b, owner), " stands behind a later layer");
        before = layer;
        if (layer) last = layer;
      }
    }
    return {};
  }

  Status CheckLines() const {
    std::map<uint32_t, uint32_t> first;  // buffers by line
    for (uint32_t b = 0; b < buffers_.size(); ++b) {
      const uint32_t a = first.try_emplace(buffers_[b].line, b).first->second;
      if (owners_[a].size() != owners_[b].size()) {
        return Refuse("ranks that divide the same tensors have ", owners_[a].size(), " and ",
                      owners_[b].size(), " parameters");
      }
      for (size_t i = 0; i < owners_[b].size(); ++i) {
        const OrderedParameter& one = ParameterOf(a, owners_[a][i]);
        const OrderedParameter& other = ParameterOf(b, owners_[b][i]);
        if (one.name == other.name && one.layer == other.layer) continue;
        return Refuse("where one rank has ", NameOf(a, owners_[a][i]),
                      ", another one that divides the same tensors has ", NameOf(b, owners_[b][i]));
      }
    }
    return {};
  }

  std::span<const std::vector<OrderedParameter>> ranks_;
  std::span<const OrderedBuffer> buffers_;
  const Namer& name_of_;
  std::vector<std::vector<uint32_t>> owners_;            // by buffer and place
  std::map<Key, uint32_t> layers_;                       // buffers by rank and layer
  std::map<Key, std::map<uint32_t, uint32_t>> numbers_;  // parameters by rank, layer and name
};

}  // namespace

Result<std::vector<std::vector<uint32_t>>> DecideOrder(
    std::span<const std::vector<OrderedParameter>> ranks, std::span<const OrderedBuffer> buffers,
    const std::function<std::string(uint32_t rank, uint32_t parameter)>& name_of) {
  return Orders(ranks, buffers, name_of).Decide();
}

}  // namespace ckptfs::megatron
