// SPDX-License-Identifier: Apache-2.0
//
// FileRoot is a directory of this machine as a Root.  Files are opened below it
// by open_beneath.h's rules, which say how far a symbolic link may lead.
//
// Thread safety: immutable.
// Lifetime: holds nothing open: a directory that is away or exchanged for a
// while is the concern of the call that meets it.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/io/root.h"

namespace ckptfs {

class FileRoot final : public Root {
 public:
  // `directory`: absolute; it need not be there yet.
  explicit FileRoot(std::string directory) : Root(std::move(directory), true) {}

  Result<std::vector<RootEntry>> List(std::string_view path) const override;
  Result<EntryStat> Stat(std::string_view path) const override;
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override;
};

// The file at a path that the user gave: links are followed.
Result<std::shared_ptr<const File>> OpenLocalFile(const std::string& path);

// Lists the directory at an absolute path, sorted by name.  With `follow` a link counts as
// what it leads to, else as kOther.  kUnsupported above `most` entries, each of which takes
// some hundred bytes here.
inline constexpr size_t kMaxEntries = 1 << 21;
Result<std::vector<RootEntry>> ListDirectory(const std::string& path, bool follow,
                                             size_t most = kMaxEntries);

}  // namespace ckptfs
