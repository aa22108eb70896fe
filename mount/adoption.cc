// SPDX-License-Identifier: Apache-2.0

#include "mount/adoption.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <charconv>
#include <filesystem>

#include "core/base/strings.h"
#include "core/jobs/publish.h"
#include "formats/families/shipped.h"
#include "formats/registry.h"
#include "mount/mount_table.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

namespace files = std::filesystem;

Result<FamilyVariables> ParseVariables(const std::vector<std::string>& words) {
  FamilyVariables variables;
  for (const std::string& word : words) {
    CKPT_ASSIGN_OR_RETURN(auto variable, ParseFamilyVariable(word));
    variables[std::move(variable.first)] = variable.second;
  }
  return variables;
}

// The name of the family `wanted` means; a file's family joins the set.
Result<std::string> ResolveFamily(const std::string& wanted, FamilySet& families) {
  const bool is_file = wanted.find('/') != std::string::npos || wanted.ends_with(".toml");
  if (wanted.empty()) return wanted;
  if (!is_file) {
    if (families.Find(wanted) != nullptr) return wanted;
    return Fail(ErrorCode::kNotFound, StrCat("--family ", wanted, ": no shipped family of that "
                                                                  "name; a file needs a '/' or .toml"));
  }
  auto name = families.AddFile(wanted);
  if (!name) return Fail(std::move(name).error().WithContext("--family"));
  return name;
}

// The save directory of a step and, by default, its run's name.
Result<std::string> RunNameOf(const AdoptRequest& request, const files::path& root) {
  if (!request.name.empty()) {
    CKPT_RETURN_IF_ERROR(CheckName(request.name, "--name"));
    return request.name;
  }
  const std::string name = root.filename().string();
  if (const Status valid = CheckName(name, "run"); !valid) {
    return Fail(ErrorCode::kInvalid, StrCat(root.string(), ": its base name cannot name a run (",
                                            valid.error().message, "); give --name"));
  }
  return name;
}

// A step's own directory gives the same manifest as its save directory does:
// roots are save directories.
void RootAtSaveDirectory(StepModel& model, const files::path& directory) {
  for (uint32_t root = 0; root < model.roots.size(); ++root) {
    if (model.roots[root] != directory) continue;
    model.roots[root] = directory.parent_path().string();
    for (Blob& blob : model.blobs) {
      if (blob.root == root) blob.path = (directory.filename() / blob.path).string();
    }
  }
}

// The step as the store's own files have it.
Result<StepModel> OwnedModel(const std::string& store, const IngestedStep& step,
                             const AdoptRequest& request) {
  IngestRequest owned = request.ingest;
  // What a file beside the original told is not beside the copy.
  for (const auto& [size, value] : step.model.family_sizes) {
    owned.family_set.push_back(StrCat(size, "=", value));
  }
  CKPT_ASSIGN_OR_RETURN(owned.path,
                        TakeOwnership(store, step.candidate, step.model, request.ownership));
  CKPT_ASSIGN_OR_RETURN(IngestResult again, IngestRequested(owned));
  return OwnedStep(std::move(again.steps.back().model));
}

std::string FirstFile(const StepModel& model) {
  return model.blobs.empty() ? "" : model.PathOf(model.blobs.front());
}

// How many names a file has; 0 if it is gone.
uint64_t NamesOf(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? info.st_nlink : 0;
}

// The step on the store's own files.  A hard link changes the change time of what
// it links, for which other steps on the same file take it for changed.
Status Own(const Store& store, const AdoptRequest& request, IngestedStep& step,
           AdoptOutcome& outcome) {
  const std::string file = FirstFile(step.model);
  const uint64_t names = NamesOf(file);
  CKPT_ASSIGN_OR_RETURN(step.model, OwnedModel(store.directory(), step, request));
  if (request.ownership == Ownership::kLink && NamesOf(file) > names) {
    outcome.warnings.push_back(
        StrCat(step.candidate.directory, ": its files have hard links in the store now, which "
                                         "changed their change time: steps adopted from them "
                                         "before are stale and must be adopted again"));
  }
  return {};
}

// A mount that referred to its own files would read through itself: its threads
// could wait for each other, and it would keep itself busy for ever.
Status CheckNoMountOf(const Store& store, const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return Fail(ErrnoError(errno, path));
  const std::string device = StrCat(major(info.st_dev), ":", minor(info.st_dev));
  CKPT_ASSIGN_OR_RETURN(const std::vector<MountEntry> mounts, ReadMounts());
  for (const MountEntry& mount : mounts) {
    if (mount.device != device || mount.type != "fuse.ckptfs") continue;
    if (mount.source != store.directory()) continue;
    return Fail(ErrorCode::kUnsupported,
                StrCat(path, ": lies in a mount of this very store, which cannot refer to itself; "
                             "adopt the original checkpoint, or give --copy"));
  }
  return {};
}

}  // namespace

Result<std::pair<std::string, int64_t>> ParseFamilyVariable(const std::string& word) {
  const size_t equals = word.find('=');
  int64_t value = 0;
  const char* begin = equals == std::string::npos ? nullptr : word.data() + equals + 1;
  const char* end = word.data() + word.size();
  const bool well_formed = begin != nullptr && equals != 0 && begin != end &&
                           std::from_chars(begin, end, value).ptr == end;
  if (well_formed) return std::pair(word.substr(0, equals), value);
  return Fail(ErrorCode::kInvalid, StrCat("'", word, "': write NAME=NUMBER, such as heads=32"));
}

Result<IngestResult> IngestRequested(const IngestRequest& request) {
  CKPT_ASSIGN_OR_RETURN(FamilySet families, ShippedFamilies());
  SourceOptions options;
  CKPT_ASSIGN_OR_RETURN(options.family, ResolveFamily(request.family, families));
  CKPT_ASSIGN_OR_RETURN(options.variables, ParseVariables(request.family_set));
  options.families = &families;
  options.replicated = request.replicated;
  options.averaged = request.averaged;
  options.weights_only = request.weights_only;
  const auto sources = MakeSources();
  return IngestPath(request.path, sources, options);
}

Result<AdoptOutcome> Adopt(Store& store, const AdoptRequest& request) {
  CKPT_ASSIGN_OR_RETURN(const std::string path, AbsolutePath(request.ingest.path));
  if (request.ownership == Ownership::kReference) {
    CKPT_RETURN_IF_ERROR(CheckNoMountOf(store, path));
  }
  CKPT_ASSIGN_OR_RETURN(IngestResult ingest, IngestRequested(request.ingest));
  AdoptOutcome outcome;
  outcome.skipped = std::move(ingest.skipped);
  for (IngestedStep& step : ingest.steps) {
    const files::path directory = step.candidate.directory;
    outcome.whole_run = outcome.whole_run || directory != path;
    const files::path root = directory.parent_path();
    CKPT_ASSIGN_OR_RETURN(const std::string run, RunNameOf(request, root));
    RootAtSaveDirectory(step.model, directory);
    if (request.ownership != Ownership::kReference) {
      CKPT_RETURN_IF_ERROR(Own(store, request, step, outcome));
    }
    const std::string id = step.model.id;
    const PublishRequest wanted{run, directory.string(), root.string(), request.pack, {}};
    auto published = PublishStep(store, std::move(step.model), wanted);
    if (!published) return Fail(std::move(published).error().WithContext(step.candidate.id));
    if (!published->warning.empty()) {
      outcome.warnings.push_back(StrCat(run, "/", published->record.id, ": ", published->warning));
    }
    if (published->record.id != id) {
      outcome.warnings.push_back(StrCat(run, "/", published->record.id, ": the source changed since ",
                                        run, "/", id, " was adopted, or that was adopted with "
                                        "other options"));
    }
    outcome.steps.push_back(std::move(published->record));
  }
  if (const Status swept = store.Sweep(); !swept) {
    outcome.warnings.push_back(StrCat("side blobs of removed steps stay: ", swept.error().message));
  }
  return outcome;
}

}  // namespace ckptfs
