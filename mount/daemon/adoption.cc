// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/adoption.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>

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
  return IngestPlace(place, sources, options, HintsOfTools());
}

Status CheckRequested(const std::string& store, const AdoptRequest& request) {
  CKPT_ASSIGN_OR_RETURN(const std::string path, AbsolutePath(request.ingest.path));
  if (request.ownership == Ownership::kReference) {
    CKPT_RETURN_IF_ERROR(CheckNoMountOf(store, path));
  }
  CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
  CKPT_RETURN_IF_ERROR(ScanPlace(place, MakeSources(), HintsOfTools()));
  if (request.ownership == Ownership::kLink) return CheckLinks(store, path);
  return {};
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
  if (request.ownership == Ownership::kReference) {
    CKPT_RETURN_IF_ERROR(CheckNoMountOf(store, request.ingest.path));
  }
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
  CKPT_ASSIGN_OR_RETURN(const std::string path, AbsolutePath(request.ingest.path));
  CKPT_ASSIGN_OR_RETURN(FamilySet families, ShippedFamilies());
  CKPT_ASSIGN_OR_RETURN(const AdoptOptions options,
                        AdoptOptionsOf(store.directory(), request, families));
  if (request.ownership == Ownership::kLink) {  // before a store is made
    CKPT_RETURN_IF_ERROR(CheckLinks(store.directory(), path));
  }
  const auto sources = MakeSources();
  CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
  return AdoptPlace(LaterStore{[&] { return store.Open(); }, store.fresh()}, place, sources,
                    options);
}

}  // namespace ckptfs
