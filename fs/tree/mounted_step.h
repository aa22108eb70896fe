// SPDX-License-Identifier: Apache-2.0
//
// A step as the tree shows it.  StepEntry is its place in a run and stays
// small; MountedStep is the loaded manifest with its blobs, loaded when
// somebody looks inside and dropped when nobody does.
//
// Thread safety: all methods may be called concurrently; no lock is held
// across I/O.
// Lifetime: the catalogue must outlive a StepEntry; a MountedStep stands alone and
// lives as long as open files hold it, also when the step has been removed.
// Units: bytes.

#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/store/step_catalogue.h"
#include "core/view/view_format.h"
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

class MountedStep {
 public:
  // The bytes it has read are added to `*retired_reads` when it goes.
  MountedStep(std::shared_ptr<const Step> step, std::unique_ptr<BlobReader> blobs,
              std::shared_ptr<std::atomic<uint64_t>> retired_reads);
  ~MountedStep();

  const Step& step() const { return *step_; }
  const StepRecord& record() const { return step_->record; }
  const StepModel& model() const { return step_->model; }
  BlobReader& blobs() const { return *blobs_; }

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

 private:
  // Those that were last looked at before `after`, ns of the steady clock.
  Status CheckOlder(const std::vector<BlobIndex>& blobs, int64_t after) const;

  std::shared_ptr<const Step> step_;
  std::unique_ptr<BlobReader> blobs_;
  std::shared_ptr<std::atomic<uint64_t>> retired_reads_;
  mutable std::once_flag params_once_, sources_once_, info_once_;
  mutable ParamIndex params_;
  mutable SourceIndex sources_;
  mutable std::string info_;
  // Per blob: when it was last found unchanged, ns of the steady clock.
  std::unique_ptr<std::atomic<int64_t>[]> checked_;
};

// A layout of a step: which formats can show it, and why the others cannot.
struct LayoutView {
  Layout layout;
  std::string name;                  // canonical
  std::vector<std::string> refusals; // per format; empty: it can
  bool Any() const;
};

// Keeps the steps that were looked into last, so that a manifest is not parsed
// for every lookup, and knows all that are loaded.
class RecentSteps {
 public:
  explicit RecentSteps(size_t limit) : limit_(limit) {}
  void Touch(std::shared_ptr<const MountedStep> step);
  void Drop(const Digest& manifest);

  const std::shared_ptr<std::atomic<uint64_t>>& retired_reads() const { return retired_reads_; }
  uint64_t bytes_read() const;  // by all steps ever loaded
  size_t loaded() const;

 private:
  using StepPtr = std::shared_ptr<const MountedStep>;
  const size_t limit_;
  const std::shared_ptr<std::atomic<uint64_t>> retired_reads_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  mutable Mutex mutex_;
  std::list<StepPtr> steps_ GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<const MountedStep>> loaded_ GUARDED_BY(mutex_);
};

class StepEntry {
 public:
  StepEntry(StepCatalogue& catalogue, StepRecord record, RootMap roots, RecentSteps& recent);

  const StepRecord& record() const { return record_; }
  const std::string& path() const { return path_; }  // "/run/<run>/step/<id>"
  uint64_t inode_seed() const { return inode_seed_; }

  // BLOCKS: on loading the manifest, once for all who ask meanwhile.
  Result<std::shared_ptr<const MountedStep>> Mounted();
  // Loads the step the first time only.
  Result<std::shared_ptr<const StepAccess>> Access();

  // Its bytes lie elsewhere now: who asks from now on loads it again.
  void Reload();

  // Names of a removed step resolve no more; open files go on.
  void MarkRemoved() { removed_.store(true, std::memory_order_release); }
  bool removed() const { return removed_.load(std::memory_order_acquire); }

  // The view of a layout, remembered (the `kMaxViews` used last) for listing.
  // kUnsupported with every format's reason if none can show it.
  Result<std::shared_ptr<const LayoutView>> View(
      const Layout& layout, std::span<const std::unique_ptr<ViewFormat>> formats);
  std::vector<std::string> ViewsInUse() const;  // canonical names, sorted

  static constexpr size_t kMaxViews = 256;

 private:
  using Loaded = Result<std::shared_ptr<const MountedStep>>;
  Loaded Load();

  StepCatalogue& catalogue_;
  const StepRecord record_;
  const RootMap roots_;
  RecentSteps& recent_;
  const std::string path_;
  const uint64_t inode_seed_;
  std::atomic<bool> removed_{false};

  mutable Mutex mutex_;
  std::weak_ptr<const MountedStep> mounted_ GUARDED_BY(mutex_);
  std::shared_future<Loaded> loading_ GUARDED_BY(mutex_);
  bool is_loading_ GUARDED_BY(mutex_) = false;
  std::shared_ptr<const StepAccess> access_ GUARDED_BY(mutex_);
  struct UsedView {
    std::shared_ptr<const LayoutView> view;
    uint64_t used = 0;
  };
  std::map<std::string, UsedView> views_ GUARDED_BY(mutex_);
  uint64_t view_clock_ GUARDED_BY(mutex_) = 0;
};

}  // namespace ckptfs
