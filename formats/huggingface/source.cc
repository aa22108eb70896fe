// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/source.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/strings.h"
#include "formats/directory.h"
#include "formats/huggingface/names.h"
#include "formats/huggingface/reader.h"

namespace ckptfs {
namespace {

using huggingface::StepFiles;

constexpr std::array<std::string_view, 4> kFileSuffixes = {".safetensors", ".bin", ".pt", ".pth"};

std::string LastComponent(const std::string& path) {
  return path.substr(path.find_last_of('/') + 1);
}

std::string ParentOf(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  return slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash);
}

// A directory in which weights are, whatever Complete will say of them; an adapter
// only where nothing else can be meant.
Result<bool> HasWeights(const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const bool there, IsDirectory(directory));
  if (!there) return false;
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(directory));
  const auto chosen = huggingface::ChooseWeights(names);
  if (!chosen || !*chosen || !(*chosen)->adapter) return !chosen || chosen->has_value();
  for (const std::string& name : names) {
    CKPT_ASSIGN_OR_RETURN(const bool deeper, IsDirectory(StrCat(directory, "/", name)));
    if (deeper) return false;
  }
  return true;
}

Result<StepCandidate> CandidateOf(const std::string& path, const std::string& root) {
  StepCandidate out;
  out.directory = path;
  out.root = root;
  out.id = LastComponent(path);
  out.iteration = TrainerIteration(out.id).value_or(0);
  CKPT_ASSIGN_OR_RETURN(out.mtime_ns, NewestEntry(path));
  return out;
}

// The folder of a hub's cache that a snapshot is in.
std::optional<std::string> HubFolder(const std::string& snapshot) {
  const std::string above = ParentOf(snapshot);
  if (LastComponent(above) != "snapshots") return std::nullopt;
  const std::string folder = ParentOf(above);
  return LastComponent(folder).starts_with("models--") ? std::optional(folder) : std::nullopt;
}

// Where links of the directory may lead.
std::string RootOf(const std::string& directory) {
  if (const auto hub = HubFolder(directory)) return *hub;
  const bool trainer = TrainerIteration(LastComponent(directory)).has_value();
  return trainer ? ParentOf(directory) : directory;
}

class HuggingFaceSource : public Source {
 public:
  std::string_view name() const override { return "huggingface"; }

  Result<std::vector<StepCandidate>> Find(const std::string& path) const override {
    std::vector<StepCandidate> out;
    CKPT_ASSIGN_OR_RETURN(const bool file, IsRegularFile(path));
    if (file) return FindFile(path);
    const auto add = [&](const std::string& directory, const std::string& root) -> Status {
      CKPT_ASSIGN_OR_RETURN(const bool weights, HasWeights(directory));
      if (!weights) return {};
      CKPT_ASSIGN_OR_RETURN(StepCandidate step, CandidateOf(directory, root));
      out.push_back(std::move(step));
      return {};
    };
    CKPT_RETURN_IF_ERROR(add(path, RootOf(path)));
    CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(path));
    const bool hub = std::find(names.begin(), names.end(), "snapshots") != names.end() &&
                     LastComponent(path).starts_with("models--");
    if (hub) {
      const std::string snapshots = path + "/snapshots";
      CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> revisions, ListNames(snapshots));
      for (const std::string& name : revisions) {
        CKPT_RETURN_IF_ERROR(add(StrCat(snapshots, "/", name), path));
      }
    }
    for (const std::string& name : names) {
      if (!TrainerIteration(name)) continue;
      CKPT_RETURN_IF_ERROR(add(StrCat(path, "/", name), path));
    }
    return out;
  }

  Status Complete(const StepCandidate& step, const SourceOptions&) const override {
    CKPT_ASSIGN_OR_RETURN(const StepFiles files, huggingface::ListStep(step));
    for (const std::string& name : files.weights) {
      const std::string path = StrCat(files.directory, "/", name);
      CKPT_ASSIGN_OR_RETURN(const bool there, IsRegularFile(path));
      if (there) continue;
      return Fail(ErrorCode::kInvalid, StrCat(path, ": not there, though ", files.index, " names it"));
    }
    return {};
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const override {
    CKPT_ASSIGN_OR_RETURN(StepFiles files, huggingface::ListStep(step));
    return huggingface::Reader(step, options, std::move(files)).Read();
  }

 private:
  static Result<std::vector<StepCandidate>> FindFile(const std::string& path) {
    std::vector<StepCandidate> out;
    const auto ends = [&](std::string_view suffix) { return path.ends_with(suffix); };
    if (std::none_of(kFileSuffixes.begin(), kFileSuffixes.end(), ends)) return out;
    CKPT_ASSIGN_OR_RETURN(StepCandidate step, CandidateOf(path, ParentOf(path)));
    out.push_back(std::move(step));
    return out;
  }
};

}  // namespace

std::unique_ptr<Source> MakeHuggingFaceSource() { return std::make_unique<HuggingFaceSource>(); }

}  // namespace ckptfs
