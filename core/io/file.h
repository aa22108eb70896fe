// SPDX-License-Identifier: Apache-2.0
//
// File is the seam under all bytes that are read: one file of a Root, of a size
// that does not change while it is open (one that shrinks is an error when it is
// read).  A file that can be mapped is read through its mapping; of any other
// many ranges are asked for in one call, which its storage serves together.
//
// Thread safety: const methods may be called concurrently.
// Lifetime: a Mapping is independent of its File; both keep what they need.
// Units: bytes; times are nanoseconds since the epoch.

#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/result.h"
#include "core/io/blob.h"

namespace ckptfs {

using FileStamp = BlobStamp;  // equal while the file is still the one it was

// The owner, group and mode (permission bits) of a file or directory.  An ACL may
// allow more.
struct OwnerAndMode {
  uint32_t mode = 0;
  uint32_t uid = 0;
  uint32_t gid = 0;
  bool acl = false;
  auto operator<=>(const OwnerAndMode&) const = default;
  // With an ACL only the owner's bits are certain.
  uint32_t CertainMode() const { return acl ? mode & 0700 : mode; }
  // POSIX: the owner's bits for the owner, the group's for members, else the others'; root
  // has all.  `right`: 04 to read a file, 01 to search a directory.
  bool Lets(uint32_t right, uint32_t user, std::span<const uint32_t> groups) const {
    if (user == 0) return true;
    const bool member = std::ranges::find(groups, gid) != groups.end();
    return (CertainMode() >> (user == uid ? 6 : member ? 3 : 0) & right) != 0;
  }
};

struct FileIdentity {
  FileStamp stamp;
  OwnerAndMode access;
};

// One range to be read.
struct ReadRequest {
  uint64_t offset = 0;
  std::span<std::byte> out;
};

// The bytes of a whole file in memory.  If others may truncate the file, touch them
// under RunGuarded only (core/io/bus_guard.h).
class Mapping {
 public:
  virtual ~Mapping() = default;
  std::span<const std::byte> bytes() const { return bytes_; }

 protected:
  explicit Mapping(std::span<const std::byte> bytes) : bytes_(bytes) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

 private:
  const std::span<const std::byte> bytes_;
};

class File {
 public:
  virtual ~File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& name() const { return name_; }  // for messages
  uint64_t size() const { return size_; }            // when it was opened

  // The stamp of the opened file as it is now.
  virtual Result<FileIdentity> Identity() const = 0;

  // All requests, in any order and as many at once as the storage takes; errors
  // name the file.  kDataLoss if a range is not there.  On an error the outputs
  // are unspecified.  BLOCKS: on the device.
  virtual Status ReadAt(std::span<const ReadRequest> requests) const = 0;

  // The whole file, or null if it cannot be mapped.
  virtual Result<std::shared_ptr<const Mapping>> Map() const = 0;

  // For callers that hand the file to the kernel (passthrough, a lock); -1 if there is
  // none.  OWNERSHIP: the file's.
  virtual int descriptor() const = 0;

  // ---- In terms of these -------------------------------------------------------

  Status ReadAt(uint64_t offset, std::span<std::byte> out) const;
  // Exactly `length` bytes; kInvalid, naming `what`, if the file's size has no
  // room for them: for what a file says of itself.
  Result<std::string> Read(uint64_t offset, uint64_t length, std::string_view what) const;

 protected:
  File(std::string name, uint64_t size) : name_(std::move(name)), size_(size) {}
  // kDataLoss unless every request lies inside the file.
  Status CheckRanges(std::span<const ReadRequest> requests) const;

 private:
  const std::string name_;
  const uint64_t size_;
};

}  // namespace ckptfs
