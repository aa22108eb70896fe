// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/args_config.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "core/base/strings.h"

namespace ckptfs::megatron {
namespace {

using Json = nlohmann::ordered_json;

// A value that an argument must have for a model of transformers to compute the same.
struct Needed {
  std::string_view name;
  Json value;
  bool absent = false;  // the cores that do not have it compute so
};

const std::vector<Needed>& AlwaysNeeded() {
  static const std::vector<Needed> needed = {
      {"normalization", "RMSNorm"},
      {"swiglu", true},
      {"add_bias_linear", false},
      {"position_embedding_type", "rope"},
      {"rotary_percent", 1.0},
      {"rotary_interleaved", false},
      {"apply_layernorm_1p", false},
      {"use_rope_scaling", false, true},
      {"rotary_seq_len_interpolation_factor", nullptr, true},
      {"attention_output_gate", false, true},
      {"window_size", nullptr, true},
      {"qk_l2_norm", false, true},
      {"no_rope_freq", nullptr, true},
      {"softmax_type", "vanilla", true},
      {"softmax_scale", nullptr, true},
      {"mtp_num_layers", nullptr, true},
      {"activation_func_clamp_value", nullptr, true},
      {"glu_linear_offset", 0.0, true},
      {"experimental_attention_variant", nullptr, true},
      {"apply_residual_connection_post_layernorm", false, true},
  };
  return needed;
}

const std::vector<Needed>& NeededOfExperts() {
  static const std::vector<Needed> needed = {
      {"moe_apply_probs_on_input", false, true},
      {"moe_latent_size", nullptr, true},
      {"moe_expert_capacity_factor", nullptr, true},
  };
  return needed;
}

const std::vector<Needed>& NeededOfSoftmax() {
  static const std::vector<Needed> needed = {
      {"moe_layer_freq", 1, true},
      {"moe_router_score_function", "softmax", true},
      {"moe_router_num_groups", nullptr, true},
      {"moe_router_topk_scaling_factor", nullptr, true},
      {"moe_router_enable_expert_bias", false, true},
  };
  return needed;
}

const std::vector<Needed>& NeededOfGroups() {
  static const std::vector<Needed> needed = {{"multi_latent_attention", false, true}};
  return needed;
}

// DeepSeek's attention, whose queries and keys come out of a small latent, and its experts.
const std::vector<Needed>& NeededOfLatents() {
  static const std::vector<Needed> needed = {
      {"multi_latent_attention", true},
      {"moe_router_score_function", "sigmoid"},
      {"moe_router_enable_expert_bias", true},
  };
  return needed;
}

// A plain value; nothing for another.
std::optional<Json> ValueOf(PickleRef value) {
  if (!value) return std::nullopt;
  if (value.IsNone()) return Json(nullptr);
  if (const auto flag = value.Bool()) return Json(*flag);
  if (const auto whole = value.Int()) return Json(*whole);
  if (const auto number = value.Number()) return Json(*number);
  if (const auto text = value.String()) return Json(std::string(*text));
  return std::nullopt;
}

bool Equal(const Json& one, const Json& other) {
  if (one.is_number() && other.is_number()) return one.get<double>() == other.get<double>();
  return one == other;
}

class ConfigMaker {
 public:
  ConfigMaker(PickleRef fields, const std::vector<StateDict::Tensor>& tensors)
      : fields_(fields), tensors_(tensors) {}

  MadeConfig Make() {
    Check(AlwaysNeeded());
    const bool experts = Has(".mlp.router.weight");
    if (experts) {
      Check(NeededOfExperts());
      CheckBalancing();
    }
    Has(".self_attention.linear_kv_down_proj.weight") ? MakeOfLatents(experts)
                                                      : MakeOfGroups(experts);
    if (!why_.empty()) return {"", why_};
    return {out_.dump(2) + "\n", ""};
  }

 private:
  void MakeOfGroups(bool experts) {
    Check(NeededOfGroups());
    if (experts) Check(NeededOfSoftmax());
    ChooseModel(experts);
    AddShapes(experts);
    AddGroups();
  }

  void MakeOfLatents(bool experts) {
    Check(NeededOfLatents());
    ChooseDeepSeek(experts);
    AddShapes(experts);
    AddLatents();
  }

  void Fail(std::string why) {
    if (why_.empty()) why_ = std::move(why);
  }

  void Check(const std::vector<Needed>& needed) {
    for (const Needed& one : needed) {
      const auto value = ValueOf(fields_[one.name]);
      if (!fields_[one.name] && one.absent) continue;
      if (!fields_[one.name]) Fail(StrCat("they do not say ", one.name));
      if (!value || !Equal(*value, one.value)) {
        Fail(StrCat(one.name, " is ", value ? value->dump() : "no plain value", ", not ",
                    one.value.dump()));
      }
    }
  }

  // Sinkhorn's weights of experts do not add up to one; other ways of balancing change losses
  // alone.
  void CheckBalancing() {
    const PickleRef type = fields_["moe_router_load_balancing_type"];
    const auto is = [](PickleRef one) { return one && one.String() == "sinkhorn"; };
    bool sinkhorn = is(type);
    for (size_t i = 0; type && type.IsSequence() && i < type.size(); ++i) {
      sinkhorn = sinkhorn || is(type.at(i));
    }
    if (sinkhorn) Fail("moe_router_load_balancing_type is sinkhorn");
  }

  bool Has(std::string_view ending) const {
    return std::ranges::any_of(
        tensors_, [&](const StateDict::Tensor& tensor) { return tensor.name.ends_with(ending); });
  }
  const StateDict::Tensor* Find(std::string_view name) const {
    const auto found = std::ranges::find(tensors_, name, &StateDict::Tensor::name);
    return found == tensors_.end() ? nullptr : &*found;
  }

  // The first of the names that the arguments have: a positive number.
  Json Number(std::initializer_list<std::string_view> names) {
    for (const std::string_view name : names) {
      const auto value = ValueOf(fields_[name]);
      if (value && value->is_number() && value->get<double>() > 0) return *value;
    }
    Fail(StrCat("they do not say ", *names.begin()));
    return nullptr;
  }
  std::optional<int64_t> Whole(std::string_view name) {
    constexpr int64_t kMost = 1 << 24;
    const auto value = fields_[name] ? fields_[name].Int() : std::nullopt;
    if (value && *value > 0 && *value <= kMost) return value;
    Fail(StrCat("they do not say ", name));
    return std::nullopt;
  }
  std::optional<bool> Flag(std::string_view name) {
    const auto value = fields_[name] ? fields_[name].Bool() : std::nullopt;
    if (!value) Fail(StrCat("they do not say ", name));
    return value;
  }

  // By what only this architecture has.
  void ChooseModel(bool experts) {
    const bool bias = Has(".self_attention.linear_qkv.bias");
    const bool norm = Has(".self_attention.q_layernorm.weight");
    const bool shared = Has(".mlp.shared_experts.linear_fc1.weight");
    const bool gated = Has(".mlp.shared_experts.gate_weight");
    const char* type = nullptr;
    const char* architecture = nullptr;
    const auto choose = [&](const char* a, const char* b) {
      type = a;
      architecture = b;
    };
    if (bias && norm) {
      Fail("no architecture of the table has both a bias and norms of queries and keys");
    } else if (!experts) {
      norm   ? choose("qwen3", "Qwen3ForCausalLM")
      : bias ? choose("qwen2", "Qwen2ForCausalLM")
             : choose("llama", "LlamaForCausalLM");
    } else if (norm && !shared) {
      choose("qwen3_moe", "Qwen3MoeForCausalLM");
    } else if (bias && shared && gated) {
      choose("qwen2_moe", "Qwen2MoeForCausalLM");
    } else if (!norm && !bias && !shared) {
      choose("mixtral", "MixtralForCausalLM");
    } else {
      Fail("no architecture of the table has these shared experts");
    }
    if (type == nullptr) return;
    out_["architectures"] = {architecture};
    out_["model_type"] = type;
    if (experts) AddExperts(type);
  }

  void AddExperts(std::string_view type) {
    const auto before = fields_["moe_router_pre_softmax"].Bool().value_or(false);
    const Json topk = Number({"moe_router_topk"});
    out_["num_experts_per_tok"] = topk;
    if (type == "mixtral") {
      if (before)
        Fail("moe_router_pre_softmax is true: Mixtral's weights of experts add up to one");
      out_["num_local_experts"] = Number({"num_experts"});
      out_["sliding_window"] = nullptr;
      return;
    }
    out_["num_experts"] = Number({"num_experts"});
    out_["norm_topk_prob"] = !before;
    out_["decoder_sparse_step"] = 1;
    out_["mlp_only_layers"] = Json::array();
    out_["moe_intermediate_size"] = Number({"moe_ffn_hidden_size", "ffn_hidden_size"});
    if (type == "qwen2_moe") {
      out_["shared_expert_intermediate_size"] = Number({"moe_shared_expert_intermediate_size"});
    }
  }

  void AddShapes(bool experts) {
    out_["hidden_act"] = "silu";
    out_["num_hidden_layers"] = Number({"num_layers"});
    out_["hidden_size"] = Number({"hidden_size"});
    const bool mixtral = experts && out_.value("model_type", "") == "mixtral";
    out_["intermediate_size"] =
        mixtral ? Number({"moe_ffn_hidden_size", "ffn_hidden_size"}) : Number({"ffn_hidden_size"});
    out_["num_attention_heads"] = Number({"num_attention_heads"});
    out_["max_position_embeddings"] = Number({"max_position_embeddings"});
    out_["rms_norm_eps"] = Number({"norm_epsilon", "layernorm_epsilon"});
    out_["rope_theta"] = Number({"rotary_base"});
    out_["rope_scaling"] = nullptr;
    out_["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", out_["rope_theta"]}};
    out_["attention_bias"] = false;
    if (out_.value("model_type", "") == "llama") out_["mlp_bias"] = false;
    if (out_.value("model_type", "").starts_with("qwen")) {
      out_["use_sliding_window"] = false;
      out_["sliding_window"] = nullptr;
    }
    if (out_.value("model_type", "") == "qwen2_moe") out_["qkv_bias"] = true;
    AddVocabulary();
    for (const char* id : {"bos_token_id", "eos_token_id", "pad_token_id"}) out_[id] = nullptr;
  }

  void AddGroups() {
    const auto grouped = Flag("group_query_attention");
    out_["num_key_value_heads"] =
        grouped && *grouped ? Number({"num_query_groups"}) : Number({"num_attention_heads"});
    out_["head_dim"] = Number({"kv_channels"});
  }

  void ChooseDeepSeek(bool experts) {
    if (!experts || !Has(".mlp.shared_experts.linear_fc1.weight") ||
        Has(".mlp.shared_experts.gate_weight")) {
      return Fail("no architecture of the table has latent attention with these experts");
    }
    out_["architectures"] = {"DeepseekV3ForCausalLM"};
    out_["model_type"] = "deepseek_v3";
    out_["n_routed_experts"] = Number({"num_experts"});
    out_["moe_intermediate_size"] = Number({"moe_ffn_hidden_size"});
    const auto shared = Whole("moe_shared_expert_intermediate_size");
    const auto one = Whole("moe_ffn_hidden_size");
    if (shared && one) {
      if (*shared % *one != 0) {
        Fail("moe_shared_expert_intermediate_size is not a multiple of moe_ffn_hidden_size");
      }
      out_["n_shared_experts"] = *shared / *one;
    }
    AddDenseLayers();
    AddRouter();
  }

  // Layers without experts come first: `moe_layer_freq` is 1, or [0, 0, 1, ...] of all layers.
  void AddDenseLayers() {
    constexpr std::string_view kFrequency = "moe_layer_freq";
    const PickleRef list = fields_[kFrequency];
    size_t dense = 0;
    if (list && list.IsSequence()) {
      while (dense < list.size() && list.at(dense).Int() == 0) ++dense;
      for (size_t i = dense; i < list.size(); ++i) {
        if (list.at(i).Int() != 1) Fail("moe_layer_freq has dense layers between others");
      }
      if (Json(list.size()) != Number({"num_layers"})) Fail("moe_layer_freq is not of all layers");
    } else if (list && list.Int() != 1) {
      Fail("moe_layer_freq is neither 1 nor a list");
    }
    out_["first_k_dense_replace"] = dense;
  }

  // transformers chooses groups by the sum of their best two experts, Megatron by the sum of the
  // best topk / group_topk.
  void AddRouter() {
    const auto topk = Whole("moe_router_topk");
    out_["num_experts_per_tok"] = topk.value_or(0);
    out_["norm_topk_prob"] = topk.value_or(0) > 1;
    out_["n_group"] = 1;
    out_["topk_group"] = 1;
    if (fields_["moe_router_group_topk"] && !fields_["moe_router_group_topk"].IsNone()) {
      const auto groups = Whole("moe_router_group_topk");
      out_["n_group"] = Number({"moe_router_num_groups"});
      out_["topk_group"] = groups.value_or(0);
      if (topk && groups && *topk / *groups != 2) {
        Fail(StrCat("moe_router_topk is ", *topk, " and moe_router_group_topk ", *groups,
                    ": DeepSeek's groups are chosen by their best two experts"));
      }
    }
    const PickleRef factor = fields_["moe_router_topk_scaling_factor"];
    out_["routed_scaling_factor"] =
        factor && !factor.IsNone() ? Number({"moe_router_topk_scaling_factor"}) : Json(1.0);
  }

  void AddLatents() {
    const auto heads = Whole("num_attention_heads");
    const auto nope = Whole("qk_head_dim");
    const auto rope = Whole("qk_pos_emb_head_dim");
    const auto value = Whole("v_head_dim");
    const auto latent = Whole("kv_lora_rank");
    if (!heads || !nope || !rope || !value || !latent) return;
    const bool low = Has(".self_attention.linear_q_down_proj.weight");
    const char* const queries = low ? ".linear_q_up_proj.weight" : ".linear_q_proj.weight";
    CheckSize(queries, 2, *heads * (*nope + *rope));
    CheckSize(".linear_kv_up_proj.weight", 2, *heads * (*nope + *value));
    CheckSize(".linear_kv_down_proj.weight", 2, *latent + *rope);
    CheckSize(".self_attention.linear_proj.weight", 1, *heads * *value);
    out_["num_key_value_heads"] = *heads;
    out_["qk_nope_head_dim"] = *nope;
    out_["qk_rope_head_dim"] = *rope;
    out_["v_head_dim"] = *value;
    out_["kv_lora_rank"] = *latent;
    out_["q_lora_rank"] = low ? Number({"q_lora_rank"}) : Json(nullptr);
    out_["rope_interleave"] = true;
    if (!Equal(out_["rms_norm_eps"], 1e-6)) {
      Fail(StrCat("norm_epsilon is ", out_["rms_norm_eps"].dump(),
                  ": transformers' norms of latents have 1e-06"));
    }
    AddRope();
  }

  // Where the arguments have no word for a setting, the core takes its configuration's default
  // (MLATransformerConfig of 0.16.1).
  void AddRope() {
    const auto type = fields_["rope_type"] ? fields_["rope_type"].String() : std::nullopt;
    const auto number = [&](std::string_view name, Json other) {
      const auto given = ValueOf(fields_[name]);
      return given && given->is_number() ? *given : other;
    };
    const Json all = number("mscale_all_dim", 0.0);
    if (type == "rope" && Equal(all, 0)) return;
    if (type == "rope") return Fail("mscale_all_dim is not 0 with rope_type rope");
    if (type != "yarn") return Fail("rope_type is neither rope nor yarn");
    const Json scale = number("mscale", 1.0);
    if (Equal(all, 0) && !Equal(scale, 1)) Fail("mscale is not 1 and mscale_all_dim 0");
    out_["rope_parameters"] = {
        {"rope_type", "yarn"},
        {"rope_theta", out_["rope_theta"]},
        {"factor", Number({"rotary_scaling_factor"})},
        {"original_max_position_embeddings", number("original_max_position_embeddings", 4096)},
        {"beta_fast", number("beta_fast", 32)},
        {"beta_slow", number("beta_slow", 1)},
        {"mscale", scale},
        {"mscale_all_dim", all}};
    out_["rope_scaling"] = out_["rope_parameters"];
    out_["rope_scaling"]["type"] = "yarn";
  }

  // The dimension, counted from the last, of the first tensor of the ending is so long.
  void CheckSize(std::string_view ending, size_t from_last, int64_t elements) {
    const auto found = std::ranges::find_if(
        tensors_, [&](const StateDict::Tensor& tensor) { return tensor.name.ends_with(ending); });
    if (found == tensors_.end() || found->shape.size() < from_last) return;
    const uint64_t size = found->shape[found->shape.size() - from_last];
    if (size == static_cast<uint64_t>(elements)) return;
    Fail(StrCat("a dimension of '", found->name, "' is ", size, ", but by the arguments ",
                elements));
  }

  void AddVocabulary() {
    const StateDict::Tensor* embedding = Find("embedding.word_embeddings.weight");
    const bool whole = embedding != nullptr && embedding->shape.size() == 2;
    if (!whole) return Fail("there is no embedding of words");
    if (!Equal(out_["hidden_size"], embedding->shape[1])) {
      return Fail(
          StrCat("hidden_size is not that of the embedding, ", ShapeToString(embedding->shape)));
    }
    out_["vocab_size"] = embedding->shape[0];
    const bool untied = Find("output_layer.weight") != nullptr;
    const auto said = Flag("untie_embeddings_and_output_weights");
    if (said && *said != untied) {
      Fail(StrCat("untie_embeddings_and_output_weights is ", *said ? "true" : "false", ", but ",
                  untied ? "there is an output layer" : "there is no output layer"));
    }
    out_["tie_word_embeddings"] = !untied;
    const DType dtype = embedding->dtype;
    if (IsFloat(dtype)) out_["dtype"] = std::string(TorchName(dtype));
  }

  const PickleRef fields_;
  const std::vector<StateDict::Tensor>& tensors_;
  Json out_;
  std::string why_;
};

}  // namespace

MadeConfig ConfigOfArguments(PickleRef args, const std::vector<StateDict::Tensor>& tensors) {
  const PickleRef fields = !args ? PickleRef() : args.IsDict() ? args : args.State();
  if (!fields || !fields.IsDict()) return {"", "the checkpoint does not hold them"};
  return ConfigMaker(fields, tensors).Make();
}

}  // namespace ckptfs::megatron
