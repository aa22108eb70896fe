// SPDX-License-Identifier: Apache-2.0
//
// Parameter names as path components, and inode numbers from paths.
//
//   component = escaped                      if it has at most 255 bytes
//             | first 200 bytes of escaped, cut at an escape or UTF-8 border,
//               "~", HashOf(name) as 16 hex digits          otherwise
//   escaped   = the name with '/', '%', and bytes below 0x20 and 0x7f as %XX;
//               "." is "%2E", ".." is "%2E%2E", the empty name "%"
//
// Thread safety: pure functions.
// Units: bytes.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/digest.h"
#include "fs/types.h"

namespace ckptfs {

inline constexpr size_t kMaxComponent = 255;

std::string EscapeComponent(std::string_view name);

// The seed that every inode of one manifest derives from.
uint64_t InodeSeed(const Digest& manifest);

// The inode of a path below a manifest (seed 0: above any).  Never 0 or the
// root's.  `attempt` > 0 is for a path whose number is taken by another one.
InodeNumber InodeOf(uint64_t seed, std::string_view path, uint64_t attempt = 0);

// Directory cookies of listings that change: from the name, so that an entry
// that stays is neither skipped nor repeated.  Above those of "." and "..".
uint64_t CookieOf(std::string_view name);

// The directory of such steps in that of their run.
inline std::string_view PlaceName(StepPlace place) {
  return place == StepPlace::kStep ? "step" : "memory";
}

}  // namespace ckptfs
