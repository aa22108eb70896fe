// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/sharding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>

#include "core/base/strings.h"
#include "formats/deepspeed/optimizer_states.h"
#include "formats/torch/pickle_writer.h"

namespace ckptfs::deepspeed {
namespace {

TEST(NamePatternTest, AgreesWithABacktrackingMatcher) {
  const char* patterns[] = {"^model\\.layers\\.\\d+\\.mlp\\.(gate|up)_proj\\.weight$",
                            "\\d+\\.word_embeddings.weight", "^(a|b)*c?$", "a{2,3}b", "[^.]+\\.w",
                            "[a-c_\\d]+", "(?:x|yy)+?z", "^$", ".*", "a|b|", "(a*)*b"};
  const char* names[] = {"model.layers.12.mlp.up_proj.weight", "model.layers.x.mlp.up_proj.weight",
                         "3.word_embeddings.weight", "abab", "ababc", "abd", "aab", "aaab", "ab",
                         "abc.w", "..w", "xyyz", "xyz", "", "model.layers.1.mlp.gate_proj.weight.x"};
  for (const char* pattern : patterns) {
    const auto ours = NamePattern::Parse(pattern);
    ASSERT_TRUE(ours) << ours.error().message;
    const std::regex theirs(pattern);
    for (const char* name : names) {
      EXPECT_EQ(ours->MatchesPrefix(name),
                std::regex_search(name, theirs, std::regex_constants::match_continuous))
          << pattern << " on " << name;
      EXPECT_EQ(ours->MatchesWhole(name), std::regex_match(name, theirs)) << pattern << " on " << name;
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
    return DigestOfValue(RootOf(tree)).value();
  };
  EXPECT_EQ(digest(true, ""), digest(false, "auto"));
  EXPECT_NE(digest(false, "auto"), digest(false, "none"));
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
  auto rules = ShardingRules::Make(info, options, {}, locals.size(), {});
  EXPECT_TRUE(rules);
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
  const auto families = FamilySet::Shipped();
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
    if (info.autotp) EXPECT_EQ((*out)->source_pattern, Pattern::Replicate());
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
  const auto families = FamilySet::Shipped();
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

TEST(ShardingTest, UnevenWidthsBecomePieces) {
  const LocalTensor local = LocalOfWidths({10, 2}, 0, {{3, 1}, {2, 4}}, 1);
  EXPECT_EQ(local.shape, (Shape{5, 2}));
  ASSERT_EQ(local.pieces.size(), 2u);
  EXPECT_EQ(local.pieces[0].atom_begin[0], 3u);
  EXPECT_EQ(local.pieces[1].atom_begin[0], 6u);
  EXPECT_EQ(local.pieces[1].local_offset, 2u);
}

}  // namespace
}  // namespace ckptfs::deepspeed
