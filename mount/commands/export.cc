// SPDX-License-Identifier: Apache-2.0

#include "core/export/export.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/store/model_of.h"
#include "formats/registry.h"
#include "fs/permissions.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct ExportFlags {
  std::string step;
  std::string view;
  std::string destination;
  std::string store;
  std::vector<std::string> roots;
  std::string hf_config;
  unsigned threads = 0;
  bool json = false;
};

Result<Layout> LayoutOfView(const std::string& view) {
  const std::string_view first = std::string_view(view).substr(0, view.find('/'));
  Result<Layout> layout = Layout::Parse(first);
  const auto is_it = [&](const auto& format) { return first.starts_with(format->name()); };
  if (layout || std::ranges::none_of(MakeViewFormats(), is_it)) return layout;
  return Fail(Error{ErrorCode::kInvalid, StrCat("'", view, "' is a part of a layout")}.Needing(
      StrCat("write LAYOUT/", view, ", such as tp1/", view)));
}

// Where one group does not say who may read all of the source, only everybody or
// nobody can be said.
ExportAccess AccessFor(const Step& step, const BlobReader& blobs) {
  const auto rule = StepAccess(step, blobs).rule();
  if (rule->exact) return {rule->read_bits & 044, rule->gid};
  return {(rule->read_bits & 04) != 0 ? 044u : 0u, 0};
}

Status RunExport(const ExportFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const Layout layout, LayoutOfView(options.view));
  const size_t slash = options.view.find('/');
  const std::string part = slash == std::string::npos ? "" : options.view.substr(slash + 1);
  CKPT_ASSIGN_OR_RETURN(const std::string destination, AbsolutePath(options.destination));
  IngestRequest ingest;
  ingest.hf_config = options.hf_config;
  CKPT_ASSIGN_OR_RETURN(const auto step, LoadSubject(options.step, options.store, ingest));
  CKPT_ASSIGN_OR_RETURN(RootMap roots, ParseRoots(options.roots));
  const auto blobs = BlobReader::Create(step->model, ReaderOptions(std::move(roots)));
  JobOptions job;
  job.threads = options.threads;
  job.progress = ProgressBar("export");
  const std::string source =
      step->record.run.empty() ? step->record.source : step->record.manifest.Hex();
  const std::string identity =
      StrCat(source, " ", layout.ToString(), " ", part, " ", options.hf_config);
  CKPT_ASSIGN_OR_RETURN(auto models, GivenModelFiles(options.hf_config));
  const auto views = ViewSet::Open(ModelOf(step), layout, MakeViewFormats(std::move(models)));
  CKPT_ASSIGN_OR_RETURN(
      const ExportReport report,
      ExportView(*views, part, destination, identity, *blobs, AccessFor(*step, *blobs), job));
  if (options.json) {
    PrintJson({{"destination", destination},
               {"files", report.files},
               {"bytes", report.bytes},
               {"bytes_resumed", report.bytes_resumed}});
    return {};
  }
  fmt::print("{}, {} in {}", Counted(report.files, "file"), HumanBytes(report.bytes),
             Printable(destination));
  if (report.bytes_resumed > 0) {
    fmt::print(" ({} were there)", HumanBytes(report.bytes_resumed));
  }
  fmt::print("\n");
  return {};
}

}  // namespace

void AddExportCommand(CommandSet& commands) {
  auto options = std::make_shared<ExportFlags>();
  Command& command =
      commands.Add("export", "Write a view as plain files; goes on where it was interrupted");
  command.Add("STEP", options->step, "RUN/ID, RUN, or a checkpoint's path")
      .Required()
      .Offers(kOfferSteps | kOfferRuns | kOfferFiles);
  command.Add("VIEW", options->view, "LAYOUT, or a part of it: tp2_dp2_zero1/deepspeed")
      .Required()
      .Offers(kOfferNothing)
      .Check(Checked(LayoutOfView));
  command.Add("DEST", options->destination, "A directory, made if missing").Required();
  AddStoreOption(command, options->store);
  AddRootOption(command, options->roots);
  AddModelFilesOption(command, options->hf_config);
  AddThreadsOption(command, options->threads, "Threads that read and write");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunExport(*options); };
}

}  // namespace ckptfs
