// SPDX-License-Identifier: Apache-2.0
#include "snapshot/trainer/said_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ckptfs {
namespace {

using testing::ElementsAre;

SnapshotMessage Message(SnapshotWord word, uint64_t attempt, uint64_t chunk = 0) {
  SnapshotMessage message{word};
  message.attempt = attempt;
  message.chunk = chunk;
  return message;
}
constexpr SnapshotWord kBegin = SnapshotWord::kBegin, kChunk = SnapshotWord::kChunk,
                       kEnd = SnapshotWord::kEnd, kDrop = SnapshotWord::kDrop;

// All that is to be sent now, as "attempt" + the word's letter.
std::vector<std::string> Send(SaidSteps& said) {
  std::vector<std::string> sent;
  while (const auto next = said.Next()) {
    const char* letters = "   .bced    a";
    const std::string letter(1, letters[static_cast<uint32_t>(next->word)]);
    sent.push_back(std::to_string(next->attempt) + letter + (next->chunk == 1 ? "+" : ""));
    said.Sent(next->attempt);
  }
  return sent;
}

TEST(SaidStepsTest, WhatIsNotOverIsSaidAgainFromTheBeginning) {
  SaidSteps said;
  EXPECT_TRUE(said.empty());
  for (const uint64_t attempt : {1, 2}) EXPECT_TRUE(said.Add(Message(kBegin, attempt)));
  EXPECT_TRUE(said.Add(Message(kChunk, 1, 5)));
  EXPECT_TRUE(said.Add(Message(kEnd, 1)));
  EXPECT_TRUE(said.Add(Message(kChunk, 2, 6)));
  EXPECT_THAT(Send(said), ElementsAre("1b", "1c", "1e", "2b", "2c"));
  EXPECT_THAT(Send(said), ElementsAre());
  EXPECT_FALSE(said.empty());
  said.Restart();
  EXPECT_THAT(said.Chunks(), ElementsAre(5, 6));
  EXPECT_TRUE(said.Add(Message(kEnd, 2)));
  EXPECT_THAT(Send(said), ElementsAre("1b+", "1c", "1e", "2b+", "2c", "2e"));
  said.Settle(1);
  said.Restart();
  EXPECT_THAT(Send(said), ElementsAre("2b+", "2c", "2e"));
  said.Settle(2);
  EXPECT_TRUE(said.empty());
  EXPECT_THAT(said.Chunks(), ElementsAre());
}

// A later message about it does not have a beginning for the next daemon.
TEST(SaidStepsTest, WhatTheLastDaemonDroppedIsNotSaidToTheNext) {
  SaidSteps said;
  said.Add(Message(kBegin, 1));
  said.Add(Message(kChunk, 1, 5));
  Send(said);
  said.Settle(1);
  EXPECT_TRUE(said.empty());
  EXPECT_TRUE(said.Add(Message(kChunk, 1, 6)));  // this one has to hear it
  EXPECT_THAT(Send(said), ElementsAre("1c"));
  said.Restart();
  EXPECT_THAT(said.Chunks(), ElementsAre());
  EXPECT_FALSE(said.Add(Message(kChunk, 1, 7)));
  EXPECT_FALSE(said.Add(Message(kEnd, 1)));
  EXPECT_THAT(Send(said), ElementsAre());
  EXPECT_TRUE(said.Add(Message(kBegin, 2)));
}

// It is asked about until somebody has told.
TEST(SaidStepsTest, OfWhatIsOnADiskNothingIsSaidAgain) {
  SaidSteps said;
  said.Add(Message(kBegin, 1));
  said.Add(Message(kChunk, 1, 5));
  said.Shelve(1, "early");  // nobody can have all of it
  EXPECT_TRUE(said.Has(1));
  said.Add(Message(kEnd, 1));
  Send(said);
  said.Shelve(1, "there");
  said.Shelve(1, "elsewhere");
  EXPECT_FALSE(said.Has(1));
  EXPECT_FALSE(said.empty());
  EXPECT_THAT(said.Chunks(), ElementsAre());
  EXPECT_THAT(Send(said), ElementsAre());
  for (int daemon = 0; daemon < 2; ++daemon) {
    said.Restart();
    EXPECT_EQ(said.Next()->text, "there");
    EXPECT_THAT(Send(said), ElementsAre("1a"));
  }
  said.Settle(1);
  EXPECT_TRUE(said.empty());
  said.Restart();
  EXPECT_THAT(Send(said), ElementsAre());
}

TEST(SaidStepsTest, OfADropOnlyTheDropIsSaidAgain) {
  SaidSteps said;
  said.Add(Message(kBegin, 1));
  Send(said);
  said.Restart();
  said.Add(Message(kDrop, 1));
  EXPECT_TRUE(said.empty());  // nothing to finish
  said.Restart();
  EXPECT_THAT(Send(said), ElementsAre("1d"));
  said.Restart();
  EXPECT_THAT(Send(said), ElementsAre());
}

}  // namespace
}  // namespace ckptfs
