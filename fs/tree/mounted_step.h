// SPDX-License-Identifier: Apache-2.0
//
// A step as the tree shows it.  StepEntry is its place in a run and stays
// small; MountedStep is the loaded manifest with its blobs, loaded when
// somebody looks inside and dropped when nobody does.
//
// Thread safety: all methods may be called concurrently; no lock is held
// across I/O.
// Lifetime: the store must outlive a StepEntry; a MountedStep stands alone and
// lives as long as open files hold it, also when the step has been removed.
// Units: bytes.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/lru.h"
#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/base/single_flight.h"
#include "core/blob/blob_reader.h"
#include "core/store/store.h"
#include "core/view/view_set.h"
#include "fs/permissions.h"

namespace ckptfs {

// The atoms of a step under param/: directories by component, links for aliases.
struct ParamDirectory {
  struct File {
    std::string component;  // "exp_avg.safetensors"
    AtomIndex atom{};
    uint64_t size = 0;
  };
  ParameterIndex parameter{};
  std::string link_target;   // not empty: an alias, a symlink to this component
  std::vector<File> files;   // sorted
};
using ParamIndex = std::map<std::string, ParamDirectory, std::less<>>;

// The source files of a step under source/: directory path -> entries.
struct SourceEntry {
  bool directory = false;
  BlobIndex blob{};
};
using SourceDirectory = std::map<std::string, SourceEntry, std::less<>>;
using SourceIndex = std::map<std::string, SourceDirectory, std::less<>>;

using ViewFormats = std::span<const std::unique_ptr<ViewFormat>>;

class MountedStep {
 public:
  // The bytes it has read are added to `*retired_reads` when it goes.
  MountedStep(std::shared_ptr<const Step> step, std::unique_ptr<BlobReader> blobs,
              ViewFormats formats, std::shared_ptr<std::atomic<uint64_t>> retired_reads);
  ~MountedStep();

  const Step& step() const { return *step_; }
  const StepRecord& record() const { return step_->record; }
  const StepModel& model() const { return step_->model; }
  BlobReader& blobs() const { return *blobs_; }

  // What the formats make of the step in a layout; those that were asked for
  // last are kept, at most kViewBytes of them.
  // BLOCKS: on opening the views, once for all who ask meanwhile.
  Result<std::shared_ptr<const ViewSet>> Views(const Layout& layout) const;

  // Computed when first asked for.
  const ParamIndex& params() const;
  const SourceIndex& sources() const;
  const std::string& info() const;  // info.json

  // kStale, naming the file, if one of `blobs` changed or went since it was
  // adopted.  Each file is looked at once per interval.
  // BLOCKS: on stat.
  Status CheckStamps(const std::vector<BlobIndex>& blobs) const;
  // The same, each looked at now: what was read before is of one state.
  Status CheckStampsNow(const std::vector<BlobIndex>& blobs) const;

  static constexpr uint64_t kViewBytes = uint64_t{64} << 20;

 private:
  using ViewSetPtr = std::shared_ptr<const ViewSet>;

  // Those that were last looked at before `after`, ns of the steady clock.
  Status CheckOlder(const std::vector<BlobIndex>& blobs, int64_t after) const;

  std::shared_ptr<const Step> step_;
  std::unique_ptr<BlobReader> blobs_;
  const ViewFormats formats_;
  std::shared_ptr<std::atomic<uint64_t>> retired_reads_;
  mutable Lru<std::string, ViewSetPtr> views_;  // by the layout's name
  mutable SingleFlight<std::string, ViewSetPtr> opening_;
  mutable std::once_flag params_once_, sources_once_, info_once_;
  mutable ParamIndex params_;
  mutable SourceIndex sources_;
  mutable std::string info_;
  // Per blob: when it was last found unchanged, ns of the steady clock.
  std::unique_ptr<std::atomic<int64_t>[]> checked_;
};

// Loads steps, each once for all who want it, and keeps those that were looked
// into last, so that a manifest is not parsed for every lookup.  It knows all
// that are loaded.
class RecentSteps {
 public:
  using StepPtr = std::shared_ptr<const MountedStep>;

  explicit RecentSteps(size_t limit) : steps_(limit) {}
  // What `load` makes, or the caller who is loading for the same `place`.
  Result<StepPtr> Load(const void* place, const std::function<Result<StepPtr>()>& load);
  void Touch(const StepPtr& step) { steps_.Insert(step.get(), step); }
  void Drop(const Digest& manifest);

  const std::shared_ptr<std::atomic<uint64_t>>& retired_reads() const { return retired_reads_; }
  uint64_t bytes_read() const;  // by all steps ever loaded
  size_t loaded() const;

 private:
  Lru<const MountedStep*, StepPtr> steps_;
  SingleFlight<const void*, StepPtr> loading_;
  const std::shared_ptr<std::atomic<uint64_t>> retired_reads_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  mutable Mutex mutex_;
  std::vector<std::weak_ptr<const MountedStep>> loaded_ GUARDED_BY(mutex_);
};

class StepEntry {
 public:
  // `formats` and `recent` must outlive it.
  StepEntry(Store& store, StepRecord record, RootMap roots, ViewFormats formats,
            RecentSteps& recent);

  const StepRecord& record() const { return record_; }
  const std::string& path() const { return path_; }  // "/run/<run>/step/<id>"
  uint64_t inode_seed() const { return inode_seed_; }

  // BLOCKS: on loading the manifest, once for all who ask meanwhile.
  Result<std::shared_ptr<const MountedStep>> Mounted();
  // Loads the step the first time only.
  Result<std::shared_ptr<const StepAccess>> Access();

  // Names of a removed step resolve no more; open files go on.
  void MarkRemoved() { removed_.store(true, std::memory_order_release); }
  bool removed() const { return removed_.load(std::memory_order_acquire); }

  // What the step offers in a layout; the kMaxLayouts used last are remembered
  // for listing.  kUnsupported with every format's reason if none can show it.
  Result<std::shared_ptr<const LayoutOffer>> Offer(const Layout& layout);
  std::vector<std::string> LayoutsInUse() const;  // canonical names, sorted

  static constexpr size_t kMaxLayouts = 256;

 private:
  Result<std::shared_ptr<const MountedStep>> Load();

  Store& store_;
  const StepRecord record_;
  const RootMap roots_;
  const ViewFormats formats_;
  RecentSteps& recent_;
  const std::string path_;
  const uint64_t inode_seed_;
  std::atomic<bool> removed_{false};
  Lru<std::string, std::shared_ptr<const LayoutOffer>> offers_{kMaxLayouts};

  mutable Mutex mutex_;
  std::weak_ptr<const MountedStep> mounted_ GUARDED_BY(mutex_);
  std::shared_ptr<const StepAccess> access_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
