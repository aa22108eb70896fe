// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/mounted_step.h"

#include <algorithm>
#include <chrono>

#include "core/base/strings.h"
#include "fs/tree/names.h"
#include "fs/tree/param_files.h"
#include "fs/tree/source_files.h"
#include "fs/tree/step_info.h"

namespace ckptfs {
namespace {

constexpr int64_t kStampIntervalNs = 1'000'000'000;

int64_t SteadyNow() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

MountedStep::MountedStep(std::shared_ptr<const Step> step, std::unique_ptr<BlobReader> blobs,
                         std::shared_ptr<std::atomic<uint64_t>> retired_reads)
    : step_(std::move(step)),
      blobs_(std::move(blobs)),
      retired_reads_(std::move(retired_reads)),
      checked_(std::make_unique<std::atomic<int64_t>[]>(step_->model.blobs.size())) {}

MountedStep::~MountedStep() {
  retired_reads_->fetch_add(blobs_->bytes_read(), std::memory_order_relaxed);
}

const ParamIndex& MountedStep::params() const {
  std::call_once(params_once_, [this] { params_ = IndexParameters(model()); });
  return params_;
}

const SourceIndex& MountedStep::sources() const {
  std::call_once(sources_once_, [this] { sources_ = IndexSources(model()); });
  return sources_;
}

const std::string& MountedStep::info() const {
  std::call_once(info_once_, [this] { info_ = RenderStepInfo(*step_); });
  return info_;
}

Status MountedStep::CheckStamps(const std::vector<BlobIndex>& blobs) const {
  return CheckOlder(blobs, SteadyNow() - kStampIntervalNs);
}

Status MountedStep::CheckStampsNow(const std::vector<BlobIndex>& blobs) const {
  return CheckOlder(blobs, SteadyNow());
}

Status MountedStep::CheckOlder(const std::vector<BlobIndex>& blobs, int64_t after) const {
  for (const BlobIndex blob : blobs) {
    std::atomic<int64_t>& checked = checked_[static_cast<uint32_t>(blob)];
    const int64_t last = checked.load(std::memory_order_relaxed);
    if (last != 0 && last > after) continue;
    const int64_t now = SteadyNow();
    if (Status status = blobs_->Check(blob); !status) {
      Error error = std::move(status).error();
      // The name in the mount exists; it is the source that went.
      if (error.code == ErrorCode::kNotFound) error.code = ErrorCode::kStale;
      return Fail(std::move(error));
    }
    checked.store(now, std::memory_order_relaxed);
  }
  return {};
}

bool LayoutView::Any() const {
  return std::any_of(refusals.begin(), refusals.end(),
                     [](const std::string& reason) { return reason.empty(); });
}

void RecentSteps::Touch(StepPtr step) {
  StepPtr evicted;  // destroyed after the lock
  MutexLock lock(mutex_);
  const auto found = std::find(steps_.begin(), steps_.end(), step);
  if (found != steps_.end()) {
    steps_.splice(steps_.begin(), steps_, found);
    return;
  }
  std::erase_if(loaded_, [](const auto& weak) { return weak.expired(); });
  const auto same = [&](const auto& weak) { return !weak.owner_before(step) &&
                                                   !step.owner_before(weak); };
  if (std::none_of(loaded_.begin(), loaded_.end(), same)) loaded_.push_back(step);
  steps_.push_front(std::move(step));
  if (steps_.size() <= limit_) return;
  evicted = std::move(steps_.back());
  steps_.pop_back();
}

void RecentSteps::Drop(const Digest& manifest) {
  std::list<StepPtr> dropped;  // destroyed after the lock
  MutexLock lock(mutex_);
  for (auto step = steps_.begin(); step != steps_.end();) {
    const auto next = std::next(step);
    if ((*step)->record().manifest == manifest) dropped.splice(dropped.end(), steps_, step);
    step = next;
  }
}

uint64_t RecentSteps::bytes_read() const {
  std::vector<StepPtr> alive;  // let go after the lock
  {
    MutexLock lock(mutex_);
    for (const auto& weak : loaded_) {
      if (StepPtr step = weak.lock()) alive.push_back(std::move(step));
    }
  }
  uint64_t total = retired_reads_->load(std::memory_order_relaxed);
  for (const StepPtr& step : alive) total += step->blobs().bytes_read();
  return total;
}

size_t RecentSteps::loaded() const {
  MutexLock lock(mutex_);
  return static_cast<size_t>(std::count_if(loaded_.begin(), loaded_.end(),
                                           [](const auto& weak) { return !weak.expired(); }));
}

StepEntry::StepEntry(StepCatalogue& catalogue, StepRecord record, RootMap roots,
                     RecentSteps& recent)
    : catalogue_(catalogue),
      record_(std::move(record)),
      roots_(std::move(roots)),
      recent_(recent),
      path_(StrCat("/run/", record_.run, "/step/", record_.id)),
      inode_seed_(InodeSeed(record_.manifest)) {}

StepEntry::Loaded StepEntry::Load() {
  auto step = catalogue_.Load(record_);
  if (!step) return Fail(std::move(step).error().WithContext(path_));
  BlobReader::Options options;
  options.roots = roots_;
  options.open_roots = (*step)->roots;
  auto blobs = BlobReader::Create((*step)->model, std::move(options));
  return std::make_shared<const MountedStep>(*std::move(step), std::move(blobs),
                                             recent_.retired_reads());
}

void StepEntry::Reload() {
  MutexLock lock(mutex_);
  mounted_.reset();
  access_.reset();
}

Result<std::shared_ptr<const MountedStep>> StepEntry::Mounted() {
  std::promise<Loaded> promise;
  std::shared_future<Loaded> others;
  std::shared_ptr<const MountedStep> mounted;
  {
    MutexLock lock(mutex_);
    mounted = mounted_.lock();
    if (mounted) {
      // Nothing to do.
    } else if (is_loading_) {
      others = loading_;
    } else {
      is_loading_ = true;
      loading_ = promise.get_future().share();
    }
  }
  if (mounted) {
    recent_.Touch(mounted);
    return mounted;
  }
  if (others.valid()) return others.get();
  Loaded loaded = Load();
  {
    MutexLock lock(mutex_);
    is_loading_ = false;
    loading_ = {};
    if (loaded) mounted_ = *loaded;
  }
  if (loaded) recent_.Touch(*loaded);
  promise.set_value(loaded);
  return loaded;
}

Result<std::shared_ptr<const StepAccess>> StepEntry::Access() {
  {
    MutexLock lock(mutex_);
    if (access_) return access_;
  }
  CKPT_ASSIGN_OR_RETURN(const auto mounted, Mounted());
  auto access = std::make_shared<const StepAccess>(mounted->step(), mounted->blobs());
  MutexLock lock(mutex_);
  if (!access_) access_ = std::move(access);
  return access_;
}

Result<std::shared_ptr<const LayoutView>> StepEntry::View(
    const Layout& layout, std::span<const std::unique_ptr<ViewFormat>> formats) {
  const std::string name = layout.ToString();
  {
    MutexLock lock(mutex_);
    const auto found = views_.find(name);
    if (found != views_.end()) {
      found->second.used = ++view_clock_;
      return found->second.view;
    }
  }
  CKPT_ASSIGN_OR_RETURN(const auto mounted, Mounted());
  auto view = std::make_shared<LayoutView>();
  view->layout = layout;
  view->name = name;
  std::string reasons;
  for (const auto& format : formats) {
    Status supported = format->Supports(mounted->model(), layout);
    view->refusals.push_back(supported ? std::string() : supported.error().message);
    if (!supported) reasons += StrCat("; ", format->name(), ": ", supported.error().message);
  }
  if (!view->Any()) {
    return Fail(ErrorCode::kUnsupported, StrCat("no format can show layout ", name, reasons));
  }
  MutexLock lock(mutex_);
  const auto [place, inserted] = views_.try_emplace(name);
  if (inserted) place->second.view = std::move(view);
  place->second.used = ++view_clock_;
  const auto result = place->second.view;
  if (views_.size() > kMaxViews) {
    views_.erase(std::min_element(views_.begin(), views_.end(), [](const auto& a, const auto& b) {
      return a.second.used < b.second.used;
    }));
  }
  return result;
}

std::vector<std::string> StepEntry::ViewsInUse() const {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, used] : views_) names.push_back(name);
  return names;
}

}  // namespace ckptfs
