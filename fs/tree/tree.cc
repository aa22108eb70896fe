// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/tree.h"

#include <algorithm>

#include "core/base/strings.h"

namespace ckptfs {
std::shared_ptr<StepEntry> Tree::FindStep(std::string_view run, std::string_view id) const {
  const auto found = runs.find(run);
  if (found == runs.end()) return nullptr;
  const auto step = found->second.steps.find(id);
  return step == found->second.steps.end() ? nullptr : step->second;
}

Result<Tree> BuildTree(Store& store, const MakeStepEntry& make) {
  Tree tree;
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> runs, store.Runs());
  for (const std::string& name : runs) {
    if (!CheckName(name, "run")) continue;
    CKPT_ASSIGN_OR_RETURN(const std::vector<StepRecord> records, store.Steps(name));
    Tree::Run run;
    for (const StepRecord& record : records) {
      if (!CheckName(record.id, "step")) continue;
      auto entry = make(record);
      if (!run.latest || IsOlder(run.latest->record(), record)) run.latest = entry;
      run.mtime_ns = std::max(run.mtime_ns, record.mtime_ns);
      run.steps.emplace(record.id, std::move(entry));
    }
    // A run whose last step was removed is no name any more.
    if (run.steps.empty()) continue;
    tree.mtime_ns = std::max(tree.mtime_ns, run.mtime_ns);
    tree.runs.emplace(name, std::move(run));
  }
  return tree;
}

void KeepEntries(const Tree& before, Tree& tree) {
  for (auto& [name, run] : tree.runs) {
    for (auto& [id, step] : run.steps) {
      const auto kept = before.FindStep(name, id);
      if (!kept || kept->removed() || kept->record().manifest != step->record().manifest) continue;
      if (run.latest == step) run.latest = kept;
      step = kept;
    }
  }
}

std::vector<TreeChange> Compare(const Tree& before, const Tree& after) {
  std::vector<TreeChange> changes;
  for (const auto& [name, run] : before.runs) {
    for (const auto& [id, step] : run.steps) {
      if (after.FindStep(name, id) != step) changes.push_back({name, id, step});
    }
  }
  for (const auto& [name, run] : after.runs) {
    for (const auto& [id, step] : run.steps) {
      if (before.FindStep(name, id) != step) changes.push_back({name, id, nullptr});
    }
  }
  return changes;
}

std::shared_ptr<StepEntry> ViewTarget::Choose(const Tree& tree, std::string* reason) const {
  if (!run_ && tree.runs.size() > 1) {
    *reason = "several runs: choose one with --run or `ckptfs switch`";
    return nullptr;
  }
  if (tree.runs.empty()) {
    *reason = "there is no step yet";
    return nullptr;
  }
  const auto run = run_ ? tree.runs.find(*run_) : tree.runs.begin();
  if (run == tree.runs.end()) {
    *reason = StrCat("there is no run '", *run_, "' yet");
    return nullptr;
  }
  if (follow_ || step_ == "latest") return run->second.latest;
  const auto step = run->second.steps.find(step_);
  if (step != run->second.steps.end()) return step->second;
  *reason = StrCat("there is no step '", run->first, "/", step_, "' yet");
  return nullptr;
}

void ViewTarget::Update(const Tree& tree, std::string* reason) {
  reason->clear();
  const bool there =
      shown_ && tree.FindStep(shown_->record().run, shown_->record().id) == shown_;
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
    *reason = "the step it showed was removed";
    return;
  }
  // Following stays with the run it follows.
  if (follow_ && !run_ && shown_) run_ = shown_->record().run;
  shown_ = Choose(tree, reason);
  if (shown_) was_shown_ = true;
}

Status ViewTarget::Switch(const Tree& tree, std::string_view run, std::string_view id) {
  const auto found = tree.runs.find(run);
  if (found == tree.runs.end()) return Fail(ErrorCode::kNotFound, StrCat("no run '", run, "'"));
  const auto step = id == "latest" ? found->second.latest : tree.FindStep(run, id);
  if (!step) return Fail(ErrorCode::kNotFound, StrCat("no step '", run, "/", id, "'"));
  run_ = std::string(run);
  follow_ = follow_ && id == "latest";
  shown_ = step;
  was_shown_ = true;
  return {};
}

}  // namespace ckptfs
