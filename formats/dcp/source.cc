// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/source.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "formats/dcp/reader.h"
#include "formats/dcp/step_files.h"
#include "formats/model_files/directories.h"
#include "formats/runs/step_names.h"
#include "formats/runs/step_tree.h"
#include "formats/runs/tool_seal.h"

namespace ckptfs {
namespace {

using dcp::PartFiles;

class DcpSource : public Source {
 public:
  std::string_view name() const override { return "dcp"; }

  Result<std::vector<StepCandidate>> Find(const std::shared_ptr<const Root>& root,
                                          const std::string& directory) const override {
    std::vector<StepCandidate> out;
    CKPT_ASSIGN_OR_RETURN(const EntryStat itself, root->Stat(directory));
    if (itself.kind != EntryKind::kDirectory) return out;
    const std::string name = LastComponent(root->PathOf(directory));
    CKPT_RETURN_IF_ERROR(Add(root, directory, RunOfToolStep(directory, name), out));
    if (!out.empty()) return out;
    CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*root, directory));
    // What consolidates shards of safetensors leaves them here.
    const bool consolidated = std::ranges::any_of(
        entries.files, [](const std::string& file) { return file.ends_with(".safetensors"); });
    for (const std::string& inner : entries.directories) {
      if (consolidated && inner == "sharded") continue;
      Status added = Add(root, JoinPath(directory, inner), directory, out);
      if (!added && !IsOutOfReach(added.error())) return Fail(std::move(added).error());
    }
    return out;
  }

  Status Complete(const StepCandidate& step, const SourceOptions& options) const override {
    CKPT_ASSIGN_OR_RETURN(const std::vector<PartFiles> parts,
                          dcp::ListParts(*step.root, step.directory));
    for (const PartFiles& part : parts) {
      if (part.metadata || !part.ranks.empty() || !part.shards.empty()) continue;
      return Fail(ErrorCode::kInvalid,
                  StrCat(step.root->PathOf(JoinPath(step.directory, part.directory)),
                         ": no .metadata, which is written last: the save did not finish"));
    }
    if (!parts.empty()) return CheckSealed(step, options);
    return Fail(ErrorCode::kInvalid, StrCat(step.Path(), ": no .metadata"));
  }

  // The coordinator writes .metadata when all ranks' files are there, and Lightning its own file
  // after that.
  Result<Seal> SealOf(const StepCandidate& step) const override {
    CKPT_ASSIGN_OR_RETURN(const StepEntries around, ListStepEntries(*step.root, step.directory));
    const StepTool tool = ToolOf(LastComponent(step.directory), around);
    if (tool == StepTool::kTrainer || tool == StepTool::kAccelerate) {
      return ToolSeal(step, step.directory);
    }
    CKPT_ASSIGN_OR_RETURN(const std::vector<PartFiles> parts,
                          dcp::ListParts(*step.root, step.directory));
    const bool lightning = tool == StepTool::kLightning;
    bool newest = parts.size() == 1;  // of two directories the other may come yet
    for (const PartFiles& part : parts) {
      const std::string folder = JoinPath(step.directory, part.directory);
      const std::string last = JoinPath(folder, lightning ? kLightningMeta : dcp::kMetadataFile);
      CKPT_ASSIGN_OR_RETURN(const auto written, StatIfThere(*step.root, last));
      const bool known = lightning || (part.data && part.ranks.empty());
      if (!written) return known ? Seal::kMissing : Seal::kUnknown;
      if (step.growing.contains(last)) return Seal::kUnknown;
      CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, step.root->List(folder));
      for (const RootEntry& entry : entries) {
        const std::string path = JoinPath(folder, entry.name);
        if (step.growing.contains(path)) continue;
        CKPT_ASSIGN_OR_RETURN(const auto found, StatIfThere(*step.root, path));
        newest = newest && (!found || found->stamp.mtime_ns <= written->stamp.mtime_ns);
      }
    }
    return newest ? Seal::kThere : Seal::kUnknown;
  }

  Result<std::string> LastFileOf(const StepCandidate& step) const override {
    CKPT_ASSIGN_OR_RETURN(const std::string tools, ToolLastFile(step, step.directory));
    if (!tools.empty()) return tools;
    CKPT_ASSIGN_OR_RETURN(const StepEntries around, ListStepEntries(*step.root, step.directory));
    const bool lightning = ToolOf(LastComponent(step.directory), around) == StepTool::kLightning;
    CKPT_ASSIGN_OR_RETURN(const std::vector<PartFiles> parts,
                          dcp::ListParts(*step.root, step.directory));
    if (parts.size() != 1) return std::string();
    return JoinPath(JoinPath(step.directory, parts.front().directory),
                    lightning ? kLightningMeta : dcp::kMetadataFile);
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const override {
    CKPT_ASSIGN_OR_RETURN(std::vector<PartFiles> parts,
                          dcp::ListParts(*step.root, step.directory));
    if (options.weights_only) {
      std::erase_if(parts,
                    [](const PartFiles& part) { return dcp::IsOptimizerPart(part.directory); });
    }
    return dcp::Reader(step, options, std::move(parts)).Read();
  }

 private:
  static Status Add(const std::shared_ptr<const Root>& root, const std::string& directory,
                    const std::string& save, std::vector<StepCandidate>& out) {
    CKPT_ASSIGN_OR_RETURN(const std::vector<PartFiles> parts, dcp::ListParts(*root, directory));
    if (parts.empty()) return {};
    StepCandidate step;
    step.root = root;
    step.directory = directory;
    step.save = save;
    step.id = LastComponent(root->PathOf(directory));
    step.iteration = StepNumber(step.id).value_or(0);
    CKPT_ASSIGN_OR_RETURN(step.mtime_ns, NewestEntry(*root, directory));
    out.push_back(std::move(step));
    return {};
  }
};

}  // namespace

std::unique_ptr<Source> MakeDcpSource() { return std::make_unique<DcpSource>(); }

}  // namespace ckptfs
