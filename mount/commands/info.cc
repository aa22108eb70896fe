// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "core/adopt/closed_file.h"
#include "core/base/strings.h"
#include "core/check/source_state.h"
#include "core/store/lives.h"
#include "core/store/model_of.h"
#include "core/view/layout_survey.h"
#include "formats/dialects/translations.h"
#include "formats/registry.h"
#include "fs/tree/step_info.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/commands/step_readers_text.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

struct InfoFlags {
  std::string subject;
  std::string store;
  IngestRequest ingest;
  bool verbose = false;
  bool json = false;
};

// "views": {"deepspeed": {"shown": [layouts], "refused": {reason: [layouts]}}}, and "refusals" and
// "left_out".
void AddViews(const LayoutSurvey& survey, Json& info) {
  Json& views = info["views"] = Json::object();
  for (const LayoutSurvey::Format& format : survey.formats) {
    Json& view = views[format.name];
    view = {{"shown", format.shown}, {"refused", Json::object()}};
    for (const auto& [reason, layouts] : format.refused) view["refused"][reason] = layouts;
  }
  Json refusals = Json::array();
  Json left_out = info.value("left_out", Json::array());  // of the step; then of its views
  for (const auto& offer : survey.offers) {
    for (const auto& refusal : RefusalsJson(*offer)) refusals.push_back(Json(refusal));
    for (const auto& line : LeftOutJson(*offer)) left_out.push_back(Json(line));
  }
  info["refusals"] = std::move(refusals);
  info["left_out"] = std::move(left_out);
}

std::string Joined(const Json& texts, const char* separator) {
  std::string out;
  for (const Json& text : texts) {
    out += StrCat(out.empty() ? "" : separator, text.get<std::string>());
  }
  return out;
}

// A line of what the layouts that were tried do not allow: a healthy step has some of it, too.
void PrintRefusedBriefly(const LayoutSurvey& survey) {
  std::string formats, layouts;
  std::set<std::string> told;
  for (const LayoutSurvey::Format& format : survey.formats) {
    if (format.shown.empty()) formats += StrCat(formats.empty() ? "" : ", ", format.name);
    if (format.shown.empty()) continue;
    for (const auto& [reason, refused] : format.refused) {
      for (const std::string& layout : refused) {
        if (told.insert(layout).second) layouts += StrCat(layouts.empty() ? "" : " ", layout);
      }
    }
  }
  if (formats.empty() && layouts.empty()) return;
  const std::string between = formats.empty() || layouts.empty() ? "" : "; ";
  const std::string some = layouts.empty() ? "" : StrCat("in some formats ", layouts);
  fmt::print("not shown: {} (--verbose says why)\n", Printable(StrCat(formats, between, some)));
}

void PrintViews(const LayoutSurvey& survey, bool verbose) {
  fmt::print("views (any legal layout may be asked for; these were tried):\n");
  for (const LayoutSurvey::Format& format : survey.formats) {
    if (format.shown.empty()) continue;
    fmt::print("  {}: {}\n", Printable(format.name), Printable(Joined(format.shown, " ")));
  }
  if (!verbose) PrintRefusedBriefly(survey);
  const auto refused = verbose ? survey.CauseLines() : std::vector<std::string>();
  if (!refused.empty()) fmt::print("not shown:\n");
  for (const std::string& line : refused) fmt::print("  {}\n", Printable(line));
  const std::vector<std::string> left_out = survey.LeftOutLines();
  if (!left_out.empty()) fmt::print("left out:\n");
  for (const std::string& line : left_out) fmt::print("  {}\n", Printable(line));
}

void PrintSizes(const Json& info) {
  for (const auto& [role, counted] : info["parameters"].items()) {
    fmt::print("{} parameters: {} with {}\n", Printable(role), counted.value("number", uint64_t{0}),
               Counted(counted.value("elements", uint64_t{0}), "element"));
  }
  for (const auto& [kind, sum] : info["kinds"].items()) {
    fmt::print("  {:<12} {:>8} tensors  {:>10}  {}{}\n", Printable(kind),
               sum.value("atoms", uint64_t{0}), HumanBytes(sum.value("bytes", uint64_t{0})),
               Joined(sum["dtypes"], " "), sum.contains("derived") ? "  (derived)" : "");
  }
}

void PrintRun(const Json& info) {
  if (!info.contains("run_steps")) return;
  constexpr size_t kShown = 8;  // `list` has all
  const Json& steps = info["run_steps"];
  std::string names = Joined(steps, ", ");
  if (steps.size() > kShown) {
    names = StrCat(steps.front().get<std::string>(), " to ", steps.back().get<std::string>(),
                   "; `ckptfs list` names all");
  }
  const size_t lives = info.value("lives", size_t{1});
  fmt::print("run: {} ({} step{}{}: {}); this is the latest{}\n", Printable(info.value("run", "")),
             steps.size(), steps.size() == 1 ? "" : "s",
             lives == 1 ? "" : StrCat(" of ", lives, " lives"), Printable(names),
             lives == 1 ? "" : ", of the newest life");
}

void PrintText(const Json& info, const LayoutSurvey& survey, bool verbose) {
  fmt::print("{}\n", Printable(info.value("adopted_from", "")));
  PrintRun(info);
  fmt::print("format: {} {}\n", Printable(info.value("framework", "")),
             Printable(info.value("framework_version", "")));
  fmt::print("step: {} (iteration {}, {})\n", Printable(info.value("step", "")),
             info.value("iteration", uint64_t{0}), LocalTime(info.value("mtime_ns", int64_t{0})));
  for (const char* key : {"skipped", "refused"}) {
    for (const Json& line : info.value(key, Json::array())) {
      fmt::print("beside it {}: {}\n", key, Printable(line.get<std::string>()));
    }
  }
  fmt::print("layout: {} ({})\n", Printable(info.value("layout", "")),
             Counted(info.value("world", uint64_t{0}), "rank"));
  for (const char* key : {"model_dtype", "family"}) {
    if (info.contains(key)) fmt::print("{}: {}\n", key, Printable(info.value(key, "")));
  }
  if (info["names"].contains("dialects")) {
    fmt::print("names: {} ({})\n", Printable(info["names"].value("dialects", "")),
               Printable(info["names"].value("why", "")));
  }
  PrintSizes(info);
  const Json& source = info["source"];
  fmt::print("source: {}, {}\n", Counted(source.value("files", uint64_t{0}), "file"),
             HumanBytes(source.value("bytes", uint64_t{0})));
  if (info.contains("reason")) {
    fmt::print("{}: {}\n", info.value("state", ""), Printable(info.value("reason", "")));
  }
  fmt::print("seen by: {}{}\n", Printable(info.value("seen_by", "")),
             info.contains("kept_out_by") ? Printable(StrCat("; ", info.value("kept_out_by", "")))
                                          : std::string());
  if (info.value("compacted", false)) fmt::print("compacted: its source is not needed any more\n");
  if (info.contains("tags")) fmt::print("tags: {}\n", Printable(Joined(info["tags"], ", ")));
  if (info.contains("hidden_from_others")) {
    fmt::print("other users do not see it: {}\n", Printable(info.value("hidden_from_others", "")));
  }
  if (info.contains("side_blob")) {
    fmt::print("packed: {} in small pieces, {}\n",
               Counted(info["side_blob"].value("tensors", uint64_t{0}), "tensor"),
               HumanBytes(info["side_blob"].value("bytes", uint64_t{0})));
  }
  for (const Json& one : info["left_out"]) {
    if (one.contains("text")) fmt::print("{}\n", Printable(one.value("text", "")));
  }
  for (const Json& note : info["notes"]) {
    fmt::print("note: {}\n", Printable(note.get<std::string>()));
  }
  PrintViews(survey, verbose);
}

// Which dialect the step's names are of, and what proves it.
Status AddNames(const std::shared_ptr<const StepModel>& step,
                const std::optional<ModelFiles>& models, Json& info) {
  CKPT_ASSIGN_OR_RETURN(const auto translations, Translations::Make(models));
  const FoundDialect said = translations->Of(step);
  info["names"] = {{"why", said.why}};
  if (said.same) {
    info["names"]["dialects"] = "hf, hf5";
  } else if (said.dialect != Dialect::kAsSource) {
    info["names"]["dialects"] = DialectToken(said.dialect);
  }
  return {};
}

Status RunInfo(const InfoFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const LoadedSubject subject,
                        LookAtSubject(options.subject, options.store, options.ingest));
  const std::shared_ptr<const Step>& step = subject.step;
  Json info = Json::parse(RenderStepInfo(*step), nullptr, false);
  if (!info.is_object()) return Fail(ErrorCode::kInternal, "the step's description is not JSON");
  const std::string given = ModelFilesOfMounts(options.ingest.hf_config, options.store);
  CKPT_ASSIGN_OR_RETURN(auto models, GivenModelFiles(given));
  CKPT_RETURN_IF_ERROR(AddNames(ModelOf(step), models, info));
  const auto formats = MakeViewFormats(std::move(models));
  const LayoutSurvey survey = SurveyLayouts(ModelOf(step), formats);
  AddViews(survey, info);
  const auto blobs = BlobReader::Create(step->model, ReaderOptions());
  const SourceReport sources = LookAtSources(step->model, *blobs);
  if (!subject.skipped.empty()) info["skipped"] = subject.skipped;
  for (const Error& error : subject.refused) info["refused"].push_back(error.message);
  for (const StepRecord& record : subject.steps) info["run_steps"].push_back(record.id);
  if (step->record.compacted) info["compacted"] = true;
  for (const StepTag& tag : subject.tags) {
    if (tag.id == step->record.id) info["tags"].push_back(tag.name);
  }
  if (!subject.steps.empty()) info["lives"] = SplitIntoLives(subject.steps).size();
  info["state"] = SourceStateName(sources.state);
  if (!sources.reason.empty()) info["reason"] = sources.reason;
  const ReadersText readers = DescribeReaders(*step, *blobs);
  info["seen_by"] = readers.who;
  if (!readers.kept_out.empty()) info["kept_out_by"] = readers.kept_out;
  const auto closed = FindClosedFile(step->model, *blobs);
  if (closed) info["hidden_from_others"] = DescribeClosedFile(*closed);
  if (options.json) {
    PrintJson(info);
  } else {
    PrintText(info, survey, options.verbose);
  }
  // One that is told is there; so are those beside it that adopt would refuse.
  for (const Error& error : subject.refused) {
    fmt::print(stderr, "ckptfs: {}\n", Printable(error.message));
  }
  return subject.refused.empty()
             ? Status()
             : ExitWith(static_cast<int>(ExitCodeOf(subject.refused.front().code)));
}

}  // namespace

void AddInfoCommand(CommandSet& commands) {
  auto options = std::make_shared<InfoFlags>();
  Command& command =
      commands.Add("info", "Show what a checkpoint or a step holds, and which views it allows");
  command
      .Add("SUBJECT", options->subject, "A checkpoint's path (it is not adopted), RUN/ID, or RUN")
      .Required()
      .Offers(kOfferSteps | kOfferRuns | kOfferFiles);
  AddStoreOption(command, options->store);
  AddIngestOptions(command, options->ingest);
  command.Add("--verbose", options->verbose, "Say why each layout is not shown");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunInfo(*options); };
}

}  // namespace ckptfs
