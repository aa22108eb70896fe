// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

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
  fmt::print("views (any legal layout may be asked for; these were tried):\n");
  for (const auto& [format, answer] : views.items()) {
    fmt::print("  {}: {}\n", Printable(format), Printable(Joined(answer["shown"], " ")));
    for (const auto& [reason, layouts] : answer["refused"].items()) {
      fmt::print("    not {}: {}\n", Printable(Joined(layouts, ", ")), Printable(reason));
    }
  }
}

void PrintSizes(const Json& info) {
  for (const auto& [role, counted] : info["parameters"].items()) {
    fmt::print("{} parameters: {} with {} elements\n", Printable(role),
               counted.value("number", uint64_t{0}), counted.value("elements", uint64_t{0}));
  }
  for (const auto& [kind, sum] : info["kinds"].items()) {
    fmt::print("  {:<12} {:>8} tensors  {:>10}  {}{}\n", Printable(kind),
               sum.value("atoms", uint64_t{0}), HumanBytes(sum.value("bytes", uint64_t{0})),
               Joined(sum["dtypes"], " "), sum.contains("derived") ? "  (derived)" : "");
  }
}

void PrintText(const Json& info) {
  fmt::print("{}\n", Printable(info.value("adopted_from", "")));
  fmt::print("format: {} {}\n", Printable(info.value("framework", "")),
             Printable(info.value("framework_version", "")));
  fmt::print("step: {} (iteration {}, {})\n", Printable(info.value("step", "")),
             info.value("iteration", uint64_t{0}), LocalTime(info.value("mtime_ns", int64_t{0})));
  fmt::print("layout: {} ({} ranks)\n", Printable(info.value("layout", "")),
             info.value("world", uint64_t{0}));
  for (const char* key : {"model_dtype", "family"}) {
    if (info.contains(key)) fmt::print("{}: {}\n", key, Printable(info.value(key, "")));
  }
  PrintSizes(info);
  const Json& source = info["source"];
  fmt::print("source: {} files, {}\n", source.value("files", uint64_t{0}),
             HumanBytes(source.value("bytes", uint64_t{0})));
  if (info.contains("reason")) {
    fmt::print("{}: {}\n", info.value("state", ""), Printable(info.value("reason", "")));
  }
  if (info.contains("side_blob")) {
    fmt::print("packed: {} tensors in small pieces, {}\n",
               info["side_blob"].value("tensors", uint64_t{0}),
               HumanBytes(info["side_blob"].value("bytes", uint64_t{0})));
  }
  for (const Json& note : info["notes"]) {
    fmt::print("note: {}\n", Printable(note.get<std::string>()));
  }
  PrintViews(info["views"]);
}

Status RunInfo(const InfoFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto step,
                        LoadSubject(options.subject, options.store, options.ingest));
  Json info = Json::parse(RenderStepInfo(*step), nullptr, false);
  if (!info.is_object()) return Fail(ErrorCode::kInternal, "the step's description is no JSON");
  info["views"] = ViewsOf(step);
  const auto blobs = BlobReader::Create(step->model, ReaderOptions());
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
