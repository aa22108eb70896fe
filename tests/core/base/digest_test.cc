// SPDX-License-Identifier: Apache-2.0
#include "core/base/digest.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "core/base/xxh3.h"

namespace ckptfs {
namespace {

std::vector<std::byte> Noise(size_t size) {
  std::mt19937 random(static_cast<unsigned>(size));
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// The expected digests are those of `xxh128sum`.
TEST(DigestTest, ItIsXxh3) {
  EXPECT_EQ(DigestOf("").Hex(), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(DigestOf("abc").Hex(), "06b05ab6733a618578af5f94892f3950");
}

// The faster code of this processor gives the digests of other machines, for all lengths and
// pieces.
TEST(DigestTest, ItIsTheSameOnEveryProcessor) {
  uint64_t any[2];
  for (size_t size = 0; size < 70'000; size += size < 1100 ? 1 : 977) {
    const std::vector<std::byte> bytes = Noise(size);
    internal::kXxh3Here.hash(bytes.data(), size, any);
    ASSERT_EQ(DigestOf(bytes), (Digest{any[0], any[1]})) << size;
  }
  const std::vector<std::byte> bytes = Noise(300'000);
  DigestStream stream;
  for (const size_t piece : {1u, 63u, 64u, 255u, 256u, 257u, 1024u, 4096u, 65'537u}) {
    XXH3_state_t state;
    internal::kXxh3Here.reset(&state);
    for (size_t at = 0; at < bytes.size(); at += piece) {
      const std::span<const std::byte> one =
          std::span(bytes).subspan(at, std::min(piece, bytes.size() - at));
      stream.Add(one);
      internal::kXxh3Here.update(&state, one.data(), one.size());
    }
    internal::kXxh3Here.digest(&state, any);
    const Digest found = stream.Finish();
    EXPECT_EQ(found, (Digest{any[0], any[1]})) << piece;
    EXPECT_EQ(found, DigestOf(bytes)) << piece;
  }
}

}  // namespace
}  // namespace ckptfs
