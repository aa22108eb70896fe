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
      {"multi_latent_attention", false, true},
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
      {"moe_layer_freq", 1, true},
      {"moe_router_score_function", "softmax", true},
      {"moe_router_num_groups", nullptr, true},
      {"moe_router_topk_scaling_factor", nullptr, true},
      {"moe_router_enable_expert_bias", false, true},
      {"moe_apply_probs_on_input", false, true},
      {"moe_latent_size", nullptr, true},
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
    if (experts) Check(NeededOfExperts());
    ChooseModel(experts);
    AddShapes(experts);
    if (!why_.empty()) return {"", why_};
    return {out_.dump(2) + "\n", ""};
  }

 private:
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
    const auto grouped = Flag("group_query_attention");
    out_["num_key_value_heads"] =
        grouped && *grouped ? Number({"num_query_groups"}) : Number({"num_attention_heads"});
    out_["head_dim"] = Number({"kv_channels"});
    out_["max_position_embeddings"] = Number({"max_position_embeddings"});
    out_["rms_norm_eps"] = Number({"norm_epsilon", "layernorm_epsilon"});
    const Json base = Number({"rotary_base"});
    out_["rope_theta"] = base;
    out_["rope_scaling"] = nullptr;
    out_["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", base}};
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
