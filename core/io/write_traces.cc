// SPDX-License-Identifier: Apache-2.0

#include "core/io/write_traces.h"

#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <new>

#include "core/io/local_filesystem.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxHoles = 4096;
constexpr uint32_t kExtents = 64;    // for one ioctl
constexpr size_t kMaxRounds = 1024;  // of it
constexpr int64_t kZfs = 0x2FC12FC1;
constexpr int64_t kClockSkew = 100'000'000;  // nanoseconds, between machines that write one step

bool MakesHolesOfZeros(int file) {
  struct statfs info {};
  return ::fstatfs(file, &info) != 0 || (static_cast<int64_t>(info.f_type) & 0xFFFFFFFF) == kZfs;
}

uint64_t BytesInHoles(int file, uint64_t size) {
  const auto end = static_cast<off_t>(size);
  uint64_t bytes = 0;
  off_t at = 0;
  for (size_t i = 0; i < kMaxHoles && at < end; ++i) {
    const off_t data = ::lseek(file, at, SEEK_DATA);
    if (data < 0 && errno != ENXIO) return bytes;  // it does not tell
    const off_t hole_end = data < 0 ? end : std::min(data, end);
    bytes += static_cast<uint64_t>(hole_end - at);
    at = hole_end < end ? ::lseek(file, hole_end, SEEK_HOLE) : end;
    if (at < 0) return bytes;
  }
  return bytes;
}

using Map = struct fiemap;
using Extent = struct fiemap_extent;

struct MapMemory {
  alignas(Map) std::array<std::byte, sizeof(Map) + kExtents * sizeof(Extent)> bytes{};
};

// The bytes of unwritten extents; 0 where the filesystem does not tell.  `flags`:
// FIEMAP_FLAG_SYNC, without which an extent counts until its pages are written back.
uint64_t BytesUnwritten(int file, uint64_t size, uint32_t flags) {
  uint64_t bytes = 0, at = 0;
  for (size_t round = 0; round < kMaxRounds && at < size; ++round) {
    MapMemory memory;
    Map* const map = new (memory.bytes.data()) Map{};
    map->fm_start = at;
    map->fm_length = size - at;
    map->fm_flags = flags;
    map->fm_extent_count = kExtents;
    if (::ioctl(file, FS_IOC_FIEMAP, map) != 0 || map->fm_mapped_extents == 0) return bytes;
    for (uint32_t i = 0; i < std::min(map->fm_mapped_extents, kExtents); ++i) {
      const Extent& extent = map->fm_extents[i];
      const uint64_t begin = std::max<uint64_t>(extent.fe_logical, at);
      const uint64_t end = std::min<uint64_t>(extent.fe_logical + extent.fe_length, size);
      if (end <= begin) continue;
      if ((extent.fe_flags & FIEMAP_EXTENT_UNWRITTEN) != 0) bytes += end - begin;
      at = end;
      if ((extent.fe_flags & FIEMAP_EXTENT_LAST) != 0) return bytes;
    }
    if (at == map->fm_start) return bytes;
  }
  return bytes;
}

}  // namespace

bool IsOpenForWriting(const File& file) {
  const int descriptor = file.descriptor();
  if (descriptor < 0 || !IsLocalFilesystem(descriptor)) return false;
  // A lease for reading is refused while somebody may write.  A process that opens the file
  // for writing while we hold one waits that long; the signal for us is one that is ignored.
  (void)::fcntl(descriptor, F_SETSIG, SIGURG);
  if (::fcntl(descriptor, F_SETLEASE, F_RDLCK) != 0) return errno == EAGAIN;
  (void)::fcntl(descriptor, F_SETLEASE, F_UNLCK);
  return false;
}

uint64_t BytesNeverWritten(const File& file) {
  const int descriptor = file.descriptor();
  if (descriptor < 0 || file.size() == 0 || MakesHolesOfZeros(descriptor)) return 0;
  const uint64_t holes = BytesInHoles(descriptor, file.size());
  if (holes > 0 || BytesUnwritten(descriptor, file.size(), 0) == 0) return holes;
  return BytesUnwritten(descriptor, file.size(), FIEMAP_FLAG_SYNC);
}

bool WasWrittenAnew(const File& file, int64_t since_ns) {
  struct statx info {};
  const int wanted = STATX_BTIME | STATX_MTIME;
  const int descriptor = file.descriptor();
  if (descriptor < 0 || ::statx(descriptor, "", AT_EMPTY_PATH, wanted, &info) != 0) return false;
  if ((info.stx_mask & wanted) != wanted) return false;
  const auto nanoseconds = [](const struct statx_timestamp& time) {
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  };
  return nanoseconds(info.stx_btime) < since_ns &&
         nanoseconds(info.stx_mtime) > since_ns + kClockSkew;
}

}  // namespace ckptfs
