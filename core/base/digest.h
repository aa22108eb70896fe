// SPDX-License-Identifier: Apache-2.0
//
// Digest is an XXH3-128 of some bytes: it detects accidents, not attackers.
//
// Thread safety: value type; the functions are pure but for RandomDigest, which any thread
// may call; a DigestStream is one thread's.

#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace ckptfs {

struct Digest {
  uint64_t high = 0;
  uint64_t low = 0;
  auto operator<=>(const Digest&) const = default;

  std::string Hex() const;  // 32 lower-case letters, high half first
};

Digest DigestOf(std::span<const std::byte> bytes);
Digest DigestOf(std::string_view bytes);

// The digest of bytes that come piece by piece.
class DigestStream {
 public:
  DigestStream();
  void Add(std::span<const std::byte> bytes);
  // The digest of everything added since the last Finish.
  Digest Finish();

 private:
  alignas(64) std::array<std::byte, 576> state_;
};

// 128 random bits, for a name that nothing else has.
Digest RandomDigest();

// 64-bit hash of a text; stable for ever (inode numbers derive from it).
uint64_t HashOf(std::string_view text, uint64_t seed = 0);

}  // namespace ckptfs
