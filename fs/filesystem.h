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
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/store/step_catalogue.h"
#include "core/view/lent_bytes.h"
#include "fs/handover.h"
#include "fs/types.h"

namespace ckptfs {

class Filesystem {
 public:
  static Result<std::unique_ptr<Filesystem>> Create(StepCatalogue& catalogue, ViewFormats formats,
                                                    FilesystemOptions options);
  ~Filesystem();

  // Each successful Lookup and each Remember counts one reference that Forget
  // gives back.
  Result<Attributes> Lookup(InodeNumber parent, std::string_view name, const Caller& caller);
  void Forget(InodeNumber inode, uint64_t count);
  // kStale if the kernel's name is one of a process that was killed.
  Status CheckKnown(InodeNumber inode);
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

  // Returns what the kernel knows, for who serves the mount next.  REQUIRES: no request is
  // being answered, and none will be.
  Handover HandOver() const;
  // Goes on where that process ended; the descriptors of backings are this filesystem's from now
  // on.  Names that are not what they were are kStale when somebody asks for them, reads of their
  // open files, too.  Returns the open files.  REQUIRES: no request was answered.
  // BLOCKS: on making the plans of files that are open.
  std::vector<TakenFile> TakeOver(const Handover& handover);

  // FilesystemOptions::invalidate is called no more.  BLOCKS: on the last call.
  void EndInvalidation();

  // The status as JSON text: requests, bytes served and read, cache, open
  // files, errors, mode and reason per recent open.  Also /.ckptfs/status.
  // BLOCKS: on looking at the sources of the steps in use, unless only counters are asked for.
  std::string StatusJson(StatusDepth depth = StatusDepth::kAll) const;

 private:
  struct State;
  explicit Filesystem(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ckptfs
