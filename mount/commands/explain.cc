// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/model/side_blob.h"
#include "core/store/model_of.h"
#include "core/view/plan_reader.h"
#include "core/view/view_set.h"
#include "formats/registry.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/commands/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

struct ExplainFlags {
  std::string layout;
  std::string file;
  std::string step;
  std::string store;
  std::string at;
  std::string length;
  size_t limit = 100;
  bool json = false;
};

// Without --step: the latest step of the store's only run.
Result<std::string> DefaultStep(const ExplainFlags& options) {
  if (!options.step.empty()) return options.step;
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> runs, store->Runs());
  if (runs.size() == 1) return StrCat(runs[0], "/latest");
  return Fail(RefuseUsage(runs.empty() ? "the store is empty; give --step a checkpoint's path"
                                       : "the store has several runs: give --step RUN/ID")
                  .error());
}

Json OriginJson(const Origin& origin, const StepModel& model, BlobReader& blobs) {
  Json json = {{"begin", origin.begin}, {"end", origin.end}};
  switch (origin.kind) {
    case Origin::Kind::kLiteral: json["from"] = "literal"; break;
    case Origin::Kind::kZero: json["from"] = "zeros"; break;
    case Origin::Kind::kInline: json["from"] = "manifest"; break;
    case Origin::Kind::kBlob:
      json["from"] = "source";
      json["file"] = blobs.PathOf(origin.blob);
      json["offset"] = origin.blob_offset;
      json["length"] = origin.blob_length;
      break;
  }
  if (origin.atom) {
    const Atom& atom = model.atom(*origin.atom);
    json["parameter"] = model.parameter(atom.parameter).name;
    json["kind"] = atom.kind;
    json["stored"] = std::string(DTypeName(origin.stored));
    json["shown"] = std::string(DTypeName(origin.shown));
  }
  return json;
}

// Adds to what lies in the side blob the pieces that it was packed from.
Status AddPieces(Json& json, const Origin& origin, const Plan& plan, const StepModel& unpacked,
                 BlobReader& blobs, size_t limit) {
  const PlanReader reader(plan, unpacked, blobs);
  CKPT_ASSIGN_OR_RETURN(const std::vector<Origin> pieces,
                        reader.Explain(origin.begin, origin.end - origin.begin, limit));
  json["packed_from"] = Json::array();
  for (const Origin& piece : pieces) {
    json["packed_from"].push_back({{"file", blobs.PathOf(piece.blob)},
                                   {"offset", piece.blob_offset},
                                   {"length", piece.blob_length}});
  }
  return {};
}

void PrintOrigin(const Json& origin) {
  const std::string from = origin.value("from", "");
  fmt::print("[{}, {})  ", origin.value("begin", uint64_t{0}), origin.value("end", uint64_t{0}));
  if (origin.contains("parameter")) {
    fmt::print("{} {}  ", Printable(origin.value("parameter", "")),
               Printable(origin.value("kind", "")));
    if (origin["stored"] != origin["shown"]) {
      fmt::print("{} -> {}  ", Printable(origin.value("stored", "")),
                 Printable(origin.value("shown", "")));
    }
  }
  if (from != "source") {
    fmt::print("{}\n", Printable(from));
    return;
  }
  fmt::print("{} at {}, {} bytes\n", Printable(origin.value("file", "")),
             origin.value("offset", uint64_t{0}), origin.value("length", uint64_t{0}));
  if (!origin.contains("packed_from") || origin["packed_from"].empty()) return;
  const Json& first = origin["packed_from"].front();
  fmt::print("    packed from {} pieces, first {} at {}, {} bytes\n", origin["packed_from"].size(),
             Printable(first.value("file", "")), first.value("offset", uint64_t{0}),
             first.value("length", uint64_t{0}));
}

// Why each format shows the layout or not; an error if none does.
Status ExplainLayout(const ExplainFlags& options, const LayoutOffer& offer) {
  Json json = {{"layout", offer.name}, {"formats", Json::object()}};
  for (const LayoutOffer::Answer& answer : offer.answers) {
    json["formats"][answer.format] = answer.Text();
  }
  if (options.json) {
    PrintJson(json);
  } else {
    for (const auto& [name, answer] : json["formats"].items()) {
      fmt::print("{}: {}\n", Printable(name), Printable(answer.get<std::string>()));
    }
  }
  return offer.Any() ? Status{} : ExitWith(static_cast<int>(ExitCode::kRefused));
}

Status ExplainFile(const ExplainFlags& options, const StepModel& model, const Plan& plan) {
  uint64_t offset = 0;
  uint64_t length = plan.size();
  if (!options.at.empty()) {
    CKPT_ASSIGN_OR_RETURN(offset, ParseBytes(options.at));
    length = 1;
  }
  if (!options.length.empty()) {
    CKPT_ASSIGN_OR_RETURN(length, ParseBytes(options.length));
  }
  if (offset >= plan.size()) {
    return Fail(ErrorCode::kInvalid,
                StrCat("--at ", offset, ": the file has ", plan.size(), " bytes"));
  }
  const auto blobs = BlobReader::Create(model, BlobReader::Options{});
  const PlanReader reader(plan, model, *blobs);
  CKPT_ASSIGN_OR_RETURN(
      const std::vector<Origin> origins,
      reader.Explain(offset, std::min(length, plan.size() - offset), options.limit));
  Json json = Json::array();
  const StepModel unpacked = WithoutSideBlob(model);
  for (const Origin& origin : origins) {
    json.push_back(OriginJson(origin, model, *blobs));
    if (origin.kind != Origin::Kind::kBlob || !model.blob(origin.blob).side) continue;
    CKPT_RETURN_IF_ERROR(AddPieces(json.back(), origin, plan, unpacked, *blobs, options.limit));
  }
  if (options.json) {
    PrintJson({{"file", options.file}, {"size", plan.size()}, {"origins", json}});
    return {};
  }
  for (const Json& origin : json) PrintOrigin(origin);
  if (origins.size() == options.limit) fmt::print("... (--limit {})\n", options.limit);
  return {};
}

Status RunExplain(const ExplainFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const Layout layout, Layout::Parse(options.layout));
  CKPT_ASSIGN_OR_RETURN(const std::string subject, DefaultStep(options));
  CKPT_ASSIGN_OR_RETURN(const auto step, LoadSubject(subject, options.store, {}));
  const auto views = ViewSet::Open(ModelOf(step), layout, MakeViewFormats());
  if (options.file.empty()) return ExplainLayout(options, views->offer());
  const auto plan = views->MakePlan(options.file);
  if (!plan && plan.error().code == ErrorCode::kNotFound) {
    return Fail(views->WhyAbsent(options.file));
  }
  if (!plan) return Fail(plan.error());
  return ExplainFile(options, step->model, *plan);
}

}  // namespace

void AddExplainCommand(CommandSet& commands) {
  auto options = std::make_shared<ExplainFlags>();
  Command& command =
      commands.Add("explain", "Which bytes of which source files; why a layout is refused");
  command.Add("LAYOUT", options->layout, "Such as tp2_dp4_zero1")
      .Required()
      .Check(Checked(Layout::Parse));
  command.Add("FILE", options->file, "A file of the view, such as rank0/model.pt");
  command.Add("--step", options->step, "The step, or a path (default: the only run's latest)")
      .Value("RUN/ID|PATH");
  command.Add("--at", options->at, "Only the byte at this offset")
      .Value("OFFSET")
      .Check(Checked(ParseBytes));
  command.Add("--length", options->length, "As many bytes from --at on")
      .Value("BYTES")
      .Check(Checked(ParseBytes));
  command.Add("--limit", options->limit, "Print at most this many ranges (default: 100)")
      .Value("N")
      .Check(Checked(ParseCount));
  AddStoreOption(command, options->store);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunExplain(*options); };
}

}  // namespace ckptfs
