// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/step_files.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "formats/megatron/legacy/rank_model.h"
#include "formats/megatron/legacy/rank_optimizer.h"

namespace ckptfs::megatron {
namespace {

// Folders of ranks, by what is in them.
struct Folders {
  std::set<std::string> all;
  std::set<std::string> with_model;
  std::set<std::string> with_flat;
};

Result<Folders> ListFolders(const Root& root, const std::string& directory) {
  Folders out;
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(root, directory));
  for (const std::string& name : entries.directories) {
    if (!IsRankFolder(name)) continue;
    CKPT_ASSIGN_OR_RETURN(const StepEntries inside,
                          ListStepEntries(root, JoinPath(directory, name)));
    out.all.insert(name);
    if (inside.HasFile(kRankFile)) out.with_model.insert(name);
    if (inside.HasFile(kFlatFile)) out.with_flat.insert(name);
  }
  return out;
}

Result<CommonState> OpenFirst(const Root& root, const std::string& directory,
                              const Folders& folders) {
  if (folders.with_model.empty()) {
    return Refuse(root.PathOf(directory), ": no mp_rank_*/", kRankFile,
                  ": the save did not finish");
  }
  const std::string path =
      JoinPath(JoinPath(directory, *folders.with_model.begin()), std::string(kRankFile));
  CKPT_ASSIGN_OR_RETURN(auto opened, root.Open(path));
  CKPT_ASSIGN_OR_RETURN(TorchFile file, TorchFile::Open(std::move(opened)));
  return CommonState::Of(std::move(file), BlobIndex{});
}

std::string DegreesText(const JobDegrees& job) {
  std::string out =
      StrCat("tensor_model_parallel_size ", job.tp, ", pipeline_model_parallel_size ", job.pp);
  if (job.ep > 1) out += StrCat(", expert_model_parallel_size ", job.ep);
  return out;
}

bool SaysFlat(const CommonState& state) {
  const PickleRef distributed = state.ArgumentOf("use_distributed_optimizer");
  const PickleRef none = state.ArgumentOf("no_save_optim");
  return distributed && distributed.Bool() == true && !(none && none.Bool() == true);
}

}  // namespace

Result<bool> HasRankFiles(const Root& root, const std::string& directory,
                          const StepEntries& entries) {
  for (const std::string& name : entries.directories) {
    if (!IsRankFolder(name)) continue;
    const auto inside = ListStepEntries(root, JoinPath(directory, name));
    if (!inside && IsOutOfReach(inside.error())) continue;
    if (!inside) return Fail(Error(inside.error()));
    if (inside->HasFile(kRankFile) || inside->HasFile(kFlatFile)) return true;
  }
  return false;
}

Result<LegacyFiles> ReadLegacyFiles(const Root& root, const std::string& directory,
                                    bool weights_only) {
  CKPT_ASSIGN_OR_RETURN(const Folders folders, ListFolders(root, directory));
  CKPT_ASSIGN_OR_RETURN(const CommonState first, OpenFirst(root, directory, folders));
  const std::string path = root.PathOf(directory);
  const std::string of_first = StrCat(path, "/", *folders.with_model.begin(), "/", kRankFile);
  LegacyFiles out;
  auto job = DegreesOf(first);
  if (!job) return Fail(std::move(job).error().WithContext(of_first));
  out.job = *job;
  auto places = PlacesOfJob(out.job);
  if (!places) return Fail(std::move(places).error().WithContext(of_first));
  out.places = *std::move(places);
  std::set<std::string> expected;
  for (const RankPlace& place : out.places) {
    const std::string folder = FolderOf(out.job, place);
    if (!folders.with_model.contains(folder)) {
      return Refuse(path, ": no ", folder, "/", kRankFile, ", though the args in ",
                    *folders.with_model.begin(), " say ", DegreesText(out.job));
    }
    expected.insert(folder);
  }
  for (const std::string& folder : folders.all) {
    if (expected.contains(folder)) continue;
    return Refuse(path, ": ", folder, " is there, but the args in ", *folders.with_model.begin(),
                  " say ", DegreesText(out.job));
  }
  out.flat = SaysFlat(first) && !weights_only;
  if (!out.flat) return out;
  for (const std::string& folder : expected) {
    if (folders.with_flat.contains(folder)) continue;
    return Refuse(path, ": no ", folder, "/", kFlatFile,
                  ", though its args say use_distributed_optimizer (`adopt --weights-only` takes "
                  "the weights)");
  }
  return out;
}

}  // namespace ckptfs::megatron
