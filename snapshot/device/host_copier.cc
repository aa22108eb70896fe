// SPDX-License-Identifier: Apache-2.0

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/digest.h"
#include "snapshot/device/copier.h"
#include "snapshot/device/piece_lanes.h"

namespace ckptfs {
namespace {

constexpr uint64_t kPiece = 1 << 20;
constexpr uint64_t kSmall = 64 << 10;
constexpr uintptr_t kPage = 4096;  // at most the system's: more entries than it fills

// True if all of it belongs to a mapping now.
bool IsMapped(const std::byte* from, uint64_t bytes) {
  std::array<unsigned char, kPiece / kPage + 2> resident;
  const auto begin = reinterpret_cast<uintptr_t>(from);
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t first = begin / page * page;
  return ::mincore(reinterpret_cast<void*>(first), begin + bytes - first, resident.data()) == 0;
}

tl::unexpected<Error> GivenBack() {
  return Fail(ErrorCode::kStale, "the memory of a tensor was freed before the update");
}

// A file in memory; the kernel writes into it from any memory that this process can read.
class Detour {
 public:
  Detour() : file_(memfd_create("ckptfs-detour", MFD_CLOEXEC)) {
    if (!file_.valid() || ftruncate(file_.get(), kPiece) != 0) return;
    void* const mapped = mmap(nullptr, kPiece, PROT_READ, MAP_SHARED, file_.get(), 0);
    if (mapped != MAP_FAILED) bytes_ = static_cast<const std::byte*>(mapped);
  }
  ~Detour() {
    if (bytes_ != nullptr) munmap(const_cast<std::byte*>(bytes_), kPiece);
  }

  Status Copy(const std::byte* from, std::byte* to, uint64_t bytes) const {
    if (bytes_ == nullptr) return Fail(ErrorCode::kExhausted, "no memory for a snapshot's copies");
    for (uint64_t done = 0; done < bytes;) {
      const ssize_t count =
          pwrite(file_.get(), from + done, bytes - done, static_cast<off_t>(done));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return GivenBack();
      done += static_cast<uint64_t>(count);
    }
    std::memcpy(to, bytes_, bytes);
    return {};
  }

 private:
  const Descriptor file_;
  const std::byte* bytes_ = nullptr;
};

// Copies through the kernel, which gives an error for memory that is not there.  It needs one
// copy if it may look at the memory, and two for a device driver's memory, or if told not to.
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
    thread_local const Detour detour;
    return detour.Copy(copy.from + done, copy.to + done, copy.bytes - done);
  }
  return {};
}

// Copies for a trainer that waits: memory that it gave back before is not mapped now.
Status CopyMapped(const MemoryCopy& copy) {
  if (!IsMapped(copy.from, copy.bytes)) return GivenBack();
  std::memcpy(copy.to, copy.from, copy.bytes);
  return {};
}

// Copies small pieces, sorted by address, none of them far from the next.  It asks
// the kernel, whose answer takes longer than a copy, once for as many as possible.
Status CopyNeighbours(std::span<const MemoryCopy> copies) {
  while (!copies.empty()) {
    const std::byte* const begin = copies.front().from;
    size_t count = 0;
    uint64_t bytes = 0;
    for (; count < copies.size(); ++count) {
      const uint64_t all = static_cast<uint64_t>(copies[count].from - begin) + copies[count].bytes;
      if (all > kPiece) break;
      bytes = std::max(bytes, all);
    }
    const bool mapped = IsMapped(begin, bytes);
    for (const MemoryCopy& copy : copies.first(count)) {
      if (!mapped && !IsMapped(copy.from, copy.bytes)) return GivenBack();
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
    copies = copies.subspan(count);
  }
  return {};
}

}  // namespace

Status CopyHostMemory(const MemoryCopy& copy, Trainer trainer) {
  for (uint64_t at = 0; at < copy.bytes; at += kPiece) {
    const MemoryCopy piece{copy.from + at, copy.to + at, std::min(kPiece, copy.bytes - at), kHost};
    CKPT_RETURN_IF_ERROR(trainer == Trainer::kWaits ? CopyMapped(piece) : CopyPiece(piece));
  }
  return {};
}

DeviceDigest PieceDigestOf(std::span<const std::byte> bytes) {
  std::array<std::byte, kShortestPiece> padded{};
  if (bytes.size() < padded.size()) {
    std::ranges::copy(bytes, padded.begin());
    bytes = padded;
  }
  const auto digest = DigestOf(bytes);
  return {digest.high, digest.low};
}

Result<DeviceMoment> HostCopier::TakeMoment(std::span<const MemoryPiece>,
                                            std::span<const MemoryPiece>,
                                            std::span<const DeviceStream>) {
  return Fail(ErrorCode::kUnsupported, "memory of a device without its driver");
}

Status HostCopier::Follow(std::span<const DeviceStream> streams) {
  if (streams.empty()) return {};
  return Fail(ErrorCode::kUnsupported, "memory of a device without its driver");
}

Status CopyHostMemory(std::span<const MemoryCopy> copies, Trainer trainer) {
  std::vector<MemoryCopy> small;
  for (const MemoryCopy& copy : copies) {
    if (trainer == Trainer::kWaits && copy.bytes < kSmall) {
      small.push_back(copy);
    } else {
      CKPT_RETURN_IF_ERROR(CopyHostMemory(copy, trainer));
    }
  }
  std::ranges::sort(small, std::less<const std::byte*>(), &MemoryCopy::from);
  return CopyNeighbours(small);
}

Status HostCopier::Enqueue(std::span<const MemoryCopy> copies, Trainer trainer) {
  for (const MemoryCopy& copy : copies) {
    if (copy.device == kHost) continue;
    return Fail(ErrorCode::kUnsupported, "memory of a device without its driver");
  }
  return CopyHostMemory(copies, trainer);
}

Status HostCopier::Wait() { return {}; }

Result<std::shared_ptr<const CopyMark>> HostCopier::Mark(std::span<const DeviceStream>) {
  return Fail(ErrorCode::kUnsupported, "memory of a device without its driver");
}

Result<std::shared_ptr<const void>> HostCopier::Pin(std::span<std::byte>, int) {
  return Fail(ErrorCode::kUnsupported, "memory of a device without its driver");
}

}  // namespace ckptfs
