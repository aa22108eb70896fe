// SPDX-License-Identifier: Apache-2.0

#include "core/io/local_filesystem.h"

#include <linux/magic.h>
#include <sys/vfs.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace ckptfs {
namespace {

constexpr std::array<int64_t, 8> kLocal = {
    EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC,       BTRFS_SUPER_MAGIC, TMPFS_MAGIC,
    F2FS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, 0x2FC12FC1,  // ZFS
    0xCA451A4E};                                          // bcachefs

bool IsLocal(const struct statfs& info) {
  const auto type = static_cast<int64_t>(info.f_type) & 0xFFFFFFFF;
  return std::ranges::find(kLocal, type) != kLocal.end();
}

}  // namespace

bool IsLocalFilesystem(const std::string& path) {
  struct statfs info {};
  return ::statfs(path.c_str(), &info) == 0 && IsLocal(info);
}

bool IsLocalFilesystem(int descriptor) {
  struct statfs info {};
  return ::fstatfs(descriptor, &info) == 0 && IsLocal(info);
}

}  // namespace ckptfs
