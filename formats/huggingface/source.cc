// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/source.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/strings.h"
#include "formats/huggingface/names.h"
#include "formats/huggingface/reader.h"
#include "formats/model_files/directories.h"

namespace ckptfs {
namespace {

using huggingface::StepFiles;

constexpr std::array<std::string_view, 4> kFileSuffixes = {".safetensors", ".bin", ".pt", ".pth"};

using RootPointer = std::shared_ptr<const Root>;

// The name of a directory of the root, or of the root itself.
std::string NameOf(const Root& root, const std::string& directory) {
  return LastComponent(root.PathOf(directory));
}

bool IsHubFolder(const Root& root, const std::string& directory) {
  return NameOf(root, directory).starts_with("models--");
}

// A directory in which weights are, whatever Complete will say of them; an adapter
// only where nothing else can be meant.
Result<bool> HasWeights(const Root& root, const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const bool there, HasDirectory(root, directory));
  if (!there) return false;
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  std::vector<std::string> names;
  bool deeper = false;
  for (const RootEntry& entry : entries) {
    names.push_back(entry.name);
    deeper = deeper || entry.kind == EntryKind::kDirectory;
  }
  const auto chosen = huggingface::ChooseWeights(names);
  if (!chosen || !*chosen) return !chosen;
  return !(*chosen)->adapter || !deeper;
}

Result<StepCandidate> CandidateOf(const RootPointer& root, const std::string& path,
                                  const std::string& save) {
  StepCandidate out;
  out.root = root;
  out.directory = path;
  out.save = save;
  out.id = NameOf(*root, path);
  out.iteration = TrainerIteration(out.id).value_or(0);
  CKPT_ASSIGN_OR_RETURN(out.mtime_ns, NewestEntry(*root, path));
  return out;
}

// The save directory of a step: itself, a Trainer's output, or the folder of a
// model in the hub's cache.
std::string SaveOf(const Root& root, const std::string& directory) {
  const std::string above = ParentPath(directory);
  const bool snapshot = directory != above && LastComponent(above) == "snapshots" &&
                        IsHubFolder(root, ParentPath(above));
  if (snapshot) return ParentPath(above);
  return TrainerIteration(LastComponent(directory)) ? above : directory;
}

class HuggingFaceSource : public Source {
 public:
  std::string_view name() const override { return "huggingface"; }

  Result<std::vector<StepCandidate>> Find(const RootPointer& root,
                                          const std::string& directory) const override {
    std::vector<StepCandidate> out;
    CKPT_ASSIGN_OR_RETURN(const bool file, HasFile(*root, directory));
    if (file) return FindFile(root, directory);
    CKPT_RETURN_IF_ERROR(Add(root, directory, SaveOf(*root, directory), out));
    CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root->List(directory));
    for (const RootEntry& entry : entries) {
      const std::string path = JoinPath(directory, entry.name);
      if (entry.name == "snapshots" && IsHubFolder(*root, directory)) {
        CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> revisions, root->List(path));
        for (const RootEntry& revision : revisions) {
          CKPT_RETURN_IF_ERROR(Add(root, JoinPath(path, revision.name), directory, out));
        }
      }
      if (TrainerIteration(entry.name)) CKPT_RETURN_IF_ERROR(Add(root, path, directory, out));
    }
    return out;
  }

  Status Complete(const StepCandidate& step, const SourceOptions&) const override {
    CKPT_ASSIGN_OR_RETURN(const StepFiles files, huggingface::ListStep(step));
    for (const std::string& name : files.weights) {
      const std::string path = JoinPath(files.directory, name);
      CKPT_ASSIGN_OR_RETURN(const bool there, HasFile(*step.root, path));
      if (there) continue;
      return Fail(ErrorCode::kInvalid, StrCat(step.root->PathOf(path), ": not there, though ",
                                              files.index, " names it"));
    }
    return {};
  }

  Result<Seal> SealOf(const StepCandidate& step) const override {
    if (!TrainerIteration(LastComponent(step.directory))) return Seal::kUnknown;
    return TrainerSeal(*step.root, step.directory, step.mtime_ns);
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const override {
    CKPT_ASSIGN_OR_RETURN(StepFiles files, huggingface::ListStep(step));
    return huggingface::Reader(step, options, std::move(files)).Read();
  }

 private:
  static Status Add(const RootPointer& root, const std::string& directory, const std::string& save,
                    std::vector<StepCandidate>& out) {
    CKPT_ASSIGN_OR_RETURN(const bool weights, HasWeights(*root, directory));
    if (!weights) return {};
    CKPT_ASSIGN_OR_RETURN(StepCandidate step, CandidateOf(root, directory, save));
    out.push_back(std::move(step));
    return {};
  }

  static Result<std::vector<StepCandidate>> FindFile(const RootPointer& root,
                                                     const std::string& path) {
    std::vector<StepCandidate> out;
    const auto ends = [&](std::string_view suffix) { return path.ends_with(suffix); };
    if (std::none_of(kFileSuffixes.begin(), kFileSuffixes.end(), ends)) return out;
    CKPT_ASSIGN_OR_RETURN(StepCandidate step, CandidateOf(root, path, ParentPath(path)));
    out.push_back(std::move(step));
    return out;
  }
};

}  // namespace

std::unique_ptr<Source> MakeHuggingFaceSource() { return std::make_unique<HuggingFaceSource>(); }

}  // namespace ckptfs
