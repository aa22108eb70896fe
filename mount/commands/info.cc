// SPDX-License-Identifier: Apache-2.0

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/jobs/source_state.h"
#include "core/store/model_of.h"
#include "core/view/view_set.h"
#include "formats/registry.h"
#include "fs/tree/step_info.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/commands/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

struct InfoFlags {
  std::string subject;
  std::string store;
  IngestRequest ingest;
  bool json = false;
};

// Layouts that stand for the degrees a user may ask for, the step's own first.
std::vector<Layout> Probes(const Layout& own) {
  std::vector<Layout> probes = {own};
  for (const char* text : {"tp1", "dp2_zero1", "dp3_zero2", "dp8_zero3", "tp2", "tp4", "tp8", "pp2",
                           "pp3", "pp4", "tp2_pp2_dp2_zero1", "dp2_ep2", "cp2", "vpp2_pp2", "bf16",
                           "fp16", "fp32", "plain", "pipe"}) {
    auto layout = Layout::Parse(text);
    if (layout && *layout != own) probes.push_back(*std::move(layout));
  }
  return probes;
}

// {"deepspeed": {"shown": [layouts], "refused": {reason: [layouts]}}}
Json ViewsOf(const std::shared_ptr<const Step>& step) {
  const auto formats = MakeViewFormats();
  Json views = Json::object();
  for (const auto& format : formats) {
    views[std::string(format->name())] = {{"shown", Json::array()}, {"refused", Json::object()}};
  }
  for (const Layout& layout : Probes(step->model.layout)) {
    const auto opened = ViewSet::Open(ModelOf(step), layout, formats);
    for (const LayoutOffer::Answer& answer : opened->offer().answers) {
      Json& view = views[answer.format];
      Json& where = answer.refusal.empty() ? view["shown"] : view["refused"][answer.refusal];
      where.push_back(opened->offer().name);
    }
  }
  return views;
}

std::string Joined(const Json& texts, const char* separator) {
  std::string out;
  for (const Json& text : texts) {
    out += StrCat(out.empty() ? "" : separator, text.get<std::string>());
  }
  return out;
}

void PrintViews(const Json& views) {
  std::printf("views (any legal layout may be asked for; these were tried):\n");
  for (const auto& [format, answer] : views.items()) {
    std::printf("  %s: %s\n", Printable(format).c_str(),
                Printable(Joined(answer["shown"], " ")).c_str());
    for (const auto& [reason, layouts] : answer["refused"].items()) {
      std::printf("    not %s: %s\n", Printable(Joined(layouts, ", ")).c_str(),
                  Printable(reason).c_str());
    }
  }
}

void PrintSizes(const Json& info) {
  for (const auto& [role, counted] : info["parameters"].items()) {
    std::printf("%s parameters: %llu with %llu elements\n", Printable(role).c_str(),
                static_cast<unsigned long long>(counted.value("number", uint64_t{0})),
                static_cast<unsigned long long>(counted.value("elements", uint64_t{0})));
  }
  for (const auto& [kind, sum] : info["kinds"].items()) {
    std::printf("  %-12s %8llu tensors  %10s  %s%s\n", Printable(kind).c_str(),
                static_cast<unsigned long long>(sum.value("atoms", uint64_t{0})),
                HumanBytes(sum.value("bytes", uint64_t{0})).c_str(),
                Joined(sum["dtypes"], " ").c_str(), sum.contains("derived") ? "  (derived)" : "");
  }
}

void PrintText(const Json& info) {
  std::printf("%s\n", Printable(info.value("adopted_from", "")).c_str());
  std::printf("format: %s %s\n", Printable(info.value("framework", "")).c_str(),
              Printable(info.value("framework_version", "")).c_str());
  std::printf("step: %s (iteration %llu, %s)\n", Printable(info.value("step", "")).c_str(),
              static_cast<unsigned long long>(info.value("iteration", uint64_t{0})),
              LocalTime(info.value("mtime_ns", int64_t{0})).c_str());
  std::printf("layout: %s (%llu ranks)\n", Printable(info.value("layout", "")).c_str(),
              static_cast<unsigned long long>(info.value("world", uint64_t{0})));
  for (const char* key : {"model_dtype", "family"}) {
    if (info.contains(key)) std::printf("%s: %s\n", key, Printable(info.value(key, "")).c_str());
  }
  PrintSizes(info);
  const Json& source = info["source"];
  std::printf("source: %llu files, %s\n",
              static_cast<unsigned long long>(source.value("files", uint64_t{0})),
              HumanBytes(source.value("bytes", uint64_t{0})).c_str());
  if (info.contains("reason")) {
    std::printf("%s: %s\n", info.value("state", "").c_str(),
                Printable(info.value("reason", "")).c_str());
  }
  if (info.contains("side_blob")) {
    std::printf("packed: %llu tensors in small pieces, %s\n",
                static_cast<unsigned long long>(info["side_blob"].value("tensors", uint64_t{0})),
                HumanBytes(info["side_blob"].value("bytes", uint64_t{0})).c_str());
  }
  for (const Json& note : info["notes"]) {
    std::printf("note: %s\n", Printable(note.get<std::string>()).c_str());
  }
  PrintViews(info["views"]);
}

Status RunInfo(const InfoFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto step,
                        LoadSubject(options.subject, options.store, options.ingest));
  Json info = Json::parse(RenderStepInfo(*step), nullptr, false);
  if (!info.is_object()) return Fail(ErrorCode::kInternal, "the step's description is no JSON");
  info["views"] = ViewsOf(step);
  const auto blobs = BlobReader::Create(step->model, {});
  const SourceReport sources = LookAtSources(step->model, *blobs);
  info["state"] = SourceStateName(sources.state);
  if (!sources.reason.empty()) info["reason"] = sources.reason;
  if (options.json) {
    PrintJson(info);
  } else {
    PrintText(info);
  }
  return {};
}

}  // namespace

void AddInfoCommand(CommandSet& commands) {
  auto options = std::make_shared<InfoFlags>();
  Command& command =
      commands.Add("info", "What a checkpoint or a step holds, and which views it allows");
  command.Add("SUBJECT", options->subject, "A checkpoint's path (it is not adopted), or RUN/ID")
      .Required();
  AddStoreOption(command, options->store);
  AddIngestOptions(command, options->ingest);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunInfo(*options); };
}

}  // namespace ckptfs
