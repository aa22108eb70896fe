// SPDX-License-Identifier: Apache-2.0

#include "core/ingest/ingest.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <optional>
#include <tuple>

#include "core/base/parallel.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

struct Job {
  const Source* source = nullptr;
  StepCandidate candidate;
  std::optional<Result<StepModel>> outcome;
};

Result<std::string> RealDirectory(const std::string& path) {
  std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), std::free);
  if (!real) return Fail(ErrnoError(errno, path));
  struct stat info {};
  if (::stat(real.get(), &info) != 0) return Fail(ErrnoError(errno, path));
  if (!S_ISDIR(info.st_mode)) {
    return Fail(ErrorCode::kInvalid, StrCat(path, ": not a directory; give the directory of a "
                                                  "checkpoint or the one that holds several"));
  }
  return std::string(real.get());
}

Error NothingKnown(const std::string& path, std::span<const std::unique_ptr<Source>> sources) {
  std::string names;
  for (const auto& source : sources) names += StrCat(names.empty() ? "" : ", ", source->name());
  return Error{ErrorCode::kNotFound,
               StrCat(path, ": no checkpoint found; looked for the formats ", names,
                      " (a save directory, or one step's own directory)")};
}

// True for a malformed step among others that its framework does not call the
// latest: so a save that was cut off looks, and the others are sound.
bool IsCutOff(const Error& error, const StepCandidate& step, const std::string& directory) {
  return error.code == ErrorCode::kInvalid && !step.latest && step.directory != directory;
}

}  // namespace

Result<IngestResult> IngestPath(const std::string& path,
                                std::span<const std::unique_ptr<Source>> sources,
                                const SourceOptions& options) {
  CKPT_ASSIGN_OR_RETURN(const std::string directory, RealDirectory(path));
  IngestResult result;
  std::vector<Job> jobs;
  bool found = false;
  for (const auto& source : sources) {
    CKPT_ASSIGN_OR_RETURN(std::vector<StepCandidate> candidates, source->Find(directory));
    for (StepCandidate& candidate : candidates) {
      found = true;
      Status complete = source->Complete(candidate, options);
      if (complete) {
        jobs.push_back(Job{source.get(), std::move(candidate), std::nullopt});
      } else if (candidate.directory == directory) {
        return Fail(std::move(complete).error());
      } else {
        result.skipped.push_back(StrCat(candidate.id, ": incomplete: ", complete.error().message));
      }
    }
  }
  if (!found) return Fail(NothingKnown(path, sources));
  ParallelFor(jobs.size(), [&](size_t i) {
    jobs[i].outcome = jobs[i].source->Read(jobs[i].candidate, options);
  });
  for (Job& job : jobs) {
    if (!*job.outcome) {
      Error error = std::move(*job.outcome).error().WithContext(job.candidate.id);
      if (!IsCutOff(error, job.candidate, directory)) return Fail(std::move(error));
      result.skipped.push_back(std::move(error.message));
      continue;
    }
    result.steps.push_back(IngestedStep{std::move(job.candidate), **std::move(job.outcome)});
  }
  if (result.steps.empty()) {
    return Fail(ErrorCode::kInvalid,
                StrCat(path, ": no complete step; ", result.skipped.front()));
  }
  std::stable_sort(result.steps.begin(), result.steps.end(),
                   [](const IngestedStep& a, const IngestedStep& b) {
                     return std::tie(a.model.iteration, a.candidate.mtime_ns) <
                            std::tie(b.model.iteration, b.candidate.mtime_ns);
                   });
  return result;
}

}  // namespace ckptfs
