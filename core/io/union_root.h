// SPDX-License-Identifier: Apache-2.0
//
// UnionRoot shows several directories as one: a save whose ranks wrote to the disks of their own
// nodes, each below the same name.  A name may be in several of them: directories are joined, and
// files must be equal byte for byte, which is compared when one is opened.
//
// Paths are those of the first directory's root.  Above that directory there is only what the
// first root has.  PathOf says where a file really lies.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: as FileRoot, holds nothing open.

#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/io/root.h"

namespace ckptfs {

// A directory below a root.
struct UnionPart {
  std::shared_ptr<const Root> root;
  std::string directory;

  std::string Path() const { return root->PathOf(directory); }
};

class UnionRoot final : public Root {
 public:
  // REQUIRES: two parts or more, none of which lies in another.
  explicit UnionRoot(std::vector<UnionPart> parts);

  // kInvalid where one name is a directory in one part and a file in another.
  Result<std::vector<RootEntry>> List(std::string_view path) const override;
  Result<EntryStat> Stat(std::string_view path) const override;
  // kInvalid if two parts have other bytes under this name.  BLOCKS: on reading both.
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override;
  // A name that is in no part has the place that the first part would give it.
  std::string PathOf(std::string_view path) const override;

 private:
  struct Where {
    const UnionPart* part;
    std::string path;  // below the part's root
    EntryStat stat;
  };
  // Every part that has the path, in order; kNotFound if there is none.
  Result<std::vector<Where>> Find(std::string_view path) const;
  // The path in a part; the first part's where the path lies above or beside the directories.
  std::vector<std::pair<const UnionPart*, std::string>> PlacesOf(std::string_view path) const;
  Status CheckEqual(std::string_view path, const File& first,
                    const std::vector<Where>& found) const;

  const std::vector<UnionPart> parts_;
  mutable Mutex mutex_;
  mutable std::set<std::string, std::less<>> equal_ GUARDED_BY(mutex_);  // paths
};

}  // namespace ckptfs
