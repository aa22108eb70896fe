// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/scan.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <optional>
#include <tuple>

#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "core/io/file_root.h"

namespace ckptfs {
namespace {

// Directories above the one that is given: a run's, a save directory, a tag.
constexpr int kAbove = 2;

struct Job {
  FoundStep found;
  Status complete;
  std::optional<Result<StepModel>> outcome;  // nothing if it is not complete
};

Error NothingKnown(const Place& place, Sources sources) {
  std::string names;
  for (const auto& source : sources) names += StrCat(names.empty() ? "" : ", ", source->name());
  return Error{ErrorCode::kNotFound,
               StrCat(place.Path(), ": no checkpoint found; looked for the formats ", names,
                      " (a save directory, one step's own directory, or a file of weights)")};
}

bool IsBelow(const std::string& inner, const std::string& outer) {
  return inner.size() > outer.size() && inner.starts_with(outer) && inner[outer.size()] == '/';
}

// How many steps of the source lie below the directory.
size_t CountBelow(const std::vector<FoundStep>& found, const Source* source,
                  const std::string& directory) {
  return static_cast<size_t>(std::count_if(found.begin(), found.end(), [&](const FoundStep& one) {
    return one.source == source && IsBelow(one.candidate.directory, directory);
  }));
}

// A save directory holds what was saved at many moments; its own files are of one
// that nothing tells.
bool IsSaveDirectory(const StepCandidate& step) { return step.directory == step.save; }

// True if `later` is a step that an earlier source claims, or the only part of
// its kind in the same tree of one moment.
bool IsSameStep(const std::vector<FoundStep>& found, const FoundStep& earlier,
                const FoundStep& later) {
  const std::string& one = earlier.candidate.directory;
  const std::string& other = later.candidate.directory;
  if (one == other) return true;
  const FoundStep& outer = IsBelow(other, one) ? earlier : later;
  const FoundStep& inner = IsBelow(other, one) ? later : earlier;
  return IsBelow(inner.candidate.directory, outer.candidate.directory) &&
         !IsSaveDirectory(outer.candidate) &&
         CountBelow(found, inner.source, outer.candidate.directory) == 1;
}

void KeepEachOnce(std::vector<FoundStep>& found) {
  std::vector<FoundStep> kept;
  for (const FoundStep& step : found) {
    const bool known = std::any_of(kept.begin(), kept.end(), [&](const FoundStep& other) {
      return other.source != step.source && IsSameStep(found, other, step);
    });
    if (!known) kept.push_back(step);
  }
  found = std::move(kept);
}

// True for a malformed step among others that its framework does not call the
// latest: so a save that was cut off looks, and the others are sound.
bool IsCutOff(const Error& error, const StepCandidate& step, const std::string& directory) {
  return error.code == ErrorCode::kInvalid && !step.latest && step.directory != directory;
}

// What became of a step: among the steps, the skipped or the refused.
void Settle(Job& job, const std::string& directory, IngestResult& result) {
  const StepCandidate& step = job.found.candidate;
  if (!job.complete) {
    Error error = std::move(job.complete).error();
    if (step.directory == directory) {
      result.refused.push_back(std::move(error));
    } else {
      result.skipped.push_back(StrCat(step.id, ": incomplete: ", error.message));
    }
    return;
  }
  if (*job.outcome) {
    result.steps.push_back(IngestedStep{std::move(job.found.candidate), **std::move(job.outcome)});
    return;
  }
  Error error = std::move(*job.outcome).error().WithContext(step.id);
  if (IsCutOff(error, step, directory)) {
    result.skipped.push_back(std::move(error.message));
  } else {
    result.refused.push_back(std::move(error));
  }
}

auto OrderOf(const IngestedStep& step) {
  return std::tuple(step.model.iteration, !step.candidate.converted, step.candidate.mtime_ns);
}

}  // namespace

Result<Place> PlaceOf(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), std::free);
  if (!real) return Fail(ErrnoError(errno, path));
  std::string top = real.get();
  for (int i = 0; i < kAbove && top.size() > 1; ++i) {
    top = top.substr(0, std::max<size_t>(top.rfind('/'), 1));
  }
  const std::string_view below = std::string_view(real.get()).substr(top.size());
  Place place{std::make_shared<FileRoot>(top),
              std::string(below.substr(below.starts_with('/') ? 1 : 0))};
  CKPT_ASSIGN_OR_RETURN(const EntryStat found, place.root->Stat(place.directory));
  if (found.kind != EntryKind::kOther) return place;
  return Fail(ErrorCode::kInvalid, StrCat(path, ": neither a directory nor a file; give a checkpoint "
                                                "or the directory that holds several"));
}

Result<std::vector<FoundStep>> ScanIfAny(const Place& place, Sources sources) {
  std::vector<FoundStep> found;
  for (const auto& source : sources) {
    CKPT_ASSIGN_OR_RETURN(std::vector<StepCandidate> candidates,
                          source->Find(place.root, place.directory));
    for (StepCandidate& candidate : candidates) {
      found.push_back(FoundStep{std::move(candidate), source.get()});
    }
  }
  KeepEachOnce(found);
  return found;
}

Result<std::vector<FoundStep>> Scan(const Place& place, Sources sources) {
  CKPT_ASSIGN_OR_RETURN(std::vector<FoundStep> found, ScanIfAny(place, sources));
  if (found.empty()) return Fail(NothingKnown(place, sources));
  return found;
}

Result<StepModel> IngestStep(const FoundStep& found, const SourceOptions& options) {
  CKPT_RETURN_IF_ERROR(found.source->Complete(found.candidate, options));
  return found.source->Read(found.candidate, options);
}

Result<IngestResult> IngestPlace(const Place& place, Sources sources,
                                 const SourceOptions& options) {
  CKPT_ASSIGN_OR_RETURN(std::vector<FoundStep> found, Scan(place, sources));
  std::vector<Job> jobs;
  for (FoundStep& step : found) {
    Status complete = step.source->Complete(step.candidate, options);
    jobs.push_back(Job{std::move(step), std::move(complete), std::nullopt});
  }
  ParallelFor(jobs.size(), [&](size_t i) {
    if (!jobs[i].complete) return;
    jobs[i].outcome = jobs[i].found.source->Read(jobs[i].found.candidate, options);
  });
  IngestResult result;
  for (Job& job : jobs) Settle(job, place.directory, result);
  if (result.steps.empty() && !result.refused.empty()) {
    return Fail(std::move(result.refused.front()));
  }
  if (result.steps.empty()) {
    return Fail(ErrorCode::kInvalid,
                StrCat(place.Path(), ": no complete step; ", result.skipped.front()));
  }
  std::stable_sort(
      result.steps.begin(), result.steps.end(),
      [](const IngestedStep& a, const IngestedStep& b) { return OrderOf(a) < OrderOf(b); });
  return result;
}

}  // namespace ckptfs
