// SPDX-License-Identifier: Apache-2.0
//
// Mirror is a directory of the disk as a filesystem that one can write to: each operation is the
// same operation on the directory, done as who asked for it.  It stores nothing and decides
// nothing; a name, a mode or an error is the disk's.
//
// One name is its own: `.status` at the top, a text that says what became of the steps.  It is not
// listed, and nobody can change it.
//
// Thread safety: all methods may be called concurrently.  No lock is held over a system call.
// BLOCKS: all but Forget, on the disk.

#pragma once

#include <dirent.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/result.h"
#include "mount/mirror/act_as.h"
#include "mount/mirror/mirror_nodes.h"
#include "mount/mirror/mirror_types.h"

namespace ckptfs {

// A file that somebody has open.
struct MirrorFile {
  MirrorNodes::NodePtr node;  // null: .status
  Descriptor file;            // with the opener's flags and rights
  PlacePtr place;             // for the kernel to pass through to
  std::string text;           // of .status, as it was when it was opened
  bool writes = false;
  bool streamed = false;  // its reads and writes come here
};

// A directory that somebody lists; of one reader at a time, as the kernel asks.
struct MirrorDirectory {
  MirrorNodes::NodePtr node;
  std::unique_ptr<DIR, int (*)(DIR*)> listing{nullptr, ::closedir};
  off_t position = 0;
};

// The attributes that setattr is to change; others stay.
struct MirrorChange {
  bool mode = false, owner = false, size = false, times = false;
  mode_t new_mode = 0;
  uid_t uid = static_cast<uid_t>(-1);
  gid_t gid = static_cast<gid_t>(-1);
  off_t new_size = 0;
  timespec new_times[2] = {};  // UTIME_OMIT and UTIME_NOW as in utimensat
};

class Mirror {
 public:
  static constexpr std::string_view kStatusName = ".status";
  // The text of .status as this caller may see it.
  using StatusText = std::function<std::string(const MirrorCaller&)>;

  // `directory`: absolute.  `descriptors`: how many are kept for inodes that nobody has open.
  static Result<std::unique_ptr<Mirror>> Open(const std::string& directory, size_t descriptors,
                                              StatusText status);

  Errno<MirrorEntry> Lookup(MirrorId parent, const std::string& name);
  void Forget(MirrorId id, uint64_t count) { nodes_->Forget(id, count); }
  // `open`: the file by which it is asked, or null.
  Errno<struct stat> Attributes(MirrorId id, const MirrorFile* open = nullptr);
  Errno<struct stat> Change(MirrorId id, const MirrorChange& change, const MirrorFile* open,
                            const MirrorCaller& caller);
  Errno<std::string> ReadLink(MirrorId id);
  Errno<struct statvfs> Space(MirrorId id);

  Errno<MirrorEntry> MakeDirectory(MirrorId parent, const std::string& name, mode_t mode,
                                   const MirrorCaller& caller);
  // Devices are made for those who may make some, and opened for nobody (the mount is nodev).
  Errno<MirrorEntry> MakeNode(MirrorId parent, const std::string& name, mode_t mode, dev_t device,
                              const MirrorCaller& caller);
  Errno<MirrorEntry> MakeSymlink(MirrorId parent, const std::string& name,
                                 const std::string& target, const MirrorCaller& caller);
  Errno<MirrorEntry> Link(MirrorId id, MirrorId parent, const std::string& name,
                          const MirrorCaller& caller);
  ErrnoStatus Unlink(MirrorId parent, const std::string& name, const MirrorCaller& caller);
  ErrnoStatus RemoveDirectory(MirrorId parent, const std::string& name, const MirrorCaller& caller);
  ErrnoStatus Rename(MirrorId parent, const std::string& name, MirrorId to,
                     const std::string& new_name, unsigned flags, const MirrorCaller& caller);

  // `flags`: open(2)'s.
  Errno<std::unique_ptr<MirrorFile>> Open(MirrorId id, int flags, const MirrorCaller& caller);
  struct Created {
    MirrorEntry entry;
    std::unique_ptr<MirrorFile> file;
  };
  Errno<Created> Create(MirrorId parent, const std::string& name, mode_t mode, int flags,
                        const MirrorCaller& caller);
  void Closed(const MirrorFile& file);
  Errno<std::unique_ptr<MirrorDirectory>> OpenDirectory(MirrorId id, const MirrorCaller& caller);

  // Of `user.*` and ACLs; ENOTSUP for others.  An empty value asks for none to be there.
  ErrnoStatus SetAttribute(MirrorId id, const std::string& name, std::string_view value, int flags,
                           const MirrorCaller& caller);
  ErrnoStatus RemoveAttribute(MirrorId id, const std::string& name, const MirrorCaller& caller);
  Errno<std::string> Attribute(MirrorId id, const std::string& name, const MirrorCaller& caller);
  Errno<std::string> AttributeNames(MirrorId id, const MirrorCaller& caller);  // each ends in NUL

  // How many files are open for writing.
  uint64_t writers() const { return writers_; }
  size_t nodes() const { return nodes_->size(); }

 private:
  Mirror(std::unique_ptr<MirrorNodes> nodes, StatusText status, struct stat top);
  struct stat StatusAttributes() const;
  Errno<PlacePtr> PlaceOf(MirrorId id, const MirrorFile* open);
  Errno<std::string> ReadAttribute(MirrorId id, const std::string& name,
                                   const MirrorCaller& caller);
  Errno<PlacePtr> PlaceWithAttributes(MirrorId id, const std::string& name);
  // Runs `act` (the directory's descriptor) as the caller, and looks up what it made.
  template <class Act>
  Errno<MirrorEntry> Make(MirrorId parent, const std::string& name, const MirrorCaller& caller,
                          const Act& act);
  ErrnoStatus Remove(MirrorId parent, const std::string& name, int flags,
                     const MirrorCaller& caller);
  std::unique_ptr<MirrorFile> Opened(MirrorNodes::NodePtr node, Descriptor file, PlacePtr place,
                                     int flags);

  const std::unique_ptr<MirrorNodes> nodes_;
  const StatusText status_;
  const struct stat top_;  // of the directory, when it was opened
  std::atomic<uint64_t> writers_{0};
};

}  // namespace ckptfs
