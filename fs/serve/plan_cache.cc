// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/plan_cache.h"

#include <variant>

namespace ckptfs {
namespace {

class BlobCollector {
 public:
  explicit BlobCollector(const StepModel& model)
      : model_(model), blobs_(model.blobs.size()), atoms_(model.atoms.size()) {}

  void AddBlob(uint64_t blob) {
    if (blob < blobs_.size()) blobs_[blob] = true;
  }

  void AddAtom(AtomIndex index) {
    const auto i = static_cast<uint32_t>(index);
    if (i >= atoms_.size() || atoms_[i]) return;
    atoms_[i] = true;
    const AtomSource& source = model_.atoms[i].source;
    for (const Gather& gather : source.gathers) {
      for (const FragmentSeries& series : gather.series) AddSeries(series);
    }
    if (source.kind == SourceKind::kCast || source.kind == SourceKind::kDecode) {
      AddAtom(source.of);
    }
    if (source.kind == SourceKind::kDecode) AddAtom(source.scales);
  }

  std::vector<BlobIndex> Finish() const {
    std::vector<BlobIndex> result;
    for (size_t i = 0; i < blobs_.size(); ++i) {
      if (blobs_[i]) result.push_back(BlobIndex{static_cast<uint32_t>(i)});
    }
    return result;
  }

 private:
  void AddSeries(const FragmentSeries& series) {
    AddBlob(series.blob);
    if (series.blob_step == 0) return;
    for (uint32_t k = 1; k < series.count; ++k) {
      AddBlob(static_cast<uint64_t>(series.blob + static_cast<int64_t>(k) * series.blob_step));
    }
  }

  const StepModel& model_;
  std::vector<bool> blobs_;
  std::vector<bool> atoms_;
};

}  // namespace

std::vector<BlobIndex> BlobsOf(const Plan& plan, const StepModel& model) {
  BlobCollector collector(model);
  for (const Segment& segment : plan.segments()) {
    if (const auto* atom = std::get_if<AtomSegment>(&segment.body)) collector.AddAtom(atom->atom);
    if (const auto* blob = std::get_if<BlobSegment>(&segment.body)) {
      collector.AddBlob(static_cast<uint32_t>(blob->blob));
    }
  }
  return collector.Finish();
}

PreparedPlan::PreparedPlan(std::shared_ptr<const MountedStep> step, Plan plan, std::string path)
    : step_(std::move(step)),
      plan_(std::move(plan)),
      reader_(plan_, step_->model(), step_->blobs()),
      path_(std::move(path)),
      blobs_(BlobsOf(plan_, step_->model())) {}

uint64_t PreparedPlan::MemoryBytes() const {
  return sizeof(*this) + plan_.MemoryBytes() + path_.size() + blobs_.size() * sizeof(BlobIndex);
}

std::shared_ptr<const PreparedPlan> PlanCache::Find(InodeNumber inode) {
  MutexLock lock(mutex_);
  const auto found = places_.find(static_cast<uint64_t>(inode));
  if (found == places_.end()) return nullptr;
  order_.splice(order_.begin(), order_, found->second);
  return order_.front().plan;
}

std::shared_ptr<const PreparedPlan> PlanCache::Insert(InodeNumber inode,
                                                      std::shared_ptr<const PreparedPlan> plan) {
  const uint64_t bytes = plan->MemoryBytes();
  Order evicted;  // destroyed after the lock
  MutexLock lock(mutex_);
  const auto found = places_.find(static_cast<uint64_t>(inode));
  if (found != places_.end()) {
    order_.splice(order_.begin(), order_, found->second);
    return order_.front().plan;
  }
  order_.push_front(Kept{inode, plan, bytes});
  places_[static_cast<uint64_t>(inode)] = order_.begin();
  bytes_ += bytes;
  while (bytes_ > limit_ && !order_.empty()) {
    const auto last = std::prev(order_.end());
    places_.erase(static_cast<uint64_t>(last->inode));
    bytes_ -= last->bytes;
    evicted.splice(evicted.end(), order_, last);
  }
  return plan;
}

void PlanCache::DropStep(const Digest& manifest) {
  Order dropped;  // destroyed after the lock
  MutexLock lock(mutex_);
  for (auto kept = order_.begin(); kept != order_.end();) {
    const auto next = std::next(kept);
    if (kept->plan->step().record().manifest == manifest) {
      places_.erase(static_cast<uint64_t>(kept->inode));
      bytes_ -= kept->bytes;
      dropped.splice(dropped.end(), order_, kept);
    }
    kept = next;
  }
}

uint64_t PlanCache::bytes() const {
  MutexLock lock(mutex_);
  return bytes_;
}

size_t PlanCache::size() const {
  MutexLock lock(mutex_);
  return order_.size();
}

}  // namespace ckptfs
