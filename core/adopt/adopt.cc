// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/adopt.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "core/adopt/publish.h"
#include "core/adopt/step_notices.h"
#include "core/adopt/written.h"
#include "core/base/strings.h"
#include "core/check/weight_check.h"
#include "core/io/root.h"
#include "core/model/read_blobs.h"

namespace ckptfs {
namespace {

// One name for several runs that were only found would mix what nobody said to mix.
Status CheckOneRun(const Place& place, const IngestResult& ingest, const std::string& name) {
  std::set<std::string> saves;
  for (const IngestedStep& step : ingest.steps) saves.insert(step.candidate.SavePath());
  if (saves.size() < 2) return {};
  return Fail(
      Error{ErrorCode::kUnsupported, StrCat(place.Path(), ": holds ", saves.size(), " runs (",
                                            *saves.begin(), ", ...), but --name names only one")}
          .Needing(StrCat("to join several into one run, name them: adopt "
                          "--name ",
                          name, " ", *saves.begin(), " ", *saves.rbegin())));
}

// How to take a step whose sample differs nevertheless.
Error Explained(Error error) {
  if (error.code != ErrorCode::kDataLoss) return error;
  error.message += "; files of two ranks or saves were exchanged, or one is damaged";
  return std::move(error).Needing("`adopt --check never` takes the step as it is");
}

// Warns of a step that is taken though nobody wrote some of its bytes, or refuses it; "" if
// there are none.
Result<std::string> LookForBlank(const StepModel& model, const AdoptOptions& options) {
  const std::string blank = NeverWritten(model, options.hints.names);
  if (blank.empty()) return blank;
  if (options.refuse_blank) {
    return Fail(
        Error{ErrorCode::kDataLoss, blank + ": a copy is still running, or it died"}.Needing(
            "if the zeros are intended, `ckptfs adopt` takes the step as it is"));
  }
  return blank + "; they read as zeros: the file was made sparse, or a copy did not finish";
}

// The roots of the step's files, unless they are directories of this machine.
OpenRoots OpenRootsOf(const StepCandidate& step) {
  if (step.root->local()) return {};
  return {{step.SavePath(), RootBelow(step.root, step.save)}};
}

// The step on the store's own files.
Result<OwnedStep> TakeFiles(const Store& store, const StepCandidate& step, StepModel model,
                            Ownership ownership, bool check) {
  if (!step.root->local()) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(step.Path(), ": the store takes only files of this machine"));
  }
  if (check) {  // before a step that is not one is copied
    auto checked = CheckWeightSample(model, *BlobReader::Create(model, {}));
    if (!checked) return Fail(Explained(std::move(checked).error()));
  }
  return Own(store.directory(), step.Path(), std::move(model), ownership);
}

bool HasOptimizer(const StepModel& model) {
  return !model.groups.empty() || std::ranges::any_of(model.atoms, [](const Atom& atom) {
    return atom.kind != "weight" && atom.kind != "master";
  });
}

Status CheckRequired(const StepModel& model, const AdoptOptions& options) {
  if (!options.require_optimizer) return {};
  for (const LeftOut& one : model.left_out) {
    if (one.part != LeftOutPart::kOptimizer) continue;
    Error error{ErrorCode::kUnsupported,
                StrCat("its optimizer is not whole, but --require asks for "
                       "it: ",
                       LeftOutText(one))};
    error.needs = one.remedy;
    return Fail(std::move(error));
  }
  if (HasOptimizer(model)) return {};
  return Fail(ErrorCode::kUnsupported, "it has no optimizer, but --require asks for one");
}

// The earliest time of a file that something is read of; 0 if there is none.
int64_t OldestOf(const StepModel& model) {
  const std::vector<uint8_t> read = FindReadBlobs(model);
  int64_t oldest = 0;
  for (size_t i = 0; i < model.blobs.size(); ++i) {
    const int64_t time = model.blobs[i].stamp.mtime_ns;
    if (read[i] != 0 && (oldest == 0 || time < oldest)) oldest = time;
  }
  return oldest;
}

// How the step's files are to be kept.  A step that the store has files of its own of stays so
// when it is adopted again without a word: its source may be about to go.
Ownership OwnershipOf(Store& store, std::string_view run, const StepModel& model,
                      const StepCandidate& step, const AdoptOptions& options) {
  if (options.ownership != Ownership::kReference || !step.root->local()) return options.ownership;
  const auto before = store.Resolve(run, model.id);
  if (!before || before->compacted || before->source != step.Path()) return options.ownership;
  const auto there = store.Load(*before);
  if (!there) return options.ownership;
  const auto kept = std::ranges::find_if(
      (*there)->model.blobs, [](const Blob& blob) { return blob.store_owned && !blob.side; });
  if (kept == (*there)->model.blobs.end()) return options.ownership;
  return kept->owned() ? Ownership::kCopy : Ownership::kLink;
}

// An indexed step becomes one of the store's.
Result<Adopted> Publish(Store& store, IngestedStep read, const AdoptOptions& options,
                        const std::optional<NewSave::Named>& named) {
  const std::string mixed = NoteWrittenAnew(read, options.source, options.hints.names);
  const StepCandidate& step = read.candidate;
  StepModel model = std::move(read.model);
  CKPT_ASSIGN_OR_RETURN(const std::string blank, LookForBlank(model, options));
  CKPT_RETURN_IF_ERROR(CheckRequired(model, options));
  Adopted adopted;
  adopted.left_out = model.left_out;
  if (step.root->local()) adopted.closed = FindClosedFile(model, *BlobReader::Create(model, {}));
  // A file that the store owns has no times.  Where some files are older than what is written last,
  // it is not a save that all of its files are of.
  const int64_t oldest_ns = mixed.empty() ? OldestOf(model) : 1;
  CKPT_ASSIGN_OR_RETURN(const std::string run,
                        RunNameOf(options.run, step.SavePath(), options.hints.names));
  const Ownership ownership = OwnershipOf(store, run, model, step, options);
  const bool owned = ownership != Ownership::kReference;
  std::shared_ptr<const void> hold;  // until it is published
  if (owned) {
    CKPT_ASSIGN_OR_RETURN(OwnedStep taken,
                          TakeFiles(store, step, std::move(model), ownership, options.check));
    model = std::move(taken.model);
    hold = std::move(taken.hold);
    CKPT_RETURN_IF_ERROR(store.PutChunkLists(model));
  }
  const std::string id = model.id;
  PublishRequest wanted;
  wanted.run = run;
  wanted.source = step.Path();
  wanted.root = step.SavePath();
  wanted.open_roots = OpenRootsOf(step);
  wanted.how.converted = step.converted;
  wanted.how.provisional = options.provisional;
  wanted.how.replace = options.refresh;
  wanted.how.notes = options.notes && !owned;
  wanted.how.join = !options.run.empty();
  wanted.named = named;
  wanted.arrived = options.arrived;
  wanted.version = step.version;
  wanted.oldest_ns = oldest_ns;
  wanted.pack = options.pack;
  wanted.check = options.check && !owned;
  auto published = PublishStep(store, std::move(model), wanted);
  if (!published) return Fail(Explained(std::move(published).error()));
  adopted.record = std::move(published->record);
  const std::string name = StrCat(run, "/", adopted.record.id);
  for (const std::string& line : {blank, mixed, published->warning}) {
    if (!line.empty()) adopted.warnings.push_back(StrCat(name, ": ", line));
  }
  std::string life = DescribeChoice(adopted.record, published->life);
  if (published->life.begins == LifeEvidence::kNone) {
    adopted.unproven = std::move(life);
  } else {
    adopted.warnings.push_back(std::move(life));
  }
  if (adopted.record.id != id) {
    const auto first = store.Resolve(run, id);
    const bool other = first && first->source != adopted.record.source;
    const std::string what = first && first->compacted ? " was compacted, which stays as it is"
                             : options.refresh ? " was adopted; it has a tag, and the store's own "
                                                 "files, so it stays as it is"
                                               : " was adopted; --refresh replaces it";
    adopted.warnings.push_back(
        other ? StrCat(name, ": ", run, "/", id, " was adopted from ", first->source)
              : StrCat(name,
                       ": the source, the options or the version of ckptfs changed "
                       "since ",
                       run, "/", id, what));
  }
  return adopted;
}

}  // namespace

Result<std::string> RunNameOf(const std::string& wanted, const std::string& root,
                              const ToolNames& names) {
  if (!wanted.empty()) {
    CKPT_RETURN_IF_ERROR(CheckName(wanted, "--name"));
    return wanted;
  }
  const bool folder = names.IsStepsFolder(LastComponent(root));
  const std::string name = LastComponent(folder ? ParentPath(root) : root);
  if (const Status valid = CheckName(name, "run"); !valid) {
    return Fail(Error{ErrorCode::kInvalid, StrCat(root, ": its base name cannot name a run (",
                                                  valid.error().message, ")")}
                    .Needing("give --name"));
  }
  return name;
}

namespace {

// By their inodes: a file may have several names.
Status CheckNotGrowing(const StepModel& model, const std::set<uint64_t>& growing) {
  if (growing.empty()) return {};
  const std::vector<uint8_t> read = FindReadBlobs(model);
  for (size_t i = 0; i < model.blobs.size(); ++i) {
    const Blob& blob = model.blobs[i];
    if (read[i] != 0 && growing.contains(blob.stamp.inode)) {
      return Fail(ErrorCode::kStale, StrCat(model.PathOf(blob), ": is being written"));
    }
  }
  return {};
}

}  // namespace

Result<Adopted> Adopt(Store& store, const FoundStep& found, const AdoptOptions& options) {
  CKPT_ASSIGN_OR_RETURN(StepModel model, IngestStep(found, options.source));
  CKPT_RETURN_IF_ERROR(CheckNotGrowing(model, options.growing));
  if (options.check) CKPT_RETURN_IF_ERROR(CheckNoWriter(model, options.hints.names));
  std::optional<NewSave::Named> named;
  if (found.candidate.latest && !found.candidate.converted) {
    named = NewSave::Named{model.iteration, model.mtime_ns};
  }
  return Publish(store, {found.candidate, std::move(model), found.source}, options, named);
}

namespace {

// The defects of a step that can be found without a store.
Status CheckBefore(const IngestedStep& step, const AdoptOptions& options) {
  CKPT_RETURN_IF_ERROR(CheckRequired(step.model, options));
  CKPT_RETURN_IF_ERROR(RunNameOf(options.run, step.candidate.SavePath(), options.hints.names));
  if (!options.check) return {};
  BlobReader::Options reading;
  reading.open_roots = OpenRootsOf(step.candidate);
  const auto blobs = BlobReader::Create(step.model, std::move(reading));
  auto checked = CheckWeightSample(step.model, *blobs);
  return checked ? Status{} : Fail(Explained(std::move(checked).error()));
}

// Those that pass; the others are refused.
void CheckAllBefore(IngestResult& ingest, const AdoptOptions& options) {
  std::vector<IngestedStep> sound;
  for (IngestedStep& step : ingest.steps) {
    Status checked = CheckBefore(step, options);
    if (checked) {
      sound.push_back(std::move(step));
    } else {
      ingest.refused.push_back(std::move(checked).error().WithContext(step.candidate.id));
    }
  }
  ingest.steps = std::move(sound);
}

// The steps that the job's own pointers name, by save directory.
std::map<std::string, NewSave::Named> NamedOf(const std::vector<IngestedStep>& steps) {
  std::map<std::string, NewSave::Named> named;
  for (const IngestedStep& step : steps) {
    if (!step.candidate.latest || step.candidate.converted) continue;
    named[step.candidate.SavePath()] = {step.model.iteration, step.model.mtime_ns};
  }
  return named;
}

// Takes out the steps that a process writes; the error if one of them is the place itself, or
// nothing else is left.
Status LeaveOutWritten(const Place& place, const ToolNames& names, IngestResult& ingest) {
  Status none;
  std::vector<IngestedStep> rest;
  for (IngestedStep& step : ingest.steps) {
    Status closed = CheckNoWriter(step.model, names);
    if (closed) {
      rest.push_back(std::move(step));
      continue;
    }
    if (step.candidate.Own() == place.directory) return closed;
    ingest.skipped.push_back(StrCat(step.candidate.id, ": incomplete: ", closed.error().message));
    none = std::move(closed);
  }
  ingest.steps = std::move(rest);
  return ingest.steps.empty() ? none : Status();
}

}  // namespace

Result<AdoptReport> AdoptPlace(const LaterStore& later, const Place& place, Sources sources,
                               const AdoptOptions& wanted) {
  AdoptOptions options = wanted;
  CKPT_ASSIGN_OR_RETURN(IngestResult ingest,
                        IngestPlace(place, sources, options.source, options.hints));
  if (options.check) CKPT_RETURN_IF_ERROR(LeaveOutWritten(place, options.hints.names, ingest));
  if (!options.run.empty()) CKPT_RETURN_IF_ERROR(CheckOneRun(place, ingest, options.run));
  AdoptReport report;
  for (const IngestedStep& step : ingest.steps) {
    report.whole_run = report.whole_run || step.candidate.Own() != place.directory;
  }
  if (later.fresh) {
    CheckAllBefore(ingest, options);
    options.check = false;  // it is done
    if (ingest.steps.empty()) return Fail(std::move(ingest.refused.front()));
  }
  CKPT_ASSIGN_OR_RETURN(Store* const store, later.open());
  report.said = std::move(ingest.said);
  report.skipped = std::move(ingest.skipped);
  report.refused = std::move(ingest.refused);
  StepNotices notices;
  const std::map<std::string, NewSave::Named> named = NamedOf(ingest.steps);
  std::string unproven;  // of the last such step: one line for all
  for (IngestedStep& step : ingest.steps) {
    const auto of_run = named.find(step.candidate.SavePath());
    const std::string id = step.candidate.id;
    auto adopted = Publish(*store, std::move(step), options,
                           of_run == named.end() ? std::nullopt : std::optional(of_run->second));
    if (!adopted) {
      report.refused.push_back(std::move(adopted).error().WithContext(id));
      continue;
    }
    report.warnings.insert(report.warnings.end(), adopted->warnings.begin(),
                           adopted->warnings.end());
    const std::string name = StrCat(adopted->record.run, "/", adopted->record.id);
    notices.Add(name, adopted->left_out);
    notices.Add(name, adopted->closed);
    if (!adopted->unproven.empty()) unproven = std::move(adopted->unproven);
    report.steps.push_back(std::move(adopted->record));
  }
  if (report.steps.empty()) return Fail(std::move(report.refused.front()));
  for (std::string& line : notices.Take()) report.warnings.push_back(std::move(line));
  if (!unproven.empty()) report.warnings.push_back(std::move(unproven));
  return report;
}

Result<AdoptReport> AdoptPlace(Store& store, const Place& place, Sources sources,
                               const AdoptOptions& options) {
  return AdoptPlace(LaterStore{[&store]() -> Result<Store*> { return &store; }, false}, place,
                    sources, options);
}

}  // namespace ckptfs
