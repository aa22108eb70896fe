// SPDX-License-Identifier: Apache-2.0
//
// The life of a save, state by state, and the time of the next try after a failure.
#include "snapshot/landing/landing_state.h"

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "core/base/strings.h"
#include "snapshot/landing/retry_rule.h"

namespace ckptfs {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class LandingStateTest : public testing::Test {
 protected:
  using A = LandingAction;
  using E = LandingEvent;
  using S = LandingState;
  static constexpr std::array kStates{S::kWhole,   S::kShown,   S::kPrepared, S::kDecided,
                                      S::kDurable, S::kDropped, S::kLeft};
  static constexpr std::array kEvents{E::kEntered,  E::kFound,   E::kPersisted,
                                      E::kPrepared, E::kDecided, E::kPublished,
                                      E::kRefused,  E::kGaveUp,  E::kLeft};
};

// Every state and every event: a transition of these, or none.
TEST_F(LandingStateTest, TheseTransitionsAndNoOthers) {
  using To = std::pair<S, A>;
  const std::map<std::pair<S, E>, To> allowed{
      {{S::kWhole, E::kEntered}, {S::kShown, A::kPersist}},
      {{S::kWhole, E::kFound}, {S::kDurable, A::kDurable}},
      {{S::kWhole, E::kPrepared}, {S::kPrepared, A::kLook}},
      {{S::kWhole, E::kRefused}, {S::kDropped, A::kDrop}},
      {{S::kWhole, E::kGaveUp}, {S::kDropped, A::kDrop}},
      {{S::kWhole, E::kLeft}, {S::kLeft, A::kForget}},
      {{S::kShown, E::kPersisted}, {S::kDurable, A::kDurable}},
      {{S::kShown, E::kRefused}, {S::kDropped, A::kDrop}},
      {{S::kShown, E::kGaveUp}, {S::kDropped, A::kDrop}},
      {{S::kShown, E::kLeft}, {S::kLeft, A::kForget}},
      {{S::kPrepared, E::kDecided}, {S::kDecided, A::kLook}},
      {{S::kPrepared, E::kPublished}, {S::kDurable, A::kDurable}},
      {{S::kPrepared, E::kRefused}, {S::kDropped, A::kDrop}},
      {{S::kPrepared, E::kGaveUp}, {S::kDropped, A::kDrop}},
      {{S::kDecided, E::kPublished}, {S::kDurable, A::kDurable}},
      {{S::kDecided, E::kRefused}, {S::kDropped, A::kDrop}},
      {{S::kDecided, E::kGaveUp}, {S::kDropped, A::kDrop}},
  };
  size_t found = 0;
  for (const S state : kStates) {
    for (const E event : kEvents) {
      SCOPED_TRACE(StrCat(NameOf(state), ", event ", static_cast<int>(event)));
      const LandingTransition* const row = TransitionOf(state, event);
      const auto expected = allowed.find({state, event});
      ASSERT_EQ(row != nullptr, expected != allowed.end());
      if (row == nullptr) continue;
      ++found;
      EXPECT_EQ((To{row->to, row->action}), expected->second);
    }
  }
  EXPECT_EQ(found, allowed.size());
  EXPECT_EQ(LandingTransitions().size(), found);  // none twice
}

// From every state that is not an end a save can become durable, and can be dropped.
TEST_F(LandingStateTest, EveryStateHasTwoWaysOut) {
  for (const S state : kStates) {
    std::set<S> reached{state};
    for (size_t before = 0; before != reached.size();) {
      before = reached.size();
      for (const LandingTransition& row : LandingTransitions()) {
        if (reached.contains(row.from)) reached.insert(row.to);
      }
    }
    const bool ends = state == S::kDurable || state == S::kDropped || state == S::kLeft;
    EXPECT_EQ(reached.size() == 1, ends) << NameOf(state);
    EXPECT_TRUE(ends || reached.contains(S::kDurable)) << NameOf(state);
    EXPECT_TRUE(ends || reached.contains(S::kDropped)) << NameOf(state);
  }
}

TEST_F(LandingStateTest, WhatMayPassIsNotFinal) {
  for (const A action : {A::kEnter, A::kPersist, A::kPrepare, A::kLook}) {
    EXPECT_TRUE(IsFinal(action, ErrorCode::kDataLoss));
    for (const ErrorCode code : {ErrorCode::kIo, ErrorCode::kExhausted, ErrorCode::kInternal}) {
      EXPECT_FALSE(IsFinal(action, code));
    }
  }
  EXPECT_FALSE(IsFinal(A::kPersist, ErrorCode::kExists));  // another name may be free
}

TEST(RetryRuleTest, PausesGrowUntilTheLimit) {
  const RetryRule rule{milliseconds(100), milliseconds(300), seconds(1)};
  Tries tries;
  const auto begin = tries.begun;
  const auto limited = RetryRule::Patience::kLimited;
  auto now = begin;
  for (const int pause : {100, 200, 300, 300}) {
    ASSERT_TRUE(rule.Again(tries, now, limited));
    EXPECT_EQ(tries.due - now, milliseconds(pause));
    now = tries.due;
  }
  EXPECT_TRUE(rule.Again(tries, begin + milliseconds(999), limited));
  EXPECT_FALSE(rule.Again(tries, begin + seconds(1), limited));
  EXPECT_EQ(tries.failed, 6u);
}

TEST(RetryRuleTest, WhatIsSafeIsTriedForEver) {
  const RetryRule rule{milliseconds(1), milliseconds(1), milliseconds(0)};
  Tries tries;
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(
        rule.Again(tries, tries.begun + std::chrono::hours(i), RetryRule::Patience::kForEver));
  }
}

TEST(RetryRuleTest, AtTheEndOnceMoreAtOnce) {
  const RetryRule rule;
  Tries tries;
  const auto now = tries.begun;
  ASSERT_TRUE(rule.Again(tries, now, RetryRule::Patience::kLimited));
  EXPECT_TRUE(rule.Again(tries, now, RetryRule::Patience::kOnceMore));
  EXPECT_EQ(tries.due, now);
  EXPECT_FALSE(rule.Again(tries, now, RetryRule::Patience::kOnceMore));
}

}  // namespace
}  // namespace ckptfs
