// SPDX-License-Identifier: Apache-2.0
//
// Parity against an oracle: GF(2^8) byte by byte, from its definition.

#include "core/peer/parity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <random>

#include "core/blob/chunk_digests.h"

namespace ckptfs {
namespace {

using Bytes = std::vector<std::byte>;

// Multiplies two polynomials modulo x^8 + x^4 + x^3 + x^2 + 1.
uint8_t Times(uint8_t a, uint8_t b) {
  unsigned product = 0;
  for (unsigned bit = 0; bit < 8; ++bit)
    if ((b >> bit & 1) != 0) product ^= unsigned{a} << bit;
  for (unsigned bit = 15; bit >= 8; --bit)
    if ((product >> bit & 1) != 0) product ^= 0x11du << (bit - 8);
  return static_cast<uint8_t>(product);
}

uint8_t Over(uint8_t a, uint8_t b) {
  for (unsigned x = 0; x < 256; ++x)
    if (Times(b, static_cast<uint8_t>(x)) == a) return static_cast<uint8_t>(x);
  return 0;
}

// Entry (j, i) of the scaled Cauchy matrix, as the header defines it.
uint8_t Coefficient(const StripeShape& shape, uint32_t j, uint32_t i) {
  const auto cauchy = [&](uint32_t row, uint32_t column) {
    return Over(1, static_cast<uint8_t>((shape.data + row) ^ column));
  };
  const uint8_t scaled = Over(cauchy(j, i), cauchy(0, i));
  return Over(scaled, Over(cauchy(j, 0), cauchy(0, 0)));
}

Bytes RandomBytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// A stripe of random data units, with parity by the oracle.
struct Stripe {
  Stripe(StripeShape of, size_t count) : shape(of) {
    for (uint32_t i = 0; i < shape.data; ++i) units.push_back(RandomBytes(count, i + 1));
    for (uint32_t j = 0; j < shape.parity; ++j) {
      Bytes parity(count);
      for (uint32_t i = 0; i < shape.data; ++i) {
        const uint8_t coefficient = Coefficient(shape, j, i);
        for (size_t at = 0; at < count; ++at)
          parity[at] ^=
              static_cast<std::byte>(Times(coefficient, static_cast<uint8_t>(units[i][at])));
      }
      units.push_back(std::move(parity));
    }
  }
  StripeShape shape;
  std::vector<Bytes> units;
};

const std::vector<StripeShape> kShapes = {{1, 1}, {1, 3}, {2, 1}, {4, 1}, {4, 2}, {8, 2}, {5, 4}};

TEST(StripeCodeTest, ParityIsTheOraclesInAnyOrder) {
  std::mt19937 random(5);
  for (const StripeShape& shape : kShapes) {
    for (const size_t count : {1, 31, 64, 1000, 4099}) {
      const Stripe stripe(shape, count);
      const StripeCode code(shape);
      std::vector<uint32_t> order(shape.data);
      std::iota(order.begin(), order.end(), 0u);
      std::shuffle(order.begin(), order.end(), random);
      for (uint32_t j = 0; j < shape.parity; ++j) {
        Bytes parity(count);
        for (const uint32_t unit : order) code.Fold(unit, stripe.units[unit], j, parity);
        EXPECT_EQ(parity, stripe.units[shape.data + j])
            << shape.data << "+" << shape.parity << ", " << count << " bytes, parity " << j;
      }
    }
  }
}

TEST(StripeCodeTest, OneParityUnitIsTheXorAndParityOfOneUnitItsCopy) {
  for (const uint32_t data : {2u, 4u, 16u, 100u}) {
    const Stripe stripe({data, 1}, 50);
    Bytes all(50);
    for (uint32_t i = 0; i < data; ++i)
      for (size_t at = 0; at < 50; ++at) all[at] ^= stripe.units[i][at];
    EXPECT_EQ(stripe.units[data], all);
  }
  const Stripe copies({1, 15}, 50);
  for (const Bytes& unit : copies.units) EXPECT_EQ(unit, copies.units[0]);
}

// All sets of lost units that the parity bears; what is left is exactly enough.
TEST(StripeCodeTest, EveryErasurePatternIsRestored) {
  for (const StripeShape& shape : kShapes) {
    const Stripe stripe(shape, 333);
    const StripeCode code(shape);
    size_t patterns = 0;
    for (uint32_t lost = 0; lost < 1u << shape.units(); ++lost) {
      if (static_cast<uint32_t>(std::popcount(lost)) > shape.parity) continue;
      std::map<uint32_t, std::span<const std::byte>> known;
      for (uint32_t unit = 0; unit < shape.units(); ++unit)
        if ((lost >> unit & 1) == 0) known[unit] = stripe.units[unit];
      for (uint32_t unit = 0; unit < shape.units(); ++unit) {
        Bytes restored(333, std::byte{1});
        ASSERT_TRUE(code.Restore(known, unit, restored));
        EXPECT_EQ(restored, stripe.units[unit])
            << shape.data << "+" << shape.parity << " without " << lost << ": unit " << unit;
      }
      ++patterns;
    }
    EXPECT_GE(patterns, shape.units()) << "one lost at a time, and none";
  }
}

TEST(StripeCodeTest, OneLossMoreIsRefused) {
  for (const StripeShape& shape : kShapes) {
    const Stripe stripe(shape, 64);
    std::map<uint32_t, std::span<const std::byte>> known;
    for (uint32_t unit = shape.parity + 1; unit < shape.units(); ++unit)
      known[unit] = stripe.units[unit];
    Bytes restored(64);
    EXPECT_EQ(StripeCode(shape).Restore(known, 0, restored).error().code, ErrorCode::kInvalid);
  }
}

// The last row of a file: units have fewer bytes, or none, and count as if zeros followed.
TEST(StripeCodeTest, ShorterUnitsCountAsIfZerosFollowed) {
  const StripeShape shape{4, 2};
  const StripeCode code(shape);
  Stripe stripe(shape, 100);
  std::vector<Bytes> cut(stripe.units.begin(), stripe.units.begin() + 4);
  cut[1].resize(37);
  cut[2].clear();
  cut[3].clear();
  std::vector<Bytes> parity(2, Bytes(100));
  for (uint32_t j = 0; j < 2; ++j)
    for (uint32_t i = 0; i < 4; ++i) code.Fold(i, cut[i], j, parity[j]);
  Bytes restored(100);
  ASSERT_TRUE(
      code.Restore({{2, cut[2]}, {3, cut[3]}, {4, parity[0]}, {5, parity[1]}}, 1, restored));
  cut[1].resize(100);
  EXPECT_EQ(restored, cut[1]);
  ASSERT_TRUE(
      code.Restore({{2, cut[2]}, {3, cut[3]}, {4, parity[0]}, {5, parity[1]}}, 0, restored));
  EXPECT_EQ(restored, cut[0]);
}

// A wide group, as 200 nodes make it: some sets of lost units.
TEST(StripeCodeTest, WideStripesAreRestored) {
  std::mt19937 random(6);
  for (const StripeShape& shape : {StripeShape{128, 127}, StripeShape{253, 2}}) {
    const Stripe stripe(shape, 40);
    const StripeCode code(shape);
    for (int i = 0; i < 5; ++i) {
      std::vector<uint32_t> order(shape.units());
      std::iota(order.begin(), order.end(), 0u);
      std::shuffle(order.begin(), order.end(), random);
      std::map<uint32_t, std::span<const std::byte>> known;
      for (uint32_t k = 0; k < shape.data; ++k) known[order[k]] = stripe.units[order[k]];
      Bytes restored(40);
      ASSERT_TRUE(code.Restore(known, order.back(), restored));
      EXPECT_EQ(restored, stripe.units[order.back()]);
    }
  }
}

TEST(StripeShapeTest, UnitsAreTheFileChunkByChunk) {
  for (const StripeShape& shape : {StripeShape{2, 1}, StripeShape{4, 2}, StripeShape{8, 2}}) {
    for (const uint64_t bytes : {uint64_t{1}, kChunkBytes - 1, kChunkBytes, kChunkBytes + 1,
                                 5 * kChunkBytes, 9 * kChunkBytes + 17}) {
      uint64_t data = 0, longest = 0;
      for (uint32_t unit = 0; unit < shape.units(); ++unit) {
        uint64_t of_unit = 0;
        for (uint64_t row = 0; row < shape.RowsOf(bytes); ++row)
          of_unit += shape.ChunkBytesOf(unit, row, bytes);
        EXPECT_EQ(shape.ChunkBytesOf(unit, shape.RowsOf(bytes), bytes), 0u);
        EXPECT_EQ(shape.UnitBytes(unit, bytes), of_unit) << shape.data << " " << bytes;
        if (unit < shape.data) data += of_unit;
        longest = std::max(longest, of_unit);
        EXPECT_TRUE(unit < shape.data || of_unit == longest);
      }
      EXPECT_EQ(data, bytes);
    }
    EXPECT_EQ(shape.UnitBytes(0, 0), 0u);
  }
}

}  // namespace
}  // namespace ckptfs
