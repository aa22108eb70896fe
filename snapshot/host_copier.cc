// SPDX-License-Identifier: Apache-2.0

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/base/strings.h"
#include "snapshot/copier.h"

namespace ckptfs {
namespace {

constexpr uint64_t kPiece = 1 << 20;
constexpr uintptr_t kPage = 4096;  // at most the system's: more entries than it fills

// Whether all of it belongs to a mapping now.
bool IsMapped(const std::byte* from, uint64_t bytes) {
  std::array<unsigned char, kPiece / kPage + 2> resident;
  const auto begin = reinterpret_cast<uintptr_t>(from);
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t first = begin / page * page;
  return ::mincore(reinterpret_cast<void*>(first), begin + bytes - first, resident.data()) == 0;
}

// Through the kernel, to which what is not there is an error.  It does not look at memory of
// a device's driver, nor where it is told not to: that is copied plainly while it is mapped.
Status CopyPiece(const MemoryCopy& copy) {
  for (uint64_t done = 0; done < copy.bytes;) {
    iovec to{copy.to + done, copy.bytes - done};
    iovec from{const_cast<std::byte*>(copy.from) + done, copy.bytes - done};
    const ssize_t count = ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0);
    if (count > 0) {
      done += static_cast<uint64_t>(count);
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    if (!IsMapped(copy.from + done, copy.bytes - done)) {
      return Fail(ErrorCode::kStale, "memory of a tensor was given back before the update");
    }
    std::memcpy(copy.to + done, copy.from + done, copy.bytes - done);
    return {};
  }
  return {};
}

}  // namespace

Status CopyHostMemory(const MemoryCopy& copy, Trainer trainer) {
  if (trainer == Trainer::kWaits) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    return {};
  }
  for (uint64_t at = 0; at < copy.bytes; at += kPiece) {
    CKPT_RETURN_IF_ERROR(
        CopyPiece({copy.from + at, copy.to + at, std::min(kPiece, copy.bytes - at), kHost}));
  }
  return {};
}

Status HostCopier::Follow(std::span<const DeviceStream> streams) {
  if (streams.empty()) return {};
  return Fail(ErrorCode::kUnsupported, "memory of a device without its driver");
}

Status HostCopier::Enqueue(std::span<const MemoryCopy> copies, Trainer trainer) {
  for (const MemoryCopy& copy : copies) {
    if (copy.device != kHost) {
      return Fail(ErrorCode::kUnsupported, "memory of a device without its driver");
    }
    CKPT_RETURN_IF_ERROR(CopyHostMemory(copy, trainer));
  }
  return {};
}

Status HostCopier::Wait() { return {}; }

std::shared_ptr<const void> HostCopier::Pin(std::span<std::byte>) { return nullptr; }

}  // namespace ckptfs
