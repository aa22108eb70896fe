// SPDX-License-Identifier: Apache-2.0
#include "formats/sharding/sharding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "core/base/strings.h"
#include "formats/deepspeed/optimizer_states.h"
#include "formats/families/shipped.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/print_value.h"

namespace ckptfs {
namespace {

TEST(NamePatternTest, AgreesWithABacktrackingMatcher) {
  const char* patterns[] = {"^model\\.layers\\.\\d+\\.mlp\\.(gate|up)_proj\\.weight$",
                            "\\d+\\.word_embeddings.weight",
                            "^(a|b)*c?$",
                            "a{2,3}b",
                            "[^.]+\\.w",
                            "[a-c_\\d]+",
                            "(?:x|yy)+?z",
                            "^$",
                            ".*",
                            "a|b|",
                            "(a*)*b"};
  const char* names[] = {"model.layers.12.mlp.up_proj.weight",
                         "model.layers.x.mlp.up_proj.weight",
                         "3.word_embeddings.weight",
                         "abab",
                         "ababc",
                         "abd",
                         "aab",
                         "aaab",
                         "ab",
                         "abc.w",
                         "..w",
                         "xyyz",
                         "xyz",
                         "",
                         "model.layers.1.mlp.gate_proj.weight.x"};
  for (const char* pattern : patterns) {
    const auto ours = NamePattern::Parse(pattern);
    ASSERT_TRUE(ours) << ours.error().message;
    const std::regex theirs(pattern);
    for (const char* name : names) {
      EXPECT_EQ(ours->MatchesPrefix(name),
                std::regex_search(name, theirs, std::regex_constants::match_continuous))
          << pattern << " on " << name;
      EXPECT_EQ(ours->MatchesWhole(name), std::regex_match(name, theirs))
          << pattern << " on " << name;
    }
  }
}

TEST(NamePatternTest, HostilePatternsEnd) {
  const std::string name(100'000, 'a');
  EXPECT_FALSE(NamePattern::Parse("(a+)+b")->MatchesPrefix(name));
  EXPECT_FALSE(NamePattern::Parse("(a|aa)*$b")->MatchesPrefix(name));
  EXPECT_FALSE(NamePattern::Parse(std::string(5000, 'a')));
  EXPECT_FALSE(NamePattern::Parse(std::string(2000, '(')));
  EXPECT_FALSE(NamePattern::Parse("((((a{1000}){1000}){1000}){1000})"));
  EXPECT_FALSE(NamePattern::Parse("((((()){9999}){9999}){9999}){9999}"));
  for (const char* bad : {"(", ")", "[", "[z-a]", "a\\", "*a", "(?=a)", "(?i)a", "\\1", "a{3,2}"}) {
    EXPECT_FALSE(NamePattern::Parse(bad)) << bad;
  }
}

TEST(DigestOfValueTest, DoesNotDependOnWhichStringsAreOneObject) {
  const auto digest = [](bool shared, std::string_view second) {
    PickleBuilder builder;
    const NodeId one = builder.String("auto");
    const NodeId other = shared ? one : builder.String(second);
    const NodeId root = builder.Dict({{one, other}, {builder.String("x"), builder.List({other})}});
    const PickleTree tree = std::move(builder).Finish(root);
    return deepspeed::DigestOfValue(RootOf(tree)).value();
  };
  EXPECT_EQ(digest(true, ""), digest(false, "auto"));
  EXPECT_NE(digest(false, "auto"), digest(false, "none"));
}

TEST(DigestOfValueTest, ATextThatIsMeantManyTimesIsPrintedOnce) {
  PickleBuilder builder;
  const NodeId text = builder.String(std::string(100'000, 'x'));
  const NodeId list = builder.List(std::vector<NodeId>(1000, text));
  const NodeId root = builder.Dict(
      {{builder.String("other"), builder.String("y")}, {builder.String("list"), list}});
  const PickleTree tree = std::move(builder).Finish(root);
  EXPECT_LT(PrintValue(RootOf(tree))->size(), 110'000u);
  // Where it stands: what is beside it does not matter.
  PickleBuilder alone;
  const NodeId copy = alone.Copy(RootOf(tree)["list"]);
  const PickleTree other = std::move(alone).Finish(copy);
  EXPECT_EQ(deepspeed::DigestOfValue(RootOf(tree)["list"]).value(),
            deepspeed::DigestOfValue(RootOf(other)).value());
}

// universal_checkpoint_info with one list.
struct Info {
  PickleTree tree;
  explicit Info(std::string_view list, std::string_view pattern, int64_t vocabulary = 0) {
    PickleBuilder builder;
    std::vector<std::pair<NodeId, NodeId>> items;
    items.emplace_back(builder.String(list), builder.List({builder.String(pattern)}));
    if (vocabulary > 0) {
      items.emplace_back(builder.String("original_vocab_size"), builder.Int(vocabulary));
    }
    const NodeId root = builder.Dict(items);
    tree = std::move(builder).Finish(root);
  }
  ShardingInfo Parse() const {
    auto info = ParseShardingInfo(RootOf(tree));
    EXPECT_TRUE(info);
    return *std::move(info);
  }
};

Result<std::optional<Sharding>> Resolve(const ShardingInfo* info, const SourceOptions& options,
                                        std::string_view name, std::vector<Shape> locals) {
  auto rules = ShardingRules::Make(info, options, {{std::string(name), locals}}, {});
  EXPECT_TRUE(rules) << rules.error().message;
  return rules->Resolve(name, locals, false);
}

TEST(ShardingTest, ListsSayHowRanksMakeUpTheWhole) {
  const ShardingInfo row = Info("parameter_with_row_parallelism_patterns", "down").Parse();
  auto out = Resolve(&row, {}, "down.weight", {{4, 3}, {4, 3}});
  ASSERT_TRUE(out && *out) << out.error().message;
  EXPECT_EQ((*out)->shape, (Shape{4, 6}));
  EXPECT_EQ((*out)->locals[1].pieces[0].atom_begin, (std::vector<uint64_t>{0, 3}));
  const ShardingInfo halves = Info("parameter_with_2_sub_params_cat_dim_0", "gate_up").Parse();
  out = Resolve(&halves, {}, "gate_up", {{4, 3}, {4, 3}});
  ASSERT_TRUE(out && *out);
  EXPECT_EQ((*out)->pattern.cuts[0].parts, (std::vector<uint64_t>{4, 4}));
  ASSERT_EQ((*out)->locals[1].pieces.size(), 2u);
  EXPECT_EQ((*out)->locals[1].pieces[1].atom_begin[0], 6u);
  const ShardingInfo same = Info("tp_replicated_parameter_patterns", "norm").Parse();
  out = Resolve(&same, {}, "norm", {{4}, {4}});
  ASSERT_TRUE(out && *out);
  EXPECT_EQ((*out)->how, Sharding::How::kReplicas);
  EXPECT_FALSE(Resolve(&same, {}, "norm", {{4}, {5}}));
  // In no list: a cut along dim 0, as the stock converter takes it.
  out = Resolve(&same, {}, "other", {{4, 2}, {4, 2}});
  ASSERT_TRUE(out && *out);
  EXPECT_EQ((*out)->shape, (Shape{8, 2}));
}

TEST(ShardingTest, WhatAutoTpLeavesWholeIsCutForOthersAsTheFamilySays) {
  const auto families = ShippedFamilies();
  SourceOptions options;
  options.families = &*families;
  options.family = "llama";
  const std::string name = "model.embed_tokens.weight";
  ShardingInfo info = Info("tp_replicated_parameter_patterns", "model.*").Parse();
  const auto pattern = [&] {
    auto out = Resolve(&info, options, name, {{499, 8}, {499, 8}});
    EXPECT_TRUE(out && *out) << out.error().message;
    EXPECT_EQ((*out)->how, Sharding::How::kReplicas);
    EXPECT_EQ((*out)->shape, (Shape{499, 8}));
    if (info.autotp) {
      EXPECT_EQ((*out)->source_pattern, Pattern::Replicate());
    }
    return (*out)->pattern;
  };
  EXPECT_EQ(pattern().kind, PatternKind::kReplicate);
  info.autotp = true;
  EXPECT_EQ(pattern().kind, PatternKind::kShard);
  EXPECT_GT(pattern().cuts[0].pad_multiple, 0u);
}

TEST(ShardingTest, VocabulariesLoseTheirPadding) {
  const ShardingInfo info = Info("vocabulary_parameter_patterns", "embed", 499).Parse();
  const auto out = Resolve(&info, {}, "embed", {{256, 8}, {256, 8}});
  ASSERT_TRUE(out && *out);
  EXPECT_EQ((*out)->shape, (Shape{499, 8}));
  EXPECT_EQ((*out)->locals[1].pieces[0].shape[0], 243u);
  EXPECT_EQ((*out)->locals[1].shape[0], 256u);
  EXPECT_FALSE(Resolve(&info, {}, "embed", {{200, 8}, {200, 8}}));
}

TEST(ShardingTest, NothingIsGuessed) {
  auto out = Resolve(nullptr, {}, "w", {{4}, {4}});
  ASSERT_TRUE(out);
  EXPECT_FALSE(*out);
  SourceOptions options;
  options.replicated = {"w.*"};
  out = Resolve(nullptr, options, "w", {{4}, {4}});
  ASSERT_TRUE(out && *out);
  EXPECT_EQ((*out)->how, Sharding::How::kReplicas);
  options.replicated = {};
  options.averaged = {"w"};
  out = Resolve(nullptr, options, "w", {{4}, {4}});
  ASSERT_TRUE(out && *out);
  EXPECT_EQ((*out)->how, Sharding::How::kAverage);
  out = Resolve(nullptr, options, "ww", {{4}, {4}});
  ASSERT_TRUE(out);
  EXPECT_FALSE(*out) << "--averaged matches whole names";
  out = Resolve(nullptr, {}, "w", {{4}});
  ASSERT_TRUE(out && *out);
  EXPECT_EQ((*out)->pattern.kind, PatternKind::kUnknown);
}

TEST(ShardingTest, UnevenRanksOfAListStayOpenForOthers) {
  const ShardingInfo row = Info("parameter_with_row_parallelism_patterns", "down").Parse();
  auto out = Resolve(&row, {}, "down.weight", {{4, 51}, {4, 50}});
  ASSERT_TRUE(out && *out) << out.error().message;
  EXPECT_EQ((*out)->pattern.kind, PatternKind::kUnknown);
  ASSERT_TRUE((*out)->source_pattern);
  EXPECT_EQ((*out)->source_pattern->cuts[0].widths, (std::vector<uint64_t>{51, 50}));
  EXPECT_EQ((*out)->source_pattern->cuts[0].dim, 1u);
  // A family knows that rows of this layer are no more than rows.
  const auto families = ShippedFamilies();
  SourceOptions options;
  options.families = &*families;
  options.family = "llama";
  const ShardingInfo named = Info("parameter_with_row_parallelism_patterns", ".*down_proj").Parse();
  out = Resolve(&named, options, "model.layers.0.mlp.down_proj.weight", {{4, 51}, {4, 50}});
  ASSERT_TRUE(out && *out) << out.error().message;
  EXPECT_EQ((*out)->pattern.kind, PatternKind::kShard);
  EXPECT_TRUE((*out)->source_pattern);
}

TEST(ShardingTest, TheSourcesPaddingIsItsOwn) {
  const ShardingInfo info = Info("vocabulary_parameter_patterns", "embed", 499).Parse();
  const auto out = Resolve(&info, {}, "embed", {{256, 8}, {256, 8}});
  ASSERT_TRUE(out && *out);
  EXPECT_EQ((*out)->pattern.kind, PatternKind::kShard);
  ASSERT_TRUE((*out)->source_pattern);
  EXPECT_EQ((*out)->source_pattern->cuts[0].widths, (std::vector<uint64_t>{256, 256}));
}

// A tiny Llama's key projection: 2 key-value heads of 16 rows.
constexpr std::string_view kKeys = "model.layers.0.self_attn.k_proj.weight";

Result<Pattern> KeysOf(const FamilySet& families, const ModelSizes& sizes,
                       std::vector<Shape> locals, std::vector<std::string>* notes = nullptr) {
  SourceOptions options;
  options.families = &families;
  const std::vector<Shape> queries(locals.size(), Shape{64 / locals.size(), 8});
  CKPT_ASSIGN_OR_RETURN(const ShardingRules rules,
                        ShardingRules::Make(nullptr, options,
                                            {{std::string(kKeys), locals},
                                             {"model.layers.0.self_attn.q_proj.weight", queries}},
                                            sizes));
  CKPT_ASSIGN_OR_RETURN(const auto sharding, rules.Resolve(kKeys, locals, false));
  StepModel header;
  rules.Describe(header);
  if (notes != nullptr) *notes = header.notes;
  EXPECT_EQ(header.family, "llama");
  EXPECT_FALSE(header.family_rules.empty());
  return sharding->pattern;
}

bool Cuts(const Result<Pattern>& pattern, const Shape& whole, uint64_t degree) {
  EXPECT_TRUE(pattern) << pattern.error().message;
  return pattern && MakeLocal(*pattern, whole, 0, degree).has_value();
}

TEST(ShardingTest, NoViewCutsThroughAHead) {
  const auto families = ShippedFamilies();
  const FamilyVariables known{{"heads", 4}, {"kv_heads", 2}};
  for (const ModelSizes& sizes : {ModelSizes{known, {}, {}, ""}, ModelSizes{{}, known, {}, ""},
                                  ModelSizes{{}, {}, known, "config.json"}}) {
    const auto keys = KeysOf(*families, sizes, {{32, 8}});
    EXPECT_TRUE(Cuts(keys, {32, 8}, 2));
    EXPECT_FALSE(Cuts(keys, {32, 8}, 4));
    EXPECT_FALSE(Cuts(keys, {32, 8}, 8));
  }
}

TEST(ShardingTest, WhereNothingTellsTheHeadsOnlyTheSourcesOwnCutIsSafe) {
  const auto families = ShippedFamilies();
  std::vector<std::string> notes;
  const auto whole = KeysOf(*families, {}, {{32, 8}}, &notes);
  EXPECT_TRUE(Cuts(whole, {32, 8}, 1));
  EXPECT_FALSE(Cuts(whole, {32, 8}, 2));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_THAT(notes[0], testing::HasSubstr("head_dim"));
  EXPECT_THAT(notes[0], testing::HasSubstr("--family-set"));
  const auto halves = KeysOf(*families, {}, {{16, 8}, {16, 8}});
  EXPECT_TRUE(Cuts(halves, {32, 8}, 2));
  EXPECT_FALSE(Cuts(halves, {32, 8}, 4));
}

TEST(ShardingTest, AConfigThatContradictsTheShapesIsNotUsed) {
  const auto families = ShippedFamilies();
  const FamilyVariables wrong{{"heads", 8}, {"head_dim", 4}};
  std::vector<std::string> notes;
  EXPECT_FALSE(
      Cuts(KeysOf(*families, {{}, {}, wrong, "/x/config.json"}, {{32, 8}}, &notes), {32, 8}, 2));
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_THAT(notes[0], testing::HasSubstr("/x/config.json: not used: family 'llama'"));
  EXPECT_THAT(notes[0], testing::HasSubstr("q_rows = 64"));
  // The args beside it hold.
  EXPECT_TRUE(
      Cuts(KeysOf(*families, {{}, {{"heads", 4}}, {{"kv_heads", 1}}, "c"}, {{32, 8}}), {32, 8}, 2));
  EXPECT_FALSE(Cuts(KeysOf(*families, {{}, wrong, {}, ""}, {{32, 8}}), {32, 8}, 2));
  const auto user = KeysOf(*families, {wrong, {}, {}, ""}, {{32, 8}});
  ASSERT_FALSE(user);
  EXPECT_THAT(user.error().message, testing::HasSubstr("--family-set"));
}

TEST(ShardingTest, AFamilyThatMatchesNothingIsRefusedWhenForced) {
  const auto families = ShippedFamilies();
  SourceOptions options;
  options.families = &*families;
  options.family = "gpt2";
  auto rules = ShardingRules::Make(nullptr, options, {{std::string(kKeys), {{32, 8}}}}, {});
  ASSERT_FALSE(rules);
  EXPECT_THAT(rules.error().message, testing::HasSubstr("family 'llama' matches 1"));
  options.family = "";
  rules = ShardingRules::Make(nullptr, options, {{"backbone.norm.w", {{8}}}}, {});
  ASSERT_TRUE(rules);
  StepModel header;
  rules->Describe(header);
  ASSERT_EQ(header.notes.size(), 1u);
  EXPECT_THAT(header.notes[0], testing::HasSubstr("no family matches any of the 1 parameters"));
}

// A script's module keeps the model in an attribute; what stands beside it has no rule.
TEST(ShardingTest, AFamilysRulesHoldBelowAModule) {
  const auto families = ShippedFamilies();
  SourceOptions options;
  options.families = &*families;
  const std::string name = "model.model.layers.3.mlp.gate_proj.weight";
  const auto rules = ShardingRules::Make(
      nullptr, options,
      {{name, {{8, 4}}}, {"model.lm_head.weight", {{16, 4}}}, {"loss.weight", {{4}}}}, {});
  ASSERT_TRUE(rules) << rules.error().message;
  const auto sharding = rules->Resolve(name, std::vector<Shape>{{8, 4}}, false);
  ASSERT_TRUE(sharding && *sharding);
  EXPECT_EQ((*sharding)->pattern.kind, PatternKind::kShard);
  EXPECT_EQ((*sharding)->layer, 3u);
  StepModel header;
  rules->Describe(header);
  EXPECT_EQ(header.family, "llama");
  EXPECT_EQ(header.layers, 4u);
  ASSERT_EQ(header.notes.size(), 1u);
  EXPECT_EQ(header.notes[0],
            "family 'llama' comes closest: it has rules for 2 of 3 parameters (below 'model.'), "
            "but none for 'loss.weight'");
}

TEST(ShardingTest, AMissingSizeIsNamedWhereARuleNeedsIt) {
  const auto families = ShippedFamilies();
  SourceOptions options;
  options.families = &*families;
  const std::string name = "model.layers.0.mlp.gate_up_proj.weight";
  const auto rules = ShardingRules::Make(nullptr, options, {{name, {{8, 4}, {8, 4}}}}, {});
  ASSERT_TRUE(rules) << rules.error().message;
  const auto sharding = rules->Resolve(name, std::vector<Shape>{{8, 4}, {8, 4}}, false);
  ASSERT_TRUE(sharding);
  EXPECT_FALSE(*sharding);
  EXPECT_THAT(rules->WhyOpen(name), testing::HasSubstr("needs dense_ffn"));
  EXPECT_EQ(rules->WhyOpen("other"), "no rule covers it");
}

TEST(ShardingTest, UnevenWidthsBecomePieces) {
  const LocalTensor local = LocalOfWidths({10, 2}, 0, {{3, 1}, {2, 4}}, 1);
  EXPECT_EQ(local.shape, (Shape{5, 2}));
  ASSERT_EQ(local.pieces.size(), 2u);
  EXPECT_EQ(local.pieces[0].atom_begin[0], 3u);
  EXPECT_EQ(local.pieces[1].atom_begin[0], 6u);
  EXPECT_EQ(local.pieces[1].local_offset, 2u);
}

}  // namespace
}  // namespace ckptfs
