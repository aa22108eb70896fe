// SPDX-License-Identifier: Apache-2.0
#include "core/commit/kept_files.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "core/commit/world_commit.h"

namespace ckptfs {
namespace {

// Files of a save in memory or a spool, and those of earlier saves in the store.
class StoredBehind final : public Root {
 public:
  StoredBehind(std::shared_ptr<const Root> own, std::shared_ptr<const Root> stored, BlobHolds holds)
      : Root(own->name(), false),
        own_(std::move(own)),
        stored_(std::move(stored)),
        holds_(std::move(holds)) {}

  Result<std::vector<RootEntry>> List(std::string_view path) const override {
    return own_->List(path);
  }
  Result<EntryStat> Stat(std::string_view path) const override {
    auto found = own_->Stat(path);
    return IsAbsent(found) ? stored_->Stat(path) : std::move(found);
  }
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override {
    auto opened = own_->Open(path);
    return IsAbsent(opened) ? stored_->Open(path) : std::move(opened);
  }

 private:
  template <class T>
  static bool IsAbsent(const Result<T>& result) {
    return !result && result.error().code == ErrorCode::kNotFound;
  }

  const std::shared_ptr<const Root> own_;
  const std::shared_ptr<const Root> stored_;
  const BlobHolds holds_;
};

// The blobs of these paths that live steps of the run have.  A step that cannot be read proves
// nothing.
Result<std::map<std::string, Blob>> FindAll(Store& store, const std::string& run,
                                            std::set<std::string> paths) {
  std::map<std::string, Blob> found;
  CKPT_RETURN_IF_ERROR(store.Refresh());
  auto records = store.Steps(run);
  if (!records && records.error().code == ErrorCode::kNotFound) return found;
  if (!records) return Fail(std::move(records).error());
  std::ranges::reverse(*records);
  for (const StepRecord& record : *records) {
    if (paths.empty()) break;
    if (record.root != SnapshotHome(run)) continue;
    const auto step = store.Load(record);
    if (!step && step.error().code != ErrorCode::kDataLoss &&
        step.error().code != ErrorCode::kNotFound) {
      return Fail(Error(step.error()));
    }
    if (!step) continue;
    for (const Blob& blob : (*step)->model.blobs) {
      if (!blob.owned() || paths.erase(blob.path) == 0) continue;
      found.emplace(blob.path, blob);
    }
  }
  return found;
}

}  // namespace

Result<KeptFiles> KeptFiles::Hold(Store& store, const std::string& run, const StepModel& model,
                                  size_t ranks, const Say& say) {
  KeptFiles kept;
  std::set<std::string> paths;
  std::set<std::string> directories;
  for (size_t i = ranks; i < model.blobs.size(); ++i) {
    const std::string& path = model.blobs[i].path;
    paths.insert(path);
    if (!directories.insert(ParentPath(path)).second) continue;
    if (say) {
      CKPT_ASSIGN_OR_RETURN(kept.holds_.emplace_back(), say(StrCat("blobs/", ParentPath(path))));
    }
    CKPT_ASSIGN_OR_RETURN(kept.holds_.emplace_back(), store.HoldBlobs(path));
  }
  if (paths.empty()) return kept;
  CKPT_ASSIGN_OR_RETURN(auto found, FindAll(store, run, paths));
  for (size_t i = ranks; i < model.blobs.size(); ++i) {
    const Blob& there = model.blobs[i];
    const auto proved = found.find(there.path);
    if (proved == found.end()) {
      return Refuse("tensors are kept in ", there.path, ", which no step of run '", run, "' has");
    }
    if (proved->second.stamp.size != there.stamp.size) {
      return Fail(ErrorCode::kDataLoss,
                  StrCat(there.path, ": ", there.stamp.size, " bytes, its step says ",
                         proved->second.stamp.size));
    }
    kept.blobs_.push_back(proved->second);
  }
  return kept;
}

std::shared_ptr<const Root> WithStoredFiles(std::shared_ptr<const Root> own, const Store& store,
                                            BlobHolds holds) {
  return std::make_shared<StoredBehind>(std::move(own), RootBelow(store.storage(), "blobs"),
                                        std::move(holds));
}

}  // namespace ckptfs
