// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/base/edit_distance.h"
#include "core/base/strings.h"
#include "core/model/side_blob.h"
#include "core/store/model_of.h"
#include "core/view/layout_survey.h"
#include "core/view/plan_reader.h"
#include "core/view/view_set.h"
#include "formats/registry.h"
#include "fs/tree/param_files.h"
#include "fs/tree/source_files.h"
#include "fs/tree/step_info.h"
#include "mount/commands/command_set.h"
#include "mount/commands/mount_path.h"
#include "mount/commands/step_access.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

struct ExplainFlags {
  std::string layout;
  std::string file;
  std::string step;
  std::string store;
  std::string hf_config;
  std::string at;
  std::string length;
  size_t limit = 100;
  bool json = false;
};

// "tp2/rank0", as `export` takes it: a layout and what is below it, where nothing has that path.
bool IsLayoutAndFile(const std::string& text) {
  std::error_code error;
  const size_t slash = text.find('/');
  return slash != std::string::npos && Layout::Parse(text.substr(0, slash)) &&
         !std::filesystem::exists(text, error);
}

// A layout has no slash; what is not a layout and is there is a path, too.
bool IsPathArgument(const std::string& text) {
  std::error_code error;
  if (IsLayoutAndFile(text)) return false;
  return text.find('/') != std::string::npos ||
         (!Layout::Parse(text) && std::filesystem::exists(text, error));
}

std::string CheckLayoutOrPath(const std::string& text) {
  const bool known = IsPathArgument(text) || IsLayoutAndFile(text);
  const auto layout = known ? Result<Layout>(Layout{}) : Layout::Parse(text);
  return layout ? std::string() : layout.error().message;
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

// Why each format shows the layout or not, a line a cause; an error if none does.
Status ExplainLayout(const ExplainFlags& options, const LayoutOffer& offer) {
  Json json = {{"layout", offer.name}, {"formats", Json::object()}, {"shown", Json::array()}};
  std::string shown;
  for (const LayoutOffer::Answer& answer : offer.answers) {
    json["formats"][answer.format] = answer.Text();
    if (answer.refusal) continue;
    json["shown"].push_back(answer.format);
    shown += StrCat(shown.empty() ? "" : ", ", answer.format);
  }
  json["refused"] = Json(RefusalsJson(offer));
  json["left_out"] = Json(LeftOutJson(offer));
  if (options.json) {
    PrintJson(json);
  } else {
    if (!shown.empty()) fmt::print("{}: yes\n", Printable(shown));
    for (const Json& line : json["left_out"]) {
      fmt::print("{} leaves out: {}\n", line.value("format", ""),
                 Printable(line.value("what", "")));
    }
    for (const Json& cause : json["refused"]) {
      std::string formats;
      for (const Json& format : cause["formats"]) {
        formats += StrCat(formats.empty() ? "" : ", ", format.get<std::string>());
      }
      fmt::print("{}: no: {}\n", Printable(formats), Printable(cause.value("reason", "")));
    }
  }
  return offer.Any() ? Status{} : ExitWith(static_cast<int>(ExitCode::kRefused));
}

// Lists what a format has below a directory of a view.
Status ExplainDirectory(const ExplainFlags& options, const ViewSet& views,
                        const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const auto entries, views.List(path));
  Json json = {{"directory", path}, {"layout", views.offer().name}, {"entries", Json::array()}};
  for (const ViewEntry& entry : entries) {
    json["entries"].push_back({{"name", entry.name}, {"size", entry.size}});
  }
  if (options.json) {
    PrintJson(json);
    return {};
  }
  for (const ViewEntry& entry : entries) {
    const bool file = entry.type == ViewEntry::Type::kFile;
    fmt::print("{}{}\n", Printable(entry.name), file ? StrCat("  ", HumanBytes(entry.size)) : "/");
  }
  return {};
}

Status ExplainFile(const ExplainFlags& options, const StepModel& model, const std::string& file,
                   const Plan& plan) {
  uint64_t offset = 0;
  uint64_t length = plan.size();
  if (!options.at.empty()) {
    CKPT_ASSIGN_OR_RETURN(offset, ParseBytes(options.at));
    length = 1;
  }
  if (!options.length.empty()) {
    CKPT_ASSIGN_OR_RETURN(length, ParseBytes(options.length));
  }
  if (offset >= plan.size() && !(plan.size() == 0 && options.at.empty())) {
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
    PrintJson({{"file", file}, {"size", plan.size()}, {"origins", json}});
    return {};
  }
  if (plan.size() == 0) fmt::print("it has no bytes\n");
  for (const Json& origin : json) PrintOrigin(origin);
  if (origins.size() == options.limit) fmt::print("... (--limit {})\n", options.limit);
  return {};
}

void PrintLeftOut(const StepModel& model) {
  for (const LeftOut& one : model.left_out) fmt::print("{}\n", Printable(LeftOutText(one)));
}

// "hf" is what many call the part that is named huggingface.
std::string PartMeant(const std::string& file) {
  constexpr std::string_view kShort = "hf";
  if (file != kShort && !file.starts_with("hf/")) return file;
  return StrCat("huggingface", file.substr(kShort.size()));
}

Status ExplainView(const ExplainFlags& options, const std::shared_ptr<const Step>& step,
                   const std::string& layout_text, const std::string& written) {
  const std::string file = PartMeant(written);
  CKPT_ASSIGN_OR_RETURN(const Layout layout, Layout::Parse(layout_text));
  CKPT_ASSIGN_OR_RETURN(auto models, GivenModelFiles(options.hf_config));
  const auto views = ViewSet::Open(ModelOf(step), layout, MakeViewFormats(std::move(models)));
  if (file.empty()) {
    if (!options.json) PrintLeftOut(step->model);
    return ExplainLayout(options, views->offer());
  }
  const auto entry = views->Find(file);
  if (entry && entry->type == ViewEntry::Type::kDirectory) {
    return ExplainDirectory(options, *views, file);
  }
  const auto plan = views->MakePlan(file);
  if (!plan && plan.error().code == ErrorCode::kNotFound) return Fail(views->WhyAbsent(file));
  if (!plan) return Fail(plan.error());
  return ExplainFile(options, *plan->step, file, plan->plan);
}

// ---- a path in a mount ---------------------------------------------------------

// Prints a line of text, for which no bytes of a source are needed.
Status Say(const ExplainFlags& options, const MountPath& path, const std::string& kind,
           const std::string& text) {
  if (options.json) {
    PrintJson({{"path", StrCat("/", JoinedPath(path.parts, 0))},
               {"mountpoint", path.mountpoint},
               {"store", path.store},
               {"kind", kind},
               {"text", text}});
  } else {
    fmt::print("{}\n", Printable(text));
  }
  return {};
}

// kNotFound, with what may have been meant.
Error NotThere(std::string_view what, std::string_view name,
               const std::vector<std::string>& known) {
  return Error{ErrorCode::kNotFound, StrCat(what, MeantText(name, known))};
}

// Fails if the name is not there, since what would be told of it is not an answer then.
Status CheckThere(const std::string& path) {
  namespace files = std::filesystem;
  struct stat info {};
  if (::lstat(path.c_str(), &info) == 0) return {};
  Error error = ErrnoError(errno, path);
  // The first name that is not there, among those beside it.
  files::path missing = files::absolute(path).lexically_normal();
  if (!missing.has_filename()) missing = missing.parent_path();
  std::error_code code;
  while (missing.has_relative_path() && !files::exists(missing.parent_path(), code)) {
    missing = missing.parent_path();
  }
  std::vector<std::string> names;
  for (files::directory_iterator entry(missing.parent_path(), code), end; !code && entry != end;
       entry.increment(code)) {
    names.push_back(entry->path().filename().string());
  }
  error.message += MeantText(missing.filename().string(), names);
  return Fail(std::move(error));
}

std::vector<std::string> KeysOf(const auto& map) {
  std::vector<std::string> keys;
  keys.reserve(map.size());
  for (const auto& [key, value] : map) keys.emplace_back(key);
  return keys;
}

Status ExplainParameter(const ExplainFlags& options, const MountPath& path, const Step& step) {
  const std::vector<std::string> inside = path.Inside();
  if (inside.size() == 1) {
    return Say(options, path, "parameters",
               "one directory per parameter: each of its states whole");
  }
  const ParamIndex index = IndexParameters(step.model);
  const auto found = index.find(inside[1]);
  if (found == index.end()) {
    Error error = NotThere(StrCat("no parameter '", inside[1], "' in ", path.Step()), inside[1],
                           KeysOf(index));
    error.parameter = inside[1];
    return Fail(std::move(error));
  }
  if (inside.size() == 2) {
    return Say(
        options, path, "parameter",
        StrCat("the states of parameter ", step.model.parameter(found->second.parameter).name,
               ", each whole: unsharded, unpadded, as stored"));
  }
  std::vector<std::string> states;
  for (const ParamDirectory::File& file : found->second.files) {
    states.push_back(file.component);
    if (file.component != inside[2]) continue;
    CKPT_ASSIGN_OR_RETURN(const Plan plan, PlanAtomFile(step.model, file.atom));
    CKPT_RETURN_IF_ERROR(plan.Validate(step.model));
    return ExplainFile(options, step.model, file.component, plan);
  }
  return Fail(
      NotThere(StrCat("no '", inside[2], "' of parameter '", inside[1], "'"), inside[2], states));
}

// The file that is shown as it is.
Status ExplainSource(const ExplainFlags& options, const MountPath& path, const Step& step) {
  const std::string wanted = JoinedPath(path.Inside(), 1);
  const SourceIndex index = IndexSources(step.model);
  const size_t slash = wanted.rfind('/');
  const auto directory = index.find(slash == std::string::npos ? "" : wanted.substr(0, slash));
  if (wanted.empty() || index.contains(wanted)) {
    return Say(options, path, "source", StrCat("files as they were saved in ", step.record.source));
  }
  if (directory != index.end()) {
    const auto entry =
        directory->second.find(wanted.substr(slash == std::string::npos ? 0 : slash + 1));
    if (entry != directory->second.end()) {
      if (entry->second.text) {
        const SideText& text = step.model.texts[*entry->second.text];
        return Say(options, path, "source file",
                   StrCat(text.path, " as it was when the step was adopted, ", text.text.size(),
                          " bytes"));
      }
      const Blob& blob = step.model.blob(entry->second.blob);
      return Say(options, path, "source file",
                 StrCat(step.model.PathOf(blob), " as it is, ", blob.stamp.size, " bytes"));
    }
  }
  // The first name that is not there, among those of its directory.
  size_t begin = 0;
  for (size_t end = wanted.find('/'); end != std::string::npos; end = wanted.find('/', end + 1)) {
    if (!index.contains(wanted.substr(0, end))) break;
    begin = end + 1;
  }
  const auto beside = index.find(begin == 0 ? "" : wanted.substr(0, begin - 1));
  return Fail(
      NotThere(StrCat("no source file '", wanted, "' in ", path.Step()),
               wanted.substr(begin, wanted.find('/', begin) - begin),
               beside == index.end() ? std::vector<std::string>() : KeysOf(beside->second)));
}

Status ExplainInside(const ExplainFlags& options, const MountPath& path, const Step& step,
                     const std::shared_ptr<const Step>& shared) {
  const std::vector<std::string> inside = path.Inside();
  if (inside.empty()) {
    return Say(options, path, "step",
               StrCat("step ", path.Step(), ", adopted from ", step.record.source,
                      "; `ckptfs info ", ShellWord(path.Step()), "` describes it"));
  }
  if (inside[0] == "param") return ExplainParameter(options, path, step);
  if (inside[0] == "source") return ExplainSource(options, path, step);
  if (inside[0] != "view" || inside.back() == "info.json") {
    CKPT_RETURN_IF_ERROR(CheckThere(options.layout));
    return Say(options, path, "text",
               "made by ckptfs from the step's index: no bytes of the source");
  }
  if (inside.size() == 1) {
    CKPT_ASSIGN_OR_RETURN(auto models, GivenModelFiles(options.hf_config));
    const auto formats = MakeViewFormats(std::move(models));
    const std::string text = RenderViewReadme(step, SurveyLayouts(ModelOf(shared), formats));
    if (options.json) return Say(options, path, "layouts", text);
    fmt::print("{}", text);  // printable as it is
    return {};
  }
  if (inside[1] == "README.txt" || inside[1] == "layouts.json") {
    return Say(options, path, "text",
               "made by ckptfs: which layouts work here, and what others need");
  }
  return ExplainView(options, shared, inside[1], JoinedPath(inside, 2));
}

// RUN/latest is a step in a command, and not a name below run/RUN/step/.
Status CheckStepName(const MountPath& path, const Step& step) {
  const std::string& name = path.parts[3];
  if (name == step.record.id) return {};
  std::vector<std::string> real = path.parts;
  real[3] = step.record.id;
  return Fail(ErrorCode::kNotFound, StrCat("'", name, "' is not a name in the mount; it means ",
                                           path.mountpoint, "/", JoinedPath(real, 0)));
}

Status ExplainPath(const ExplainFlags& given) {
  ExplainFlags options = given;
  CKPT_ASSIGN_OR_RETURN(const MountPath path, TakeApart(options.layout));
  options.hf_config = ModelFilesOfMounts(given.hf_config, path.store, path.mountpoint);
  const std::string step = path.Step();
  if (step.empty()) {
    const std::string top = path.parts.empty() ? "" : path.parts[0];
    if (top != "view") CKPT_RETURN_IF_ERROR(CheckThere(options.layout));
    const std::string what = top == "run"       ? "runs of the store, and below each its steps"
                             : top == ".ckptfs" ? "the daemon's status, for root and its own user"
                             : top == "ingest"  ? "reserved; empty"
                             : top == "view"
                                 ? "no step is shown: `ckptfs switch RUN/ID` picks one"
                                 : "the mount's top: run/RUN/step/ID/, and /view, a link to one";
    return Say(options, path, "mount",
               StrCat("store ", path.store, " at ", path.mountpoint, ": ", what));
  }
  CKPT_ASSIGN_OR_RETURN(const auto loaded, LoadSubject(step, path.store, {}));
  CKPT_RETURN_IF_ERROR(CheckStepName(path, *loaded));
  return ExplainInside(options, path, *loaded, loaded);
}

Status RunExplain(const ExplainFlags& given) {
  if (IsPathArgument(given.layout)) return ExplainPath(given);
  ExplainFlags options = given;
  if (IsLayoutAndFile(options.layout)) {
    const size_t slash = options.layout.find('/');
    options.file =
        StrCat(options.layout.substr(slash + 1), options.file.empty() ? "" : "/", options.file);
    options.layout.resize(slash);
  }
  options.hf_config = ModelFilesOfMounts(given.hf_config, options.store);
  CKPT_ASSIGN_OR_RETURN(const std::string subject, OnlyStep(options.step, options.store));
  IngestRequest ingest;
  ingest.hf_config = given.hf_config;
  CKPT_ASSIGN_OR_RETURN(const auto step, LoadSubject(subject, options.store, ingest));
  return ExplainView(options, step, options.layout, options.file);
}

}  // namespace

void AddExplainCommand(CommandSet& commands) {
  auto options = std::make_shared<ExplainFlags>();
  Command& command =
      commands.Add("explain",
                   "Show which bytes of which source files a view has, or why a layout "
                   "is refused");
  command.Add("LAYOUT", options->layout, "Such as tp2_dp4_zero1; or any path in a mount")
      .Required()
      .Check(CheckLayoutOrPath);
  command.Add("FILE", options->file, "A file of the view, such as rank0/model.pt")
      .Offers(kOfferNothing);
  command.Add("--step", options->step, "The step, or a path (default: the only run's latest)")
      .Value("RUN/ID|PATH")
      .Offers(kOfferSteps | kOfferRuns | kOfferFiles);
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
  AddModelFilesOption(command, options->hf_config);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunExplain(*options); };
}

}  // namespace ckptfs
