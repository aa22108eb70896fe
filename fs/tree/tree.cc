// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/tree.h"

#include <algorithm>
#include <tuple>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

// Names that no path can have are left out.
using Named = std::tuple<std::string, StepPlace, std::string>;

std::map<Named, const StepChange*> LastOfEach(const StepNews& news) {
  std::map<Named, const StepChange*> last;
  for (const StepChange& change : news.changes) {
    if (!CheckName(change.run, "run") || !CheckName(change.id, "step")) continue;
    last[{change.run, change.place, change.id}] = &change;
  }
  return last;
}

// The steps that `before` has and `next`, which was told everything, does not.
void AddGone(const Tree& before, NextTree& next) {
  for (const auto& [name, run] : before.runs) {
    for (const StepPlace place : {StepPlace::kStep, StepPlace::kMemory}) {
      run->At(place).Any([&, &name = name](const std::string& id, const auto& step) {
        if (!next.tree.FindStep(name, id, place))
          next.changes.push_back({name, id, step, nullptr, place});
        return false;
      });
    }
  }
}

// A run with changes; a run whose last step was removed is not a name any more.
void Replace(const std::string& name, StepPlace place, std::vector<StepMap::Change> changes,
             Tree& tree) {
  const Tree::Run* const known = tree.FindRun(name);
  Tree::Run run = known ? *known : Tree::Run();
  StepMap& steps = place == StepPlace::kStep ? run.steps : run.memory;
  steps = steps.With(std::move(changes));
  tree.runs.erase(name);
  if (run.steps.empty() && run.memory.empty()) return;
  run.latest = run.steps.latest();
  run.mtime_ns = run.steps.empty() ? run.memory.mtime_ns() : run.steps.mtime_ns();
  tree.runs.emplace(name, std::make_shared<const Tree::Run>(std::move(run)));
}

}  // namespace

const Tree::Run* Tree::FindRun(std::string_view run) const {
  const auto found = runs.find(run);
  return found == runs.end() ? nullptr : found->second.get();
}

std::shared_ptr<StepEntry> Tree::FindStep(std::string_view run, std::string_view id,
                                          StepPlace place) const {
  const Run* const found = FindRun(run);
  return found == nullptr ? nullptr : found->At(place).Find(id);
}

NextTree TakeIn(const Tree& before, const StepNews& news, const MakeStepEntry& make) {
  NextTree next;
  // Sorted, as LastOfEach is.
  std::map<std::pair<std::string, StepPlace>, std::vector<StepMap::Change>> touched;
  if (!news.all) next.tree = before;
  for (const auto& [name, change] : LastOfEach(news)) {
    const auto& [run, place, id] = name;
    const auto was = before.FindStep(run, id, place);
    const bool same = was && change->record && !was->removed() &&
                      was->record().manifest == change->record->manifest;
    StepMap::Change& step = touched[{run, place}].emplace_back(StepMap::Change{id, nullptr});
    if (change->record) step.step = same ? was : make(*change->record);
    if (same && !news.all) next.changes.push_back({run, id, nullptr, was, place});
    if (!same && (was || change->record)) next.changes.push_back({run, id, was, nullptr, place});
  }
  for (auto& [name, changes] : touched) {
    Replace(name.first, name.second, std::move(changes), next.tree);
  }
  if (news.all) AddGone(before, next);
  next.tree.mtime_ns = 0;
  for (const auto& [name, run] : next.tree.runs) {
    next.tree.mtime_ns = std::max(next.tree.mtime_ns, run->mtime_ns);
  }
  return next;
}

std::shared_ptr<StepEntry> ViewTarget::Choose(const Tree& tree, std::string* reason) const {
  if (!run_ && tree.runs.size() > 1) {
    *reason = "there are several runs: choose one with --run or `ckptfs switch`";
    return nullptr;
  }
  if (tree.runs.empty()) {
    *reason = "there is no step yet";
    return nullptr;
  }
  const std::string name = run_.value_or(tree.runs.begin()->first);
  const Tree::Run* const run = tree.FindRun(name);
  if (run == nullptr) {
    *reason = StrCat("there is no run '", name, "' yet");
    return nullptr;
  }
  if (run->steps.empty()) {
    *reason = StrCat("run '", name, "' has no durable step yet");
    return nullptr;
  }
  if (follow_ || step_ == "latest") return run->latest;
  if (auto step = run->steps.Find(step_)) return step;
  *reason = StrCat("there is no step '", name, "/", step_, "' yet");
  return nullptr;
}

void ViewTarget::Update(const Tree& tree, std::string* reason) {
  reason->clear();
  const bool there = shown_ && tree.FindStep(shown_->record().run, shown_->record().id) == shown_;
  if (there && !follow_) return;
  if (shown_ && !there && !follow_) {
    // A step that was adopted again in its place is the same step.
    const auto now = tree.FindStep(shown_->record().run, shown_->record().id);
    if (now && now->record().replaces == shown_->record().manifest) {
      shown_ = now;
      return;
    }
  }
  if (shown_ && !there && !follow_) {
    *reason = StrCat("step ", shown_->path(), " was removed; `ckptfs switch` chooses another");
    shown_ = nullptr;
    return;
  }
  if (was_shown_ && !follow_) {
    *reason = "the step that it showed was removed";
    return;
  }
  // Following stays with the run it follows.
  if (follow_ && !run_ && shown_) run_ = shown_->record().run;
  shown_ = Choose(tree, reason);
  if (shown_) was_shown_ = true;
}

Status ViewTarget::Switch(const Tree& tree, std::string_view run, std::string_view id) {
  const Tree::Run* const found = tree.FindRun(run);
  if (found == nullptr) return Fail(ErrorCode::kNotFound, StrCat("no run '", run, "'"));
  const auto step = id == "latest" ? found->latest : tree.FindStep(run, id);
  if (!step) return Fail(ErrorCode::kNotFound, StrCat("no step '", run, "/", id, "'"));
  run_ = std::string(run);
  follow_ = may_follow_ && id == "latest";
  shown_ = step;
  was_shown_ = true;
  return {};
}

}  // namespace ckptfs
