// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/mounted_step.h"

#include <algorithm>
#include <chrono>

#include "core/base/printable.h"
#include "core/base/strings.h"
#include "core/model/box_index.h"
#include "core/store/model_of.h"
#include "core/view/layout_survey.h"
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

uint64_t BytesOfModel(const StepModel& model) {
  constexpr uint64_t kNames = 512;  // of an atom under param/
  uint64_t bytes = model.blobs.size() * (sizeof(Blob) + kNames);
  for (const Parameter& parameter : model.parameters) {
    bytes += sizeof(parameter) + parameter.name.capacity();
  }
  for (const ModelFile& file : model.facts.model_files.files) {
    bytes += sizeof(file) + (file.text() != nullptr ? file.text()->capacity() : 0);
  }
  for (const Document& document : model.documents) {
    bytes += sizeof(document) + document.pickle.capacity() +
             document.tensors.capacity() * sizeof(StoredTensor);
  }
  for (const Atom& atom : model.atoms) {
    bytes += sizeof(atom) + kNames + atom.source.inline_bytes.capacity();
    for (const Gather& gather : atom.source.gathers) {
      bytes += sizeof(gather) + gather.series.capacity() * sizeof(FragmentSeries);
      if (gather.index) bytes += gather.index->MemoryBytes();
      for (const LocalTensor& local : gather.locals) {
        bytes += sizeof(local) + local.pieces.capacity() * (sizeof(Piece) + kNames);
      }
    }
  }
  return bytes;
}

// Differs where the mode does, or whether it was linked, of one owner and group.
uint64_t MixAccess(uint64_t mode, uint64_t uid, uint64_t gid, bool linked) {
  return ((uid << 32 | gid) * 0x9e3779b97f4a7c15u) ^ (mode & 0777) ^ (linked ? 1u << 16 : 0);
}

// The name in the mount exists; it is the source that went.
Status OfTheSource(Status status) {
  if (status || status.error().code != ErrorCode::kNotFound) return status;
  Error error = std::move(status).error();
  error.code = ErrorCode::kStale;
  return Fail(std::move(error));
}

}  // namespace

Result<OpenViews::ViewSetPtr> OpenViews::Get(const MountedStep& step, const std::string& layout,
                                             const std::function<ViewSetPtr()>& open) {
  const Key key{&step, layout};
  return kept_.Get(key, [&]() -> Result<ViewSetPtr> { return open(); });
}

void OpenViews::Forget(const MountedStep& step) {
  kept_.DropIf([&](const Key& key, const ViewSetPtr&) { return key.step == &step; });
}

MountedStep::MountedStep(std::shared_ptr<const Step> step, std::unique_ptr<BlobReader> blobs,
                         ViewFormats formats, std::shared_ptr<SharedBySteps> shared,
                         std::shared_ptr<std::atomic<uint64_t>> access_changes)
    : step_(std::move(step)),
      blobs_(std::move(blobs)),
      formats_(formats),
      memory_bytes_(BytesOfModel(step_->model)),
      shared_(std::move(shared)),
      checked_(std::make_unique<std::atomic<int64_t>[]>(step_->model.blobs.size())),
      access_(std::make_unique<std::atomic<uint64_t>[]>(step_->model.blobs.size())),
      access_changes_(std::move(access_changes)) {
  for (size_t i = 0; i < step_->model.blobs.size(); ++i) {
    const Blob& blob = step_->model.blobs[i];
    access_[i] = MixAccess(blob.mode, blob.uid, blob.gid, false);
  }
}

MountedStep::~MountedStep() {
  shared_->views.Forget(*this);
  shared_->retired_reads.fetch_add(blobs_->bytes_read(), std::memory_order_relaxed);
}

Result<std::shared_ptr<const ViewSet>> MountedStep::Views(const Layout& layout) const {
  // The views keep the step, not this object: it forgets them when it goes.
  return shared_->views.Get(*this, layout.ToString(),
                            [&] { return ViewSet::Open(ModelOf(step_), layout, formats_); });
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

void MountedStep::Survey() const {
  std::call_once(survey_once_, [this] {
    const LayoutSurvey survey = SurveyLayouts(ModelOf(step_), formats_);
    view_readme_ = RenderViewReadme(*step_, survey);
    layout_index_ = RenderLayoutIndex(*step_, survey);
  });
}

const std::string& MountedStep::view_readme() const {
  Survey();
  return view_readme_;
}

const std::string& MountedStep::layout_index() const {
  Survey();
  return layout_index_;
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
    std::optional<EntryStat> found;
    Status status = blobs_->Check(blob, &found);
    if (found) NoteAccess(blob, *found);
    CKPT_RETURN_IF_ERROR(OfTheSource(std::move(status)));
    checked.store(now, std::memory_order_relaxed);
  }
  return {};
}

// The access rule is that of the files as they were when they were looked at.
void MountedStep::NoteAccess(BlobIndex blob, const EntryStat& found) const {
  if (model().blob(blob).side) return;
  const OwnerAndMode& access = found.access;
  const uint64_t now = MixAccess(access.mode, access.uid, access.gid, found.linked);
  const uint64_t before = access_[static_cast<uint32_t>(blob)].exchange(now);
  if (before != now) access_changes_->fetch_add(1);
}

Status MountedStep::CheckStampsAgain(const std::vector<BlobIndex>& blobs) const {
  for (const BlobIndex blob : blobs) CKPT_RETURN_IF_ERROR(OfTheSource(blobs_->CheckAgain(blob)));
  return {};
}

Result<RecentSteps::StepPtr> RecentSteps::Load(const void* place,
                                               const std::function<Result<StepPtr>()>& load) {
  return loading_.Do(place, [&]() -> Result<StepPtr> {
    CKPT_ASSIGN_OR_RETURN(StepPtr step, load());
    MutexLock lock(mutex_);
    std::erase_if(loaded_, [&](const auto& weak) {
      const bool same = !weak.owner_before(step) && !step.owner_before(weak);
      return same || weak.expired();
    });
    loaded_.push_back(step);
    return step;
  });
}

void RecentSteps::Drop(const Digest& manifest) {
  steps_.DropIf(
      [&](const MountedStep*, const StepPtr& step) { return step->record().manifest == manifest; });
}

std::vector<std::shared_ptr<const MountedStep>> RecentSteps::Loaded() const {
  std::vector<StepPtr> alive;
  MutexLock lock(mutex_);
  for (const auto& weak : loaded_) {
    if (StepPtr step = weak.lock()) alive.push_back(std::move(step));
  }
  return alive;
}

uint64_t RecentSteps::bytes_read() const {
  uint64_t total = shared_->retired_reads.load(std::memory_order_relaxed);
  for (const StepPtr& step : Loaded()) total += step->blobs().bytes_read();
  return total;
}

size_t RecentSteps::loaded() const {
  MutexLock lock(mutex_);
  return static_cast<size_t>(std::count_if(loaded_.begin(), loaded_.end(),
                                           [](const auto& weak) { return !weak.expired(); }));
}

StepEntry::StepEntry(StepCatalogue& catalogue, StepRecord record, RootMap roots,
                     ViewFormats formats, RecentSteps& recent)
    : catalogue_(catalogue),
      record_(std::move(record)),
      roots_(std::move(roots)),
      formats_(formats),
      recent_(recent),
      path_(StrCat("/run/", record_.run, "/", PlaceName(record_.place), "/", record_.id)),
      inode_seed_(InodeSeed(record_.manifest)) {}

Result<std::shared_ptr<const MountedStep>> StepEntry::Load() {
  {
    // Another caller may have loaded it since we looked.
    MutexLock lock(mutex_);
    if (auto mounted = mounted_.lock()) return mounted;
  }
  CKPT_ASSIGN_OR_RETURN(auto step, catalogue_.Load(record_));
  BlobReader::Options options;
  options.roots = roots_;
  options.open_roots = step->roots;
  options.touched = recent_.shared()->touched;
  auto blobs = BlobReader::Create(step->model, std::move(options));
  auto mounted = std::make_shared<const MountedStep>(std::move(step), std::move(blobs), formats_,
                                                     recent_.shared(), access_changes_);
  MutexLock lock(mutex_);
  mounted_ = mounted;
  return mounted;
}

void StepEntry::Reload() {
  MutexLock lock(mutex_);
  mounted_.reset();
  access_.reset();
}

Result<std::shared_ptr<const MountedStep>> StepEntry::Mounted() {
  std::shared_ptr<const MountedStep> mounted;
  {
    MutexLock lock(mutex_);
    mounted = mounted_.lock();
  }
  if (!mounted) {
    auto loaded = recent_.Load(this, [this] { return Load(); });
    if (!loaded) return Fail(std::move(loaded).error().WithContext(path_));
    mounted = *std::move(loaded);
  }
  recent_.Touch(mounted);
  return mounted;
}

Result<std::shared_ptr<const StepAccess>> StepEntry::Access() {
  const uint64_t changes = access_changes_->load();
  std::shared_ptr<const StepAccess> before;
  {
    MutexLock lock(mutex_);
    if (access_ && access_of_ >= changes) return access_;
    before = access_;
  }
  CKPT_ASSIGN_OR_RETURN(const auto mounted, Mounted());
  auto access = std::make_shared<const StepAccess>(mounted->step(), mounted->blobs(), before.get());
  MutexLock lock(mutex_);
  if (!access_ || access_of_ < changes) {
    access_ = std::move(access);
    access_of_ = changes;
  }
  return access_;
}

Result<std::shared_ptr<const LayoutOffer>> StepEntry::Offer(const Layout& layout) {
  const std::string name = layout.ToString();
  if (auto known = offers_.Find(name)) return *known;
  CKPT_ASSIGN_OR_RETURN(const auto mounted, Mounted());
  CKPT_ASSIGN_OR_RETURN(const auto views, mounted->Views(layout));
  if (!views->offer().Any()) return Fail(views->offer().Refusal());
  return offers_.Insert(name, views->shared_offer());
}

std::vector<std::string> StepEntry::LayoutsInUse() const {
  std::vector<std::string> names;
  offers_.ForEach([&](const std::string& name, const auto&) { names.push_back(name); });
  std::sort(names.begin(), names.end());
  return names;
}

// Names and reasons are cut to the size that an attribute may have.
void StepEntry::NoteRefusal(std::string_view name, std::string_view reason) {
  constexpr size_t kMostBytes = 2048;
  if (name.starts_with('.')) return;  // file managers and shells look for these
  std::pair<std::string, std::string> refusal{Printable(name.substr(0, 255)),
                                              Printable(reason.substr(0, kMostBytes))};
  MutexLock lock(mutex_);
  std::erase_if(refusals_, [&](const auto& known) { return known.first == refusal.first; });
  refusals_.push_front(std::move(refusal));
  if (refusals_.size() > kMaxRefusals) refusals_.pop_back();
}

std::string StepEntry::Refusals() const {
  MutexLock lock(mutex_);
  std::string text;
  for (const auto& [name, reason] : refusals_) text += StrCat(name, ": ", reason, "\n");
  return text;
}

}  // namespace ckptfs
