// SPDX-License-Identifier: Apache-2.0

#include "core/base/crc32.h"

#include <zlib.h>

namespace ckptfs {

uint32_t Crc32(uint32_t before, std::span<const std::byte> bytes) {
  if (bytes.empty()) return before;  // zlib takes a null pointer for a new start
  const auto* data = reinterpret_cast<const Bytef*>(bytes.data());
  return static_cast<uint32_t>(::crc32_z(before, data, bytes.size()));
}

}  // namespace ckptfs
