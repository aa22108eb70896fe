// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/step_access.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/base/utf8.h"
#include "core/check/source_state.h"
#include "formats/torch/file_records.h"
#include "mount/commands/command_set.h"
#include "mount/commands/mount_path.h"
#include "mount/control/control_client.h"
#include "mount/options.h"
#include "mount/printable.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

constexpr int kBarWidth = 40;

void Draw(const std::string& what, const JobProgress& progress) {
  // Bytes that are read or written, and nothing else; a part that is done again counts once.
  const bool done = progress.items_done == progress.items_total;
  const uint64_t bytes =
      done ? progress.bytes_total : std::min(progress.bytes_done, progress.bytes_total);
  const double share = progress.bytes_total == 0
                           ? (done ? 1.0 : 0.0)
                           : static_cast<double>(bytes) / static_cast<double>(progress.bytes_total);
  const int filled = static_cast<int>(share * kBarWidth);
  const std::string bar = std::string(static_cast<size_t>(filled), '#') +
                          std::string(static_cast<size_t>(kBarWidth - filled), ' ');
  fmt::print(stderr, "\r{} [{}] {:>3.0f} %  {} of {}\x1b[K{}", what, bar, share * 100,
             HumanBytes(bytes), HumanBytes(progress.bytes_total), done ? "\n" : "");
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
  if (!may_mean_a_step) return Fail(std::move(error));
  return Fail(std::move(error).Needing("a step is written RUN/ID, as `ckptfs list` shows it"));
}

std::string CheckModelDirectory(const std::string& directory) {
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return "";
  const std::string parent = std::filesystem::path(directory).parent_path().string();
  return StrCat(directory, " is a file; give its directory, ", parent.empty() ? "." : parent);
}

// RUN/latest is a step also where a DeepSpeed run lies in this directory, whose pointer
// file has that path and is not a checkpoint.
bool IsPath(const std::string& subject) {
  const auto step = ParseStepReference(subject);
  if (!step) return true;
  struct stat info {};
  if (step->id == "latest" && ::stat(subject.c_str(), &info) == 0 && S_ISREG(info.st_mode)) {
    return false;
  }
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
           "config.json (sizes, huggingface/) and tokenizers for steps without their own")
      .Value("DIR")
      .Check(CheckModelDirectory);
}

Result<std::optional<ModelFiles>> GivenModelFiles(const std::string& directory) {
  if (directory.empty()) return std::optional<ModelFiles>();
  CKPT_ASSIGN_OR_RETURN(const std::string path, AbsolutePath(directory));
  CKPT_ASSIGN_OR_RETURN(ModelFiles files, ReadModelFiles(path));
  return std::optional(std::move(files));
}

std::string ModelFilesOfMounts(const std::string& given, const std::string& store,
                               const std::string& mountpoint) {
  if (!given.empty()) return given;
  const auto path = StorePath(store);
  if (!path) return "";
  std::string found;
  for (const LiveMount& mount : FindLiveMounts(*path)) {
    if (!mountpoint.empty() && mount.mountpoint != mountpoint) continue;
    if (mount.hf_config.empty() || mount.hf_config == found) continue;
    if (!found.empty()) return "";
    found = mount.hf_config;
  }
  return found;
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
  auto record = store.Resolve(step.run, step.id);
  if (record || record.error().code != ErrorCode::kNotFound) return record;
  return Fail(std::move(record).error().Needing(
      StrCat("`ckptfs list --store ", ShellWord(store.directory()), "` shows what there is")));
}

namespace {

Result<LoadedSubject> LookAtPath(const std::string& subject, const IngestRequest& request) {
  CKPT_RETURN_IF_ERROR(CheckPath(subject));
  IngestRequest from_path = request;
  from_path.path = subject;
  CKPT_ASSIGN_OR_RETURN(IngestResult ingest, IngestRequested(from_path));
  IngestedStep& newest = ingest.steps.back();
  auto step = std::make_shared<Step>();
  step->record.id = newest.candidate.id;
  step->record.iteration = newest.model.iteration;
  step->record.mtime_ns = newest.model.mtime_ns;
  step->record.source = newest.candidate.Path();
  step->model = std::move(newest.model);
  return LoadedSubject{
      std::move(step), std::move(ingest.skipped), std::move(ingest.refused), {}, {}};
}

// The steps of the run that the store has under this name; none if it has no such run.
Result<std::vector<StepRecord>> StepsOfRun(const std::string& store, const std::string& name) {
  CKPT_ASSIGN_OR_RETURN(const auto opened, OpenStore(store, false));
  return opened->Steps(name);
}

Result<LoadedSubject> LookAtStep(const std::string& subject, const std::string& store) {
  auto opened = OpenStore(store, false);
  if (!opened) {
    return Fail(
        std::move(opened).error().WithContext(StrCat(subject, " is not a file here; as a step")));
  }
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, ResolveStep(**opened, subject));
  CKPT_ASSIGN_OR_RETURN(auto step, (*opened)->Load(record));
  CKPT_ASSIGN_OR_RETURN(auto tags, (*opened)->Tags(record.run));
  return LoadedSubject{std::move(step), {}, {}, {}, std::move(tags)};
}

// Nothing has the word's path.
bool IsAbsent(const std::string& subject) {
  struct stat info {};
  return ::stat(subject.c_str(), &info) != 0 && errno == ENOENT;
}

}  // namespace

Result<LoadedSubject> LookAtSubject(const std::string& subject, const std::string& store,
                                    const IngestRequest& request) {
  CKPT_RETURN_IF_ERROR(AbsolutePath(subject));  // not a URL
  if (!IsPath(subject)) return LookAtStep(subject, store);
  if (!CheckName(subject, "run") || subject == "." || subject == "..") {
    return LookAtPath(subject, request);
  }
  auto steps = StepsOfRun(store, subject);
  if (!steps || steps->empty()) return LookAtPath(subject, request);
  const std::string latest = subject + "/latest";
  if (IsAbsent(subject)) {
    CKPT_ASSIGN_OR_RETURN(LoadedSubject loaded, LookAtStep(latest, store));
    loaded.steps = *std::move(steps);
    return loaded;
  }
  // A path comes first, as wherever a path may be given; the run is named.
  auto loaded = LookAtPath(subject, request);
  if (!loaded) {
    return Fail(std::move(loaded).error().Needing(
        StrCat("the store's run of that name is written ", ShellWord(latest))));
  }
  fmt::print(stderr, "ckptfs: {} is a path here; the store's run of that name is written {}\n",
             Printable(subject), Printable(ShellWord(latest)));
  return loaded;
}

Result<std::shared_ptr<const Step>> LoadSubject(const std::string& subject,
                                                const std::string& store,
                                                const IngestRequest& request) {
  CKPT_ASSIGN_OR_RETURN(LoadedSubject loaded, LookAtSubject(subject, store, request));
  if (loaded.refused.empty()) return std::move(loaded.step);
  // An older step is not what was asked for.
  Error error = std::move(loaded.refused.front());
  return Fail(std::move(error).Needing(StrCat(
      "name the directory of the step that is meant, such as ", loaded.step->record.source)));
}

std::optional<std::string> StepOfMounts(const std::string& store) {
  std::optional<std::string> shown;
  for (const LiveMount& mount : FindLiveMounts(store)) {
    const auto text = AskDaemon(mount, "status", {}, kGreeting);
    if (!text) continue;
    const auto status = nlohmann::json::parse(*text, nullptr, false);
    if (!status.is_object() || !status.contains("view") || !status["view"].is_string()) continue;
    const std::string view = BytesOfUtf8(status["view"].get<std::string>());
    const std::string step = StepOfView(view);
    if (step.empty() || (shown && *shown != step)) return std::nullopt;
    shown = step;
  }
  return shown;
}

Result<std::string> OnlyStep(const std::string& given, const std::string& store_path) {
  if (!given.empty()) return given;
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(store_path, false));
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> runs, store->Runs());
  if (runs.size() == 1) return StrCat(runs[0], "/latest");
  if (const auto shown = StepOfMounts(store->directory())) return *shown;
  return Fail(RefuseUsage(runs.empty()
                              ? "the store is empty; give --step a checkpoint's path"
                              : "the store has several runs, and no mount shows one of their "
                                "steps: give --step RUN/ID")
                  .error());
}

void WarnIfGone(Store& store, const StepRecord& record) {
  struct stat info {};
  if (::stat(record.source.c_str(), &info) == 0 || errno != ENOENT) return;
  const auto step = store.Load(record);  // it may be the store's own by now
  if (!step) return;
  const auto blobs = BlobReader::Create((*step)->model, ReaderOptions());
  if (LookAtSources((*step)->model, *blobs).state != SourceState::kMissing) return;
  fmt::print(stderr,
             "ckptfs: {}/{}: {} is gone, and reads of the step fail; `ckptfs list {}` shows which "
             "steps are whole\n",
             Printable(record.run), Printable(record.id), Printable(record.source),
             Printable(ShellWord(record.run)));
}

std::function<void(const JobProgress&)> ProgressBar(const std::string& what) {
  if (::isatty(STDERR_FILENO) == 0) return nullptr;
  return [what](const JobProgress& progress) { Draw(what, progress); };
}

}  // namespace ckptfs
