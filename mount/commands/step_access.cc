// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/step_access.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "core/base/strings.h"
#include "formats/torch/file_records.h"
#include "mount/commands/command_set.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

constexpr int kBarWidth = 40;

void Draw(const std::string& what, const JobProgress& progress) {
  const double share = progress.bytes_total == 0 ? 1.0
                                                 : static_cast<double>(progress.bytes_done) /
                                                       static_cast<double>(progress.bytes_total);
  const int filled = static_cast<int>(share * kBarWidth);
  const std::string bar = std::string(static_cast<size_t>(filled), '#') +
                          std::string(static_cast<size_t>(kBarWidth - filled), ' ');
  const bool done = progress.items_done == progress.items_total;
  fmt::print(stderr, "\r{} [{}] {:>3.0f} %  {} of {} {}", what, bar, share * 100,
             HumanBytes(progress.bytes_done), HumanBytes(progress.bytes_total), done ? "\n" : "");
}

Result<std::pair<std::string, std::string>> ParseRoot(const std::string& word) {
  const size_t equals = word.find('=');
  if (equals == std::string::npos || equals == 0) {
    return Fail(ErrorCode::kInvalid, StrCat("'", word, "': write FROM=TO"));
  }
  return std::pair(word.substr(0, equals), word.substr(equals + 1));
}

// kNotFound, kPermission, ... as the operating system says.
Status CheckPath(const std::string& subject) {
  struct stat info {};
  if (::stat(subject.c_str(), &info) == 0) return {};
  const bool may_mean_a_step =
      errno == ENOENT && !subject.starts_with('/') && !subject.starts_with('.');
  Error error = ErrnoError(errno, subject);
  if (may_mean_a_step) error.message += "; a step is written RUN/ID, as `ckptfs list` shows it";
  return Fail(std::move(error));
}

bool IsPath(const std::string& subject) {
  if (!ParseStepReference(subject)) return true;
  struct stat info {};
  return ::stat(subject.c_str(), &info) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

}  // namespace

void AddRootOption(Command& command, std::vector<std::string>& roots) {
  command.Add("--root", roots, "The source directory FROM lies at TO on this machine")
      .Value("FROM=TO")
      .Check(Checked(ParseRoot));
}

void AddModelFilesOption(Command& command, std::string& directory) {
  command
      .Add("--hf-config", directory,
           "config.json and tokenizers for huggingface/ of steps without their own")
      .Value("DIR");
}

Result<std::optional<ModelFiles>> GivenModelFiles(const std::string& directory) {
  if (directory.empty()) return std::optional<ModelFiles>();
  CKPT_ASSIGN_OR_RETURN(const std::string path, AbsolutePath(directory));
  CKPT_ASSIGN_OR_RETURN(ModelFiles files, ReadModelFiles(path));
  return std::optional(std::move(files));
}

Result<RootMap> ParseRoots(const std::vector<std::string>& words) {
  RootMap roots;
  for (const std::string& word : words) {
    CKPT_ASSIGN_OR_RETURN(const auto root, ParseRoot(word));
    CKPT_ASSIGN_OR_RETURN(roots[root.first], AbsolutePath(root.second));
  }
  return roots;
}

BlobReader::Options ReaderOptions(RootMap roots) {
  BlobReader::Options reading;
  reading.roots = std::move(roots);
  reading.touched = std::make_shared<TouchedFiles>(TouchedFiles::Options{
      RecordsOfFile,
      [](std::string_view line) { fmt::print(stderr, "ckptfs: {}\n", Printable(line)); }});
  return reading;
}

void AddThreadsOption(Command& command, unsigned& threads, const std::string& description) {
  command.Add("--threads", threads, description).Value("N").Check(Checked(ParseCount));
}

Result<StepRecord> ResolveStep(Store& store, std::string_view name) {
  CKPT_ASSIGN_OR_RETURN(const StepReference step, ParseStepReference(name));
  return store.Resolve(step.run, step.id);
}

Result<std::shared_ptr<const Step>> LoadSubject(const std::string& subject,
                                                const std::string& store,
                                                const IngestRequest& request) {
  if (!IsPath(subject)) {
    auto opened = OpenStore(store, false);
    if (!opened) {
      return Fail(
          std::move(opened).error().WithContext(StrCat(subject, " is no file here; as a step")));
    }
    CKPT_ASSIGN_OR_RETURN(const StepRecord record, ResolveStep(**opened, subject));
    return (*opened)->Load(record);
  }
  CKPT_RETURN_IF_ERROR(CheckPath(subject));
  IngestRequest from_path = request;
  from_path.path = subject;
  CKPT_ASSIGN_OR_RETURN(IngestResult ingest, IngestRequested(from_path));
  // An older step is not what was asked for.
  if (!ingest.refused.empty()) return Fail(std::move(ingest.refused.front()));
  IngestedStep& newest = ingest.steps.back();
  auto step = std::make_shared<Step>();
  step->record.id = newest.candidate.id;
  step->record.iteration = newest.model.iteration;
  step->record.mtime_ns = newest.model.mtime_ns;
  step->record.source = newest.candidate.Path();
  step->model = std::move(newest.model);
  return std::shared_ptr<const Step>(std::move(step));
}

std::function<void(const JobProgress&)> ProgressBar(const std::string& what) {
  if (::isatty(STDERR_FILENO) == 0) return nullptr;
  return [what](const JobProgress& progress) { Draw(what, progress); };
}

}  // namespace ckptfs
