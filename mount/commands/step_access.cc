// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/step_access.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

constexpr int kBarWidth = 40;

void Draw(const std::string& what, const JobProgress& progress) {
  const double share = progress.bytes_total == 0
                           ? 1.0
                           : static_cast<double>(progress.bytes_done) /
                                 static_cast<double>(progress.bytes_total);
  const int filled = static_cast<int>(share * kBarWidth);
  const std::string bar = std::string(static_cast<size_t>(filled), '#') +
                          std::string(static_cast<size_t>(kBarWidth - filled), ' ');
  const bool done = progress.items_done == progress.items_total;
  std::fprintf(stderr, "\r%s [%s] %3.0f %%  %s of %s %s", what.c_str(), bar.c_str(), share * 100,
               HumanBytes(progress.bytes_done).c_str(), HumanBytes(progress.bytes_total).c_str(),
               done ? "\n" : "");
}

}  // namespace

void AddRootOption(CLI::App* command, std::vector<std::string>& roots) {
  command->add_option("--root", roots, "The source directory FROM lies at TO on this machine")
      ->type_name("FROM=TO")
      ->allow_extra_args(false);
}

Result<RootMap> ParseRoots(const std::vector<std::string>& words) {
  RootMap roots;
  for (const std::string& word : words) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos || equals == 0) {
      return Fail(ErrorCode::kInvalid, StrCat("--root ", word, ": write FROM=TO"));
    }
    CKPT_ASSIGN_OR_RETURN(roots[word.substr(0, equals)], AbsolutePath(word.substr(equals + 1)));
  }
  return roots;
}

Result<StepRecord> ResolveStep(Store& store, std::string_view name) {
  CKPT_ASSIGN_OR_RETURN(const StepName step, ParseStepName(name));
  return store.Resolve(step.run, step.id);
}

Result<std::shared_ptr<const Step>> LoadSubject(const std::string& subject,
                                                const std::string& store,
                                                const IngestRequest& request) {
  std::error_code error;
  if (!std::filesystem::is_directory(subject, error)) {
    CKPT_ASSIGN_OR_RETURN(const auto opened, OpenStore(store, false));
    CKPT_ASSIGN_OR_RETURN(const StepRecord record, ResolveStep(*opened, subject));
    return opened->Load(record);
  }
  IngestRequest from_path = request;
  from_path.path = subject;
  CKPT_ASSIGN_OR_RETURN(IngestResult ingest, IngestRequested(from_path));
  IngestedStep& newest = ingest.steps.back();
  auto step = std::make_shared<Step>();
  step->record.id = newest.candidate.id;
  step->record.iteration = newest.model.iteration;
  step->record.mtime_ns = newest.model.mtime_ns;
  step->record.source = newest.candidate.directory;
  step->model = std::move(newest.model);
  return std::shared_ptr<const Step>(std::move(step));
}

std::function<void(const JobProgress&)> ProgressBar(const std::string& what) {
  if (::isatty(STDERR_FILENO) == 0) return nullptr;
  return [what](const JobProgress& progress) { Draw(what, progress); };
}

}  // namespace ckptfs
