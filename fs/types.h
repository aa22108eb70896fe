// SPDX-License-Identifier: Apache-2.0
//
// The words that all of fs/ shares: inodes, handles, callers, attributes, how a file is served, and
// the options of a filesystem.
//
// Thread safety: values.
// Lifetime: a DirectoryEntry keeps its node; the backing of an OpenFile belongs to the filesystem.
// Units: bytes; times are nanoseconds since the epoch unless a name says otherwise.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/view/view_format.h"

namespace ckptfs {

using ViewFormats = std::span<const std::unique_ptr<ViewFormat>>;

enum class InodeNumber : uint64_t {};
inline constexpr InodeNumber kRootInode{1};
enum class FileHandle : uint64_t {};

// The caller; ACLs of sources count as owner-only.
struct Caller {
  uint32_t uid = 0;
  uint32_t gid = 0;
  uint32_t pid = 0;
};

struct Attributes {
  InodeNumber inode{};
  uint32_t mode = 0;  // type and permission bits, as st_mode
  uint32_t nlink = 1;
  uint32_t uid = 0;
  uint32_t gid = 0;
  uint64_t size = 0;
  uint64_t blocks = 0;  // of 512 bytes
  int64_t mtime_ns = 0;
  // The name and these attributes may be cached for ever (of a directory: not
  // its entries).
  bool immutable = false;
  // For how long they may be cached if they are not immutable.  REQUIRES of the
  // mount: the kernel checks modes (default_permissions); 0 is where that check
  // alone would let through somebody who may not see the step, so every walk
  // has to ask.
  uint32_t valid_ms = 0;
};

struct Node;

struct DirectoryEntry {
  std::string name;
  Attributes attributes;
  uint64_t next_offset = 0;          // resume readdir after this entry
  std::shared_ptr<const Node> node;  // for Remember; null of "." and ".."
};

// How an open file is served (design, section 4).
enum class ServingMode : uint8_t { kStream = 0, kMaterialise = 1, kDirect = 2 };
inline constexpr size_t kServingModes = 3;
std::string_view ServingModeName(ServingMode mode);

// How much a status tells.
enum class StatusDepth {
  kAll,
  kCounters,  // nothing that waits for a source's disk
};

struct OpenFile {
  FileHandle handle{};
  ServingMode mode = ServingMode::kStream;
  // A descriptor to pass through to (materialised or direct), or -1.  Owned by
  // the filesystem, valid until Release.
  int backing_fd = -1;
  // Identifies the backing: opens with the same inode and token must share one
  // kernel backing id (the kernel refuses a second one).
  uint64_t backing_token = 0;
  bool keep_cache = false;
  bool direct_io = false;  // answer READs of read-type readers without the page cache
};

struct FilesystemOptions {
  std::optional<std::string> run;  // --run
  std::string step = "latest";     // --step
  bool follow = false;             // --follow
  std::vector<Layout> layouts;     // --layout, listed by readdir
  size_t max_names = 1 << 18;      // below view/, that the kernel is let remember
  RootMap roots;
  // Compares the files of steps that were touched; without it those steps are stale.
  std::shared_ptr<TouchedFiles> touched;
  std::optional<ServingMode> force_mode;  // --mode
  uint64_t materialise_budget = 0;        // bytes of huge-page memory; 0: a quarter of RAM
  // Most of it that is kept touched and idle for the next files (PageReserve);
  // absent: a third of the budget, at most 8 GiB.
  std::optional<uint64_t> reserve = 0;
  bool passthrough = false;     // the kernel and our privileges allow it; set by mount/
  bool direct_io_mmap = false;  // files opened for direct I/O can be mapped; set by mount/
  std::function<void(std::string_view)> log;  // one line, for reasons behind ENOENT and fallbacks
  void Say(std::string_view line) const {
    if (log) log(line);
  }
  // Called when names became invalid (a step removed, /view moved), from a
  // thread that serves no request; returns when the kernel has forgotten them.
  std::function<void(InodeNumber parent, const std::string& name)> invalidate;
};

// The result of a warm.
struct WarmReport {
  uint64_t files = 0;  // in memory now
  uint64_t bytes = 0;
  std::map<std::string, uint64_t> skipped;  // files by the reason why they are not
};

// The step that /view shows.
struct ShownStep {
  std::string run;
  std::string id;
};

}  // namespace ckptfs
