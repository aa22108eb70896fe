// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/prepared_plan.h"

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

}  // namespace ckptfs
