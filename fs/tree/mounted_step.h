// SPDX-License-Identifier: Apache-2.0
//
// A step as the tree shows it.  StepEntry is its place in a run and stays small; MountedStep is
// the loaded manifest with its blobs, loaded on a first look inside and dropped after the last.
//
// Thread safety: all methods may be called concurrently; no lock is held
// across I/O.
// Lifetime: the catalogue must outlive a StepEntry; a MountedStep stands alone and
// lives as long as open files hold it, also when the step has been removed.
// Units: bytes.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/loading_cache.h"
#include "core/base/lru.h"
#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/base/single_flight.h"
#include "core/blob/blob_reader.h"
#include "core/store/model_of.h"
#include "core/store/step_catalogue.h"
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
  std::string link_target;  // not empty: an alias, a symlink to this component
  std::vector<File> files;  // sorted
};
using ParamIndex = std::map<std::string, ParamDirectory, std::less<>>;

// The source files of a step under source/: directory path -> entries.
struct SourceEntry {
  bool directory = false;
  BlobIndex blob{};
  std::optional<uint32_t> text;  // no blob: of StepModel::texts
};
using SourceDirectory = std::map<std::string, SourceEntry, std::less<>>;
using SourceIndex = std::map<std::string, SourceDirectory, std::less<>>;

class MountedStep;

// The views of all loaded steps that were looked into last, at most kBytes of
// them: anybody may ask for any layout.
class OpenViews {
 public:
  using ViewSetPtr = std::shared_ptr<const ViewSet>;

  OpenViews() : kept_(kBytes, [](const ViewSetPtr& views) { return views->MemoryBytes(); }) {}
  // Returns what `open` makes, or what another caller who is opening the same makes.
  Result<ViewSetPtr> Get(const MountedStep& step, const std::string& layout,
                         const std::function<ViewSetPtr()>& open);
  void Forget(const MountedStep& step);

  uint64_t bytes() const { return kept_.weight(); }
  size_t size() const { return kept_.size(); }

  static constexpr uint64_t kBytes = uint64_t{128} << 20;

 private:
  struct Key {
    const MountedStep* step = nullptr;
    std::string layout;  // its name
    bool operator==(const Key&) const = default;
  };
  struct HashKey {
    size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.step) * 31 + std::hash<std::string>()(key.layout);
    }
  };

  LoadingCache<Key, ViewSetPtr, HashKey> kept_;
};

// The state that the loaded steps of a mount share, and that outlives them.
struct SharedBySteps {
  std::atomic<uint64_t> retired_reads{0};  // bytes read by steps that went
  OpenViews views;
  std::shared_ptr<TouchedFiles> touched;  // may be null
};

class MountedStep {
 public:
  // `*access_changes` counts the files found with another owner or mode.
  MountedStep(std::shared_ptr<const Step> step, std::unique_ptr<BlobReader> blobs,
              ViewFormats formats, std::shared_ptr<SharedBySteps> shared,
              std::shared_ptr<std::atomic<uint64_t>> access_changes);
  ~MountedStep();

  const Step& step() const { return *step_; }
  const StepRecord& record() const { return step_->record; }
  const StepModel& model() const { return step_->model; }
  std::shared_ptr<const StepModel> shared_model() const { return ModelOf(step_); }
  BlobReader& blobs() const { return *blobs_; }
  uint64_t MemoryBytes() const { return memory_bytes_; }  // of the model and its indexes, about

  // As the formats show the step.  BLOCKS: on opening the views, once for all who ask meanwhile.
  Result<std::shared_ptr<const ViewSet>> Views(const Layout& layout) const;

  // Computed when first asked for.
  const ParamIndex& params() const;
  const SourceIndex& sources() const;
  const std::string& info() const;          // info.json
  const std::string& view_readme() const;   // view/README.txt
  const std::string& layout_index() const;  // view/layouts.json

  // kStale, naming the file, if one of `blobs` changed or went since it was
  // adopted.  Each file is looked at once per interval.
  // BLOCKS: on stat.
  Status CheckStamps(const std::vector<BlobIndex>& blobs) const;
  // The same, each looked at now.
  Status CheckStampsNow(const std::vector<BlobIndex>& blobs) const;
  // After reading: nothing of them moved since, so that all was of one state.
  Status CheckStampsAgain(const std::vector<BlobIndex>& blobs) const;

 private:
  // Those that were last looked at before `after`, ns of the steady clock.
  Status CheckOlder(const std::vector<BlobIndex>& blobs, int64_t after) const;
  void NoteAccess(BlobIndex blob, const EntryStat& found) const;
  void Survey() const;

  std::shared_ptr<const Step> step_;
  std::unique_ptr<BlobReader> blobs_;
  const ViewFormats formats_;
  const uint64_t memory_bytes_;
  const std::shared_ptr<SharedBySteps> shared_;
  mutable std::once_flag params_once_, sources_once_, info_once_, survey_once_;
  mutable ParamIndex params_;
  mutable SourceIndex sources_;
  mutable std::string info_, view_readme_, layout_index_;
  // Per blob: when it was last found unchanged, ns of the steady clock.
  std::unique_ptr<std::atomic<int64_t>[]> checked_;
  // Per blob: owner, group, mode and whether it was linked, mixed.
  std::unique_ptr<std::atomic<uint64_t>[]> access_;
  std::shared_ptr<std::atomic<uint64_t>> access_changes_;
};

// Loads steps, each once for all who want it, and keeps those that were looked
// into last, so that a manifest is not parsed for every lookup.  It knows all
// that are loaded.
class RecentSteps {
 public:
  using StepPtr = std::shared_ptr<const MountedStep>;

  // Keeps `limit` steps, fewer if they take more than `bytes` together.
  explicit RecentSteps(size_t limit, uint64_t bytes = kBytes,
                       std::shared_ptr<TouchedFiles> touched = nullptr)
      : steps_(bytes, [least = bytes / limit](const StepPtr& step) {
          return std::max(least, step->MemoryBytes());
        }) {
    shared_->touched = std::move(touched);
  }
  // Returns what `load` makes, or what another caller loads for the same `place`.
  Result<StepPtr> Load(const void* place, const std::function<Result<StepPtr>()>& load);
  void Touch(const StepPtr& step) { steps_.Insert(step.get(), step); }
  void Drop(const Digest& manifest);

  const std::shared_ptr<SharedBySteps>& shared() const { return shared_; }
  uint64_t bytes_read() const;  // by all steps ever loaded
  std::vector<std::shared_ptr<const MountedStep>> Loaded() const;
  size_t loaded() const;

  static constexpr uint64_t kBytes = uint64_t{256} << 20;

 private:
  Lru<const MountedStep*, StepPtr> steps_;
  SingleFlight<const void*, StepPtr> loading_;
  const std::shared_ptr<SharedBySteps> shared_ = std::make_shared<SharedBySteps>();
  mutable Mutex mutex_;
  std::vector<std::weak_ptr<const MountedStep>> loaded_ GUARDED_BY(mutex_);
};

class StepEntry {
 public:
  // `formats` and `recent` must outlive it.
  StepEntry(StepCatalogue& catalogue, StepRecord record, RootMap roots, ViewFormats formats,
            RecentSteps& recent);

  const StepRecord& record() const { return record_; }
  const std::string& path() const { return path_; }  // "/run/<run>/step/<id>", or "memory"
  uint64_t inode_seed() const { return inode_seed_; }

  // BLOCKS: on loading the manifest, once for all who ask meanwhile.
  Result<std::shared_ptr<const MountedStep>> Mounted();
  // Loads the step the first time, and when a file was found changed.
  Result<std::shared_ptr<const StepAccess>> Access();

  // Its bytes lie elsewhere now: who asks from now on loads it again.
  void Reload();

  // Names of a removed step resolve no more; open files go on.
  void MarkRemoved() { removed_.store(true, std::memory_order_release); }
  bool removed() const { return removed_.load(std::memory_order_acquire); }

  // The offer of the step in a layout; the kMaxLayouts used last are remembered
  // for listing.  kUnsupported with every format's reason if none can show it.
  Result<std::shared_ptr<const LayoutOffer>> Offer(const Layout& layout);
  std::vector<std::string> LayoutsInUse() const;  // canonical names, sorted

  // Why a name that was looked up in view/ is not there; the last kMaxRefusals are kept.
  void NoteRefusal(std::string_view name, std::string_view reason);
  std::string Refusals() const;  // "tp3: rank, deepspeed: ...\n", the newest first
  static constexpr size_t kMaxLayouts = 256;
  static constexpr size_t kMaxRefusals = 16;

 private:
  Result<std::shared_ptr<const MountedStep>> Load();

  StepCatalogue& catalogue_;
  const StepRecord record_;
  const RootMap roots_;
  const ViewFormats formats_;
  RecentSteps& recent_;
  const std::string path_;
  const uint64_t inode_seed_;
  std::atomic<bool> removed_{false};
  Lru<std::string, std::shared_ptr<const LayoutOffer>> offers_{kMaxLayouts};

  mutable Mutex mutex_;
  std::deque<std::pair<std::string, std::string>> refusals_ GUARDED_BY(mutex_);
  std::weak_ptr<const MountedStep> mounted_ GUARDED_BY(mutex_);
  const std::shared_ptr<std::atomic<uint64_t>> access_changes_ =
      std::make_shared<std::atomic<uint64_t>>(0);
  std::shared_ptr<const StepAccess> access_ GUARDED_BY(mutex_);
  uint64_t access_of_ GUARDED_BY(mutex_) = 0;  // the count of changes that `access_` knows of
};

}  // namespace ckptfs
