// SPDX-License-Identifier: Apache-2.0
//
// Tree is which runs and steps there are and which step /view shows: a
// snapshot that is never changed, only replaced by another one, which shares the
// runs that did not change.
//
// Thread safety: immutable once built.
// Lifetime: shares runs and step entries with the trees before and after it.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/store/store.h"
#include "fs/tree/mounted_step.h"
#include "fs/tree/step_map.h"

namespace ckptfs {

struct Tree {
  struct Run {  // at least one step, in either place
    StepMap steps;
    StepMap memory;                     // those that daemons hold in memory together
    std::shared_ptr<StepEntry> latest;  // of `steps`: IsOlder than none; null if there are none
    int64_t mtime_ns = 0;               // of the newest step

    const StepMap& At(StepPlace place) const { return place == StepPlace::kStep ? steps : memory; }
  };
  std::map<std::string, std::shared_ptr<const Run>, std::less<>> runs;
  int64_t mtime_ns = 0;

  // Null if there is none.
  const Run* FindRun(std::string_view run) const;
  std::shared_ptr<StepEntry> FindStep(std::string_view run, std::string_view id,
                                      StepPlace place = StepPlace::kStep) const;
};

using MakeStepEntry = std::function<std::shared_ptr<StepEntry>(const StepRecord&)>;

struct TreeChange {
  std::string run;
  std::string id;
  std::shared_ptr<StepEntry> removed;  // null: none was there
  // The step that was there before, with its entry; its bytes may lie elsewhere.
  std::shared_ptr<StepEntry> kept;
  StepPlace place = StepPlace::kStep;
};

// The tree with what is new, which shares what is not: a step costs the same however
// many its run has.  A step of the same name and manifest keeps its entry.  Records
// with names that no path can have are left out.
struct NextTree {
  Tree tree;
  std::vector<TreeChange> changes;
};
NextTree TakeIn(const Tree& before, const StepNews& news, const MakeStepEntry& make);

// ViewTarget chooses the step that /view shows.  It is fixed once it shows one; it moves
// with --follow and with Switch, and goes away with its step.
class ViewTarget {
 public:
  ViewTarget(std::optional<std::string> run, std::string step, bool follow)
      : run_(std::move(run)), step_(std::move(step)), may_follow_(follow), follow_(follow) {}

  // The target in `tree`; `reason` says why there is none, if there is none.
  void Update(const Tree& tree, std::string* reason);
  // `id` "latest" follows from then on, if the mount does.
  // kNotFound if there is no such step.
  Status Switch(const Tree& tree, std::string_view run, std::string_view id);

  const std::shared_ptr<StepEntry>& step() const { return shown_; }
  bool follows() const { return follow_; }

 private:
  std::shared_ptr<StepEntry> Choose(const Tree& tree, std::string* reason) const;

  std::optional<std::string> run_;
  std::string step_;
  bool may_follow_;         // the mount does
  bool follow_;             // until it shows a step that was named
  bool was_shown_ = false;  // a target that went does not come back by itself
  std::shared_ptr<StepEntry> shown_;
};

}  // namespace ckptfs
