// SPDX-License-Identifier: Apache-2.0
//
// The parts of a mirror (mirror.h) tell each other these: numbers, entries, open files.
//
// A failure is the system's own error number, as the disk said it: a writer that meets ENOSPC,
// EDQUOT or EIO has to see that one, and an ErrorCode would fold several of them into one.
//
// Thread safety: values.

#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/descriptor.h"
#include "core/base/expected.h"

namespace ckptfs {

template <class T>
using Errno = tl::expected<T, int>;
using ErrnoStatus = tl::expected<void, int>;

inline tl::unexpected<int> FailErrno(int error) { return tl::unexpected<int>(error); }

// The number by which the kernel asks for an inode.  It is never given to another file.
using MirrorId = uint64_t;
inline constexpr MirrorId kMirrorRoot = 1;    // FUSE_ROOT_ID
inline constexpr MirrorId kMirrorStatus = 2;  // the file .status

// A name that was found.  The kernel holds a reference on `id` from then on.
struct MirrorEntry {
  MirrorId id = 0;
  struct stat status {};
};

// An O_PATH descriptor: it leads to one inode whatever its name is now.
using PlacePtr = std::shared_ptr<const Descriptor>;

// The path by which the system opens what a descriptor leads to.
std::string PathOfPlace(int fd);

}  // namespace ckptfs

// As CKPT_ASSIGN_OR_RETURN and CKPT_RETURN_IF_ERROR, for Errno.
#define MIRROR_ASSIGN_OR_RETURN(lhs, expression) \
  MIRROR_ASSIGN_OR_RETURN_(CKPT_CONCAT(mirror_result_, __LINE__), lhs, expression)
#define MIRROR_ASSIGN_OR_RETURN_(result, lhs, expression) \
  auto result = (expression);                             \
  if (!result) [[unlikely]]                               \
    return ::ckptfs::FailErrno(result.error());           \
  lhs = *std::move(result)
#define MIRROR_RETURN_IF_ERROR(expression)                              \
  do {                                                                  \
    if (auto mirror_status = (expression); !mirror_status) [[unlikely]] \
      return ::ckptfs::FailErrno(mirror_status.error());                \
  } while (false)
