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

std::optional<WriteTimes> WriteTimesOf(const File& file) {
  struct statx info {};
  const int descriptor = file.descriptor();
  const int wanted = STATX_BTIME | STATX_MTIME | STATX_CTIME;
  if (descriptor < 0 || ::statx(descriptor, "", AT_EMPTY_PATH, wanted, &info) != 0)
    return std::nullopt;
  const auto nanoseconds = [](const struct statx_timestamp& time) {
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  };
  const bool born = (info.stx_mask & STATX_BTIME) != 0;
  return WriteTimes{born ? nanoseconds(info.stx_btime) : 0, nanoseconds(info.stx_mtime),
                    nanoseconds(info.stx_ctime)};
}

namespace {

constexpr int64_t kSecond = 1'000'000'000;    // nanoseconds
constexpr int64_t kClockSkew = kSecond / 10;  // between machines that write one step
constexpr int64_t kPause = kSecond;           // no program that copies rests so long
constexpr int64_t kLongPause = 10 * kSecond;  // ... once another file has followed
constexpr uint64_t kSmall = 1 << 20;          // bytes; nobody writes it for a second
constexpr int64_t kSlowStart = 60 * kSecond;  // before the first byte of a file
constexpr uint64_t kNanosecondsOfByte = kSecond / 10'000'000;  // of the slowest writer

// True if it got its name, or lost another, when it was written: downloads do so.
bool WasRenamed(const WriteTimes& times) {
  return times.changed_ns > times.written_ns && times.changed_ns < times.written_ns + kSecond;
}

// When somebody began to write the file, at the earliest.
int64_t BegunAt(const StepFile& file) {
  const WriteTimes& times = file.times;
  const bool born = times.born_ns != 0 && times.born_ns <= times.written_ns;
  // A small one that was made long before it was written was written again since.
  if (born && file.size < kSmall) return std::max(times.born_ns, times.written_ns - kSecond);
  if (born) return times.born_ns;
  const uint64_t longest = std::min<uint64_t>(file.size, INT64_MAX / 4 / kNanosecondsOfByte);
  return times.written_ns - kSlowStart - static_cast<int64_t>(longest * kNanosecondsOfByte);
}

// The end of the first pause after `sealed_ns`; INT64_MAX without one.  `begun`: by BegunAt.
int64_t EndOfPause(std::span<const StepFile> files, std::vector<size_t> begun, int64_t sealed_ns) {
  std::ranges::sort(begun, {}, [&](size_t i) { return BegunAt(files[i]); });
  int64_t end = sealed_ns, pause = kPause;
  for (const size_t i : begun) {
    const int64_t written = files[i].times.written_ns;
    if (BegunAt(files[i]) > end + pause) return BegunAt(files[i]);
    if (written > sealed_ns + kClockSkew) pause = kLongPause;
    end = std::max(end, written);
  }
  return INT64_MAX;
}

}  // namespace

std::vector<size_t> FindWrittenAnew(std::span<const StepFile> files, int64_t sealed_ns) {
  std::vector<size_t> out, later;
  for (size_t i = 0; i < files.size(); ++i) {
    const WriteTimes& times = files[i].times;
    if (times.written_ns <= sealed_ns) continue;
    const bool there = times.born_ns != 0 && times.born_ns < sealed_ns && !WasRenamed(times);
    if (!there) later.push_back(i);
    if (there && files[i].saved && times.written_ns > sealed_ns + kClockSkew) out.push_back(i);
  }
  const int64_t pause = EndOfPause(files, later, sealed_ns);
  for (const size_t i : later) {
    if (files[i].read && BegunAt(files[i]) >= pause) out.push_back(i);
  }
  std::ranges::sort(out);
  return out;
}

}  // namespace ckptfs
