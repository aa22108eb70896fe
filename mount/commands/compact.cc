// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/compact.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/check/verify.h"
#include "formats/compact_hooks.h"
#include "formats/torch/file_records.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/control/control_client.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

constexpr uint64_t kLeastFile = uint64_t{1} << 20;

struct CompactFlags {
  std::string step;
  std::string store;
  std::vector<std::string> roots;
  std::string file_size;
  unsigned threads = 0;
  bool verify = false;
  bool incomplete = false;
  bool dry_run = false;
  bool json = false;
};

Result<uint64_t> ParseFileSize(const std::string& text) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ParseBytes(text));
  if (bytes >= kLeastFile) return bytes;
  return Fail(ErrorCode::kInvalid, StrCat("'", text, "': at least 1M"));
}

// Everything of the source, copies of one tensor included, which are one afterwards.
Status VerifyFirst(Store& store, const StepRecord& record, const BlobReader::Options& reading,
                   unsigned threads) {
  CKPT_ASSIGN_OR_RETURN(const auto step, store.Load(record));
  const auto blobs = BlobReader::Create(step->model, reading);
  VerifyOptions verify;
  verify.records = RecordsOfFile;
  verify.job.threads = threads;
  verify.job.progress = ProgressBar("verify");
  CKPT_ASSIGN_OR_RETURN(const VerifyReport report, VerifyStep(step->model, *blobs, verify));
  if (report.defect_count == 0) return {};
  const VerifyDefect& defect = report.defects.front();
  return Fail(ErrorCode::kDataLoss,
              StrCat(record.run, "/", record.id, ": ", Counted(report.defect_count, "defect"),
                     ", nothing was packed: ", defect.subject, ": ", defect.rule));
}

nlohmann::json ReportJson(const CompactReport& report) {
  nlohmann::json json = RecordJson(report.record);
  json["done"] = report.done;
  json["tensors"] = report.tensors;
  json["packed_files"] = report.packed_files;
  json["packed_bytes"] = report.packed_bytes;
  json["kept_files"] = report.kept_files;
  json["kept_bytes"] = report.kept_bytes;
  json["in_place_files"] = report.in_place;
  json["in_place_bytes"] = report.in_place_bytes;
  json["unneeded_bytes"] = report.left_bytes;
  json["resumed_bytes"] = report.resumed_bytes;
  json["directory"] = report.directory;
  json["only_in_source"] = report.only_in_source;
  return json;
}

std::string Written(const CompactReport& report) {
  std::string text;
  if (report.packed_files > 0) {
    text = StrCat(Counted(report.tensors, "tensor"), " in ", Counted(report.packed_files, "file"),
                  " (", HumanBytes(report.packed_bytes), ")");
  }
  if (report.kept_files > 0) {
    text += StrCat(text.empty() ? "" : ", ", Counted(report.kept_files, "file"), " as they were (",
                   HumanBytes(report.kept_bytes), ")");
  }
  if (report.in_place > 0) {
    text += StrCat(text.empty() ? "" : ", ", Counted(report.in_place, "file"),
                   " of the store stay where they are (", HumanBytes(report.in_place_bytes), ")");
  }
  if (report.resumed_bytes > 0) {
    text += StrCat("; ", HumanBytes(report.resumed_bytes), " of that had been written before");
  }
  return text;
}

void PrintReport(const CompactReport& report, bool dry_run) {
  const std::string name = Printable(StrCat(report.record.run, "/", report.record.id));
  const bool nothing = report.packed_files + report.kept_files == 0;
  if (nothing) {
    fmt::print("{}: nothing to do: {}\n", name, Written(report));
  } else if (dry_run) {
    fmt::print("{}: would write {}\n", name, Written(report));
  } else {
    fmt::print("{}: {}\n", name, Written(report));
  }
  if (!dry_run && report.record.source.starts_with('/') && report.only_in_source.empty()) {
    fmt::print("  the step does not need {} any more\n", Printable(report.record.source));
  }
  for (const std::string& line : report.only_in_source) {
    fmt::print("  only in {}: {}\n", Printable(report.record.source), Printable(line));
  }
}

Status RunCompact(const CompactFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, ResolveStep(*store, options.step));
  CKPT_ASSIGN_OR_RETURN(RootMap roots, ParseRoots(options.roots));
  CompactRequest request;
  request.reading = ReaderOptions(std::move(roots));
  request.shown_whole = FilesShownWhole;
  if (!options.file_size.empty()) {
    CKPT_ASSIGN_OR_RETURN(request.file_bytes, ParseFileSize(options.file_size));
  }
  request.incomplete = options.incomplete;
  request.dry_run = options.dry_run;
  request.job.threads = options.threads;
  request.job.progress = ProgressBar("compact");
  if (options.verify) {
    CKPT_RETURN_IF_ERROR(VerifyFirst(*store, record, request.reading, options.threads));
  }
  CKPT_ASSIGN_OR_RETURN(const CompactReport report, CompactStep(*store, record, request));
  if (report.done) {
    for (const std::string& line : RefreshDaemons(store->directory(), {&report.record, 1})) {
      fmt::print(stderr, "ckptfs: a live mount was not told: {}\n", Printable(line));
    }
    (void)store->Sweep();  // a side blob that the step had
  }
  if (options.json) {
    PrintJson(ReportJson(report));
  } else {
    PrintReport(report, options.dry_run);
  }
  return {};
}

}  // namespace

void AddCompactCommand(CommandSet& commands) {
  auto options = std::make_shared<CompactFlags>();
  Command& command = commands.Add(
      "compact", "Put a step's tensors into the store, each whole, so that its source can go");
  command.Add("STEP", options->step, "RUN/ID").Required().Offers(kOfferSteps);
  AddStoreOption(command, options->store);
  AddRootOption(command, options->roots);
  command.Add("--file-size", options->file_size, "About so many bytes in a file (default: 4G)")
      .Value("BYTES")
      .Check(Checked(ParseFileSize));
  command.Add("--verify", options->verify, "Read and compare all of the source first");
  command.Add("--incomplete", options->incomplete, "Also a step that lacks parts of its source");
  command.Add("--dry-run", options->dry_run, "Say what would be written");
  AddThreadsOption(command, options->threads, "Threads that read and write");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunCompact(*options); };
}

}  // namespace ckptfs
