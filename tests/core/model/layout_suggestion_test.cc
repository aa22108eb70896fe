// SPDX-License-Identifier: Apache-2.0
#include "core/model/layout_suggestion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cctype>
#include <map>
#include <random>

#include "core/base/edit_distance.h"
#include "core/model/layout.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const char* const kLayouts[] = {"tp2",          "tp2_dp4",       "tp4_pp2_dp4_zero2_bf16",
                                "dp8_zero3",    "pp2_split3-5",  "tp2_pp2_dp2_zero1_plain",
                                "dp4_ep4_fp16", "cp2_vpp2_pipe", "tp8_etp2"};

TEST(SuggestLayout, KnowsOtherSpellings) {
  for (const auto& [written, meant] :
       std::map<std::string, std::string>{{"TP2", "tp2"},
                                          {"tp2 dp4", "tp2_dp4"},
                                          {"tp2dp4", "tp2_dp4"},
                                          {"tp2-dp4", "tp2_dp4"},
                                          {"tp=2,zero=3", "tp2_zero3"},
                                          {"2tp_4dp", "tp2_dp4"},
                                          {"dp4_zreo3", "dp4_zero3"},
                                          {"dp2_bfloat16", "dp2_bf16"},
                                          {"dp4/stage2", "dp4_zero2"},
                                          {"tp2_", "tp2"},
                                          {"tp2_half", "tp2_fp16"},
                                          {"pp2 split3-5", "pp2_split3-5"}}) {
    EXPECT_EQ(SuggestLayout(written), meant) << written;
  }
}

TEST(SuggestLayout, SaysNothingWhereNothingIsNear) {
  for (const char* text : {"", "latest", "global_step5", "rank0", "xx2", "tp", "tp0", "tp2_tp4",
                           "zero9", "\xff\xfe", "README", "2", "_", "fp8", "pp2_split3"}) {
    EXPECT_EQ(SuggestLayout(text), "") << text;
  }
  EXPECT_EQ(SuggestLayout(std::string(100000, 't')), "");
}

TEST(SuggestLayout, IsPartOfTheRefusal) {
  EXPECT_THAT(Layout::Parse("TP2").error().message, HasSubstr("do you mean tp2?"));
  EXPECT_THAT(Layout::Parse("nothing").error().message, Not(HasSubstr("do you mean")));
}

// Case, separators and one typing error in a long word lead back, or to nothing; never to
// text that is not a layout.
TEST(SuggestLayout, MutationsLeadBack) {
  std::mt19937 random(1);
  const auto pick = [&](size_t n) {
    return std::uniform_int_distribution<size_t>(0, n - 1)(random);
  };
  for (const std::string layout : kLayouts) {
    std::string upper = layout, spaced = layout, glued;
    for (char& letter : upper) letter = static_cast<char>(std::toupper(letter));
    for (char& letter : spaced) letter = letter == '_' ? " ,;.x+"[pick(6)] : letter;
    for (const char letter : layout) glued += letter == '_' ? "" : std::string(1, letter);
    EXPECT_EQ(SuggestLayout(upper), layout);
    if (spaced.find('x') == std::string::npos) {
      EXPECT_EQ(SuggestLayout(spaced), layout) << spaced;
    }
    if (layout.find("plain") == layout.npos && layout.find("pipe") == layout.npos) {
      EXPECT_EQ(SuggestLayout(glued), layout);
    }
    for (int turn = 0; turn < 200; ++turn) {
      std::string mutant = layout;
      const size_t at = pick(mutant.size());
      switch (pick(4)) {
        case 0: mutant.erase(at, 1); break;
        case 1: mutant.insert(at, 1, static_cast<char>(pick(256))); break;
        case 2: mutant[at] = static_cast<char>(pick(256)); break;
        default: std::swap(mutant[at], mutant[mutant.size() - 1 - at]);
      }
      const std::string meant = SuggestLayout(mutant);
      if (meant.empty()) continue;
      EXPECT_TRUE(Layout::ParseExactly(meant)) << mutant << " -> " << meant;
    }
  }
}

TEST(EditDistance, CountsLetters) {
  EXPECT_EQ(EditDistance("adpot", "adopt"), 1u);
  EXPECT_EQ(EditDistance("", "abc"), 3u);
  EXPECT_EQ(EditDistance("same", "same"), 0u);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3u);
}

TEST(NearestWords, AreTheNearestAlone) {
  const std::vector<std::string> words = {"adopt", "adapt", "umount", "mount"};
  EXPECT_THAT(NearestWords("adpot", words, 2), ElementsAre("adopt"));
  EXPECT_THAT(NearestWords("mout", words, 2), ElementsAre("mount"));
  EXPECT_THAT(NearestWords("xyz", words, 2), ElementsAre());
  EXPECT_THAT(NearestWords("a", words, 5), ElementsAre());
}

}  // namespace
}  // namespace ckptfs
