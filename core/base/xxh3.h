// SPDX-License-Identifier: Apache-2.0
//
// XXH3-128 as it is compiled for one kind of processor.  Each source that includes this has its
// own, for the processor that it is compiled for; only digest.cc and xxh3_avx2.cc do.  Headers with
// inline functions do not come along, since the linker may take any source's.
//
// Thread safety: pure functions; one thread for each state.

#pragma once

#include <stddef.h>
#include <stdint.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ckptfs::internal {

struct Xxh3 {
  void (*hash)(const void* bytes, size_t size, uint64_t out[2]);  // high half first
  void (*reset)(void* state);                                     // a XXH3_state_t
  void (*update)(void* state, const void* bytes, size_t size);
  void (*digest)(const void* state, uint64_t out[2]);
};

static constexpr Xxh3 kXxh3Here{
    [](const void* bytes, size_t size, uint64_t out[2]) {
      const XXH128_hash_t hash = XXH3_128bits(bytes, size);
      out[0] = hash.high64;
      out[1] = hash.low64;
    },
    [](void* state) { XXH3_128bits_reset(static_cast<XXH3_state_t*>(state)); },
    [](void* state, const void* bytes, size_t size) {
      XXH3_128bits_update(static_cast<XXH3_state_t*>(state), bytes, size);
    },
    [](const void* state, uint64_t out[2]) {
      const XXH128_hash_t hash = XXH3_128bits_digest(static_cast<const XXH3_state_t*>(state));
      out[0] = hash.high64;
      out[1] = hash.low64;
    }};

// Null where it is not compiled for such processors.
const Xxh3* Xxh3OfAvx2();

}  // namespace ckptfs::internal
