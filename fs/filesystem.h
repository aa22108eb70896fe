// SPDX-License-Identifier: Apache-2.0
//
// Filesystem is the whole mounted tree as a library: names to inodes,
// attributes, directory listings, open files and reads.  mount/ decodes FUSE
// requests, calls it, and replies; nothing here includes FUSE.
//
// Thread safety: all methods may be called concurrently; none holds a lock
// across I/O.
// Lifetime: catalogue and formats must outlive it.
// Units: bytes; times are nanoseconds since the epoch.

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
#include "core/store/step_catalogue.h"
#include "core/view/lent_bytes.h"
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
std::string_view ServingModeName(ServingMode mode);

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

// Which step /view shows.
struct ShownStep {
  std::string run;
  std::string id;
};

class Filesystem {
 public:
  static Result<std::unique_ptr<Filesystem>> Create(StepCatalogue& catalogue, ViewFormats formats,
                                                    FilesystemOptions options);
  ~Filesystem();

  // Each successful Lookup and each Remember counts one reference that Forget
  // gives back.
  Result<Attributes> Lookup(InodeNumber parent, std::string_view name, const Caller& caller);
  void Forget(InodeNumber inode, uint64_t count);
  Result<Attributes> GetAttributes(InodeNumber inode, const Caller& caller);
  Result<std::string> ReadLink(InodeNumber inode, const Caller& caller);

  // The value of an extended attribute; kNotFound if the inode has none of the name.  Directories
  // of view/ have kReasonAttribute once a name that was looked up there was refused.
  static constexpr std::string_view kReasonAttribute = "user.ckptfs.reason";
  Result<std::string> Attribute(InodeNumber inode, std::string_view name, const Caller& caller);
  std::vector<std::string> AttributeNames(InodeNumber inode, const Caller& caller);

  // Entries after `offset` (0: from the start, "." and ".." included), at most
  // `limit`.  Does not count references.
  Result<std::vector<DirectoryEntry>> ReadDirectory(InodeNumber inode, uint64_t offset,
                                                    size_t limit, const Caller& caller);
  // As a Lookup of an entry that was just read, which resolves nothing again
  // (readdirplus).  REQUIRES: entry.node.
  Attributes Remember(const DirectoryEntry& entry);

  // Errors surface here: a step whose source changed is kStale.
  // REQUIRES: `flags` only reads; writing is answered EROFS before it gets here
  // (kPermission if it does).
  // BLOCKS: on filling, when the policy materialises: its thread is busy for
  // 0.1-1 s per GB, so serve requests from more threads than files are opened
  // at once.
  Result<OpenFile> Open(InodeNumber inode, int flags, const Caller& caller);
  Result<size_t> Read(FileHandle handle, uint64_t offset, std::span<std::byte> out);
  // Lends what Read would copy, where it lies; nothing if it has to be copied (Read tells why).
  std::optional<LentBytes> Lend(FileHandle handle, uint64_t offset, uint64_t length);
  // Logs and counts lent bytes that were gone when they were touched.
  void LentInVain(FileHandle handle);
  void Release(FileHandle handle);

  // The kernel refused this open's backing: serve it by READs.  kExists if
  // other opens of the file are passed through already (use their backing id).
  Result<OpenFile> Degrade(FileHandle handle);
  // No open is passed through from now on; `reason` is logged and shown.
  void DisablePassthrough(std::string_view reason);

  // Fill the huge-page files below `path_prefix` ("rank3", "" for all) of a
  // layout before anybody opens them (`ckptfs warm`).  `layout` is of the step
  // that /view shows, or RUN/ID/LAYOUT, where ID may be "latest".  kExhausted
  // when not all of it fits the budget; kUnsupported with every format's reason
  // if none can show the layout.
  Result<WarmReport> Warm(std::string_view layout, std::string_view path_prefix);

  // SwitchView and refreshes return when the kernel has been told; not to be
  // called from a thread that serves a request.
  //
  // Move /view (`ckptfs switch`).  The result is what it showed before.
  Result<std::optional<ShownStep>> SwitchView(std::string_view run, std::string_view id);
  std::optional<ShownStep> ViewShows() const;
  // Takes in what was published or removed since: all of it, or one step (`adopt`,
  // `remove`), which costs the same however many there are.  An exception meanwhile
  // becomes an error: the tree stays as it was, and the next call goes on.
  Status Refresh();
  Status RefreshStep(std::string_view run, std::string_view id);

  // Drops what is only kept at hand of a step for the next caller, so that the step may be
  // removed unless somebody uses it.
  void LetGo(std::string_view run, std::string_view id);

  // FilesystemOptions::invalidate is called no more.  BLOCKS: on the last call.
  void EndInvalidation();

  // The status as JSON text: requests, bytes served and read, cache, open
  // files, errors, mode and reason per recent open.  Also /.ckptfs/status.
  std::string StatusJson() const;

 private:
  struct State;
  explicit Filesystem(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ckptfs
