// SPDX-License-Identifier: Apache-2.0
#include "core/model/family.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "core/base/strings.h"
#include "core/model/expression.h"
#include "core/model/name_template.h"
#include "formats/families/shipped.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

bool Matches(std::string_view text, std::string_view name, std::optional<uint32_t> layers = {}) {
  auto parsed = NameTemplate::Parse(text);
  EXPECT_TRUE(parsed) << parsed.error().message;
  return parsed && parsed->Match(name, layers).has_value();
}

TEST(NameTemplateTest, MatchesWholeNames) {
  EXPECT_TRUE(Matches("a.b", "a.b"));
  EXPECT_FALSE(Matches("a.b", "a.bc"));
  EXPECT_FALSE(Matches("a.b", "za.b"));
  EXPECT_TRUE(Matches("a.*.c", "a.b.c"));
  EXPECT_FALSE(Matches("a.*.c", "a.b.b.c"));
  EXPECT_TRUE(Matches("a.**.c", "a.b.b.c"));
  EXPECT_TRUE(Matches("**", "x.y"));
  EXPECT_TRUE(Matches("x.{weight|bias}", "x.bias"));
  EXPECT_FALSE(Matches("x.{weight|bias}", "x.biases"));
  EXPECT_TRUE(Matches("{|rotary.}f", "f"));
  EXPECT_TRUE(Matches("{a|ab}c", "abc"));  // the first word that fits is not the last tried
  EXPECT_TRUE(Matches("h.{#}.w", "h.12.w"));
  EXPECT_FALSE(Matches("h.{#}.w", "h..w"));
  EXPECT_FALSE(Matches("h.{layer}.w", "h.01.w"));  // no such spelling of a layer
  EXPECT_FALSE(Matches("h.{layer}.w", "h.99999999999.w"));
}

TEST(NameTemplateTest, CountsLayersFromTheOffset) {
  auto parsed = NameTemplate::Parse("{layer+1}.{rest}");
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->Match("3.mlp.w", 3)->layer, 2u);
  EXPECT_EQ(parsed->Match("3.mlp.w", 3)->rest, "mlp.w");
  EXPECT_FALSE(parsed->Match("0.w", 3));
  EXPECT_FALSE(parsed->Match("4.w", 3));
  EXPECT_TRUE(parsed->Match("4.w", std::nullopt));
  EXPECT_TRUE(Matches("{layers+1}.w", "4.w", 3));
  EXPECT_FALSE(Matches("{layers+1}.w", "3.w", 3));
  EXPECT_FALSE(Matches("{layers+1}.w", "4.w"));
}

TEST(NameTemplateTest, TakesNoExponentialTime) {
  std::string text;
  for (int i = 0; i < 30; ++i) text += "**a";
  const std::string name(1000, 'a');
  EXPECT_FALSE(Matches(text + "b", name));
  EXPECT_FALSE(Matches("**", std::string(5000, 'a')));  // longer than any name
}

TEST(NameTemplateTest, RefusesWhatIsNoTemplate) {
  for (const char* text : {"", "{", "{unknown}", "{layer-1}", "{layer+}", "{layer}.{layer}"}) {
    EXPECT_FALSE(NameTemplate::Parse(text)) << text;
  }
  EXPECT_FALSE(NameTemplate::Parse(std::string(600, 'a')));
}

int64_t Value(std::string_view text) {
  auto parsed = Expression::Parse(text);
  if (!parsed) return -1;
  auto value = parsed->Evaluate({{"heads", 8}, {"head_dim", 6}});
  return value ? *value : -2;
}

TEST(ExpressionTest, Evaluates) {
  EXPECT_EQ(Value("heads * head_dim"), 48);
  EXPECT_EQ(Value("(heads + 2*2) * head_dim / 2"), 36);
  EXPECT_EQ(Value("7-2-1"), 4);
  EXPECT_EQ(Value("8/2/2"), 2);
}

TEST(ExpressionTest, RefusesWhatHasNoValue) {
  EXPECT_EQ(Value(""), -1);
  EXPECT_EQ(Value("1 +"), -1);
  EXPECT_EQ(Value("(1"), -1);
  EXPECT_EQ(Value("1 2"), -1);
  EXPECT_EQ(Value("2x"), -1);
  EXPECT_EQ(Value(std::string(40, '(') + "1" + std::string(40, ')')), -1);
  EXPECT_EQ(Value("99999999999999999999"), -1);
  EXPECT_EQ(Value("7 / 2"), -2);
  EXPECT_EQ(Value("1 / (heads - 8)"), -2);
  EXPECT_EQ(Value("unknown"), -2);
  EXPECT_EQ(Value("9223372036854775807 * heads"), -2);
}

// ---- families ----------------------------------------------------------------

using NamedShape = std::pair<std::string, Shape>;

// The same on each of `degree` ranks, derived from.
Result<FamilyVariables> DeriveFrom(const Family& family, const std::vector<NamedShape>& shapes,
                                   size_t degree, const FamilyVariables& given) {
  std::vector<NamedLocals> parameters;
  for (const auto& [name, shape] : shapes) {
    parameters.emplace_back(name, std::vector<Shape>(degree, shape));
  }
  return family.Derive(parameters, given);
}

FamilyVariables Derived(const Family& family, const std::vector<NamedShape>& shapes,
                        size_t degree = 1, const FamilyVariables& given = {}) {
  auto variables = DeriveFrom(family, shapes, degree, given);
  EXPECT_TRUE(variables) << variables.error().message;
  return variables.value_or(FamilyVariables{});
}

// The model of tests/fixtures/deepspeed: 3 layers, 8 heads, 4 kv heads of 6.
std::vector<NamedShape> FixtureModel() {
  std::vector<NamedShape> model = {{"model.embed_tokens.weight", {499, 56}},
                                   {"model.norm.weight", {56}},
                                   {"lm_head.weight", {499, 56}}};
  for (int layer = 0; layer < 3; ++layer) {
    const std::string prefix = StrCat("model.layers.", layer, ".");
    model.emplace_back(prefix + "input_layernorm.weight", Shape{56});
    model.emplace_back(prefix + "self_attn.qkv_proj.weight", Shape{96, 56});
    model.emplace_back(prefix + "self_attn.qkv_proj.bias", Shape{96});
    model.emplace_back(prefix + "self_attn.o_proj.weight", Shape{56, 48});
    model.emplace_back(prefix + "self_attn.inv_freq", Shape{3});
    model.emplace_back(prefix + "post_attention_layernorm.weight", Shape{56});
    model.emplace_back(prefix + "mlp.gate_up_proj.weight", Shape{168, 56});
    model.emplace_back(prefix + "mlp.down_proj.weight", Shape{56, 84});
  }
  return model;
}

std::vector<std::string> Names(const std::vector<NamedShape>& model) {
  std::vector<std::string> names;
  for (const auto& [name, shape] : model) names.push_back(name);
  return names;
}

const FamilySet& Shipped() {
  static const FamilySet* const set = [] {
    auto made = ShippedFamilies();
    if (!made) std::fprintf(stderr, "%s\n", made.error().message.c_str());
    return new FamilySet(*std::move(made));
  }();
  return *set;
}

RuleMatch MatchOf(const Family& family, std::string_view name, const FamilyVariables& variables) {
  auto match = family.Match(name, variables);
  EXPECT_TRUE(match && *match) << name;
  return match && *match ? **match : RuleMatch{};
}

TEST(FamilyTest, ShippedFamiliesParse) {
  const auto set = ShippedFamilies();
  ASSERT_TRUE(set) << set.error().message;
  for (const char* name : {"llama", "llama_fused", "gpt2", "gpt_neox", "megatron_deepspeed"}) {
    EXPECT_NE(set->Find(name), nullptr) << name;
  }
  EXPECT_EQ(set->Find("none"), nullptr);
}

TEST(FamilyTest, CoversTheFixtureModelAndReadsItsSizesOffShapes) {
  const auto model = FixtureModel();
  const Family* family = Shipped().Choose(Names(model));
  ASSERT_NE(family, nullptr);
  EXPECT_EQ(family->name(), "llama_fused");
  EXPECT_EQ(family->CountMatches(Names(model)), model.size());
  const FamilyVariables variables = Derived(*family, model);
  EXPECT_EQ(variables.at("layers"), 3);
  EXPECT_EQ(variables.at("q_rows"), 48);
  EXPECT_EQ(variables.at("qkv_rows"), 96);
  EXPECT_EQ(variables.at("ffn"), 84);
  for (const auto& [name, shape] : model) {
    const RuleMatch match = MatchOf(*family, name, variables);
    EXPECT_EQ(match.missing, match.only_unit ? "head_dim" : "") << name;
    for (uint64_t degree : {1, 2, 4}) {
      auto local = MakeLocal(match.pattern, shape, degree - 1, degree);
      EXPECT_TRUE(local) << name << " " << local.error().message;
    }
  }
  const RuleMatch qkv = MatchOf(*family, "model.layers.2.self_attn.qkv_proj.bias", variables);
  EXPECT_EQ(qkv.pattern.cuts[0].parts, (std::vector<uint64_t>{48, 24, 24}));
  EXPECT_EQ(qkv.pattern.cuts[0].unit, 0u);  // nothing tells a head's rows
  EXPECT_EQ(qkv.layer, 2u);
  EXPECT_EQ(qkv.stage, StageRule::kLayer);
  EXPECT_EQ(MatchOf(*family, "lm_head.weight", variables).stage, StageRule::kLast);
  EXPECT_EQ(MatchOf(*family, "model.embed_tokens.weight", variables).pattern.cuts[0].pad_multiple,
            8u);
}

TEST(FamilyTest, ReadsWholeSizesOffTheShapesOfOneRank) {
  const Family* family = Shipped().Find("llama_fused");
  const std::vector<NamedShape> rank = {{"model.layers.0.self_attn.o_proj.weight", {56, 24}},
                                        {"model.layers.0.self_attn.qkv_proj.weight", {48, 56}},
                                        {"model.layers.0.mlp.down_proj.weight", {56, 42}}};
  const FamilyVariables variables = Derived(*family, rank, 2, {{"ffn", 100}});
  EXPECT_EQ(variables.at("q_rows"), 48);
  EXPECT_EQ(variables.at("qkv_rows"), 96);
  EXPECT_EQ(variables.at("ffn"), 100);  // a given size is never overruled
}

TEST(FamilyTest, MissingVariablesLeaveThePatternOpenAndAreNamed) {
  const Family* family = Shipped().Find("llama_fused");
  const RuleMatch match = MatchOf(*family, "model.layers.1.self_attn.qkv_proj.weight", {});
  EXPECT_EQ(match.pattern.kind, PatternKind::kUnknown);
  EXPECT_EQ(match.missing, "q_rows, qkv_rows, head_dim");
  EXPECT_FALSE(match.only_unit);
  EXPECT_EQ(match.layer, 1u);
}

TEST(FamilyTest, AVocabularyOfKnownSizeIsOnePartOfIt) {
  const Family* family = Shipped().Find("llama_fused");
  const RuleMatch match = MatchOf(*family, "lm_head.weight", {{"vocab", 499}});
  EXPECT_EQ(match.pattern.cuts[0].parts, (std::vector<uint64_t>{499}));
}

TEST(FamilyTest, RenamesBetweenPlainAndPipe) {
  const Family* family = Shipped().Find("llama_fused");
  auto pipe = [&](const char* name, bool tied) {
    return family->Rename(name, Naming::kPipe, 3, tied).value_or("none");
  };
  auto plain = [&](const char* name) {
    return family->Rename(name, Naming::kPlain, 3, false).value_or("none");
  };
  EXPECT_EQ(pipe("model.embed_tokens.weight", false), "0.weight");
  EXPECT_EQ(pipe("model.embed_tokens.weight", true), "tied_modules.embed.weight");
  EXPECT_EQ(pipe("model.layers.2.mlp.down_proj.weight", false), "3.mlp.down_proj.weight");
  EXPECT_EQ(pipe("model.norm.weight", false), "4.weight");
  EXPECT_EQ(pipe("lm_head.weight", false), "5.weight");
  EXPECT_EQ(pipe("lm_head.weight", true), "none");
  EXPECT_EQ(pipe("other.weight", false), "none");
  EXPECT_EQ(pipe("3.mlp.down_proj.weight", false), "3.mlp.down_proj.weight");  // is so already
  EXPECT_EQ(plain("0.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(plain("tied_modules.embed.weight"), "model.embed_tokens.weight");
  EXPECT_EQ(plain("3.mlp.down_proj.weight"), "model.layers.2.mlp.down_proj.weight");
  EXPECT_EQ(plain("4.weight"), "model.norm.weight");
  EXPECT_EQ(plain("5.weight"), "lm_head.weight");
  EXPECT_EQ(plain("6.weight"), "none");
  EXPECT_EQ(plain("model.norm.weight"), "model.norm.weight");
}

TEST(FamilyTest, RulesCoverThePipelinesSpellingToo) {
  const Family* family = Shipped().Find("llama_fused");
  std::vector<NamedShape> pipe;
  for (const auto& [name, shape] : FixtureModel()) {
    pipe.emplace_back(*family->Rename(name, Naming::kPipe, 3, false), shape);
  }
  EXPECT_EQ(Shipped().Choose(Names(pipe)), family);
  EXPECT_EQ(family->CountMatches(Names(pipe)), pipe.size());
  const FamilyVariables variables = Derived(*family, pipe);
  EXPECT_EQ(variables.at("layers"), 3);
  EXPECT_EQ(variables.at("q_rows"), 48);
  EXPECT_EQ(MatchOf(*family, "0.weight", variables).stage, StageRule::kFirst);
  EXPECT_EQ(MatchOf(*family, "4.weight", variables).pattern.kind, PatternKind::kReplicate);
  EXPECT_EQ(MatchOf(*family, "5.weight", variables).stage, StageRule::kLast);
  EXPECT_EQ(MatchOf(*family, "3.self_attn.qkv_proj.weight", variables).layer, 2u);
  EXPECT_EQ(MatchOf(*family, "tied_modules.embed.weight", variables).stage, StageRule::kFirstLast);
}

TEST(FamilyTest, ExpertsAreNumbered) {
  const Family* family = Shipped().Find("llama_fused");
  const RuleMatch match = MatchOf(
      *family, "model.layers.1.mlp.deepspeed_moe.experts.deepspeed_experts.3.down_proj.weight", {});
  EXPECT_EQ(match.expert, 3u);
  EXPECT_EQ(match.expert_at,
            sizeof("model.layers.1.mlp.deepspeed_moe.experts.deepspeed_experts.") - 1);
  EXPECT_EQ(match.pattern.kind, PatternKind::kUnique);
  // In the pipeline's spelling it stands elsewhere.
  const std::string pipe = "2.mlp.deepspeed_moe.experts.deepspeed_experts.3.down_proj.weight";
  const RuleMatch other = MatchOf(*family, pipe, {});
  EXPECT_EQ(other.expert, 3u);
  EXPECT_EQ(pipe.substr(other.expert_at), "3.down_proj.weight");
}

TEST(FamilyTest, ConditionsTellSwigluFromGelu) {
  const Family* family = Shipped().Find("megatron_deepspeed");
  const std::string fc1 = "language_model.encoder.layers.0.mlp.dense_h_to_4h.weight";
  const std::string fc2 = "language_model.encoder.layers.0.mlp.dense_4h_to_h.weight";
  const auto gelu = Derived(*family, {{fc1, {64, 16}}, {fc2, {16, 64}}});
  EXPECT_EQ(MatchOf(*family, fc1, gelu).pattern, Pattern::Shard(0));
  const auto swiglu = Derived(*family, {{fc1, {64, 16}}, {fc2, {16, 32}}});
  EXPECT_EQ(MatchOf(*family, fc1, swiglu).pattern, Pattern::Shard(0, {32, 32}));
}

TEST(FamilyTest, OtherShippedFamiliesAreChosenByTheirNames) {
  const std::vector<std::string> neox = {"gpt_neox.embed_in.weight",
                                         "gpt_neox.layers.0.attention.query_key_value.weight"};
  ASSERT_NE(Shipped().Choose(neox), nullptr);
  EXPECT_EQ(Shipped().Choose(neox)->name(), "gpt_neox");
  const std::vector<std::string> gpt2 = {"transformer.h.0.attn.c_attn.weight"};
  EXPECT_EQ(Shipped().Choose(gpt2)->name(), "gpt2");
  const std::vector<std::string> llama = {"model.layers.0.self_attn.q_proj.weight"};
  EXPECT_EQ(Shipped().Choose(llama)->name(), "llama");
  const std::vector<std::string> none = {"encoder.block.0.weird"};
  EXPECT_EQ(Shipped().Choose(none), nullptr);
}

TEST(FamilyTest, HeadsTellTheRowsThatStayTogether) {
  const Family* llama = Shipped().Find("llama");
  const std::string q = "model.layers.0.self_attn.q_proj.weight";
  const std::string k = "model.layers.0.self_attn.k_proj.weight";
  const std::vector<NamedShape> shapes = {{q, {64, 8}}, {k, {32, 8}}};
  const auto unit = [&](const FamilyVariables& given) {
    return MatchOf(*llama, k, Derived(*llama, shapes, 1, given)).pattern.cuts[0].unit;
  };
  EXPECT_EQ(unit({{"heads", 4}, {"kv_heads", 2}}), 16u);
  EXPECT_EQ(unit({{"head_dim", 16}}), 16u);
  EXPECT_EQ(unit({}), 0u);
  EXPECT_EQ(MatchOf(*llama, k, Derived(*llama, shapes)).missing, "head_dim");
  EXPECT_TRUE(MatchOf(*llama, k, Derived(*llama, shapes)).only_unit);
  // The ranks' own extents together, however uneven the cut.
  const auto uneven = llama->Derive(
      std::vector<NamedLocals>{{q, {{32, 8}, {16, 8}, {16, 8}}}, {k, {{16, 8}, {16, 8}, {0, 8}}}},
      {{"heads", 4}, {"kv_heads", 2}});
  ASSERT_TRUE(uneven) << uneven.error().message;
  EXPECT_EQ(uneven->at("head_dim"), 16);
}

TEST(FamilyTest, NumbersThatContradictTheShapesAreRefused) {
  const Family* llama = Shipped().Find("llama");
  const std::vector<NamedShape> shapes = {{"model.layers.0.self_attn.q_proj.weight", {64, 8}},
                                          {"model.layers.0.self_attn.k_proj.weight", {32, 8}}};
  const auto refusal = [&](const FamilyVariables& given) {
    const auto variables = DeriveFrom(*llama, shapes, 1, given);
    return variables ? "accepted" : variables.error().message;
  };
  EXPECT_EQ(refusal({{"heads", 4}, {"kv_heads", 2}}), "accepted");
  EXPECT_THAT(refusal({{"heads", 4}, {"head_dim", 8}}),
              HasSubstr("heads * head_dim is not q_rows (heads = 4, head_dim = 8, q_rows = 64)"));
  EXPECT_THAT(refusal({{"heads", 4}, {"kv_heads", 4}}), HasSubstr("kv_rows = 32"));
  EXPECT_THAT(refusal({{"heads", 3}}), HasSubstr("head_dim = q_rows / heads"));
  EXPECT_THAT(refusal({{"heads", INT64_MAX}, {"head_dim", INT64_MAX}}), HasSubstr("heads"));
}

TEST(FamilyTest, NormsOverAllHeadsAreNotTakenForAHeadsNorm) {
  const Family* llama = Shipped().Find("llama");
  const std::string norm = "model.layers.0.self_attn.q_norm.weight";
  const std::vector<NamedShape> shapes = {{"model.layers.0.self_attn.q_proj.weight", {64, 8}},
                                          {norm, {64}}};
  const auto match = llama->Match(norm, Derived(*llama, shapes, 1, {{"heads", 4}}));
  ASSERT_TRUE(match);
  EXPECT_FALSE(*match);
  EXPECT_EQ(MatchOf(*llama, norm, Derived(*llama, {shapes[0], {norm, {16}}})).pattern,
            Pattern::Replicate());
}

TEST(FamilyTest, MegatronsQueryGroupsStayTogether) {
  const Family* family = Shipped().Find("megatron_deepspeed");
  const std::string qkv = "language_model.encoder.layers.0.self_attention.query_key_value.weight";
  const std::string dense = "language_model.encoder.layers.0.self_attention.dense.weight";
  const std::vector<NamedShape> shapes = {{qkv, {64, 8}},
                                          {dense, {8, 32}}};  // 4 heads of 8, 2 groups
  const auto sizes = Derived(*family, shapes, 1, {{"heads", 4}, {"kv_heads", 2}});
  EXPECT_EQ(MatchOf(*family, qkv, sizes).pattern.cuts[0].unit, 32u);
  EXPECT_EQ(MatchOf(*family, dense, sizes).pattern.cuts[0].unit, 16u);
  EXPECT_FALSE(DeriveFrom(*family, shapes, 1, {{"heads", 4}}));  // four groups would have 96 rows
}

TEST(FamilyTest, RulesLookThroughWrappersNames) {
  const Family* llama = Shipped().Find("llama");
  const std::vector<std::string> names = {
      "module.model.layers.0.self_attn.q_proj.weight",
      "base_model.model.model.layers.0.self_attn.k_proj.base_layer.weight",
      "_orig_mod.model.norm.weight", "base_model.model.lm_head.modules_to_save.default.weight"};
  EXPECT_EQ(Shipped().Choose(names), llama);
  EXPECT_EQ(llama->CountMatches(names), names.size());
  EXPECT_EQ(MatchOf(*llama, names[2], {}).pattern, Pattern::Replicate());
}

// A script's own module keeps the model in an attribute: Lightning's self.model.
TEST(FamilyTest, AFamilyIsFoundBelowAModule) {
  const auto below = [](const std::vector<std::string>& names) {
    const FamilyBelow found = Shipped().ChooseBelow(names);
    return found.family == nullptr
               ? ""
               : found.family->name() + " " + found.below + " " + std::to_string(found.covered);
  };
  const std::vector<std::string> plain = {"model.layers.0.self_attn.q_proj.weight",
                                          "model.norm.weight", "lm_head.weight"};
  EXPECT_EQ(below(plain), "llama  3");
  std::vector<std::string> inner;
  for (const std::string& name : plain) inner.push_back("model." + name);
  EXPECT_EQ(below(inner), "llama model. 3");
  for (std::string& name : inner) name = "module.policy." + name;  // DDP's, and a second module
  inner.push_back("module.policy.value.weight");
  EXPECT_EQ(below(inner), "llama policy.model. 3");
  EXPECT_EQ(below({"a.b.c.d", "x"}), "");
}

TEST(FamilyTest, AnExpertBelowAModuleIsWhereItStandsInTheWholeName) {
  const std::string name = "net.model.layers.2.mlp.experts.11.gate_proj.weight";
  const auto match = Shipped().Find("llama")->Match(name, {}, "net.");
  ASSERT_TRUE(match && *match);
  EXPECT_EQ((*match)->layer, 2u);
  EXPECT_EQ((*match)->expert, 11u);
  EXPECT_EQ((*match)->expert_at, name.find("11"));
}

TEST(FamilyTest, ItsTextMakesAnEqualFamily) {
  const Family* llama = Shipped().Find("llama");
  const auto again = Family::Parse(llama->text(), "kept");
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->name(), "llama");
  EXPECT_EQ(again->text(), llama->text());
  EXPECT_EQ(llama->Mentioned({{"head_dim", 16}, {"seed", 7}, {"layers", 2}}),
            (FamilyVariables{{"head_dim", 16}, {"layers", 2}}));
}

std::string Refusal(std::string_view toml) {
  auto family = Family::Parse(toml, "my.toml");
  return family ? "accepted" : family.error().message;
}

TEST(FamilyTest, RefusesWithFileLineAndRule) {
  EXPECT_THAT(Refusal("name = "), HasSubstr("my.toml:1"));
  EXPECT_THAT(Refusal("[variables]\na = 1"), HasSubstr("'name' is missing"));
  const std::string head = "name = 'x'\n";
  EXPECT_EQ(Refusal(head), "accepted");
  EXPECT_THAT(Refusal(head + "[[rule]]\nmatch = 'a'\npatern = 'row'"), HasSubstr("my.toml:4"));
  EXPECT_THAT(Refusal(head + "[[rule]]\nmatch = 'a'\npattern = 'diagonal'"), HasSubstr("pattern"));
  EXPECT_THAT(Refusal(head + "[[rule]]\npattern = 'row'"), HasSubstr("'match' is missing"));
  EXPECT_THAT(Refusal(head + "[[rule]]\nmatch = '{layer'\npattern = 'row'"), HasSubstr("'}'"));
  EXPECT_THAT(Refusal(head + "[[rule]]\nmatch='a'\npattern='row'\nparts=['1+']"),
              HasSubstr("expression"));
  EXPECT_THAT(Refusal(head + "[[rule]]\nmatch='a'\npattern='row'\nstage='layer'"),
              HasSubstr("{layer}"));
  EXPECT_THAT(Refusal(head + "[[rule]]\nmatch='a'\npattern='row'\ndim=-1"), HasSubstr("'dim'"));
  EXPECT_THAT(Refusal(head + "[[rule]]\nmatch='a'\npattern='shard'\ncuts=[{dim=0},{dim=1}]"),
              HasSubstr("'grid'"));
  EXPECT_THAT(Refusal(head + "[variables]\na = 'b'"), HasSubstr("whole number"));
  EXPECT_THAT(Refusal(head + "[[rename]]\nplain = 'a'"), HasSubstr("'pipe' is missing"));
  EXPECT_THAT(Refusal(head + "rule = 3"), HasSubstr("list of tables"));
  EXPECT_THAT(Refusal(head + "[[derive]]\nvariable='a'\nvalue=1\ndim=0"), HasSubstr("either"));
  EXPECT_THAT(Refusal(head + "[[check]]\nequal=['a']"), HasSubstr("two sizes"));
  for (const char* header :
       {"[[[", "[", "[ ]", "[[ =", "\xef\xbb\xbf[[[", "\r[.a]", "a = 1\n [["}) {
    EXPECT_THAT(Refusal(header), HasSubstr("my.toml:")) << header;
  }
  EXPECT_THAT(Refusal(std::string(100000, '[')), HasSubstr("my.toml:1"));
}

TEST(FamilyTest, AnAddedFileComesBeforeTheShipped) {
  auto set = ShippedFamilies();
  ASSERT_TRUE(set);
  const std::string path = testing::TempDir() + "family_test.toml";
  std::ofstream(path) << "name = 'mine'\n[[rule]]\nmatch = 'model.**'\npattern = 'replicate'\n"
                         "[[rule]]\nmatch='grid'\npattern='shard'\n"
                         "cuts=[{dim=0},{dim=1}]\ngrid=[2,'n']\n";
  EXPECT_EQ(set->AddFile(path).value_or(""), "mine");
  const std::vector<std::string> names = {"model.norm.weight"};
  EXPECT_EQ(set->Choose(names)->name(), "mine");
  EXPECT_EQ(MatchOf(*set->Find("mine"), "grid", {{"n", 4}}).pattern.grid,
            (std::vector<uint64_t>{2, 4}));
  EXPECT_FALSE(set->AddFile(path + ".none"));
  std::remove(path.c_str());
}

}  // namespace
}  // namespace ckptfs
