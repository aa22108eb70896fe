// SPDX-License-Identifier: Apache-2.0

#include "core/model/left_out.h"

#include <gtest/gtest.h>

#include <string>

#include "core/model/step_model.h"

namespace ckptfs {
namespace {

LeftOut State(const std::string& name, const std::string& why) {
  return {LeftOutPart::kOptimizer, name, why, "give more"};
}

TEST(LeftOutTest, EqualReasonsAreCounted) {
  StepModel step;
  LeaveOut(step, State("'a'", "nobody knows whose"));
  LeaveOut(step, State("'b'", "nobody knows whose"));
  LeaveOut(step, State("'c'", "it is a list"));
  LeaveOut(step, {LeftOutPart::kDocument, "'d'", "it is a list", "give more"});
  ASSERT_EQ(step.left_out.size(), 3u);
  EXPECT_EQ(LeftOutText(step.left_out[0]),
            "left out: 'a' and 1 more: nobody knows whose; give more");
  EXPECT_EQ(LeftOutText(step.left_out[1]), "left out: 'c': it is a list; give more");
  EXPECT_EQ(step.left_out[2].part, LeftOutPart::kDocument);
}

TEST(LeftOutTest, AnOptimizersStateIsItsOwnOrNobodyKnowsWhose) {
  StepModel step;
  LeaveOut(step, {LeftOutPart::kDocument, "'d'", "it is a list", ""});
  EXPECT_EQ(FindLostState(step, "a"), nullptr);
  LeftOut one = State("'a'", "it is a list");
  one.optimizer = "a";
  LeaveOut(step, one);
  one.optimizer = "b";
  LeaveOut(step, one);
  ASSERT_EQ(step.left_out.size(), 3u) << "they are not counted as one";
  EXPECT_EQ(FindLostState(step, "a"), &step.left_out[1]);
  EXPECT_EQ(FindLostState(step, "b"), &step.left_out[2]);
  EXPECT_EQ(FindLostState(step, "c"), nullptr);
  LeaveOut(step, State("'e'", "it is a set"));
  EXPECT_EQ(FindLostState(step, "c"), &step.left_out[3]);
}

TEST(LeftOutTest, ReasonsAreBoundedAndNoneIsLost) {
  StepModel step;
  constexpr size_t kAll = 1000;
  for (size_t i = 0; i < kAll; ++i) LeaveOut(step, State("'a'", std::to_string(i)));
  LeaveOut(step, {LeftOutPart::kDocument, "'d'", "it is a list", ""});
  ASSERT_EQ(step.left_out.size(), kMaxLeftOutReasons + 1);  // of each part
  uint64_t counted = 0;
  for (const LeftOut& one : step.left_out) counted += 1 + one.more;
  EXPECT_EQ(counted, kAll + 1);
}

TEST(LeftOutTest, TheLastReasonIsNotSaidOfOthers) {
  StepModel step;
  for (size_t i = 0; i < kMaxLeftOutReasons; ++i) {
    LeaveOut(step, State("'a" + std::to_string(i) + "'", std::to_string(i)));
  }
  EXPECT_EQ(LeftOutText(step.left_out.back()), "left out: 'a31': 31; give more");
  LeaveOut(step, State("'b'", "32"));
  LeaveOut(step, State("'c'", "31"));
  LeaveOut(step, State("'d'", "0"));
  ASSERT_EQ(step.left_out.size(), kMaxLeftOutReasons);
  EXPECT_EQ(LeftOutText(step.left_out.back()),
            "left out: 'a31' and 2 more: they have different reasons, too many to list");
  EXPECT_EQ(LeftOutText(step.left_out.front()), "left out: 'a0' and 1 more: 0; give more");
}

}  // namespace
}  // namespace ckptfs
