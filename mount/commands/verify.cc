// SPDX-License-Identifier: Apache-2.0

#include "core/check/verify.h"

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "formats/torch/file_records.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct VerifyFlags {
  std::string step;
  std::string store;
  std::vector<std::string> roots;
  unsigned threads = 0;
  bool finite = false;
  bool json = false;
};

void PrintAsJson(const VerifyReport& report) {
  nlohmann::json defects = nlohmann::json::array();
  for (const VerifyDefect& defect : report.defects) {
    defects.push_back({{"subject", defect.subject}, {"rule", defect.rule}});
  }
  PrintJson({{"blobs", report.blobs},
             {"blob_bytes", report.blob_bytes},
             {"summed_bytes", report.summed_bytes},
             {"unsummed_blobs", report.unsummed_blobs},
             {"atoms_compared", report.atoms_compared},
             {"weights_compared", report.weights_compared},
             {"weights_skipped", report.weights_skipped},
             {"atoms_finite", report.atoms_finite},
             {"changed_notes", report.changed_notes},
             {"defect_count", report.defect_count},
             {"defects", defects}});
}

void PrintAsText(const VerifyReport& report, const VerifyFlags& options) {
  for (const VerifyDefect& defect : report.defects) {
    fmt::print("{}: {}\n", Printable(defect.subject), Printable(defect.rule));
  }
  if (report.defect_count > report.defects.size()) {
    fmt::print("... and {} more\n", report.defect_count - report.defects.size());
  }
  if (report.unsummed_blobs > 0) {
    fmt::print("note: {} written without checksums, such as {}\n",
               Counted(report.unsummed_blobs, "file"), Printable(report.unsummed));
  }
  if (report.changed_notes > 0) {
    fmt::print(
        "note: {} beside the step changed: {}; views do not read them; "
        "`adopt --refresh` takes them as they are\n",
        Counted(report.changed_notes, "file"), Printable(report.changed_note));
  }
  if (report.weights_skipped > 0) {
    fmt::print(
        "note: {} cannot be compared with masters, as averages of other copies or "
        "as weights from before the first optimizer step, such as {}\n",
        Counted(report.weights_skipped, "weight"), report.skipped);
  }
  fmt::print("{} ({}) read, {} compared with checksums, {} compared, {} compared with masters",
             Counted(report.blobs, "file"), HumanBytes(report.blob_bytes),
             HumanBytes(report.summed_bytes), Counted(report.atoms_compared, "replicated tensor"),
             Counted(report.weights_compared, "weight"));
  if (options.finite) {
    fmt::print(", {} checked for NaN and infinity", Counted(report.atoms_finite, "tensor"));
  }
  fmt::print(": {}\n", Counted(report.defect_count, "defect"));
}

Status RunVerify(const VerifyFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto step, LoadSubject(options.step, options.store, {}));
  CKPT_ASSIGN_OR_RETURN(RootMap roots, ParseRoots(options.roots));
  const auto blobs = BlobReader::Create(step->model, ReaderOptions(std::move(roots)));
  VerifyOptions verify;
  verify.finite = options.finite;
  verify.records = RecordsOfFile;
  verify.job.threads = options.threads;
  verify.job.progress = ProgressBar("verify");
  CKPT_ASSIGN_OR_RETURN(const VerifyReport report, VerifyStep(step->model, *blobs, verify));
  if (options.json) {
    PrintAsJson(report);
  } else {
    PrintAsText(report, options);
  }
  return ExitWith(report.defect_count == 0 ? 0 : static_cast<int>(ExitCode::kDataLoss));
}

}  // namespace

void AddVerifyCommand(CommandSet& commands) {
  auto options = std::make_shared<VerifyFlags>();
  Command& command = commands.Add("verify", "Read everything a step refers to; compare replicas");
  command.Add("STEP", options->step, "RUN/ID, RUN, or a checkpoint's path")
      .Required()
      .Offers(kOfferSteps | kOfferRuns | kOfferFiles);
  AddStoreOption(command, options->store);
  AddRootOption(command, options->roots);
  command.Add("--finite", options->finite, "Look for NaN and infinity, too");
  AddThreadsOption(command, options->threads, "Threads that read");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunVerify(*options); };
}

}  // namespace ckptfs
