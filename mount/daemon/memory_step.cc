// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/memory_step.h"

#include <unistd.h>

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/commit/world_commit.h"
#include "formats/families/shipped.h"
#include "formats/rank_file/rank_files.h"

namespace ckptfs {

Result<MemoryStep> StepOfMemory(const std::shared_ptr<PeerRoot>& root, Store& store,
                                const KeptFiles::Say& say) {
  const PreparedPart part = root->part().WithChunkLists();
  std::vector<std::string> paths;
  std::vector<const PreparedRank*> ranks;
  for (const PreparedRank& rank : part.ranks) {
    paths.push_back(part.PathOf(rank.rank));
    ranks.push_back(&rank);
  }
  CKPT_ASSIGN_OR_RETURN(const FamilySet families, ShippedFamilies());
  SourceOptions options;
  options.families = &families;
  CKPT_ASSIGN_OR_RETURN(StepModel model,
                        ReadRankFiles(WithStoredFiles(root, store, {}), paths, options));
  if (model.iteration != part.step) return Refuse("its files belong to step ", model.iteration);
  CKPT_ASSIGN_OR_RETURN(const KeptFiles kept,
                        KeptFiles::Hold(store, part.name.run, model, paths.size(), say));
  OwnRankFiles(model, store.blobs(), part.mtime_ns, ranks, kept.blobs());
  for (Blob& blob : std::span(model.blobs).first(paths.size())) {
    blob.mode = 0600;
    blob.uid = ::geteuid();
    blob.gid = ::getegid();
  }
  const std::string home = SnapshotHome(part.name.run);
  return MemoryStep{part.name.run,
                    StrCat(home, "/", part.step),
                    home,
                    std::move(model),
                    WithStoredFiles(root, store, kept.holds()),
                    kept.blobs().size()};
}

}  // namespace ckptfs
