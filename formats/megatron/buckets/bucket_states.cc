// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/buckets/bucket_states.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/base/strings.h"
#include "formats/megatron/buckets/bucket_layout.h"
#include "formats/megatron/buckets/bucket_order.h"
#include "formats/megatron/buckets/rank_parts.h"
#include "formats/megatron/dist_keys.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kWordEmbedding = "embedding.word_embeddings.weight";
constexpr std::string_view kOutputLayer = "output_layer.weight";
constexpr std::string_view kFurtherTokens = "mtp.";

struct Degrees {
  uint32_t tp = 1;  // of what the optimizer has: the experts' own
  uint32_t pp = 1;
  uint32_t ep = 1;
  std::optional<uint64_t> world;
  bool experts_apart = false;                 // experts have an optimizer of their own
  uint32_t Ranks() const { return tp * ep; }  // of one stage
};

Result<Degrees> DegreesOf(const CommonState& common, bool experts, size_t groups) {
  const auto degree = [&](std::string_view name) -> std::optional<uint32_t> {
    const auto number = common.Argument(name);
    if (!number || *number < 1 || *number > (1 << 15)) return std::nullopt;
    return static_cast<uint32_t>(*number);
  };
  const auto tp = degree("tensor_model_parallel_size");
  const auto pp = degree("pipeline_model_parallel_size");
  if (!tp || !pp) {
    return Refuse("the arguments do not say tensor_model_parallel_size and ",
                  "pipeline_model_parallel_size");
  }
  const uint32_t ep = degree("expert_model_parallel_size").value_or(1);
  Degrees out{*tp, *pp, 1, degree("world_size"), ep > 1};
  if (experts) {
    out.tp = degree("expert_tensor_parallel_size").value_or(*tp);
    out.ep = ep;
  }
  if (uint64_t{out.Ranks()} * out.pp != groups) {
    return Refuse("it has buffers of ", groups, " groups of ranks, but the arguments say ",
                  experts ? "expert tensor, expert and pipeline" : "tensor and pipeline",
                  " parallel sizes of which there are ", uint64_t{out.Ranks()} * out.pp);
  }
  return out;
}

// A tensor's name: that of its layer, and what is the same in all layers.
struct LayerName {
  std::string_view block;  // "decoder."; "" of a tensor without a layer
  uint64_t layer = 0;
  std::string rest;
};

LayerName LayerNameOf(std::string_view name) {
  constexpr std::string_view kLayers = "layers.";
  LayerName out{.block = {}, .layer = 0, .rest = std::string(name)};
  const size_t at = name.find(kLayers);
  if (at == std::string_view::npos || (at > 0 && name[at - 1] != '.')) return out;
  size_t end = at + kLayers.size();
  uint64_t number = 0;
  const size_t first = end;
  while (end < name.size() && IsDigit(name[end]) && end - first < 9) {
    number = number * 10 + static_cast<uint64_t>(name[end++] - '0');
  }
  if (end == first || end == name.size() || name[end] != '.') return out;
  return {name.substr(0, first), number, StrCat(name.substr(0, first), name.substr(end))};
}

// A tensor's part that a rank may hold.
struct Unit {
  size_t tensor = 0;  // of the model's
  const RankPart* part = nullptr;
  OrderedParameter ordered;  // but for its values
  Digest sample;
  Digest all;  // where the sample does not tell it apart
};

// A bucket and what lies in it.
struct Laid {
  const StoredBucket* bucket = nullptr;
  uint32_t scope = 0;
  std::vector<BucketPlace> fitting;  // then those that make up the bucket
  std::vector<Digest> samples, all;  // of `fitting`
};

// A part of a tensor in a bucket.
struct Held {
  uint32_t stage = 0;
  uint32_t rank = 0;  // of the stage's
  const StoredBucket* bucket = nullptr;
  uint64_t begin = 0;
  const RankPart* part = nullptr;
};

// Copies of a tensor, each in parts.
using HeldCopies = std::vector<std::vector<Held>>;

// All that the functions of states need as long as they may be called.
struct Decoded {
  BucketOptimizer optimizer;
  std::map<size_t, std::vector<std::vector<RankPart>>> parts;  // by stored tensor and layer
  std::map<size_t, HeldCopies> held;                           // by tensor of the model
};

class Decoder {
 public:
  Decoder(dcp::StoredState& state, const CommonState& common,
          const std::vector<StateDict::Tensor>& tensors, const std::vector<WeightSlice>& slices)
      : state_(state), common_(common), tensors_(tensors), slices_(slices) {}

  Result<BucketStates> Decode(const std::string& chain) && {
    out_ = std::make_shared<Decoded>();
    CKPT_ASSIGN_OR_RETURN(out_->optimizer, ReadBuckets(state_, chain));
    const BucketOptimizer& optimizer = out_->optimizer;
    CKPT_ASSIGN_OR_RETURN(degrees_, DegreesOf(common_, optimizer.experts, optimizer.groups.size()));
    CKPT_RETURN_IF_ERROR(MakeUnits());
    CKPT_RETURN_IF_ERROR(PrintUnits());
    CKPT_RETURN_IF_ERROR(LayBuckets());
    CKPT_RETURN_IF_ERROR(TellAlike());
    CKPT_RETURN_IF_ERROR(Assign());
    CKPT_RETURN_IF_ERROR(CheckHolders());
    return States();
  }

 private:
  // Ranks of one stage that hold the same parts, and one type of them.
  struct Scope {
    std::vector<uint32_t> units;
    std::vector<uint64_t> sizes;  // ascending, each once
    std::map<std::pair<uint64_t, Digest>, std::vector<uint32_t>> by_sample;
  };

  // ---- the model's side -------------------------------------------------------------

  uint32_t RankOf(size_t group) const { return static_cast<uint32_t>(group % degrees_.Ranks()); }
  uint32_t StageOf(size_t group) const { return static_cast<uint32_t>(group / degrees_.Ranks()); }

  const std::vector<RankPart>& PartsOfTensor(size_t tensor) {
    const WeightSlice slice = slices_[tensor];
    const auto [at, fresh] = out_->parts.try_emplace(slice.tensor);
    if (fresh) {
      at->second = RankPartsOf(state_.metadata(), state_.metadata().tensors[slice.tensor],
                               {.stacked = slice.layer >= 0,
                                .experts = IsExperts(tensors_[tensor].name),
                                .tp = degrees_.tp});
    }
    return at->second[slice.layer < 0 ? 0 : static_cast<size_t>(slice.layer)];
  }

  // False of a tensor of which some rank might have elements that are not known.  It could be the
  // true owner of a place that another one fits.
  bool IsUnderstood(size_t tensor) {
    const size_t stored = slices_[tensor].tensor;
    if (!state_.WhyNotPlain(stored).empty()) return false;
    const std::vector<RankPart>& parts = PartsOfTensor(tensor);
    const bool plain = std::ranges::all_of(parts, [&](const RankPart& part) {
      return std::ranges::all_of(part.boxes, [&](const RankPart::Box& box) {
        return state_.DensePlaceOf(stored, box.chunk).has_value();
      });
    });
    uint64_t elements = 0;
    for (const RankPart& part : parts) elements += part.elements;
    const auto all = ElementCount(tensors_[tensor].shape);
    return plain && all && *all == elements;
  }

  // Layers are counted in the order in which Megatron registers their blocks.
  std::map<std::pair<std::string_view, uint64_t>, uint32_t> LayerNumbers(
      const std::vector<LayerName>& names) const {
    std::set<std::tuple<bool, std::string_view, uint64_t>> layers;
    for (const LayerName& name : names) {
      if (name.block.empty()) continue;
      layers.emplace(!name.block.starts_with("encoder."), name.block, name.layer);
    }
    std::map<std::pair<std::string_view, uint64_t>, uint32_t> out;
    for (const auto& [later, block, layer] : layers) {
      out.emplace(std::pair(block, layer), static_cast<uint32_t>(out.size()));
    }
    return out;
  }

  Status MakeUnits() {
    const bool experts_apart = out_->optimizer.experts;
    std::vector<LayerName> names;
    for (const StateDict::Tensor& tensor : tensors_) names.push_back(LayerNameOf(tensor.name));
    const auto layers = LayerNumbers(names);
    std::map<std::string, uint32_t> numbers;
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const bool experts = IsExperts(tensors_[t].name);
      if ((experts_apart && !experts) || !IsFloat(tensors_[t].dtype)) continue;
      if (experts && !experts_apart && degrees_.experts_apart) continue;
      const uint64_t per_rank =
          experts && !tensors_[t].shape.empty() ? tensors_[t].shape.front() / degrees_.ep : 1;
      if (!IsUnderstood(t) || per_rank == 0) {
        return Refuse("the chunks of '", tensors_[t].name,
                      "' do not tell what each rank has of it");
      }
      for (const RankPart& part : PartsOfTensor(t)) {
        const uint64_t local = part.expert.value_or(0) % per_rank;
        std::string name = part.expert ? StrCat(names[t].rest, " ", local) : names[t].rest;
        const auto number = static_cast<uint32_t>(numbers.size());
        Unit unit{t, &part, {}, {}, {}};
        unit.ordered.name = numbers.try_emplace(std::move(name), number).first->second;
        if (!names[t].block.empty()) {
          unit.ordered.layer = layers.at({names[t].block, names[t].layer});
        }
        AddUnit(std::move(unit), per_rank);
      }
    }
    for (Scope& scope : scopes_) {
      std::ranges::sort(scope.sizes);
      const auto rest = std::ranges::unique(scope.sizes);
      scope.sizes.erase(rest.begin(), rest.end());
    }
    return {};
  }

  void AddUnit(Unit unit, uint64_t experts_per_rank) {
    const auto number = static_cast<uint32_t>(units_.size());
    const DType dtype = tensors_[unit.tensor].dtype;
    const uint32_t ep =
        unit.part->expert ? static_cast<uint32_t>(*unit.part->expert / experts_per_rank) : 0;
    for (uint32_t tp = 0; tp < degrees_.tp; ++tp) {
      if (unit.part->tp && *unit.part->tp != tp) continue;
      if (ep >= degrees_.ep) continue;
      Scope& scope = scopes_[ScopeOf(ep * degrees_.tp + tp, dtype)];
      scope.units.push_back(number);
      scope.sizes.push_back(unit.part->elements);
    }
    units_.push_back(std::move(unit));
  }

  uint32_t ScopeOf(uint32_t rank, DType dtype) {
    const auto [at, fresh] = scope_numbers_.try_emplace({rank, dtype}, scopes_.size());
    if (fresh) scopes_.emplace_back();
    return at->second;
  }

  // A part's elements, in the rank's order.
  FlatTensor FlatOf(const Unit& unit) const {
    const WeightSlice slice = slices_[unit.tensor];
    FlatTensor out;
    out.dtype = tensors_[unit.tensor].dtype;
    for (const RankPart::Box& box : unit.part->boxes) {
      const auto place = state_.DensePlaceOf(slice.tensor, box.chunk);
      uint64_t elements = 1;
      for (const uint64_t size : box.shape) elements *= size;
      out.runs.push_back({place->file, place->first_byte, elements});
    }
    return out;
  }

  Status PrintUnits() {
    std::map<DType, std::vector<uint32_t>> by_type;
    for (uint32_t u = 0; u < units_.size(); ++u) {
      by_type[tensors_[units_[u].tensor].dtype].push_back(u);
    }
    for (const auto& [dtype, units] : by_type) {
      CKPT_ASSIGN_OR_RETURN(
          const std::vector<Digest> prints,
          PrintsOf(
              state_, units.size(), [&](size_t i) { return FlatOf(units_[units[i]]); }, dtype,
              PrintOf::kSample));
      for (size_t i = 0; i < units.size(); ++i) units_[units[i]].sample = prints[i];
    }
    for (Scope& scope : scopes_) {
      for (const uint32_t u : scope.units) {
        scope.by_sample[{units_[u].part->elements, units_[u].sample}].push_back(u);
      }
    }
    return {};
  }

  // ---- the buckets' side -------------------------------------------------------------

  const BucketTensor& MastersOf(const Laid& laid) const {
    return laid.bucket->kinds.find(std::string(kMasterKind))->second;
  }

  // Finds the places whose values a parameter may have, as far as samples tell.
  Status LayBuckets() {
    const std::vector<RankGroup>& groups = out_->optimizer.groups;
    for (size_t g = 0; g < groups.size(); ++g) {
      for (const StoredBuffer& buffer : groups[g].buffers) {
        const uint32_t scope = ScopeOf(RankOf(g), buffer.parameters);
        for (const StoredBucket& bucket : buffer.buckets) {
          Laid laid{&bucket, scope, {}, {}, {}};
          if (!CanPrint(MastersOf(laid).dtype, buffer.parameters)) {
            return Refuse("'", bucket.key, "' is of ", DTypeName(MastersOf(laid).dtype),
                          ", which cannot be cast to weights of ", DTypeName(buffer.parameters));
          }
          auto status = Lay(laid, buffer.parameters);
          if (!status) return Fail(std::move(status).error().WithContext(Named(bucket)));
          laid_.push_back(std::move(laid));
        }
      }
    }
    return {};
  }
  static std::string Named(const StoredBucket& bucket) { return StrCat("'", bucket.key, "'"); }

  Status Lay(Laid& laid, DType as) {
    const Scope& scope = scopes_[laid.scope];
    CKPT_ASSIGN_OR_RETURN(const auto places, PlacesOf(laid.bucket->shape, scope.sizes));
    const BucketTensor& masters = MastersOf(laid);
    CKPT_ASSIGN_OR_RETURN(
        const std::vector<Digest> prints,
        PrintsOf(
            state_, places.size(), [&](size_t i) { return masters.Part(places[i]); }, as,
            PrintOf::kSample));
    for (size_t i = 0; i < places.size(); ++i) {
      if (!scope.by_sample.contains({places[i].elements, prints[i]})) continue;
      laid.fitting.push_back(places[i]);
      laid.samples.push_back(prints[i]);
    }
    laid.all.resize(laid.fitting.size());
    return {};
  }

  // Reads all of what samples do not tell apart, on both sides.
  Status TellAlike() {
    std::map<DType, std::set<uint32_t>> alike;
    const auto ambiguous = [&](const Scope& scope, uint64_t elements, const Digest& sample) {
      return elements > kSampleElements && scope.by_sample.at({elements, sample}).size() > 1;
    };
    for (const Scope& scope : scopes_) {
      for (const auto& [key, units] : scope.by_sample) {
        if (!ambiguous(scope, key.first, key.second)) continue;
        for (const uint32_t u : units) alike[tensors_[units_[u].tensor].dtype].insert(u);
      }
    }
    for (const auto& [dtype, numbers] : alike) {
      const std::vector<uint32_t> units(numbers.begin(), numbers.end());
      CKPT_ASSIGN_OR_RETURN(
          const std::vector<Digest> prints,
          PrintsOf(
              state_, units.size(), [&](size_t i) { return FlatOf(units_[units[i]]); }, dtype,
              PrintOf::kAll));
      for (size_t i = 0; i < units.size(); ++i) units_[units[i]].all = prints[i];
    }
    for (Laid& laid : laid_) {
      const Scope& scope = scopes_[laid.scope];
      for (size_t i = 0; i < laid.fitting.size(); ++i) {
        if (!ambiguous(scope, laid.fitting[i].elements, laid.samples[i])) continue;
        const auto& units = scope.by_sample.at({laid.fitting[i].elements, laid.samples[i]});
        const DType as = tensors_[units_[units.front()].tensor].dtype;
        CKPT_ASSIGN_OR_RETURN(
            const std::vector<Digest> prints,
            PrintsOf(
                state_, 1, [&](size_t) { return MastersOf(laid).Part(laid.fitting[i]); }, as,
                PrintOf::kAll));
        laid.all[i] = prints[0];
      }
    }
    return {};
  }

  // ---- whose it is --------------------------------------------------------------------

  using Values = std::tuple<uint64_t, Digest, Digest>;

  // Numbers for the values of a scope's parameters.
  std::map<Values, uint32_t> NumberValues(const Scope& scope,
                                          std::vector<OrderedParameter>& parameters) const {
    std::map<Values, uint32_t> out;
    for (const uint32_t u : scope.units) {
      const Unit& unit = units_[u];
      const auto next = static_cast<uint32_t>(out.size());
      parameters.push_back(unit.ordered);
      parameters.back().values =
          out.try_emplace({unit.part->elements, unit.sample, unit.all}, next).first->second;
    }
    return out;
  }

  // The places that make up a bucket, with the numbers of their values.
  Status Choose(Laid& laid, const std::map<Values, uint32_t>& values, std::optional<uint64_t> ranks,
                std::vector<uint32_t>& out) const {
    std::vector<BucketPlace> fitting;
    std::map<std::pair<uint64_t, uint64_t>, uint32_t> numbers;
    for (size_t i = 0; i < laid.fitting.size(); ++i) {
      const BucketPlace& place = laid.fitting[i];
      const auto found = values.find({place.elements, laid.samples[i], laid.all[i]});
      if (found == values.end()) continue;
      fitting.push_back(place);
      numbers[{place.begin, place.elements}] = found->second;
    }
    CKPT_ASSIGN_OR_RETURN(laid.fitting, LieOf(laid.bucket->shape, fitting, ranks));
    for (const BucketPlace& place : laid.fitting) {
      out.push_back(numbers.at({place.begin, place.elements}));
    }
    return {};
  }

  Status Assign() {
    std::vector<std::vector<OrderedParameter>> ranks(scopes_.size());
    std::vector<std::map<Values, uint32_t>> values;
    for (size_t s = 0; s < scopes_.size(); ++s) {
      values.push_back(NumberValues(scopes_[s], ranks[s]));
    }
    const std::vector<RankGroup>& groups = out_->optimizer.groups;
    std::optional<uint64_t> dividing;
    if (degrees_.world && *degrees_.world % groups.size() == 0) {
      dividing = *degrees_.world / groups.size();
    }
    std::vector<OrderedBuffer> buffers;
    std::map<std::pair<uint32_t, size_t>, uint32_t> lines;  // by stage and number of the buffer
    size_t next = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t b = 0; b < groups[g].buffers.size(); ++b) {
        const auto line = static_cast<uint32_t>(lines.size());
        OrderedBuffer& buffer = buffers.emplace_back();
        buffer.rank = laid_[next].scope;
        buffer.line = lines.try_emplace({StageOf(g), b}, line).first->second;
        for (size_t i = 0; i < groups[g].buffers[b].buckets.size(); ++i, ++next) {
          auto status = Choose(laid_[next], values[buffer.rank], dividing, buffer.places);
          if (!status) {
            return Fail(std::move(status).error().WithContext(Named(*laid_[next].bucket)));
          }
        }
        std::ranges::reverse(buffer.places);
      }
    }
    const auto name_of = [&](uint32_t scope, uint32_t parameter) {
      const Unit& unit = units_[scopes_[scope].units[parameter]];
      const std::string& name = tensors_[unit.tensor].name;
      return unit.part->expert ? StrCat(name, " of expert ", *unit.part->expert) : name;
    };
    CKPT_ASSIGN_OR_RETURN(const auto owners, DecideOrder(ranks, buffers, name_of));
    Hold(buffers, owners);
    return {};
  }

  // Notes who holds what, group by group.
  void Hold(const std::vector<OrderedBuffer>& buffers,
            const std::vector<std::vector<uint32_t>>& owners) {
    const std::vector<RankGroup>& groups = out_->optimizer.groups;
    size_t number = 0;
    size_t next = 0;
    for (size_t g = 0; g < groups.size(); ++g) {
      for (const StoredBuffer& buffer : groups[g].buffers) {
        size_t left = owners[number].size();
        const Scope& scope = scopes_[buffers[number].rank];
        for (size_t i = 0; i < buffer.buckets.size(); ++i, ++next) {
          for (const BucketPlace& place : laid_[next].fitting) {
            const Unit& unit = units_[scope.units[owners[number][--left]]];
            holders_[unit.tensor][unit.part].push_back(
                {StageOf(g), RankOf(g), laid_[next].bucket, place.begin, unit.part});
          }
        }
        ++number;
      }
    }
  }

  // ---- what must be so -----------------------------------------------------------------

  Status CheckHolders() {
    // The last stage has a copy as its output layer, or for predicting further tokens.
    const bool copied =
        std::ranges::find(tensors_, kOutputLayer, &StateDict::Tensor::name) == tensors_.end() ||
        std::ranges::any_of(tensors_, [](const StateDict::Tensor& tensor) {
          return tensor.name.starts_with(kFurtherTokens);
        });
    for (auto& [tensor, by_part] : holders_) {
      const std::string& name = tensors_[tensor].name;
      if (by_part.size() != PartsOfTensor(tensor).size()) {
        return Refuse("'", name, "' is held in ", by_part.size(), " of its ",
                      PartsOfTensor(tensor).size(), " parts");
      }
      const size_t stages = name == kWordEmbedding && copied ? 2 : 1;
      std::optional<std::set<uint32_t>> held_by;
      HeldCopies& copies = out_->held[tensor];
      for (auto& [part, held] : by_part) {
        std::set<uint32_t> of;
        std::set<std::pair<uint32_t, uint32_t>> ranks;
        for (const Held& one : held) {
          of.insert(one.stage);
          ranks.emplace(one.stage, one.rank);
        }
        const size_t each = part->tp ? 1 : degrees_.tp;
        const bool fine = of.size() <= stages && ranks.size() == of.size() * each &&
                          held.size() == ranks.size() && of == held_by.value_or(of);
        if (!fine) {
          return Refuse("'", name, "' is not held by exactly the ranks that have it on a stage");
        }
        held_by = of;
        copies.resize(held.size());
        for (size_t copy = 0; copy < held.size(); ++copy) copies[copy].push_back(held[copy]);
      }
    }
    return {};
  }

  // ---- states ---------------------------------------------------------------------------

  Result<BucketStates> States() {
    BucketStates out;
    for (const auto& [tensor, copies] : out_->held) {
      for (const auto& [kind, stored] : copies.front().front().bucket->kinds) {
        StateDict::State added{0, tensors_[tensor].name, kind};
        added.kinds = StateDict::Kinds::kOurs;
        added.dtype = stored.dtype;
        added.shape = tensors_[tensor].shape;
        added.place = [decoded = out_, tensor = tensor, kind = kind](Assembler& assembler,
                                                                     AtomParts& atom) {
          return Place(decoded->held.at(tensor), kind, assembler, atom);
        };
        out.states.push_back(std::move(added));
      }
    }
    out.hyper_parameters = out_->optimizer.hyper_parameters;
    out.files = std::move(out_->optimizer.files);
    return out;
  }

  static Status Place(const HeldCopies& copies, const std::string& kind, Assembler& assembler,
                      AtomIndex atom) {
    for (uint32_t copy = 0; copy < copies.size(); ++copy) {
      for (const Held& held : copies[copy]) {
        const uint32_t local = assembler.AddLocal(atom, copy, LocalOf(*held.part));
        const BucketTensor& tensor = held.bucket->kinds.at(kind);
        const uint64_t end = held.begin + held.part->elements;
        uint64_t at = held.begin;
        for (size_t i = tensor.ChunkOf(at); at < end; ++i) {
          const BucketTensor::Chunk& chunk = tensor.chunks[i];
          const uint64_t until = std::min(end, chunk.begin + chunk.elements);
          const uint64_t byte =
              chunk.place.first_byte + (at - chunk.begin) * ByteWidth(tensor.dtype);
          assembler.AddFragment(
              atom, copy, local,
              {at - held.begin, until - held.begin, chunk.place.blob, byte, tensor.dtype});
          at = until;
        }
      }
    }
    if (copies.size() > 1) assembler.DeclareReplicas(atom);
    return {};
  }

  static LocalTensor LocalOf(const RankPart& part) {
    LocalTensor local{{part.elements}, {}};
    uint64_t offset = 0;
    for (const RankPart::Box& box : part.boxes) {
      local.pieces.push_back({box.shape, box.begin, offset, RowMajorStrides(box.shape), 1.0});
      uint64_t elements = 1;
      for (const uint64_t size : box.shape) elements *= size;
      offset += elements;
    }
    return local;
  }

  dcp::StoredState& state_;
  const CommonState& common_;
  const std::vector<StateDict::Tensor>& tensors_;
  const std::vector<WeightSlice>& slices_;
  Degrees degrees_;
  std::shared_ptr<Decoded> out_;
  std::vector<Unit> units_;
  std::vector<Scope> scopes_;
  std::map<std::pair<uint32_t, DType>, uint32_t> scope_numbers_;
  std::vector<Laid> laid_;  // group by group, buffer by buffer
  std::map<size_t, std::map<const RankPart*, std::vector<Held>>> holders_;  // by tensor and part
};

}  // namespace

bool IsExperts(std::string_view name) {
  return name.find(".mlp.experts.") != std::string_view::npos;
}

Result<BucketStates> DecodeBuckets(dcp::StoredState& state, const CommonState& common,
                                   const std::string& chain,
                                   const std::vector<StateDict::Tensor>& tensors,
                                   const std::vector<WeightSlice>& slices) {
  return Decoder(state, common, tensors, slices).Decode(chain);
}

}  // namespace ckptfs::megatron
