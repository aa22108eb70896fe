// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/compact.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include "core/access/kept_gates.h"
#include "core/adopt/taken_access.h"
#include "core/base/descriptor.h"
#include "core/base/digest.h"
#include "core/base/fault_point.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/blob/fingerprint.h"
#include "core/io/blob_directories.h"
#include "core/io/file_root.h"
#include "core/model/left_out.h"
#include "core/model/step_notes.h"

namespace ckptfs {
namespace {

constexpr std::string_view kCompactPartial = ".partial-compact";
constexpr uint64_t kMebibyte = uint64_t{1} << 20;

Status CheckComplete(const StepModel& step, const StepRecord& record,
                     const CompactRequest& request) {
  if (record.provisional) {
    return Fail(Error{ErrorCode::kUnsupported,
                      StrCat(record.run, "/", record.id, ": nothing proves that its save is over")}
                    .Needing("wait until the next step of the run is there, or adopt it again"));
  }
  if (step.left_out.empty() || request.incomplete) return {};
  const LeftOut& one = step.left_out.front();
  const uint64_t more = one.more + step.left_out.size() - 1;
  return Fail(Error{ErrorCode::kUnsupported,
                    StrCat(record.run, "/", record.id, ": its source has more than the step: ",
                           one.what, more > 0 ? StrCat(" and ", more, " more") : "", ": ", one.why)}
                  .Needing(StrCat(one.remedy, one.remedy.empty() ? "" : "; or ",
                                  "give --incomplete to pack what the step has")));
}

// A tensor that repeats a few bytes of a file (a stride of 0) may be as large as it likes.
Status CheckSize(const StepModel& step, const CompactPlan& plan) {
  constexpr uint64_t kMostTimes = 8;  // as wide a dtype as there is, of the narrowest
  uint64_t files = 0;
  for (const Blob& blob : step.blobs) files += blob.stamp.size;
  uint64_t written = 0;
  for (const PlannedFile& file : plan.files) written += file.plan.size();
  if (written / kMostTimes <= files + kMebibyte) return {};
  return Fail(ErrorCode::kUnsupported,
              StrCat("its tensors would take ", written, " bytes, but its files have ", files,
                     ": they repeat bytes, which the source does better"));
}

// This alone decides what the directory holds.
std::string NameOf(const Digest& manifest, const CompactPlan& plan) {
  std::string text = StrCat("compact 1\n", manifest.Hex(), "\n");
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const OwnerAndMode& access = plan.access[i];
    text += StrCat(plan.files[i].path, "\n", plan.files[i].plan.size(), " ", access.CertainMode(),
                   " ", access.uid, " ", access.gid, "\n");
  }
  if (plan.gates) text += RenderKeptGates(*plan.gates);
  return DigestOf(text).Hex();
}

bool HasName(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

// The digests of files that an earlier call had finished.
Result<WrittenPlans> ReadWritten(const std::string& directory, const CompactPlan& plan) {
  WrittenPlans written;
  for (const PlannedFile& file : plan.files) {
    const std::string path = StrCat(directory, "/", file.path);
    CKPT_ASSIGN_OR_RETURN(const auto there, OpenLocalFile(path));
    if (there->size() != file.plan.size()) {
      return Fail(ErrorCode::kDataLoss,
                  StrCat(path, " has ", there->size(), " bytes instead of ", file.plan.size()));
    }
    CKPT_ASSIGN_OR_RETURN(written.chunks.emplace_back(), ChunkDigestsOfFile(*there));
    written.bytes_resumed += there->size();
  }
  return written;
}

Status WriteGates(const std::string& directory, const CompactPlan& plan) {
  if (!plan.gates) return {};
  const std::string path = StrCat(directory, "/", kKeptGatesName);
  const std::string text = RenderKeptGates(*plan.gates);
  CKPT_ASSIGN_OR_RETURN(const Descriptor file,
                        OpenDescriptor(path, O_WRONLY | O_CREAT | O_TRUNC, 0600));
  CKPT_RETURN_IF_ERROR(WriteAll(file.get(), 0, std::as_bytes(std::span(text)), path));
  return ::fsync(file.get()) == 0 ? Status() : Fail(ErrnoError(errno, path));
}

// Owners and modes of the files, and every directory durable.
Status Settle(const std::string& directory, const CompactPlan& plan) {
  std::set<std::string> folders{directory};
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const std::string path = StrCat(directory, "/", plan.files[i].path);
    CKPT_ASSIGN_OR_RETURN(const Descriptor file, OpenDescriptor(path, O_RDONLY | O_NOFOLLOW));
    CKPT_RETURN_IF_ERROR(TakeAccess(file.get(), path, plan.access[i], 0));
    if (::fsync(file.get()) != 0) return Fail(ErrnoError(errno, path));
    for (std::string folder = path.substr(0, path.rfind('/')); folder.size() > directory.size();
         folder.resize(folder.rfind('/'))) {
      folders.insert(folder);
    }
  }
  CKPT_RETURN_IF_ERROR(WriteGates(directory, plan));
  for (const std::string& folder : folders) CKPT_RETURN_IF_ERROR(SyncPath(folder));
  return {};
}

class Compaction {
 public:
  Compaction(Store& store, const StepRecord& record, const CompactRequest& request)
      : store_(store), record_(record), request_(request) {}

  Result<CompactReport> Run();

 private:
  Result<WrittenPlans> Write(const Step& step, BlobReader& blobs);
  Status FillBlobs(const WrittenPlans& written);
  Status Publish();
  Status NoteOwned(const StepModel& model);
  void Tell(const StepModel& step);

  Store& store_;
  const StepRecord& record_;
  const CompactRequest& request_;
  CompactPlan plan_;
  CompactReport report_;
  std::shared_ptr<const void> hold_;  // of the directory, until the step needs it
};

void Compaction::Tell(const StepModel& step) {
  report_.record = record_;
  report_.tensors = plan_.tensors;
  report_.packed_files = plan_.packed_files;
  report_.packed_bytes = plan_.packed_bytes;
  report_.kept_files = plan_.files.size() - plan_.packed_files;
  report_.kept_bytes = plan_.kept_bytes;
  report_.in_place = plan_.in_place;
  report_.in_place_bytes = plan_.in_place_bytes;
  report_.left_bytes = plan_.left_bytes;
  report_.only_in_source = plan_.lost;
  for (const std::string& note : step.notes) {
    if (note.starts_with(kNotShownNote)) {
      report_.only_in_source.push_back(note.substr(kNotShownNote.size()));
    }
  }
}

Result<WrittenPlans> Compaction::Write(const Step& step, BlobReader& blobs) {
  const std::string name = NameOf(record_.manifest, plan_);
  report_.directory = StrCat(store_.blobs(), "/", name);
  if (::mkdir(store_.blobs().c_str(), 0700) != 0 && errno != EEXIST) {
    return Fail(ErrnoError(errno, store_.blobs()));
  }
  CKPT_ASSIGN_OR_RETURN(hold_, HoldBlobDirectory(store_.directory(), name));
  if (HasName(report_.directory)) return ReadWritten(report_.directory, plan_);
  const std::string partial = StrCat(report_.directory, kCompactPartial);
  if (::mkdir(partial.c_str(), 0700) != 0 && errno != EEXIST) {
    return Fail(ErrnoError(errno, partial));
  }
  FaultPoint();
  auto written = WritePlans(partial, plan_.files, step.model, blobs, request_.job);
  if (!written && written.error().code == ErrorCode::kExhausted) {
    // Others need what room there is; we wrote it, and hold its journal no more.
    (void)RemoveBlobDirectory(store_.directory(), StrCat(name, kCompactPartial));
  }
  if (!written) return Fail(std::move(written).error());
  CKPT_RETURN_IF_ERROR(blobs.CheckOpen());  // all that was read is what was adopted
  CKPT_RETURN_IF_ERROR(Settle(partial, plan_));
  FaultPoint();
  if (::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, report_.directory.c_str(),
                  RENAME_NOREPLACE) != 0 &&
      (errno != EINVAL || ::rename(partial.c_str(), report_.directory.c_str()) != 0)) {
    return Fail(ErrnoError(errno, report_.directory));
  }
  ::unlink(StrCat(report_.directory, "/", kPiecesJournal).c_str());
  CKPT_RETURN_IF_ERROR(SyncPath(report_.directory));
  CKPT_RETURN_IF_ERROR(SyncPath(store_.blobs()));
  FaultPoint();
  return written;
}

Status Compaction::FillBlobs(const WrittenPlans& written) {
  for (size_t i = 0; i < plan_.files.size(); ++i) {
    Blob& blob = plan_.model.blobs[plan_.blobs[i]];
    blob.chunk_bytes = kChunkBytes;
    blob.chunks = written.chunks[i];
    blob.chunk_list = {};                   // what the source has lies elsewhere
    if (i >= plan_.packed_files) continue;  // it is the source's
    CKPT_ASSIGN_OR_RETURN(const auto file,
                          OpenLocalFile(StrCat(report_.directory, "/", plan_.files[i].path)));
    CKPT_ASSIGN_OR_RETURN(blob.fingerprint, FingerprintOf(*file));
  }
  return {};
}

Status Compaction::Publish() {
  plan_.SetDirectory(report_.directory);
  CKPT_RETURN_IF_ERROR(store_.PutChunkLists(plan_.model));
  CKPT_ASSIGN_OR_RETURN(const RenderedStep rendered, store_.Render(plan_.model, record_.unpacked));
  CKPT_ASSIGN_OR_RETURN(report_.record, store_.Replace(record_, plan_.model, rendered));
  report_.done = true;
  FaultPoint();
  return {};
}

// All bytes are the store's already: what the source holds later does not replace them.
Status Compaction::NoteOwned(const StepModel& model) {
  if (record_.compacted || !report_.only_in_source.empty()) return {};
  CKPT_ASSIGN_OR_RETURN(const RenderedStep rendered, store_.Render(model, record_.unpacked));
  CKPT_ASSIGN_OR_RETURN(report_.record, store_.Replace(record_, model, rendered));
  return {};
}

Result<CompactReport> Compaction::Run() {
  if (store_.directory().empty()) {
    return Fail(ErrorCode::kUnsupported,
                "only steps of a store in a directory of this machine can be compacted");
  }
  CKPT_ASSIGN_OR_RETURN(const auto step, store_.Load(record_));
  CKPT_RETURN_IF_ERROR(CheckComplete(step->model, record_, request_));
  const auto blobs = BlobReader::Create(step->model, request_.reading);
  CKPT_ASSIGN_OR_RETURN(plan_, PlanCompact(step->model, record_.source, *blobs,
                                           request_.shown_whole, request_.file_bytes));
  CKPT_RETURN_IF_ERROR(CheckSize(step->model, plan_));
  Tell(step->model);
  if (request_.dry_run) return std::move(report_);
  if (plan_.IsNothing()) {
    CKPT_RETURN_IF_ERROR(NoteOwned(step->model));
    return std::move(report_);
  }
  CKPT_ASSIGN_OR_RETURN(const WrittenPlans written, Write(*step, *blobs));
  report_.resumed_bytes = written.bytes_resumed;
  CKPT_RETURN_IF_ERROR(FillBlobs(written));
  CKPT_RETURN_IF_ERROR(Publish());
  return std::move(report_);
}

}  // namespace

Result<CompactReport> CompactStep(Store& store, const StepRecord& record,
                                  const CompactRequest& request) {
  auto report = Compaction(store, record, request).Run();
  if (report) return report;
  return Fail(
      std::move(report).error().WithContext(StrCat("compact ", record.run, "/", record.id)));
}

}  // namespace ckptfs
