// SPDX-License-Identifier: Apache-2.0
#include "core/model/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ckptfs {
namespace {

using testing::HasSubstr;

std::string Canonical(std::string_view text) {
  auto layout = Layout::Parse(text);
  return layout ? layout->ToString() : "refused: " + layout.error().message;
}

TEST(LayoutTest, RendersCanonically) {
  EXPECT_EQ(Canonical("tp1"), "tp1");
  EXPECT_EQ(Canonical("dp1_pp1"), "tp1");
  EXPECT_EQ(Canonical("zero0"), "tp1");
  EXPECT_EQ(Canonical("pipe_bf16_zero2_dp4_tp2"), "tp2_dp4_zero2_bf16_pipe");
  EXPECT_EQ(Canonical("tp4_pp2_dp4_zero2_bf16_split3-5_pipe"),
            "tp4_pp2_dp4_zero2_bf16_split3-5_pipe");
  EXPECT_EQ(Canonical("vpp2_pp2_split1-2-3-4"), "pp2_vpp2_split1-2-3-4");
  EXPECT_EQ(Canonical("tp04"), "tp4");
  EXPECT_EQ(Canonical("ep2_dp2_plain"), "dp2_ep2_plain");
  EXPECT_EQ(Canonical("flat_plain_fp32_dp2"), "dp2_fp32_plain_flat");
  EXPECT_EQ(Canonical("titan_dp1"), "titan");
  EXPECT_EQ(Canonical("hf5_titan_plain"), "plain_hf5_titan");
  EXPECT_EQ(Canonical("hf_tp2"), "tp2_hf");
  EXPECT_EQ(Canonical("accelerate_tp2"), "tp2_accelerate");
  EXPECT_EQ(Canonical("nested"), "nested");
}

TEST(LayoutTest, CanonicalTextParsesToTheSameLayout) {
  for (const char* text : {"tp2_cp2_dp2_etp2_ep4_fp32", "pp4_vpp2", "zero3_dp8_fp16", "tp1"}) {
    auto layout = Layout::Parse(text);
    ASSERT_TRUE(layout) << layout.error().message;
    auto again = Layout::Parse(layout->ToString());
    ASSERT_TRUE(again);
    EXPECT_EQ(*layout, *again);
  }
}

TEST(LayoutTest, RefusesWithTheTokenAndTheRule) {
  EXPECT_THAT(Canonical(""), HasSubstr("empty"));
  EXPECT_THAT(Canonical("tp"), HasSubstr("'tp'"));
  EXPECT_THAT(Canonical("tp0"), HasSubstr("from 1"));
  EXPECT_THAT(Canonical("tp-2"), HasSubstr("'tp-2'"));
  EXPECT_THAT(Canonical("tp2x"), HasSubstr("'tp2x'"));
  EXPECT_THAT(Canonical("tp2__dp2"), HasSubstr("unknown"));
  EXPECT_THAT(Canonical("tp2_"), HasSubstr("unknown"));
  EXPECT_THAT(Canonical("tp2_tp4"), HasSubstr("twice"));
  EXPECT_THAT(Canonical("bf16_fp16"), HasSubstr("twice"));
  EXPECT_THAT(Canonical("plain_pipe"), HasSubstr("twice"));
  EXPECT_THAT(Canonical("flat_nested"), HasSubstr("a key shape is given twice"));
  EXPECT_THAT(Canonical("zero4"), HasSubstr("0, 1, 2 or 3"));
  EXPECT_THAT(Canonical("zero"), HasSubstr("0, 1, 2 or 3"));
  EXPECT_THAT(Canonical("tp99999999999999999999"), HasSubstr("1048576"));
  EXPECT_THAT(Canonical("tp1024_dp1025"), HasSubstr("1048576 ranks"));
  EXPECT_THAT(Canonical("pp2_split3"), HasSubstr("split lists 1"));
  EXPECT_THAT(Canonical("split"), HasSubstr("joined by"));
  EXPECT_THAT(Canonical("pp2_split3-"), HasSubstr("joined by"));
  EXPECT_THAT(Canonical("pp2_split0-0"), HasSubstr("at least one layer"));
  EXPECT_THAT(Canonical("ep2"), HasSubstr("does not divide"));
  EXPECT_THAT(Canonical("dp2_ep2_etp2"), HasSubstr("does not divide"));
  EXPECT_THAT(Canonical("fp8"), HasSubstr("unknown"));
  EXPECT_THAT(Canonical(std::string(5000, 'a')), HasSubstr("4096 bytes"));
}

TEST(LayoutTest, RanksAreNumberedAsMegatronDoes) {
  const Layout layout = *Layout::Parse("tp2_cp2_dp2_pp2_ep2");
  EXPECT_EQ(layout.World(), 16u);
  // rank 13 = pp 1, inside 5 = tp 1, cp 0, dp 1; expert grid: ep 1, edp 2
  const RankCoordinate at = CoordinateOf(layout, 13);
  EXPECT_EQ(at.tp, 1u);
  EXPECT_EQ(at.cp, 0u);
  EXPECT_EQ(at.dp, 1u);
  EXPECT_EQ(at.pp, 1u);
  EXPECT_EQ(at.etp, 0u);
  EXPECT_EQ(at.ep, 1u);
  EXPECT_EQ(at.edp, 2u);
}

TEST(LayoutTest, ExpertTensorRanksAreFastestInTheExpertGrid) {
  const Layout layout = *Layout::Parse("tp2_dp4_ep2_etp2");
  const RankCoordinate at = CoordinateOf(layout, 7);  // inside 7 = 1 + 2*1 + 4*1
  EXPECT_EQ(at.etp, 1u);
  EXPECT_EQ(at.ep, 1u);
  EXPECT_EQ(at.edp, 1u);
}

}  // namespace
}  // namespace ckptfs
