// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/adoption.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>

#include "core/adopt/written.h"
#include "core/base/strings.h"
#include "core/state/model_config.h"
#include "formats/families/shipped.h"
#include "formats/registry.h"
#include "formats/tools/model_files.h"
#include "formats/tools/recognise.h"
#include "mount/fuse/mount_table.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

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
    return Fail(ErrorCode::kNotFound, StrCat("--family ", wanted,
                                             ": no family of this name is "
                                             "shipped; a file needs a '/' or "
                                             ".toml"));
  }
  auto name = families.AddFile(wanted);
  if (!name) return Fail(std::move(name).error().WithContext("--family"));
  return name;
}

// The names in a file, one a line; none without one.
Result<std::vector<std::string>> ReadOrder(const std::string& path) {
  std::vector<std::string> names;
  if (path.empty()) return names;
  std::ifstream file(path);
  const int error = file ? 0 : errno;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty()) names.push_back(std::move(line));
  }
  if (error != 0 || file.bad()) {
    return Fail(ErrnoError(error != 0 ? error : EIO, StrCat("--parameter-order ", path)));
  }
  if (!names.empty()) return names;
  return Fail(ErrorCode::kInvalid, StrCat("--parameter-order ", path,
                                          ": the file does not hold "
                                          "names"));
}

// The sizes of a config.json that the user gives.
Status AddGivenConfig(const std::string& directory, SourceOptions& options) {
  if (directory.empty()) return {};
  CKPT_ASSIGN_OR_RETURN(const std::string path, AbsolutePath(directory));
  CKPT_ASSIGN_OR_RETURN(const ModelFiles files, ReadModelFiles(path));
  options.config = StrCat(path, "/", kModelConfig);
  auto sizes = ParseModelConfig(*files.config());
  if (!sizes) return Fail(std::move(sizes).error().WithContext(options.config));
  options.configured = *std::move(sizes);
  return {};
}

// `families` gets the family of a file, and must outlive the options.
Result<SourceOptions> OptionsOf(const IngestRequest& request, FamilySet& families) {
  SourceOptions options;
  CKPT_ASSIGN_OR_RETURN(options.family, ResolveFamily(request.family, families));
  CKPT_ASSIGN_OR_RETURN(options.variables, ParseVariables(request.family_set));
  CKPT_RETURN_IF_ERROR(AddGivenConfig(request.hf_config, options));
  options.families = &families;
  options.replicated = request.replicated;
  options.averaged = request.averaged;
  options.weights_only = request.weights_only;
  options.model = request.model;
  CKPT_ASSIGN_OR_RETURN(options.parameter_order, ReadOrder(request.parameter_order));
  return options;
}

// A mount that referred to its own files would read through itself: its threads
// could wait for each other, and it would keep itself busy for ever.
Status CheckNoMountOf(const std::string& store, const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return {};  // a caller that needs it says so
    return Fail(ErrnoError(errno, path));
  }
  const std::string device = StrCat(major(info.st_dev), ":", minor(info.st_dev));
  CKPT_ASSIGN_OR_RETURN(const std::vector<MountEntry> mounts, ReadMounts());
  for (const MountEntry& mount : mounts) {
    if (mount.device != device || mount.type != "fuse.ckptfs") continue;
    if (mount.source != store) continue;
    return Fail(
        Error{ErrorCode::kUnsupported,
              StrCat(path, ": lies in a mount of this very store, which cannot refer to itself")}
            .Needing("adopt the original checkpoint, or give --copy"));
  }
  return {};
}

Status CheckNoMounts(const std::string& store, const AdoptRequest& request) {
  if (request.ownership != Ownership::kReference) return {};
  CKPT_RETURN_IF_ERROR(CheckNoMountOf(store, request.ingest.path));
  for (const std::string& path : request.ingest.joined) {
    CKPT_RETURN_IF_ERROR(CheckNoMountOf(store, path));
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
  CKPT_ASSIGN_OR_RETURN(SourceOptions options, OptionsOf(request, families));
  options.pieces = true;
  const auto sources = MakeSources();
  CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(request.path));
  const ToolHints hints = HintsOfTools();
  CKPT_ASSIGN_OR_RETURN(IngestResult out, IngestPlace(place, sources, options, hints));
  for (IngestedStep& step : out.steps) NoteWrittenAnew(step, options, hints.names);
  return out;
}

namespace {

// The directories of the request, absolute, and the place that they are together.
struct Requested {
  std::vector<std::string> paths;
  Place place;
};

Result<Requested> PlaceOfRequest(const IngestRequest& request) {
  Requested out;
  out.paths.push_back(request.path);
  out.paths.insert(out.paths.end(), request.joined.begin(), request.joined.end());
  for (std::string& path : out.paths) {
    CKPT_ASSIGN_OR_RETURN(path, AbsolutePath(path));
  }
  CKPT_ASSIGN_OR_RETURN(
      out.place, out.paths.size() == 1 ? PlaceOf(out.paths.front()) : PlaceOfUnion(out.paths));
  return out;
}

// Before a store is made.
Status CheckLinksOf(const std::string& store, const AdoptRequest& request,
                    const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    if (request.ownership == Ownership::kLink) CKPT_RETURN_IF_ERROR(CheckLinks(store, path));
  }
  return {};
}

}  // namespace

Status CheckRequested(const std::string& store, const AdoptRequest& request) {
  CKPT_ASSIGN_OR_RETURN(const Requested requested, PlaceOfRequest(request.ingest));
  CKPT_RETURN_IF_ERROR(CheckNoMounts(store, request));
  CKPT_RETURN_IF_ERROR(ScanPlace(requested.place, MakeSources(), HintsOfTools()));
  return CheckLinksOf(store, request, requested.paths);
}

namespace {

bool IsStore(const std::string& directory) {
  std::error_code error;
  return std::filesystem::exists(directory + "/format", error);
}

}  // namespace

StoreForAdoption::StoreForAdoption(std::string directory)
    : directory_(std::move(directory)), fresh_(!IsStore(directory_)) {}

Result<Store*> StoreForAdoption::Open() {
  if (!store_) {
    CKPT_ASSIGN_OR_RETURN(store_, Store::Open(directory_, true));
  }
  return store_.get();
}

Result<AdoptOptions> AdoptOptionsOf(const std::string& store, const AdoptRequest& request,
                                    FamilySet& families) {
  CKPT_RETURN_IF_ERROR(CheckNoMounts(store, request));
  AdoptOptions options;
  CKPT_ASSIGN_OR_RETURN(options.source, OptionsOf(request.ingest, families));
  options.hints = HintsOfTools();
  options.run = request.name;
  options.ownership = request.ownership;
  options.pack = request.pack;
  options.check = request.check;
  options.refresh = request.refresh;
  options.require_optimizer = request.require == "optimizer";
  options.notes = request.refresh;
  return options;
}

Result<AdoptReport> AdoptRequested(StoreForAdoption& store, const AdoptRequest& request) {
  CKPT_ASSIGN_OR_RETURN(FamilySet families, ShippedFamilies());
  CKPT_ASSIGN_OR_RETURN(const AdoptOptions options,
                        AdoptOptionsOf(store.directory(), request, families));
  CKPT_ASSIGN_OR_RETURN(const Requested requested, PlaceOfRequest(request.ingest));
  CKPT_RETURN_IF_ERROR(CheckLinksOf(store.directory(), request, requested.paths));
  const auto sources = MakeSources();
  return AdoptPlace(LaterStore{[&] { return store.Open(); }, store.fresh()}, requested.place,
                    sources, options);
}

}  // namespace ckptfs
