// SPDX-License-Identifier: Apache-2.0

#include <cstring>

#include "snapshot/copier.h"

namespace ckptfs {

Status HostCopier::Follow(std::span<const DeviceStream> streams) {
  if (streams.empty()) return {};
  return Fail(ErrorCode::kUnsupported, "memory of a device without its driver");
}

Status HostCopier::Enqueue(std::span<const MemoryCopy> copies) {
  for (const MemoryCopy& copy : copies) {
    if (copy.device != kHost) {
      return Fail(ErrorCode::kUnsupported, "memory of a device without its driver");
    }
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
  return {};
}

Status HostCopier::Wait() { return {}; }

std::shared_ptr<const void> HostCopier::Pin(std::span<std::byte>) { return nullptr; }

}  // namespace ckptfs
