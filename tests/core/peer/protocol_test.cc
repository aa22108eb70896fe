// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <random>

#include "core/peer/peer_protocol.h"
#include "core/peer/peer_records.h"
#include "tests/core/peer/peers.h"

namespace ckptfs {
namespace {

TEST(PeerFrames, AnyChangedBitIsSeen) {
  PeerFrame frame{
      .word = PeerWord::kGet, .rank = 3, .slot = 2, .offset = 4, .length = 5, .digest = {6, 7}};
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

// Digests of parity that nobody calculated.
UnitRecord UnitOf(const PreparedPart& part, StripeShape shape, uint32_t unit) {
  const uint64_t rows = shape.RowsOf(part.ranks[0].bytes);
  return {part, shape, unit, std::vector<Digest>(shape.parity * rows, Digest{3, 4})};
}

TEST(PeerTexts, AreReadAsTheyWereWritten) {
  const std::string bytes = BytesOfSeed(1, 700'000);
  const PreparedPart part = PartOf(bytes, 2);
  const UnitRecord whole{part, {}, 0}, unit = UnitOf(part, {2, 2}, 3);
  const std::vector<ShelvedPart> parts{ShelvedOf(whole, ShelvedState::kProtected),
                                       ShelvedOf(unit, ShelvedState::kHeld)};
  EXPECT_EQ(*ParseShelved(RenderShelved(parts)), parts);
  EXPECT_EQ(parts[0].Directory(), part.Directory());
  const std::vector<ShownMemoryStep> shown{
      {{"run", "job", 3, {1, 2}}, "7", {1, 2}, part.Directory(), -5, 7}};
  EXPECT_EQ(*ParseShown(RenderShown(shown)), shown);
  for (const UnitRecord& record : {whole, unit}) {
    const auto read = ParseUnit(RenderUnit(record));
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_TRUE(read->IsOf(record));
    EXPECT_EQ(read->part.Directory(), part.Directory());
  }
  const PeerRecord peer{{1, 2}, "10.0.0.1:7000", "host\n1", "rack 3"};
  EXPECT_EQ(*ParsePeer(RenderPeer(peer), peer.node), peer);
  EXPECT_FALSE(ParsePeer(RenderPeer(peer), {1, 3}));
}

TEST(PeerTexts, WhatMakesNoSenseIsRefused) {
  const PreparedPart part = PartOf("abc");
  ShelvedPart shelved = ShelvedOf({part, {}, 0}, ShelvedState::kHeld);
  shelved.rank = 4;
  EXPECT_FALSE(ParseShelved(RenderShelved({shelved}))) << "a rank beyond its world";
  shelved.rank = 0;
  shelved.name.run = "../x";
  EXPECT_FALSE(ParseShelved(RenderShelved({shelved}))) << "a run that is not a name";
  EXPECT_FALSE(ParseShown(RenderShown({{{"run", "job", 1, {}}, "a/b", {}, "", 0, 0}})));
  PreparedPart two = part;
  two.ranks.push_back({1, 3, two.ranks[0].chunks});
  EXPECT_FALSE(ParseUnit(RenderUnit({two, {}, 0}))) << "two ranks";
  std::string text = RenderUnit(UnitOf(part, {2, 1}, 2));
  for (size_t i = 0; i < text.size(); ++i) {
    std::string wrong = text;
    wrong[i] = static_cast<char>(wrong[i] ^ 1);
    EXPECT_FALSE(ParseUnit(wrong)) << i;
    EXPECT_FALSE(ParseUnit(text.substr(0, i))) << i;
  }
}

TEST(PeerTexts, AUnitThatNoStripeHasIsRefused) {
  const PreparedPart part = PartOf(BytesOfSeed(1, 700'000));
  ASSERT_TRUE(ParseUnit(RenderUnit(UnitOf(part, {2, 2}, 3))));
  for (const UnitRecord& record :
       {UnitOf(part, {2, 2}, 4), UnitRecord{part, {0, 1}, 0}, UnitOf(part, {1, 1}, 1),
        UnitOf(part, {1, 0}, 1), UnitOf(part, {200, 56}, 0)}) {
    EXPECT_FALSE(ParseUnit(RenderUnit(record))) << record.shape.data << " " << record.unit;
    ShelvedPart shelved = ShelvedOf({part, {}, 0}, ShelvedState::kHeld);
    shelved.shape = record.shape;
    shelved.unit = record.unit;
    EXPECT_FALSE(ParseShelved(RenderShelved({shelved}))) << record.shape.data;
  }
  const UnitRecord short_of_one{part, {2, 2}, 3, std::vector<Digest>(3)};
  EXPECT_FALSE(ParseUnit(RenderUnit(short_of_one))) << "a digest of parity is missing";
}

}  // namespace
}  // namespace ckptfs
