// SPDX-License-Identifier: Apache-2.0

#include "core/io/mount_info.h"

#include <libmount.h>
#include <sys/sysmacros.h>

#include <cstdio>
#include <memory>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

std::string TextOf(const char* text) { return text == nullptr ? "" : text; }

// libmount asks this at a line that it cannot read; the answer is to go on.
int SkipLine(libmnt_table*, const char*, int) { return 1; }

MountEntry EntryOf(libmnt_fs* mount) {
  const dev_t device = mnt_fs_get_devno(mount);
  return MountEntry{
      StrCat(major(device), ":", minor(device)), TextOf(mnt_fs_get_root(mount)),
      TextOf(mnt_fs_get_target(mount)),          TextOf(mnt_fs_get_fstype(mount)),
      TextOf(mnt_fs_get_source(mount)),          TextOf(mnt_fs_get_fs_options(mount))};
}

}  // namespace

Result<std::vector<MountEntry>> ReadMounts(const std::string& file) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> stream(std::fopen(file.c_str(), "re"),
                                                               std::fclose);
  if (!stream) return Fail(ErrnoError(errno, file));
  const std::unique_ptr<libmnt_table, void (*)(libmnt_table*)> table(mnt_new_table(),
                                                                     mnt_unref_table);
  const std::unique_ptr<libmnt_iter, void (*)(libmnt_iter*)> lines(mnt_new_iter(MNT_ITER_FORWARD),
                                                                   mnt_free_iter);
  if (!table || !lines) return Fail(ErrorCode::kExhausted, StrCat("no memory to read ", file));
  mnt_table_set_parser_errcb(table.get(), SkipLine);
  if (mnt_table_parse_stream(table.get(), stream.get(), file.c_str()) != 0) {
    return Fail(ErrorCode::kIo, StrCat("cannot read ", file));
  }
  std::vector<MountEntry> mounts;
  for (libmnt_fs* mount = nullptr; mnt_table_next_fs(table.get(), lines.get(), &mount) == 0;) {
    mounts.push_back(EntryOf(mount));
  }
  return mounts;
}

std::optional<std::string> MountOption(const std::string& options, const char* key) {
  char* value = nullptr;
  size_t size = 0;
  if (mnt_optstr_get_option(options.c_str(), key, &value, &size) != 0) return std::nullopt;
  return std::string(value == nullptr ? "" : value, size);
}

}  // namespace ckptfs
