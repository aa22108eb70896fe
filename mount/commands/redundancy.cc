// SPDX-License-Identifier: Apache-2.0

#include "core/redundancy/redundancy.h"

#include <memory>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/commands/picture_file.h"
#include "mount/commands/redundancy_report.h"
#include "mount/commands/step_access.h"
#include "mount/control/step_json.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

constexpr size_t kMostSteps = 64;  // whose indexes are held at once
constexpr std::string_view kAllSteps = "all";

struct RedundancyFlags {
  std::string step;
  std::vector<std::string> across;
  std::string store;
  std::vector<std::string> roots;
  std::string output;
  unsigned threads = 0;
  bool tensors = false;
  bool json = false;
};

// A step with its files.
struct OpenStep {
  std::string name;
  std::shared_ptr<const Step> step;
  std::unique_ptr<BlobReader> blobs;
};

OpenStep WithFiles(std::shared_ptr<const Step> step, const RootMap& roots) {
  const StepRecord& record = step->record;
  OpenStep open;
  open.name = record.run.empty() ? record.source : StrCat(record.run, "/", record.id);
  open.blobs = BlobReader::Create(step->model, ReaderOptions(roots));
  open.step = std::move(step);
  return open;
}

RedundancyOptions JobOf(const RedundancyFlags& options) {
  RedundancyOptions job;
  job.threads = options.threads;
  job.progress = [](std::string_view stage) { return ProgressBar(StrCat("redundancy: ", stage)); };
  return job;
}

Status ReportStep(const RedundancyFlags& options, const RootMap& roots) {
  CKPT_ASSIGN_OR_RETURN(auto step, LoadSubject(options.step, options.store, {}));
  const OpenStep open = WithFiles(std::move(step), roots);
  const StepModel& model = open.step->model;
  CKPT_ASSIGN_OR_RETURN(const RedundancyReport report,
                        FindRedundancy(model, *open.blobs, JobOf(options)));
  if (!options.output.empty()) {
    const Picture picture = DrawRedundancy(model, report, StrCat(open.name, ": redundancy"));
    CKPT_RETURN_IF_ERROR(WritePicture(options.output, picture));
  }
  if (options.json) {
    PrintJson(RedundancyJson(model, report));
  } else if (options.output.empty()) {
    PrintRedundancy(model, report, options.tensors);
  }
  return {};
}

// All steps of the run that `name` is, oldest first.
Result<std::vector<std::shared_ptr<const Step>>> LoadRun(const std::string& name,
                                                         const std::string& store) {
  CKPT_ASSIGN_OR_RETURN(const auto opened, OpenStore(store, false));
  CKPT_ASSIGN_OR_RETURN(const std::vector<StepRecord> records, opened->Steps(name));
  if (records.empty())
    return Fail(
        RefuseUsage(StrCat("'", name, "' is not a run: --across all takes all steps of one"))
            .error());
  if (records.size() == 1) {
    return Fail(
        RefuseUsage(StrCat("run '", name, "' has one step: there is nothing to compare it with"))
            .error());
  }
  if (records.size() > kMostSteps) {
    return Fail(RefuseUsage(StrCat("run '", name, "' has ", records.size(), " steps; name at most ",
                                   kMostSteps, " of them with --across"))
                    .error());
  }
  std::vector<std::shared_ptr<const Step>> steps;
  for (const StepRecord& record : records) {
    CKPT_ASSIGN_OR_RETURN(auto step, opened->Load(record));
    steps.push_back(std::move(step));
  }
  return steps;
}

Result<std::vector<std::shared_ptr<const Step>>> ChainOf(const RedundancyFlags& options) {
  if (options.across == std::vector<std::string>{std::string(kAllSteps)})
    return LoadRun(options.step, options.store);
  if (options.across.size() >= kMostSteps)
    return Fail(RefuseUsage(StrCat("at most ", kMostSteps, " steps are compared")).error());
  std::vector<std::string> subjects = {options.step};
  subjects.insert(subjects.end(), options.across.begin(), options.across.end());
  std::vector<std::shared_ptr<const Step>> steps;
  for (const std::string& subject : subjects) {
    CKPT_ASSIGN_OR_RETURN(auto step, LoadSubject(subject, options.store, {}));
    steps.push_back(std::move(step));
  }
  return steps;
}

Status ReportChain(const RedundancyFlags& options, const RootMap& roots) {
  CKPT_ASSIGN_OR_RETURN(auto chain, ChainOf(options));
  std::vector<OpenStep> open;
  std::vector<StepRef> refs;
  std::vector<ChainStep> names;
  for (auto& step : chain) {
    open.push_back(WithFiles(std::move(step), roots));
    refs.push_back({&open.back().step->model, open.back().blobs.get()});
    names.push_back({open.back().name, refs.back().model});
  }
  CKPT_ASSIGN_OR_RETURN(const std::vector<StepSince> since, FindUnchanged(refs, JobOf(options)));
  if (!options.output.empty())
    CKPT_RETURN_IF_ERROR(WritePicture(options.output, DrawUnchanged(names, since)));
  if (options.json) {
    PrintJson(UnchangedJson(names, since));
  } else if (options.output.empty()) {
    PrintUnchanged(names, since, options.tensors);
  }
  return {};
}

Status RunRedundancy(const RedundancyFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const RootMap roots, ParseRoots(options.roots));
  return options.across.empty() ? ReportStep(options, roots) : ReportChain(options, roots);
}

}  // namespace

void AddRedundancyCommand(CommandSet& commands) {
  auto options = std::make_shared<RedundancyFlags>();
  Command& command = commands.Add(
      "redundancy", "Which bytes a step's files hold more than once, or steps of a run again");
  const unsigned offered = kOfferSteps | kOfferRuns | kOfferFiles;
  command.Add("STEP", options->step, "RUN/ID, RUN, or a checkpoint's path")
      .Required()
      .Offers(offered);
  command
      .Add("--across", options->across,
           "Compare STEP, this one and so on, each with the one before it; all: the run's steps")
      .Value("STEP|all")
      .Offers(offered);
  command.Add("--tensors", options->tensors, "Print a line for each tensor, too");
  command.Add("--output", options->output, "Write a picture there instead of text")
      .Value("FILE.svg|FILE.png")
      .Check(Checked(IsPng));
  AddStoreOption(command, options->store);
  AddRootOption(command, options->roots);
  AddThreadsOption(command, options->threads, "Threads that read");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunRedundancy(*options); };
}

}  // namespace ckptfs
