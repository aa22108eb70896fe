// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/source.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/strings.h"
#include "formats/huggingface/file_pieces.h"
#include "formats/huggingface/names.h"
#include "formats/huggingface/reader.h"
#include "formats/tools/model_files.h"
#include "formats/tools/save_order.h"
#include "formats/tools/step_names.h"
#include "formats/tools/step_tree.h"

namespace ckptfs {
namespace {

using huggingface::StepFiles;

constexpr std::array<std::string_view, 5> kFileSuffixes = {".safetensors", ".bin", ".pt", ".pth",
                                                           ".ckpt"};

using RootPointer = std::shared_ptr<const Root>;

// The name of a directory of the root, or of the root itself.
std::string NameOf(const Root& root, const std::string& directory) {
  return LastComponent(root.PathOf(directory));
}

bool IsHubFolder(const Root& root, const std::string& directory) {
  return NameOf(root, directory).starts_with("models--");
}

// A file's number: by the forms of tools' names, by the files beside it, or its directory's.  One
// without (model_final.pth) is as late as the numbered ones beside it that are not newer; 0 without
// such.
Result<uint64_t> NumberOfFile(const StepCandidate& step) {
  constexpr size_t kMostFiles = 1024;
  if (const auto number = FileNumber(step.id)) return *number;
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, step.root->List(step.save));
  std::vector<std::string> names;
  for (const RootEntry& entry : entries) {
    if (entry.kind == EntryKind::kFile) names.push_back(entry.name);
  }
  if (const auto number = SiblingNumber(step.id, names)) return *number;
  const std::string directory = NameOf(*step.root, step.save);
  const bool word = !directory.empty() && !IsDigit(directory.front());
  if (const auto number = word ? StepNumber(directory) : std::nullopt) return *number;
  uint64_t out = 0;
  size_t looked = 0;
  for (const std::string& name : names) {
    const auto number = FileNumber(name);
    if (!number || *number <= out || ++looked > kMostFiles) continue;
    CKPT_ASSIGN_OR_RETURN(const auto there, StatIfThere(*step.root, JoinPath(step.save, name)));
    if (there && there->stamp.mtime_ns <= step.mtime_ns) out = *number;
  }
  return out;
}

// True if a file begins as torch.save writes it: an archive, or (before 1.6) its magic number.
Result<bool> BeginsAsTorch(const Root& root, const std::string& path) {
  static constexpr std::array<std::string_view, 2> kBegins = {
      std::string_view("PK\x03\x04", 4), std::string_view("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46", 8)};
  CKPT_ASSIGN_OR_RETURN(const auto file, root.Open(path));
  CKPT_ASSIGN_OR_RETURN(const std::string begin,
                        file->Read(0, std::min<uint64_t>(file->size(), 8), "its first bytes"));
  return std::ranges::any_of(kBegins, [&](std::string_view one) { return begin.starts_with(one); });
}

// True if each of these directories holds an adapter, as PEFT saves several of one model.
Result<bool> AreAdapters(const Root& root, const std::string& directory,
                         const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const std::string path = JoinPath(JoinPath(directory, name), std::string(kAdapterConfig));
    CKPT_ASSIGN_OR_RETURN(const auto there, StatIfThere(root, path));
    if (!there) return false;
  }
  return true;
}

// A directory in which weights are, whatever Complete will say of them; an adapter
// only where nothing else can be meant.
Result<bool> HasWeights(const Root& root, const std::string& directory,
                        const StepEntries& entries) {
  const auto chosen = huggingface::ChooseWeights(entries.files);
  if (!chosen) return true;
  if (*chosen && !(*chosen)->adapter) return true;
  if (*chosen) return AreAdapters(root, directory, entries.directories);
  if (!entries.HasFile(std::string(kModelConfig))) return false;
  CKPT_ASSIGN_OR_RETURN(const std::string configured,
                        huggingface::ConfiguredWeights(root, directory));
  return !configured.empty() && entries.HasFile(configured);
}

Result<StepCandidate> CandidateOf(const RootPointer& root, const std::string& path,
                                  const std::string& save) {
  CKPT_ASSIGN_OR_RETURN(StepCandidate out, ToolStep(root, path));
  out.save = save;
  return out;
}

// A run of its own, whose last model lies in it: it has steps, or DeepSpeed's pointer to one.
bool IsRun(const StepEntries& entries) {
  const auto is_step = [](const std::string& name) { return StepNumber(name).has_value(); };
  return entries.HasFile("latest") || std::ranges::any_of(entries.directories, is_step);
}

// True if a directory is one of several steps of the run above it: a training tool wrote it,
// or it is named so (torchtitan's step-500, a script's own epoch_1).
bool IsOneOfSeveral(std::string_view name, const StepEntries& entries) {
  return ToolOf(name, entries) != StepTool::kNone || (StepNumber(name) && !IsRun(entries));
}

// The save directory of a step that was given by itself: itself, a run's, or the
// folder of a model in the hub's cache.
std::string SaveOf(const Root& root, const std::string& directory, const StepEntries& entries) {
  const std::string above = ParentPath(directory);
  const bool snapshot = directory != above && LastComponent(above) == "snapshots" &&
                        IsHubFolder(root, ParentPath(above));
  if (snapshot) return ParentPath(above);
  const std::string name = NameOf(root, directory);
  return IsOneOfSeveral(name, entries) ? RunOfToolStep(directory, name) : directory;
}

class HuggingFaceSource : public Source {
 public:
  std::string_view name() const override { return "huggingface"; }

  Result<std::vector<StepCandidate>> Find(const RootPointer& root,
                                          const std::string& directory) const override {
    std::vector<StepCandidate> out;
    CKPT_ASSIGN_OR_RETURN(const bool file, HasFile(*root, directory));
    if (file) return FindFile(root, directory);
    CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*root, directory));
    CKPT_ASSIGN_OR_RETURN(const bool weights, HasWeights(*root, directory, entries));
    if (weights) {
      CKPT_RETURN_IF_ERROR(Add(root, directory, SaveOf(*root, directory, entries), out));
    }
    for (const std::string& name : entries.files) {
      if (!IsLightningName(name)) continue;
      CKPT_RETURN_IF_ERROR(Add(root, JoinPath(directory, name), directory, out));
    }
    for (const std::string& name : entries.directories) {
      const std::string path = JoinPath(directory, name);
      CKPT_RETURN_IF_ERROR(AddInner(root, path, directory, out));
      if (name == "snapshots" && IsHubFolder(*root, directory)) {
        CKPT_ASSIGN_OR_RETURN(const StepEntries revisions, ListStepEntries(*root, path));
        for (const std::string& revision : revisions.directories) {
          CKPT_RETURN_IF_ERROR(AddInner(root, JoinPath(path, revision), directory, out, true));
        }
      }
    }
    return out;
  }

  SaveState StateOf(const StepCandidate& step, const SourceOptions& options,
                    const SaveHistory& history) const override {
    const auto files = ListModel(step, options);
    if (!files) return SaveState::Begun(files.error());
    SaveState state = StateOfSave(step, SavePlaces{.own = step.Own()}, options, history);
    if (state.missing) return state;
    state.after = OrderOf(step, *files);
    Status whole = CheckFiles(step, *files, options);
    return whole ? state : SaveState::Begun(std::move(whole).error());
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const override {
    CKPT_ASSIGN_OR_RETURN(StepFiles files, huggingface::ListStep(step));
    return huggingface::Reader(step, options, std::move(files)).Read();
  }

 private:
  // An index is written after its shards, and a tool's optimizer after the weights.
  static std::vector<WrittenAfter> OrderOf(const StepCandidate& step, const StepFiles& files) {
    std::vector<WrittenAfter> out;
    std::vector<std::string> weights;
    for (const std::string& name : files.weights)
      weights.push_back(JoinPath(files.directory, name));
    if (!files.index.empty()) {
      out.push_back({JoinPath(files.directory, files.index), weights,
                     "which is written after all shards", true});
    }
    const bool apart = !files.optimizer.empty() && files.optimizer != files.weights.front();
    const auto entries =
        apart ? ListStepEntries(*step.root, files.directory) : Result<StepEntries>(StepEntries());
    if (entries && ToolOf(NameOf(*step.root, files.directory), *entries) != StepTool::kNone) {
      out.push_back({JoinPath(files.directory, files.optimizer), std::move(weights),
                     "which its tool writes after the weights", false});
    }
    return out;
  }

  static Result<StepFiles> ListModel(const StepCandidate& step, const SourceOptions& options) {
    if (!options.pieces) CKPT_RETURN_IF_ERROR(huggingface::CheckNoPiece(step));
    return huggingface::ListStep(step);
  }

  // Checks that every file the model needs is there.
  static Status CheckFiles(const StepCandidate& step, const StepFiles& files,
                           const SourceOptions& options) {
    if (!options.weights_only) CKPT_RETURN_IF_ERROR(CheckEngine(step));
    for (const std::string& name : files.weights) {
      const std::string path = JoinPath(files.directory, name);
      CKPT_ASSIGN_OR_RETURN(const bool there, HasFile(*step.root, path));
      if (there) continue;
      if (const auto why = step.root->Stat(path);
          !why && why.error().code == ErrorCode::kPermission)
        return Fail(Error(why.error()));
      return Fail(ErrorCode::kInvalid,
                  StrCat(step.root->PathOf(path),
                         files.index.empty() ? ": this link does not lead to a readable file of "
                                               "the checkpoint"
                                             : StrCat(": missing, "
                                                      "though ",
                                                      files.index, " names it")));
    }
    return {};
  }

  // Trainer's weights beside which an engine's tag was not copied as yet (rsync writes under hidden
  // names): with a file of it there it would be the step, or refused.
  static Status CheckEngine(const StepCandidate& step) {
    CKPT_ASSIGN_OR_RETURN(const bool directory, HasDirectory(*step.root, step.directory));
    if (!directory) return {};
    CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*step.root, step.directory));
    for (const std::string& name : entries.directories) {
      if (!name.starts_with("global_step") || !StepNumber(name)) continue;
      const auto inside = step.root->List(JoinPath(step.directory, name));
      const auto visible = [](const RootEntry& entry) { return !entry.name.starts_with("."); };
      if (!inside || std::ranges::any_of(*inside, visible)) continue;
      return Fail(ErrorCode::kInvalid,
                  StrCat(step.Path(), "/", name,
                         ": empty, though DeepSpeed's optimizer would be "
                         "there: it was not copied, "
                         "or the copy is still running (`adopt --weights-only` takes the "
                         "weights)"));
    }
    return {};
  }

  static Status Add(const RootPointer& root, const std::string& directory, const std::string& save,
                    std::vector<StepCandidate>& out) {
    CKPT_ASSIGN_OR_RETURN(StepCandidate step, CandidateOf(root, directory, save));
    out.push_back(std::move(step));
    return {};
  }

  // A directory in the one that was given: a step of its run if it is one of several
  // (`any`: whatever it is), else a model of its own.
  static Status AddInner(const RootPointer& root, const std::string& directory,
                         const std::string& save, std::vector<StepCandidate>& out,
                         bool any = false) {
    const auto entries = ListStepEntries(*root, directory);
    if (!entries && IsOutOfReach(entries.error())) return {};
    if (!entries) return Fail(Error(entries.error()));
    const bool step = any || IsOneOfSeveral(LastComponent(directory), *entries);
    if (!step) return {};
    CKPT_ASSIGN_OR_RETURN(const bool weights, HasWeights(*root, directory, *entries));
    return weights ? Add(root, directory, save, out) : Status();
  }

  static Result<std::vector<StepCandidate>> FindFile(const RootPointer& root,
                                                     const std::string& path) {
    std::vector<StepCandidate> out;
    const auto ends = [&](std::string_view suffix) { return path.ends_with(suffix); };
    if (std::ranges::none_of(kFileSuffixes, ends)) {  // checkpoint.pth.tar, model.pyth, ...
      CKPT_ASSIGN_OR_RETURN(const bool torch, BeginsAsTorch(*root, path));
      if (!torch) return out;
    }
    CKPT_ASSIGN_OR_RETURN(StepCandidate step, CandidateOf(root, path, ParentPath(path)));
    CKPT_ASSIGN_OR_RETURN(step.iteration, NumberOfFile(step));
    out.push_back(std::move(step));
    return out;
  }
};

}  // namespace

std::unique_ptr<Source> MakeHuggingFaceSource() { return std::make_unique<HuggingFaceSource>(); }

}  // namespace ckptfs
