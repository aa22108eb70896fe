// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/held_tensors.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "formats/megatron/legacy/expert_parts.h"
#include "formats/megatron/legacy/local_names.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kEmbedding = "embedding.word_embeddings.weight";
constexpr std::string_view kOutputLayer = "output_layer.weight";
constexpr std::string_view kFurtherTokens = "mtp.";
constexpr uint64_t kMaxParts = uint64_t{1} << 22;

class Collector {
 public:
  Collector(const JobDegrees& job, const std::vector<RankModel>& ranks, const StageLayers& layers)
      : job_(job), ranks_(ranks), layers_(layers) {}

  Result<std::vector<HeldTensor>> Collect() && {
    CKPT_RETURN_IF_ERROR(ReadTie());
    for (uint32_t chunk = 0; chunk < job_.chunks; ++chunk) {
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        CKPT_RETURN_IF_ERROR(AddChunk(rank, chunk));
      }
    }
    if (all_.empty()) return Refuse("it does not hold the weights of a model");
    for (HeldTensor& tensor : all_) CKPT_RETURN_IF_ERROR(Finish(tensor));
    return std::move(all_);
  }

 private:
  const NamedTensor& At(const RankEntry& of) const {
    return ranks_[of.rank].chunks[of.chunk].tensors[of.entry];
  }
  const std::string& FolderAt(const RankEntry& of) const { return ranks_[of.rank].folder; }

  // The last stage's output layer is the embedding, where args say that they are tied.
  Status ReadTie() {
    const auto has = [&](std::string_view name, bool starts) {
      return std::ranges::any_of(ranks_, [&](const RankModel& rank) {
        return std::ranges::any_of(rank.chunks, [&](const RankChunk& chunk) {
          return std::ranges::any_of(chunk.tensors, [&](const NamedTensor& one) {
            return starts ? one.name.starts_with(name) : one.name == name;
          });
        });
      });
    };
    further_ = has(kFurtherTokens, true);
    if (!has(kOutputLayer, false)) return {};
    const PickleRef untied = ranks_.front().state.ArgumentOf("untie_embeddings_and_output_weights");
    const auto said = untied ? untied.Bool() : std::nullopt;
    if (!said && job_.pp > 1) {
      return Refuse(
          "its args do not say untie_embeddings_and_output_weights: nothing tells whether "
          "'",
          kOutputLayer, "' is the embedding");
    }
    tied_ = said == false;
    if (tied_ && job_.pp == 1) {
      return Refuse("its args say that the output layer is the embedding, but '", kOutputLayer,
                    "' is there beside it");
    }
    return {};
  }

  Status AddChunk(size_t rank, uint32_t chunk) {
    const RankModel& model = ranks_[rank];
    const LocalNames names(model.chunks[chunk], layers_.First(model.place.pp, chunk));
    const auto& tensors = model.chunks[chunk].tensors;
    for (size_t entry = 0; entry < tensors.size(); ++entry) {
      LocalName name = names.Of(tensors[entry].name);
      if (tied_ && name.name == kOutputLayer) name.name = kEmbedding;
      if (++parts_ > kMaxParts) return Refuse("ranks have more than ", kMaxParts, " tensors");
      const auto [at, fresh] = numbers_.try_emplace(name.name, all_.size());
      if (fresh) all_.emplace_back().name = name.name;
      HeldTensor& tensor = all_[at->second];
      HeldPart part{{rank, chunk, entry}, model.place.tp, {}, {}};
      const bool experts = name.form != LocalName::Form::kPlain;
      if (!fresh && tensor.experts != experts) {
        return Refuse("'", name.name, "' is of experts in one rank, and not in another");
      }
      tensor.experts = experts;
      names_[part.of] = std::move(name);
      tensor.parts.push_back(std::move(part));
    }
    return {};
  }

  Status Finish(HeldTensor& tensor) {
    const RankEntry first = tensor.parts.front().of;
    tensor.dtype = At(first).tensor.dtype();
    for (const HeldPart& part : tensor.parts) {
      const FileTensor& own = At(part.of).tensor;
      if (own.dtype() == tensor.dtype) continue;
      return Refuse("'", tensor.name, "' is of ", DTypeName(own.dtype()), " in ", FolderAt(part.of),
                    " and of ", DTypeName(tensor.dtype), " in ", FolderAt(first));
    }
    CKPT_RETURN_IF_ERROR(tensor.experts ? FinishExperts(tensor) : FinishPlain(tensor));
    std::map<std::tuple<uint32_t, uint32_t>, size_t> counts;
    for (const HeldPart& part : tensor.parts) tensor.copied |= ++counts[part.number] > 1;
    return {};
  }

  // ---- tensors that are not of experts ----------------------------------------------------

  // Every rank of a stage that has the tensor has it once.
  Status FinishPlain(HeldTensor& tensor) {
    std::map<uint32_t, size_t> stages;  // parts of each
    std::set<size_t> ranks;
    for (const HeldPart& part : tensor.parts) {
      ++stages[ranks_[part.of.rank].place.pp];
      if (!ranks.insert(part.of.rank).second) {
        return Refuse("'", tensor.name, "' is there twice in ", FolderAt(part.of));
      }
    }
    const size_t most = tensor.name == kEmbedding && (tied_ || further_) ? 2 : 1;
    if (stages.size() > most) {
      return Refuse("'", tensor.name, "' is in files of the stages ", stages.begin()->first,
                    " and ", stages.rbegin()->first);
    }
    for (const auto& [stage, count] : stages) {
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (ranks_[rank].place.pp != stage || ranks.contains(rank)) continue;
        return Refuse(ranks_[rank].folder, "/", kRankFile, ": it does not have '", tensor.name,
                      "', which other ranks of its stage have");
      }
    }
    return ReadShapes(tensor);
  }

  Status ReadShapes(HeldTensor& tensor) {
    std::vector<Shape> shapes(job_.tp);
    std::vector<const HeldPart*> first(job_.tp);
    for (HeldPart& part : tensor.parts) {
      part.number = {part.tp, 0};
      const Shape& own = At(part.of).tensor.shape();
      if (first[part.tp] == nullptr) {
        first[part.tp] = &part;
        shapes[part.tp] = own;
      } else if (own != shapes[part.tp]) {
        return Refuse("'", tensor.name, "' has the shape ", ShapeToString(own), " in ",
                      FolderAt(part.of), " and ", ShapeToString(shapes[part.tp]), " in ",
                      FolderAt(first[part.tp]->of));
      }
    }
    tensor.shape = shapes.front();
    if (job_.tp > 1) tensor.ranks = std::move(shapes);
    return {};
  }

  // ---- experts ---------------------------------------------------------------------------

  Status FinishExperts(HeldTensor& tensor) {
    const auto said = ranks_.front().state.Argument("num_experts");
    if (!said || *said < 1 || *said > (1 << 20) || *said % job_.ep != 0) {
      return Refuse("'", tensor.name, "': args do not say num_experts that divide by ", job_.ep,
                    " expert ranks");
    }
    ExpertCut cut{static_cast<uint32_t>(*said), static_cast<uint32_t>(*said) / job_.ep, job_.etp,
                  false};
    if (job_.etp > 1) {
      CKPT_ASSIGN_OR_RETURN(cut.gated, IsGated(tensor));
    }
    std::map<std::tuple<uint32_t, uint32_t>, size_t> counts;  // by expert and tensor rank
    std::map<size_t, std::set<uint32_t>> of_rank;
    for (HeldPart& part : tensor.parts) {
      const RankPlace& place = ranks_[part.of.rank].place;
      const LocalName& name = names_.at(part.of);
      if (name.form == LocalName::Form::kExpert && name.expert >= cut.local) {
        return Refuse("'", At(part.of).name, "' in ", FolderAt(part.of), ": args say ", *said,
                      " experts, ", cut.local, " of each rank");
      }
      if (!of_rank[part.of.rank].insert(name.expert).second) {
        return Refuse("'", tensor.name, "' is there twice in ", FolderAt(part.of));
      }
      auto made = ExpertPartOf(cut, name, place, At(part.of).tensor.shape());
      if (!made) {
        return Fail(std::move(made).error().WithContext(
            StrCat("'", At(part.of).name, "' in ", FolderAt(part.of))));
      }
      if (tensor.shape.empty()) tensor.shape = made->whole;
      if (tensor.shape != made->whole) {
        return Refuse("'", At(part.of).name, "' in ", FolderAt(part.of),
                      " does not have the shape of other experts");
      }
      part.local = std::move(made->local);
      part.number = {made->first, made->replicated ? 0 : place.etp};
      ++counts[{made->first, place.etp}];
    }
    const bool grouped = names_.at(tensor.parts.front().of).form == LocalName::Form::kGrouped;
    const size_t all = size_t{grouped ? job_.ep : cut.all} * job_.etp;
    if (counts.size() != all) {
      return Refuse("'", tensor.name, "' is there in ", counts.size(), " of ", all, " parts");
    }
    return {};
  }

  // True if linear_fc1 of the layer has gate and up: args and the shapes must say the same.
  Result<bool> IsGated(const HeldTensor& tensor) const {
    const PickleRef swiglu = ranks_.front().state.ArgumentOf("swiglu");
    const auto said = swiglu ? swiglu.Bool() : std::nullopt;
    if (said) return *said;
    return Refuse("'", tensor.name, "': args do not say swiglu: nothing tells how ranks cut it");
  }

  const JobDegrees& job_;
  const std::vector<RankModel>& ranks_;
  const StageLayers& layers_;
  bool tied_ = false;
  bool further_ = false;
  uint64_t parts_ = 0;
  std::vector<HeldTensor> all_;
  std::map<std::string, size_t, std::less<>> numbers_;  // in all_, by name
  std::map<RankEntry, LocalName> names_;
};

Status PlacePlain(const HeldTensor& tensor, const BytesOfPart& bytes, AtomParts& atom) {
  std::map<uint32_t, uint32_t> places;  // so far, by tensor rank
  for (const HeldPart& part : tensor.parts) {
    const auto own = bytes(part);
    if (!own) continue;
    const Holder holder{places[part.tp]++, part.tp};
    if (own->at) {
      CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(atom.LocalOf(part.tp).shape));
      CKPT_ASSIGN_OR_RETURN(const Fragment fragment, own->tensor.Slice(*own->at, 0, elements));
      CKPT_ASSIGN_OR_RETURN(const auto local, atom.Add(holder));
      atom.AddFragment(local, fragment);
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(auto held, own->tensor.As(atom.LocalOf(part.tp)));
    CKPT_ASSIGN_OR_RETURN(const auto local, atom.Add(holder, std::move(held.local)));
    atom.AddFragment(local, held.fragment);
  }
  return {};
}

Status PlaceExperts(const HeldTensor& tensor, const BytesOfPart& bytes, Assembler& assembler,
                    AtomIndex atom) {
  std::map<std::tuple<uint32_t, uint32_t>, uint32_t> copies;
  bool replicas = false;
  for (const HeldPart& part : tensor.parts) {
    const auto own = bytes(part);
    if (!own) continue;
    const uint32_t copy = copies[part.number]++;
    replicas |= copy > 0;
    if (own->at) {
      CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(part.local->shape));
      CKPT_ASSIGN_OR_RETURN(const Fragment fragment, own->tensor.Slice(*own->at, 0, elements));
      assembler.AddFragment(atom, copy, assembler.AddLocal(atom, copy, *part.local), fragment);
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(auto held, own->tensor.As(*part.local));
    const uint32_t local = assembler.AddLocal(atom, copy, std::move(held.local));
    assembler.AddFragment(atom, copy, local, held.fragment);
  }
  if (replicas) assembler.DeclareReplicas(atom);
  return {};
}

}  // namespace

Result<HeldTensors> HeldTensors::Make(const JobDegrees& job, const std::vector<RankModel>& ranks,
                                      const StageLayers& layers) {
  HeldTensors out;
  CKPT_ASSIGN_OR_RETURN(out.all_, Collector(job, ranks, layers).Collect());
  return out;
}

bool MakeUpAll(const HeldTensor& tensor, const std::function<bool(const HeldPart&)>& chosen) {
  std::map<std::tuple<uint32_t, uint32_t>, size_t> counts;
  for (const HeldPart& part : tensor.parts) counts[part.number] += chosen(part) ? 1 : 0;
  const size_t copies = counts.begin()->second;
  return copies > 0 &&
         std::ranges::all_of(counts, [&](const auto& one) { return one.second == copies; });
}

PlaceParts PlaceHeldParts(const HeldTensor& tensor, BytesOfPart bytes) {
  return [&tensor, bytes = std::move(bytes)](Assembler& assembler, AtomParts& atom) {
    return tensor.experts ? PlaceExperts(tensor, bytes, assembler, atom)
                          : PlacePlain(tensor, bytes, atom);
  };
}

}  // namespace ckptfs::megatron
