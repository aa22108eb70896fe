// SPDX-License-Identifier: Apache-2.0
//
// RankView shows what each rank of a layout would hold, framework-neutral:
//
//   rank<N>/model.safetensors      the rank's shard of every weight and buffer
//   rank<N>/model.pt               the same as a flat dict (torch.load)
//   rank<N>/optimizer.safetensors  masters, moments and steps, "<kind>/<name>"
//   rank<N>/optimizer.pt
//   rank<N>/info.json              which part of which tensor each one is
//
// N from 0 to the layout's world - 1.  docs/view-formats.md has the rules.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: `families` (may be null: the shipped ones) must outlive the view.

#pragma once

#include <array>
#include <map>
#include <memory>

#include "core/base/mutex.h"
#include "core/model/family.h"
#include "core/view/shown_names.h"
#include "core/view/view_cache.h"
#include "core/view/view_format.h"
#include "formats/rank/rank_tensors.h"

namespace ckptfs {

class RankView : public ViewFormat {
 public:
  explicit RankView(const FamilySet* families = nullptr) : families_(families) {}

  std::string_view name() const override { return "rank"; }
  Status Supports(const StepModel& step, const Layout& layout) const override;
  Result<std::vector<ViewEntry>> List(const StepModel& step, const Layout& layout,
                                      std::string_view directory) const override;
  Result<ViewEntry> Find(const StepModel& step, const Layout& layout,
                         std::string_view path) const override;
  Result<Plan> MakePlan(const StepModel& step, const Layout& layout,
                        std::string_view file) const override;

  static constexpr size_t kFiles = 5;

 private:
  // File sizes of the ranks at one place of the model-parallel grid.
  using Sizes = std::array<uint64_t, kFiles>;
  using Place = std::array<uint32_t, 4>;  // tp, pp, ep, etp

  struct Prepared {
    ShownNames names;
    ParameterAtoms atoms;
    mutable Mutex mutex;
    mutable std::map<Place, Sizes> sizes GUARDED_BY(mutex);
  };
  using PreparedPtr = std::shared_ptr<const Prepared>;

  Result<PreparedPtr> Prepare(const StepModel& step, const Layout& layout) const;
  Result<Sizes> SizesOf(const StepModel& step, const Layout& layout, const Prepared& prepared,
                        uint64_t rank) const;

  const FamilySet* families_;
  mutable ViewCache<Prepared> cache_;
};

}  // namespace ckptfs
