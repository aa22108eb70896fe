// SPDX-License-Identifier: Apache-2.0
//
// The records by which several daemons make one step: what was written is read, and nothing else.
#include "core/records/commit_records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/records/record_text.h"
#include "tests/snapshot/nodes.h"

namespace ckptfs {
namespace {

const AttemptName kSaveOfRecords = testing_support::AttemptOf(1, 4);

TEST(CommitRecordsTest, WhatWasWrittenIsRead) {
  PreparedPart part{
      kSaveOfRecords, 7, 4, -5, {{1, 300'000, {DigestOf("a"), DigestOf("b")}}, {3, 0, {}}}};
  const CommitName name = *ParseCommitName(PartName(part, DigestOf("node")));
  const auto read = ParsePart(RenderPart(part), name);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->name, kSaveOfRecords);
  ASSERT_EQ(read->ranks.size(), 2u);
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(read->ranks[i].IsSameAs(part.ranks[i]));
  EXPECT_EQ(read->ranks[0].chunks, part.ranks[0].chunks);
  EXPECT_EQ(read->mtime_ns, -5);
  EXPECT_EQ(name.node, DigestOf("node"));
  const AttemptOutcome drop{kSaveOfRecords, 7, DigestOf("node"), std::nullopt, "no \n room"};
  EXPECT_EQ(ParseOutcome(RenderOutcome(drop), name)->dropped, "no \n room");
  const NodeRanks ranks{"run", "job", 4, "host", {{0, UINT64_MAX}, {3, 0}}};
  EXPECT_EQ(*ParseNodeRanks(RenderNodeRanks(ranks),
                            *ParseCommitName(NodeRanksName("run", "job", DigestOf("node")))),
            ranks);
}

// A part does not grow with the bytes of its files.
TEST(CommitRecordsTest, APartHasTheDigestOfAList) {
  PreparedPart part{kSaveOfRecords, 7, 4, 0, {{1, 3 * kChunkBytes, {}}, {3, 1, {DigestOf("a")}}}};
  part.ranks[0].chunks.assign(3, DigestOf("x"));
  const CommitName name = *ParseCommitName(PartName(part, DigestOf("node")));
  const std::string text = RenderPart(part.WithChunkLists());
  const auto read = ParsePart(text, name);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_TRUE(read->ranks[0].chunks.empty());
  EXPECT_EQ(read->ranks[0].chunk_list, DigestOfChunks(part.ranks[0].chunks));
  EXPECT_TRUE(read->ranks[0].IsSameAs(part.ranks[0]));
  EXPECT_EQ(read->ranks[1].chunk_list, Digest{});
  EXPECT_EQ(read->ranks[1].chunks, part.ranks[1].chunks);
  EXPECT_EQ(RenderPart(*read), text);
  part.ranks[0].chunks[1].low ^= 1;
  EXPECT_FALSE(read->ranks[0].IsSameAs(part.ranks[0]));
  // A build of before lists reads this.
  const auto old = UnsealRecord(text);
  ASSERT_FALSE(old);
  EXPECT_EQ(old.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(old.error().message, "record: version 3, but this build reads 1");
  EXPECT_TRUE(UnsealRecord(RenderPart(part))) << "a spool's and a peer's have all digests";

  const nlohmann::json good = *UnsealRecord(text, 3);
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, nlohmann::json>>{{"chunk_list", "zz"},
                                                           {"chunk_list", Digest().Hex()},
                                                           {"chunk_list", 1},
                                                           {"chunks", ""}}) {
    nlohmann::json object = good;
    object["ranks"][0][key] = value;
    EXPECT_FALSE(ParsePart(SealRecord(object), name)) << key << " " << value;
  }
}

TEST(CommitRecordsTest, WhatMakesNoSenseIsRefused) {
  PreparedPart part{kSaveOfRecords, 7, 4, 0, {{1, 300'000, {DigestOf("a"), DigestOf("b")}}}};
  const CommitName name = *ParseCommitName(PartName(part, DigestOf("node")));
  const nlohmann::json good = *UnsealRecord(RenderPart(part));
  ASSERT_TRUE(ParsePart(SealRecord(good), name));
  const std::vector<std::pair<std::string, nlohmann::json>> changes = {
      {"run", "other"},
      {"run", "a%2Fb"},
      {"job", "other"},
      {"attempt", 2},
      {"world", 0},
      {"world", 1},
      {"world", 1u << 21},
      {"life", DigestOf("x").Hex()},
      {"life", "00"},
      {"step", -1},
      {"step", "7"},
      {"mtime_ns", 0.5},
      {"ranks", nlohmann::json::array()},
      {"ranks", 3},
      {"version", 2},
      {"version", 4}};
  for (const auto& [key, value] : changes) {
    nlohmann::json object = good;
    object[key] = value;
    EXPECT_FALSE(ParsePart(SealRecord(object), name)) << key << " " << value;
  }
  nlohmann::json rank = good["ranks"][0];
  for (const auto& [key, value] : std::vector<std::pair<std::string, nlohmann::json>>{
           {"rank", 4}, {"bytes", 1}, {"bytes", UINT64_MAX}, {"chunks", "zz"}, {"chunks", 1}}) {
    nlohmann::json object = good;
    object["ranks"][0][key] = value;
    EXPECT_FALSE(ParsePart(SealRecord(object), name)) << key << " " << value;
  }
  nlohmann::json twice = good;
  twice["ranks"].push_back(rank);
  EXPECT_FALSE(ParsePart(SealRecord(twice), name));
  std::string flipped = RenderPart(part);
  flipped[20] ^= 1;
  EXPECT_FALSE(ParsePart(flipped, name));
}

TEST(CommitRecordsTest, AWorldIsReadAsItWasWritten) {
  const WorldRecord world{
      "run", "job", 4, DigestOf("n"), {{"a b", {{0, UINT64_MAX}, {3, 0}}}, {"c", {}}}, "no \n"};
  const CommitName name = *ParseCommitName(WorldName("run", "job"));
  const auto read = ParseWorld(RenderWorld(world), name);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, world);
  EXPECT_FALSE(ParseWorld(RenderWorld(world), *ParseCommitName(WorldName("run", "other"))));
  const nlohmann::json good = *UnsealRecord(RenderWorld(world));
  for (const auto& [key, value] : std::vector<std::pair<std::string, nlohmann::json>>{
           {"world", 3}, {"world", 0}, {"node", "0"}, {"hosts", 1}, {"hosts", {1}}}) {
    nlohmann::json object = good;
    object[key] = value;
    EXPECT_FALSE(ParseWorld(SealRecord(object), name)) << key << " " << value;
  }
}

TEST(CommitRecordsTest, OnlyNamesOfOursAreNames) {
  const std::string job = DigestOf("j").Hex(), node = DigestOf("n").Hex();
  for (const std::string& name :
       {job + "/1/part-" + node + ".0", job + "/18446744073709551615/outcome", job + "/0/done",
        job + "/ranks-" + node, job + "/world"}) {
    const auto parsed = ParseCommitName("prepared/" + name);
    ASSERT_TRUE(parsed) << name;
    EXPECT_EQ(PathOf(*parsed), "prepared/" + name);
    EXPECT_FALSE(ParseFlatName("prepared/" + name)) << name;
  }
  for (const std::string& name :
       {job + "/1/part-" + node, job + "/01/part-" + node + ".0", job + "/1/part-" + node + ".x",
        job + "/1/part-", job + "/1/" + node + ".0", "/1/part-" + node + ".0",
        job + "/ranks-" + node + ".0", job + "/ranks-world", job, job + "/", job + "/1",
        job + "/1/", job + "/18446744073709551616/done", std::string("a/1/done"),
        job + "/1/outcome/x"}) {
    EXPECT_FALSE(ParseCommitName("prepared/" + name)) << name;
  }
  EXPECT_FALSE(ParseCommitName("preparedx" + job + "/world"));
}

// The names of builds before one folder per attempt.
TEST(CommitRecordsTest, FlatNamesAreRead) {
  const std::string job = DigestOf("j").Hex(), node = DigestOf("n").Hex();
  const auto part = ParseFlatName("prepared/" + job + "-7-" + node + ".3");
  ASSERT_TRUE(part);
  EXPECT_EQ(PathOf(*part), "prepared/" + job + "/7/part-" + node + ".3");
  EXPECT_EQ(ParseFlatName("prepared/" + job + "-7-done")->kind, CommitName::Kind::kDone);
  EXPECT_EQ(ParseFlatName("prepared/" + job + "-ranks-" + node)->node, DigestOf("n"));
  for (const std::string& name :
       {job + "-1-" + node, job + "-01-" + node + ".0", job + "-1-" + node + ".x", job + "-1-",
        "-1-" + node + ".0", job + "-ranks-" + node + ".0", job + "-ranks-outcome", job,
        job + "-99999999999999999999-done", std::string("a-1-done")}) {
    EXPECT_FALSE(ParseFlatName("prepared/" + name)) << name;
  }
}

TEST(CommitRecordsTest, RanksAreNamedInRanges) {
  EXPECT_EQ(RanksText({2}), "2");
  EXPECT_EQ(RanksText({2, 3}), "2-3");
  EXPECT_EQ(RanksText({0, 2, 3, 4, 9}), "0, 2-4, 9");
  EXPECT_EQ(RanksText({0, 2, 4, 6, 8, 10, 12, 14, 16, 17}), "0, 2, 4, 6, 8, 10, 12, 14 and 2 more");
}

}  // namespace
}  // namespace ckptfs
