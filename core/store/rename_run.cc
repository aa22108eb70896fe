// SPDX-License-Identifier: Apache-2.0
//
// A run gets another name: each of its steps is published under it, with the same manifest, and
// then deleted under the old one.  So a step is there at any moment, under one name at least.
//
//   renames/<new name>   record: {"from": the old name}, while it goes on
//
// A call that was killed is finished by the same call: the record tells that what the new name
// has already is the run's own.
#include "core/base/fault_point.h"
#include "core/base/names.h"
#include "core/base/strings.h"
#include "core/records/records.h"
#include "core/store/lives.h"
#include "core/store/store_state.h"

namespace ckptfs {
namespace {

constexpr int kMaxRenameRaces = 100;
constexpr std::string_view kFromKey = "from";

std::string RenameName(std::string_view name) { return StrCat("renames/", name); }

Result<std::optional<std::string>> RenamedFrom(const Storage& storage, std::string_view name) {
  const auto text = ReadWhole(storage, RenameName(name), kRecordMaxBytes);
  if (!text && text.error().code == ErrorCode::kNotFound) return std::optional<std::string>();
  if (!text) return Fail(Error(text.error()));
  CKPT_ASSIGN_OR_RETURN(std::string from, ParseText(*text, kFromKey));
  return std::optional(std::move(from));
}

Error BeingRenamed(std::string_view run, std::string_view to) {
  return Error{ErrorCode::kExists, StrCat("run '", run, "' is being renamed to '", to, "'")}
      .Needing(StrCat("finish that first: `ckptfs rename ", run, " ", to, "`"));
}

// No other rename of the run is under way.
Status CheckNoOther(const Storage& storage, std::string_view run, std::string_view name) {
  CKPT_ASSIGN_OR_RETURN(const auto names, ListFilesBelow(storage, "renames"));
  for (const std::string& path : names) {
    const std::string to = path.substr(RenameName("").size());
    if (to == name) continue;
    CKPT_ASSIGN_OR_RETURN(const auto from, RenamedFrom(storage, to));
    if (from == run) return Fail(BeingRenamed(run, to));
  }
  return {};
}

}  // namespace

Result<uint64_t> Store::RenameRun(std::string_view from, std::string_view to) {
  CKPT_RETURN_IF_ERROR(CheckName(from, "run"));
  CKPT_RETURN_IF_ERROR(CheckName(to, "run"));
  if (from == to) return Fail(ErrorCode::kInvalid, "it has that name");
  const std::string run(from), name(to);
  State& s = *state_;
  CKPT_RETURN_IF_ERROR(Refresh());
  CKPT_RETURN_IF_ERROR(CheckNoOther(*s.storage, run, name));
  CKPT_ASSIGN_OR_RETURN(const auto begun, RenamedFrom(*s.storage, name));
  if (begun && *begun != run) return Fail(BeingRenamed(*begun, name));
  std::vector<StepRecord> steps;
  {
    MutexLock lock(s.mutex);
    const bool taken = s.index.runs.contains(name);
    if (taken && !begun) return Fail(ErrorCode::kExists, StrCat("there is a run '", name, "'"));
    const auto found = s.index.runs.find(run);
    if (found == s.index.runs.end() && !begun) {
      return Fail(ErrorCode::kNotFound, StrCat("no run '", run, "'"));
    }
    if (found != s.index.runs.end()) {
      for (const auto& [id, step] : found->second) {
        if (!step.record) return Fail(Error(step.record.error()));
        steps.push_back(*step.record);
      }
    }
  }
  std::sort(steps.begin(), steps.end(), IsOlder);
  if (!begun) {
    const Status published = PublishText(*s.storage, RenameName(name), RenderText(kFromKey, run));
    if (!published && published.error().code != ErrorCode::kExists) {
      return Fail(Error(published.error()));
    }
    if (!published) return Fail(ErrorCode::kExists, StrCat("'", name, "' is being taken"));
    const Status alone = CheckNoOther(*s.storage, run, name);
    if (!alone) {
      (void)s.storage->Remove(RenameName(name));
      return Fail(Error(alone.error()));
    }
  }
  FaultPoint();
  for (const StepRecord& step : steps) {
    StepRecord moved = step;
    // The root of a run of snapshots is its name.
    if (step.root == StrCat(kSnapshotRoot, run)) moved.root = StrCat(kSnapshotRoot, name);
    CKPT_RETURN_IF_ERROR(s.ClaimRun(name, moved.root));
    CKPT_RETURN_IF_ERROR(s.PublishUnder(name, moved));
    FaultPoint();
    const Status removed = Remove(step);
    const bool gone = !removed && removed.error().code == ErrorCode::kNotFound;
    if (!removed && !gone) return Fail(Error(removed.error()));
    FaultPoint();
  }
  CKPT_RETURN_IF_ERROR(Refresh());
  CKPT_ASSIGN_OR_RETURN(const auto tags, Tags(run));
  for (const StepTag& tag : tags) {
    CKPT_ASSIGN_OR_RETURN(const auto step, s.FindStep(name, tag.id));
    if (step && step->unpacked == tag.unpacked) CKPT_RETURN_IF_ERROR(Tag(*step, tag.name));
    CKPT_RETURN_IF_ERROR(Untag(run, tag.name));
    FaultPoint();
  }
  CKPT_RETURN_IF_ERROR(s.storage->Remove(RenameName(name)));
  return steps.size();
}

Status Store::State::PublishUnder(const std::string& run, StepRecord step) {
  step.run = run;
  const auto held = HoldManifest(step.manifest);
  for (int race = 0; race < kMaxRenameRaces; ++race) {
    CKPT_ASSIGN_OR_RETURN(const Incarnation last, LastIncarnation(*storage, run, step.id));
    if (last.live) {
      CKPT_ASSIGN_OR_RETURN(const auto there, RecordOf(last));
      if (there && there->manifest == step.manifest) {
        Note(last.name, *there);
        return {};
      }
      return Fail(ErrorCode::kExists,
                  StrCat("run '", run, "' has another step of the name '", step.id, "'"));
    }
    CKPT_ASSIGN_OR_RETURN(const bool done, TryRecord(step, last));
    if (done) return {};
  }
  return Fail(ErrorCode::kExhausted,
              StrCat("step '", step.id, "' is being published all the time"));
}

}  // namespace ckptfs
