// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <random>

#include "core/peer/peer_protocol.h"
#include "core/peer/peer_records.h"
#include "tests/core/peer/peers.h"

namespace ckptfs {
namespace {

TEST(PeerFrames, AnyChangedBitIsSeen) {
  PeerFrame frame{.word = PeerWord::kGet, .rank = 3, .offset = 4, .length = 5, .digest = {6, 7}};
  frame.text = "a text";
  const auto sent = EncodePeerFrame(frame);
  for (size_t bit = 0; bit < 8 * kPeerFrameBytes; ++bit) {
    auto bytes = sent;
    bytes[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    const auto header = DecodePeerHeader(bytes, kMaxPeerText);
    EXPECT_FALSE(header && header->text_bytes == frame.text.size() &&
                 CheckPeerFrame(*header, bytes, frame.text))
        << "bit " << bit;
  }
  const auto header = DecodePeerHeader(sent, kMaxPeerText);
  ASSERT_TRUE(header);
  EXPECT_TRUE(CheckPeerFrame(*header, sent, "a text"));
  EXPECT_FALSE(CheckPeerFrame(*header, sent, "a tEXT"));
}

TEST(PeerFrames, RandomBytesAreRefused) {
  std::mt19937_64 random(4);
  for (int i = 0; i < 20'000; ++i) {
    std::array<std::byte, kPeerFrameBytes> bytes{};
    for (auto& byte : bytes) byte = static_cast<std::byte>(random());
    if (i % 2 == 0) {  // the magic, a word and small lengths
      const auto good = EncodePeerFrame({.word = PeerWord::kList});
      std::copy_n(good.begin(), 8, bytes.begin());
      bytes[50] = bytes[51] = bytes[54] = bytes[55] = std::byte{0};
    }
    const auto header = DecodePeerHeader(bytes, kMaxPeerText);
    EXPECT_FALSE(header && CheckPeerFrame(*header, bytes, ""));
  }
}

TEST(PeerTexts, AreReadAsTheyWereWritten) {
  const std::string bytes = BytesOfSeed(1, 700'000);
  const PreparedPart part = PartOf(bytes, 2);
  const std::vector<ShelvedPart> parts{ShelvedOf(part, part.ranks[0], ShelvedState::kProtected)};
  EXPECT_EQ(*ParseShelved(RenderShelved(parts)), parts);
  EXPECT_EQ(parts[0].Directory(), part.Directory());
  const std::vector<ShownMemoryStep> shown{
      {{"run", "job", 3, {1, 2}}, "7", {1, 2}, part.Directory(), -5, 7}};
  EXPECT_EQ(*ParseShown(RenderShown(shown)), shown);
  EXPECT_EQ(ParsePeerPart(RenderPart(part))->ranks, part.ranks);
  const PeerRecord peer{{1, 2}, "10.0.0.1:7000", "host\n1", "rack 3"};
  EXPECT_EQ(*ParsePeer(RenderPeer(peer), peer.node), peer);
  EXPECT_FALSE(ParsePeer(RenderPeer(peer), {1, 3}));
}

TEST(PeerTexts, WhatMakesNoSenseIsRefused) {
  const PreparedPart part = PartOf("abc");
  ShelvedPart shelved = ShelvedOf(part, part.ranks[0], ShelvedState::kHeld);
  shelved.rank = 4;
  EXPECT_FALSE(ParseShelved(RenderShelved({shelved}))) << "a rank beyond its world";
  shelved.rank = 0;
  shelved.name.run = "../x";
  EXPECT_FALSE(ParseShelved(RenderShelved({shelved}))) << "a run that is not a name";
  EXPECT_FALSE(ParseShown(RenderShown({{{"run", "job", 1, {}}, "a/b", {}, "", 0, 0}})));
  PreparedPart two = part;
  two.ranks.push_back({1, 3, two.ranks[0].chunks});
  EXPECT_FALSE(ParsePeerPart(RenderPart(two))) << "two ranks";
  std::string text = RenderPart(part);
  for (size_t i = 0; i < text.size(); ++i) {
    std::string wrong = text;
    wrong[i] = static_cast<char>(wrong[i] ^ 1);
    EXPECT_FALSE(ParsePeerPart(wrong)) << i;
    EXPECT_FALSE(ParsePeerPart(text.substr(0, i))) << i;
  }
}

}  // namespace
}  // namespace ckptfs
