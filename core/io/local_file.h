// SPDX-License-Identifier: Apache-2.0
//
// LocalFile is a regular file of this machine, or of a network filesystem that
// it mounts: read through the page cache, mapped where somebody wants that.
//
// Thread safety: const methods may be called concurrently.
// Lifetime: owns its descriptor; mappings need none.
// Units: bytes; times are nanoseconds since the epoch.

#pragma once

#include <sys/stat.h>

#include <memory>
#include <string>

#include "core/base/descriptor.h"
#include "core/base/result.h"
#include "core/io/file.h"
#include "core/io/root.h"

namespace ckptfs {

class LocalFile final : public File {
 public:
  // `status` is the descriptor's.  kInvalid unless it is a regular file.
  static Result<std::shared_ptr<const LocalFile>> Make(Descriptor file, const struct stat& status,
                                                       std::string name);

  using File::ReadAt;
  Result<FileIdentity> Identity() const override;
  Status ReadAt(std::span<const ReadRequest> requests) const override;
  Result<std::shared_ptr<const Mapping>> Map() const override;
  int descriptor() const override { return file_.get(); }

 private:
  LocalFile(Descriptor file, uint64_t size, std::string name)
      : File(std::move(name), size), file_(std::move(file)) {}

  const Descriptor file_;
};

EntryKind KindOf(const struct stat& status);

}  // namespace ckptfs
