// SPDX-License-Identifier: Apache-2.0

#include "core/peer/placement.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "gmock/gmock.h"
#include "tests/core/peer/peer_nodes.h"

namespace ckptfs {
namespace {

using ::testing::HasSubstr;

// Members of the fullest domain of a group.
size_t MostOfOneDomain(const PeerGroup& group) {
  std::map<std::string, size_t> count;
  size_t most = 0;
  for (const PeerNode& member : group.members)
    most = std::max(most, ++count[member.failure_domain]);
  return most;
}

TEST(ProtectSchemeTest, TextsAreReadAndWritten) {
  for (const char* text :
       {"off", "local", "copy", "copy:2", "copy:15", "ec:4+1", "ec:8+2", "ec:2+126"})
    EXPECT_EQ(SchemeOf(text).Text(), text);
  EXPECT_EQ(SchemeOf("copy:1").Text(), "copy");
  EXPECT_EQ(SchemeOf("ec:8+2").GroupSize(), 10u);
  EXPECT_EQ(SchemeOf("copy:2").GroupSize(), 3u);
  EXPECT_EQ(SchemeOf("local").GroupSize(), 2u);
  EXPECT_EQ(SchemeOf("off").GroupSize(), 1u);
}

TEST(ProtectSchemeTest, OtherTextsAreRefusedWithTheRule) {
  for (const char* text : {"",
                           "copies",
                           "Copy",
                           "copy:",
                           "copy:0",
                           "copy:16",
                           "copy:01",
                           "copy:-1",
                           "copy:1 ",
                           "ec",
                           "ec:",
                           "ec:8",
                           "ec:8+",
                           "ec:+2",
                           "ec:8+0",
                           "ec:0+2",
                           "ec:127+2",
                           "ec:4294967295+1",
                           "ec:4294967297+1",
                           "ec:8+2+1",
                           "xor:4+1"}) {
    const Result<ProtectScheme> scheme = ProtectScheme::Parse(text);
    ASSERT_FALSE(scheme) << text;
    EXPECT_EQ(scheme.error().code, ErrorCode::kInvalid) << text;
  }
  EXPECT_THAT(ProtectScheme::Parse("ec:1+2").error().message, HasSubstr("write copy:2"));
}

TEST(PlacementTest, EachNodeIsInOneGroupAndProtected) {
  for (const char* text : {"copy", "copy:2", "ec:4+1", "ec:4+2", "ec:8+2", "local", "off"}) {
    const ProtectScheme scheme = SchemeOf(text);
    for (size_t count = scheme.GroupSize(); count < 40; ++count) {
      std::multiset<std::string> seen;
      const std::vector<PeerGroup> groups = PlaceNodes(NodesOf(count, 3), scheme).value();
      EXPECT_EQ(groups.size(), count / scheme.GroupSize());
      for (const PeerGroup& group : groups) {
        EXPECT_GE(group.members.size(), scheme.GroupSize());
        for (const PeerNode& member : group.members) seen.insert(member.name);
      }
      EXPECT_EQ(seen.size(), count);
      EXPECT_EQ(std::set<std::string>(seen.begin(), seen.end()).size(), count);
    }
  }
}

TEST(PlacementTest, AllNodesGetTheSameAnswer) {
  std::vector<PeerNode> nodes = NodesOf(47, 4);
  const std::vector<PeerGroup> groups = PlaceNodes(nodes, SchemeOf("ec:4+2")).value();
  std::mt19937 random(7);
  for (int i = 0; i < 20; ++i) {
    std::shuffle(nodes.begin(), nodes.end(), random);
    EXPECT_EQ(PlaceNodes(nodes, SchemeOf("ec:4+2")).value(), groups);
  }
}

TEST(PlacementTest, MembersOfAGroupAreOfDifferentDomainsIfThereAreEnough) {
  for (const char* text : {"copy", "copy:2", "ec:4+2", "ec:8+2"}) {
    const ProtectScheme scheme = SchemeOf(text);
    for (const size_t per_domain : {2, 5, 40}) {
      for (size_t count = scheme.GroupSize(); count < 120; count += 17) {
        const std::vector<PeerGroup> groups =
            PlaceNodes(NodesOf(count, per_domain), scheme).value();
        const size_t largest = std::min(per_domain, count);
        // As few of one domain as any cut into so many groups allows.
        const size_t fewest = (largest + groups.size() - 1) / groups.size();
        for (const PeerGroup& group : groups) EXPECT_LE(MostOfOneDomain(group), fewest);
      }
    }
  }
}

TEST(PlacementTest, MembersOfOneDomainStandApartInTheRing) {
  // One group of five: two domains of two, one of one; a part and its two copies.
  const std::vector<PeerGroup> groups = PlaceNodes(NodesOf(5, 2), SchemeOf("copy:2")).value();
  ASSERT_EQ(groups.size(), 1u);
  for (size_t i = 0; i < 5; ++i)
    EXPECT_NE(groups[0].members[i].failure_domain, groups[0].members[(i + 1) % 5].failure_domain);
}

// Whatever the domains are called.
TEST(PlacementTest, TheLargestDomainIsSpreadFirst) {
  const std::vector<PeerNode> nodes = {{"a", "1"}, {"b", "2"}, {"c", "2"}, {"d", "3"}};
  const PeerGroup group = PlaceNodes(nodes, SchemeOf("copy:2")).value().at(0);
  for (size_t i = 0; i < 4; ++i)
    EXPECT_NE(group.members[i].failure_domain, group.members[(i + 1) % 4].failure_domain);
}

TEST(PlacementTest, NodesWithoutADomainDieAlone) {
  // Were "" a domain, all four would be of one.
  std::vector<PeerNode> nodes = {{"a", ""}, {"b", ""}, {"c", "x"}, {"d", "x"}};
  const std::vector<PeerGroup> groups = PlaceNodes(nodes, SchemeOf("copy")).value();
  for (const PeerGroup& group : groups) {
    ASSERT_EQ(group.members.size(), 2u);
    EXPECT_NE(group.members[0].failure_domain, group.members[1].failure_domain);
  }
}

TEST(PlacementTest, AMemberKeepsAUnitOfEachOther) {
  for (const size_t count : {10, 13, 19}) {
    const PeerGroup group = PlaceNodes(NodesOf(count), SchemeOf("ec:8+2")).value().at(0);
    EXPECT_EQ(group.shape, (StripeShape{static_cast<uint32_t>(count) - 2, 2}));
    std::vector<size_t> parity(count);
    for (size_t member = 0; member < count; ++member) {
      const std::vector<size_t> holders = UnitHolders(group, member);
      EXPECT_EQ(holders.at(0), member);
      EXPECT_EQ(std::set<size_t>(holders.begin(), holders.end()).size(), count);
      for (size_t unit = group.shape.data; unit < count; ++unit) ++parity[holders[unit]];
    }
    EXPECT_EQ(parity, std::vector<size_t>(count, 2));
  }
}

TEST(PlacementTest, ACopyLiesOnTheNextNodesOfTheRing) {
  const PeerGroup group = PlaceNodes(NodesOf(5), SchemeOf("copy:2")).value().at(0);
  EXPECT_EQ(UnitHolders(group, 4), (std::vector<size_t>{4, 0, 1}));
  const PeerGroup alone = PlaceNodes(NodesOf(1), SchemeOf("off")).value().at(0);
  EXPECT_EQ(UnitHolders(alone, 0), std::vector<size_t>{0});
}

TEST(PlacementTest, WhatCannotBePlacedIsRefused) {
  EXPECT_THAT(PlaceNodes(NodesOf(9), SchemeOf("ec:8+2")).error().message,
              HasSubstr("needs 10 nodes; there are 9"));
  EXPECT_THAT(PlaceNodes({}, SchemeOf("off")).error().message, HasSubstr("there are 0"));
  EXPECT_THAT(PlaceNodes({{"a", "x"}, {"a", "y"}}, SchemeOf("copy")).error().message,
              HasSubstr("two nodes are named 'a'"));
  EXPECT_THAT(PlaceNodes({{"", ""}, {"a", ""}}, SchemeOf("copy")).error().message,
              HasSubstr("without a name"));
}

}  // namespace
}  // namespace ckptfs
