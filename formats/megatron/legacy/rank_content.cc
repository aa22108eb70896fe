// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/rank_content.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "formats/megatron/common_file.h"
#include "formats/megatron/dist_keys.h"
#include "formats/rank/rank_tensors.h"
#include "formats/tools/source_traits.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kWords = "embedding.word_embeddings.weight";
constexpr std::string_view kHead = "output_layer.weight";
constexpr std::string_view kDecoder = "decoder.layers.";
constexpr std::string_view kStacked = "mlp.experts.experts.";
constexpr std::string_view kFusedNorm = "self_attention.linear_qkv.layer_norm_";
constexpr std::string_view kFusedMlpNorm = "mlp.linear_fc1.layer_norm_";

// The source's job says this of its modules; nothing where it is silent.
struct Modules {
  std::optional<bool> local;    // --transformer-impl local
  std::optional<bool> grouped;  // --moe-grouped-gemm
};

Result<Modules> ModulesOf(const StepModel& step) {
  Modules out;
  const Document* document =
      TraitsOf(step).mcore_state ? step.FindDocument("client/args") : nullptr;
  if (document == nullptr) return out;
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
  const PickleRef root = RootOf(tree);
  const PickleRef fields = root.IsDict() ? root : root.State();
  if (!fields || !fields.IsDict()) return out;
  if (const auto said = fields["transformer_impl"].String()) out.local = *said == "local";
  out.grouped = fields["moe_grouped_gemm"].Bool();
  return out;
}

bool IsTied(const ShownState& shown) {
  return std::ranges::none_of(shown.step().parameters,
                              [](const Parameter& parameter) { return parameter.name == kHead; });
}

uint64_t LayersOf(const StepModel& step) {
  uint64_t layers = 0;
  for (const Parameter& parameter : step.parameters) {
    const auto name = LayeredNameOf(parameter.name);
    if (name && name->before == kDecoder) layers = std::max(layers, name->layer + 1);
  }
  return layers;
}

class Writer {
 public:
  Writer(const ShownState& shown, const RankCoordinate& rank) : shown_(shown), rank_(rank) {}

  Result<CommonAdditions::Entries> Write(ArchiveBuilder& archive) {
    archive_ = &archive;
    const Layout& layout = shown_.layout();
    CKPT_ASSIGN_OR_RETURN(modules_, ModulesOf(shown_.step()));
    per_chunk_ =
        std::max<uint64_t>(LayersOf(shown_.step()) / (uint64_t{layout.pp} * layout.vpp), 1);
    chunks_.resize(layout.vpp);
    CKPT_ASSIGN_OR_RETURN(const RankTensors tensors, BuildRankTensors(shown_, rank_));
    for (const RankTensor& tensor : tensors.model) CKPT_RETURN_IF_ERROR(AddTensor(tensor));
    if (IsTied(shown_) && layout.pp > 1 && rank_.pp + 1 == layout.pp) {
      CKPT_RETURN_IF_ERROR(AddTiedHead());
    }
    AddObjects();
    CommonAdditions::Entries out;
    for (size_t i = 0; i < chunks_.size(); ++i) {
      out.emplace_back(chunks_.size() > 1 ? StrCat("model", i) : "model",
                       archive.pickle().OrderedDict(chunks_[i]));
    }
    return out;
  }

 private:
  Status Add(size_t chunk, const std::vector<std::string>& keys, DType dtype, const Shape& shape,
             uint64_t bytes, SegmentBody segment) {
    CKPT_ASSIGN_OR_RETURN(const NodeId value,
                          archive_->Tensor(dtype, shape, {{bytes, std::move(segment)}}));
    for (const std::string& key : keys) {
      if (!names_.emplace(chunk, key).second) {
        return Fail(
            Error{ErrorCode::kUnsupported, "two tensors of a rank have this name"}.OfParameter(
                key));
      }
      chunks_[chunk].emplace_back(archive_->pickle().String(key), value);
    }
    return {};
  }

  Status AddTensor(const RankTensor& tensor) {
    const auto layered = LayeredNameOf(tensor.key);
    if (!layered) {
      const bool last = !tensor.key.starts_with("embedding.");
      return Add(last ? chunks_.size() - 1 : 0, {tensor.key}, tensor.dtype, tensor.shape,
                 tensor.ByteLength(), tensor.SegmentOf(rank_));
    }
    const uint64_t place = layered->layer / per_chunk_;
    const Layout& layout = shown_.layout();
    if (layered->before != kDecoder || place % layout.pp != rank_.pp ||
        place / layout.pp >= chunks_.size()) {
      return Fail(
          Error{ErrorCode::kUnsupported, "no stage of one decoder has it"}.OfParameter(tensor.key));
    }
    const size_t chunk = place / layout.pp;
    const std::string of = StrCat(kDecoder, layered->layer % per_chunk_, ".");
    if (layered->after.starts_with(kStacked)) return AddExperts(chunk, of, layered->after, tensor);
    return Add(chunk, NamesOf(of, layered->after), tensor.dtype, tensor.shape, tensor.ByteLength(),
               tensor.SegmentOf(rank_));
  }

  std::vector<std::string> NamesOf(const std::string& of, std::string_view after) const {
    std::vector<std::string> out;
    const bool attention = after.starts_with(kFusedNorm);
    const bool mlp = after.starts_with(kFusedMlpNorm);
    if ((attention || mlp) && modules_.local.value_or(true)) {
      out.push_back(StrCat(of, attention ? "input_layernorm." : "pre_mlp_layernorm.",
                           after.substr(attention ? kFusedNorm.size() : kFusedMlpNorm.size())));
    }
    if (!(attention || mlp) || !modules_.local.value_or(false)) {
      out.push_back(StrCat(of, after));
    }
    return out;
  }

  // Experts of a rank, one after the other in its tensor.
  Status AddExperts(size_t chunk, const std::string& of, std::string_view after,
                    const RankTensor& tensor) {
    const std::string_view rest = after.substr(kStacked.size());
    if (tensor.shape.empty() || tensor.shape.front() == 0) return {};
    const uint64_t experts = tensor.shape.front();
    const Shape shape(tensor.shape.begin() + 1, tensor.shape.end());
    const uint64_t elements = tensor.elements / experts;
    for (uint64_t e = 0; e < experts; ++e) {
      std::vector<std::string> keys;
      if (!modules_.grouped.value_or(false)) {
        keys.push_back(StrCat(of, "mlp.experts.local_experts.", e, ".", rest));
      }
      if (modules_.grouped.value_or(true)) keys.push_back(StrCat(of, "mlp.experts.", rest, e));
      const AtomSegment segment{tensor.atom, tensor.local, e * elements, (e + 1) * elements,
                                tensor.dtype};
      CKPT_RETURN_IF_ERROR(
          Add(chunk, keys, tensor.dtype, shape, elements * ByteWidth(tensor.dtype), segment));
    }
    return {};
  }

  // The last stage has the embedding once more, as its output layer.
  Status AddTiedHead() {
    RankCoordinate first = rank_;
    first.pp = 0;
    CKPT_ASSIGN_OR_RETURN(const RankTensors tensors, BuildRankTensors(shown_, first));
    for (const RankTensor& tensor : tensors.model) {
      if (tensor.key != kWords) continue;
      return Add(chunks_.size() - 1, {std::string(kHead)}, tensor.dtype, tensor.shape,
                 tensor.ByteLength(), tensor.SegmentOf(first));
    }
    return {};
  }

  // Linear layers keep something beside their tensors: None, for a strict reader.
  void AddObjects() {
    std::set<std::pair<size_t, std::string>> modules;
    for (const auto& [chunk, name] : names_) {
      const std::string module = name.substr(0, name.rfind('.'));
      const std::string_view last = std::string_view(module).substr(module.rfind('.') + 1);
      if (last.starts_with("linear_") || last == "output_layer") modules.emplace(chunk, module);
    }
    for (const auto& [chunk, module] : modules) {
      const NodeId key = archive_->pickle().String(StrCat(module, ".", kExtraState));
      chunks_[chunk].emplace_back(key, archive_->pickle().None());
    }
  }

  const ShownState& shown_;
  const RankCoordinate& rank_;
  ArchiveBuilder* archive_ = nullptr;
  Modules modules_;
  uint64_t per_chunk_ = 1;
  std::vector<std::vector<std::pair<NodeId, NodeId>>> chunks_;
  std::set<std::pair<size_t, std::string>> names_;
};

// The rows of the vocabulary that all tensor ranks have together, padding included.
Result<uint64_t> PaddedRows(const ShownState& shown) {
  RankCoordinate first;
  CKPT_ASSIGN_OR_RETURN(const RankTensors tensors, BuildRankTensors(shown, first));
  for (const RankTensor& tensor : tensors.model) {
    if (tensor.key == kWords && !tensor.shape.empty()) {
      return tensor.shape.front() * shown.layout().tp;
    }
  }
  return uint64_t{0};
}

}  // namespace

Status CheckLegacyLayout(const ShownState& shown) {
  const Layout& layout = shown.layout();
  const uint64_t chunks = uint64_t{layout.pp} * layout.vpp;
  if (!layout.split.empty() || LayersOf(shown.step()) % chunks != 0) {
    return Fail(ErrorCode::kUnsupported, StrCat("its ", LayersOf(shown.step()),
                                                " layers are not even on ", chunks, " stages"));
  }
  const auto experts = [](const Parameter& parameter) {
    return parameter.expert.has_value() || parameter.stacked_experts > 0;
  };
  if (layout.tp > 1 && std::ranges::any_of(shown.step().parameters, experts)) {
    return Fail(Error{
        ErrorCode::kUnsupported,
        StrCat("Megatron's tensor ranks cut each expert, which tp", layout.tp, " does not say")}
                    .Needing("leave tp out of the layout, or load megatron/"));
  }
  return {};
}

Result<ArchiveContent> RankContent(const ShownState& shown, const RankCoordinate& rank,
                                   std::string_view config) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t rows, PaddedRows(shown));
  const Layout& layout = shown.layout();
  CommonAdditions more;
  more.arguments = [&](PickleBuilder& pickle) {
    CommonAdditions::Entries out;
    out.emplace_back("untie_embeddings_and_output_weights", pickle.Bool(!IsTied(shown)));
    if (rows > 0) out.emplace_back("padded_vocab_size", pickle.Int(static_cast<int64_t>(rows)));
    out.emplace_back("virtual_pipeline_model_parallel_size",
                     layout.vpp > 1 ? pickle.Int(layout.vpp) : pickle.None());
    out.emplace_back("use_distributed_optimizer", pickle.Bool(false));
    out.emplace_back("ckpt_format", pickle.String("torch"));
    for (const char* name :
         {"decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
          "pipeline_model_parallel_layout"}) {
      out.emplace_back(name, pickle.None());
    }
    for (const char* name :
         {"account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"}) {
      out.emplace_back(name, pickle.Bool(false));
    }
    out.emplace_back("rank", pickle.Int(0));
    return out;
  };
  Writer writer(shown, rank);
  more.entries = [&](ArchiveBuilder& archive) { return writer.Write(archive); };
  return CommonFile(shown, std::nullopt, config, more);
}

}  // namespace ckptfs::megatron
