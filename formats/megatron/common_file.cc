// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/common_file.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/state/model_config.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/megatron/dist_keys.h"
#include "formats/tools/config_text.h"
#include "formats/tools/source_traits.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kClient = "client/";

// A dict that is being made; the first value of a key stays.
class Fields {
 public:
  explicit Fields(PickleBuilder& pickle) : pickle_(pickle) {}

  bool Has(std::string_view key) const { return keys_.contains(key); }
  void Put(std::string_view key, NodeId value) {
    if (!keys_.emplace(key).second) return;
    const NodeId name = pickle_.String(key);
    items_.emplace_back(name, value);
  }
  void PutBool(std::string_view key, bool value) { Put(key, pickle_.Bool(value)); }
  void PutInt(std::string_view key, uint64_t value) {
    Put(key, pickle_.Int(static_cast<int64_t>(value)));
  }
  NodeId Dict() const { return pickle_.Dict(items_); }

 private:
  PickleBuilder& pickle_;
  std::vector<std::pair<NodeId, NodeId>> items_;
  std::set<std::string, std::less<>> keys_;
};

class Printer {
 public:
  Printer(const ShownState& shown, const std::optional<TargetGroups>& groups,
          std::string_view config, const CommonAdditions& more)
      : shown_(shown), step_(shown.step()), groups_(groups), config_(config), more_(more) {}

  Result<ArchiveContent> Print() && {
    CKPT_ASSIGN_OR_RETURN(samples_, Samples());
    Fields root(pickle());
    CKPT_ASSIGN_OR_RETURN(const NodeId arguments, Arguments());
    root.Put("args", arguments);
    root.Put("checkpoint_version", pickle().Float(3.0));
    root.PutInt("iteration", step_.iteration);
    CKPT_ASSIGN_OR_RETURN(const NodeId content, Content());
    root.Put("content_metadata", content);
    if (groups_) {
      CKPT_ASSIGN_OR_RETURN(const NodeId optimizer, PrintOptimizer(*groups_, pickle()));
      root.Put("optimizer", optimizer);
    }
    if (more_.entries) {
      CKPT_ASSIGN_OR_RETURN(const auto entries, more_.entries(archive_));
      for (const auto& [key, value] : entries) root.Put(key, value);
    }
    CKPT_RETURN_IF_ERROR(AddOthers(root));
    if (groups_ && samples_) root.Put("opt_param_scheduler", Schedule());
    return std::move(archive_).Finish(root.Dict());
  }

 private:
  PickleBuilder& pickle() { return archive_.pickle(); }
  bool OfMegatron() const { return TraitsOf(step_).mcore_state; }

  // The value that the source's own common state had under the key.
  const Document* Own(std::string_view key) const {
    return OfMegatron() ? step_.FindDocument(StrCat(kClient, key)) : nullptr;
  }

  // The other entries of a dict of the source.
  Status AddRest(const Document& document, PickleRef dict, Fields& fields) {
    for (const auto& [key, value] : dict.Items()) {
      const auto name = key.String();
      if (!name || fields.Has(*name)) continue;
      CKPT_ASSIGN_OR_RETURN(const NodeId copy, archive_.PartOf(document, value));
      fields.Put(*name, copy);
    }
    return {};
  }

  Result<NodeId> Arguments() {
    Fields fields(pickle());
    if (more_.arguments) {
      for (const auto& [name, value] : more_.arguments(pickle())) fields.Put(name, value);
    }
    AddDegrees(fields);
    fields.PutBool("no_save_rng", true);
    fields.PutBool("no_save_optim", !groups_.has_value());
    if (const Document* document = Own("args")) {
      CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
      const PickleRef root = RootOf(tree);
      const PickleRef state = root.IsDict() ? root : root.State();
      if (state && state.IsDict()) CKPT_RETURN_IF_ERROR(AddRest(*document, state, fields));
    }
    CKPT_RETURN_IF_ERROR(AddSizes(fields));
    if (samples_) fields.PutInt("consumed_train_samples", *samples_);
    const NodeId cls = pickle().Global("argparse", "Namespace");
    const NodeId none = pickle().Tuple({});
    return pickle().Object(cls, none, fields.Dict());
  }

  // The samples that a job of DeepSpeed had seen; no other job says it.
  Result<std::optional<uint64_t>> Samples() const {
    const Document* document =
        OfMegatron() ? nullptr : step_.FindDocument(deepspeed::kGlobalSamples);
    if (document == nullptr) return std::optional<uint64_t>();
    CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
    const auto samples = RootOf(tree).Int();
    return samples && *samples >= 0 ? std::optional(static_cast<uint64_t>(*samples)) : std::nullopt;
  }

  // Megatron counts a schedule's steps in samples.  The rest is not known: None is equal to no
  // argument of a job, which then says that it must override them (--override-opt-param-scheduler).
  NodeId Schedule() {
    Fields fields(pickle());
    fields.PutInt("num_steps", *samples_);
    for (const char* name :
         {"max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "start_wd",
          "end_wd", "wd_incr_steps", "wd_incr_style"}) {
      fields.Put(name, pickle().None());
    }
    return fields.Dict();
  }

  // Those of the layout: nothing in the directory depends on them.
  void AddDegrees(Fields& fields) {
    const Layout& layout = shown_.layout();
    fields.PutInt("tensor_model_parallel_size", layout.tp);
    fields.PutInt("pipeline_model_parallel_size", layout.pp);
    fields.PutInt("expert_model_parallel_size", layout.ep);
    fields.PutInt("expert_tensor_parallel_size", layout.ep > 1 ? layout.etp : layout.tp);
    fields.PutInt("context_parallel_size", layout.cp);
    fields.PutInt("data_parallel_size", layout.dp);
    fields.PutInt("world_size", uint64_t{layout.tp} * layout.pp * layout.dp * layout.cp);
    for (const char* name :
         {"virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
          "num_virtual_stages_per_pipeline_rank"}) {
      fields.Put(name, pickle().None());
    }
  }

  uint64_t LayersOfDecoder() const {
    uint64_t layers = 0;
    for (const Parameter& parameter : step_.parameters) {
      const auto layered = LayeredNameOf(parameter.name);
      const bool decoders = layered && layered->before == "decoder.layers.";
      if (decoders) layers = std::max(layers, layered->layer + 1);
    }
    return layers;
  }

  // The sizes that a job compares with its own, as far as config.json has them.
  Status AddSizes(Fields& fields) {
    if (config_.empty()) return {};
    CKPT_ASSIGN_OR_RETURN(const ConfigFacts facts, ReadConfigFacts(config_));
    CKPT_ASSIGN_OR_RETURN(const FamilyVariables sizes, ParseModelConfig(config_));
    const uint64_t layers = LayersOfDecoder();
    if (facts.layers && layers != 0 && *facts.layers != layers) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("config.json says that the model has ", *facts.layers,
                         " layers, but its tensors are of ", layers));
    }
    if (facts.layers) fields.PutInt("num_layers", *facts.layers);
    if (facts.hidden) fields.PutInt("hidden_size", *facts.hidden);
    constexpr std::pair<std::string_view, std::string_view> kSizes[] = {
        {"heads", "num_attention_heads"},
        {"kv_heads", "num_query_groups"},
        {"head_dim", "kv_channels"}};
    for (const auto& [ours, theirs] : kSizes) {
      const auto found = sizes.find(std::string(ours));
      if (found != sizes.end()) fields.PutInt(theirs, static_cast<uint64_t>(found->second));
    }
    return {};
  }

  Result<NodeId> Content() {
    constexpr std::string_view kForm = "distrib_optim_sharding_type";
    Fields fields(pickle());
    if (groups_) fields.Put(kForm, pickle().String("fully_reshardable"));
    fields.PutBool("chained_optim_avoid_prefix", true);
    if (const Document* document = Own("content_metadata")) {
      CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
      for (const auto& [key, value] : RootOf(tree).Items()) {
        const auto name = key.String();
        if (!name || *name == kForm) continue;
        CKPT_ASSIGN_OR_RETURN(const NodeId copy, archive_.PartOf(*document, value));
        fields.Put(*name, copy);
      }
    }
    fields.PutBool("singleton_local_shards", false);
    fields.PutBool("distrib_optim_fully_reshardable_mem_efficient", false);
    return fields.Dict();
  }

  Status AddOthers(Fields& root) {
    if (!OfMegatron()) return {};
    for (const Document& document : step_.documents) {
      std::string_view name = document.key;
      if (!name.starts_with(kClient) || !document.scope.empty()) continue;
      name.remove_prefix(kClient.size());
      if (root.Has(name)) continue;
      CKPT_ASSIGN_OR_RETURN(const NodeId value, archive_.Value(document));
      root.Put(name, value);
    }
    return {};
  }

  const ShownState& shown_;
  const StepModel& step_;
  const std::optional<TargetGroups>& groups_;
  const std::string_view config_;
  const CommonAdditions& more_;
  std::optional<uint64_t> samples_;
  ArchiveBuilder archive_;
};

}  // namespace

Result<ArchiveContent> CommonFile(const ShownState& shown,
                                  const std::optional<TargetGroups>& groups,
                                  std::string_view config, const CommonAdditions& more) {
  return Printer(shown, groups, config, more).Print();
}

}  // namespace ckptfs::megatron
