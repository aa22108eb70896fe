// SPDX-License-Identifier: Apache-2.0

#include "core/base/digest.h"

#include <fmt/format.h>

#include <random>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ckptfs {

std::string Digest::Hex() const { return fmt::format("{:016x}{:016x}", high, low); }

Digest DigestOf(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return Digest{hash.high64, hash.low64};
}

Digest DigestOf(std::string_view bytes) { return DigestOf(std::as_bytes(std::span(bytes))); }

Digest RandomDigest() {
  std::random_device device;
  Digest id;
  for (uint64_t* half : {&id.high, &id.low}) {
    *half = (uint64_t{device()} << 32) | device();
  }
  return id;
}

uint64_t HashOf(std::string_view text, uint64_t seed) {
  return XXH3_64bits_withSeed(text.data(), text.size(), seed);
}

}  // namespace ckptfs
