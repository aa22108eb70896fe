// SPDX-License-Identifier: Apache-2.0

#include "formats/runs/tool_files.h"

#include <array>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "formats/model_files/model_files.h"
#include "formats/runs/step_names.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

constexpr std::string_view kToolKey = "tool";
constexpr std::string_view kOwnKey = "own";
constexpr int kDeepest = 4;  // folders in folders

constexpr std::array<std::pair<StepTool, std::string_view>, 3> kTools = {
    std::pair(StepTool::kTrainer, "trainer"), std::pair(StepTool::kAccelerate, "accelerate"),
    std::pair(StepTool::kLightning, "lightning")};

// Of the step's own directory, below which `path` lies.
struct Walk {
  Assembler& assembler;
  const StepCandidate& step;
  uint32_t root = 0;
  size_t files = 0;
};

// A path as it stands below the save directory.
std::string Shown(const StepCandidate& step, const std::string& path) {
  return path.substr(step.save.empty() ? 0 : step.save.size() + 1);
}

// A folder of another step: one in a Trainer's output that is a model itself.
bool IsAnothers(const Walk& walk, std::string_view name, const std::string& path) {
  return StepNumber(name) && path != walk.step.directory;
}

Status CarryFile(Walk& walk, const std::string& path) {
  auto added = walk.assembler.AddFile(walk.root, Shown(walk.step, path));
  if (added) return {};
  return LeaveOut(std::move(added).error(), walk.assembler.header());
}

void LeaveOutFolder(Walk& walk, const std::string& path, std::string_view why) {
  walk.assembler.header().notes.push_back(
      StrCat("left out: the folder '", Shown(walk.step, path), "', ", why));
}

// The files of one directory; the folders in it, to be looked into.
Result<std::vector<std::string>> CarryDirectory(Walk& walk, const std::string& directory) {
  std::vector<std::string> folders;
  auto entries = ListStepEntries(*walk.step.root, directory);
  if (!entries) {
    CKPT_RETURN_IF_ERROR(LeaveOut(std::move(entries).error(), walk.assembler.header()));
    return folders;
  }
  for (const std::string& name : entries->files) {
    if (++walk.files > kMaxToolFiles) {
      walk.assembler.header().notes.push_back(
          StrCat("left out: of the files around the step those beyond the first ", kMaxToolFiles));
      return std::vector<std::string>();
    }
    CKPT_RETURN_IF_ERROR(CarryFile(walk, JoinPath(directory, name)));
  }
  for (const std::string& name : entries->directories) {
    std::string path = JoinPath(directory, name);
    if (!IsAnothers(walk, name, path)) {
      folders.push_back(std::move(path));
    } else if (walk.step.Own() != walk.step.save) {
      LeaveOutFolder(walk, path, "named as a step of its own");
    }
  }
  return folders;
}

Document Render(StepTool tool, const std::string& own) {
  PickleBuilder pickle;
  std::string_view word;
  for (const auto& [known, name] : kTools) {
    if (known == tool) word = name;
  }
  const NodeId tool_key = pickle.String(kToolKey);
  const NodeId tool_value = pickle.String(word);
  const NodeId own_key = pickle.String(kOwnKey);
  const NodeId root = pickle.Dict({{tool_key, tool_value}, {own_key, pickle.String(own)}});
  auto printed = PrintPickle(std::move(pickle).Finish(root));
  CKPT_CHECK(printed.has_value());  // texts
  return Document{
      .key = std::string(kToolDocument), .scope = "", .pickle = *std::move(printed), .tensors = {}};
}

}  // namespace

Status CarryToolFiles(Assembler& assembler, const StepCandidate& step) {
  const std::string& own = step.Own();
  CKPT_ASSIGN_OR_RETURN(const bool directory, HasDirectory(*step.root, own));
  if (!directory) {  // one file
    if (!IsLightningName(LastComponent(own))) return {};
    assembler.header().documents.push_back(Render(StepTool::kLightning, Shown(step, own)));
    return {};
  }
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*step.root, own));
  const StepTool tool = ToolOf(LastComponent(step.root->PathOf(own)), entries);
  if (tool == StepTool::kNone) return {};
  Walk walk{assembler, step, assembler.AddRoot(RootBelow(step.root, step.save)), 0};
  std::vector<std::string> folders{own};
  for (int depth = 0; depth < kDeepest && !folders.empty(); ++depth) {
    std::vector<std::string> deeper;
    for (const std::string& folder : folders) {
      if (depth > 0 && own == step.save) break;  // a run's, with whatever lies in it
      CKPT_ASSIGN_OR_RETURN(const auto inside, CarryDirectory(walk, folder));
      deeper.insert(deeper.end(), inside.begin(), inside.end());
    }
    folders = std::move(deeper);
  }
  if (own != step.save && !folders.empty()) LeaveOutFolder(walk, folders[0], "and what is as deep");
  assembler.header().documents.push_back(
      Render(tool, own == step.save ? std::string() : Shown(step, own)));
  return {};
}

Result<std::optional<ToolFiles>> ToolFilesOf(const StepModel& step) {
  const Document* document = step.FindDocument(kToolDocument);
  if (document == nullptr) return std::optional<ToolFiles>();
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
  const auto word = RootOf(tree)[kToolKey].String();
  const auto own = RootOf(tree)[kOwnKey].String();
  ToolFiles out;
  for (const auto& [known, name] : kTools) {
    if (word == name) out.tool = known;
  }
  if (out.tool == StepTool::kNone || !own) {
    return Fail(ErrorCode::kInvalid, "document 'training_tool': not a tool and a path");
  }
  out.own = *own;
  const std::string above = out.own.empty() ? "" : out.own + "/";
  for (uint32_t i = 0; i < step.blobs.size(); ++i) {
    const Blob& blob = step.blobs[i];
    if (blob.path == out.own) out.files.emplace(LastComponent(out.own), BlobIndex{i});
    if (blob.side || blob.root != 0 || !blob.path.starts_with(above)) continue;
    out.files.emplace(blob.path.substr(above.size()), BlobIndex{i});
  }
  return std::optional(std::move(out));
}

}  // namespace ckptfs
