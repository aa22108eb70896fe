// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/source.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "formats/dcp/reader.h"
#include "formats/dcp/step_files.h"
#include "formats/tools/save_order.h"
#include "formats/tools/step_tree.h"

namespace ckptfs {
namespace {

using dcp::PartFiles;

class DcpSource : public Source {
 public:
  explicit DcpSource(std::vector<dcp::Form> forms) : forms_(std::move(forms)) {}

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
    // Tools that consolidate shards of safetensors leave the shards here.
    const bool consolidated = std::ranges::any_of(
        entries.files, [](const std::string& file) { return file.ends_with(".safetensors"); });
    for (const std::string& inner : entries.directories) {
      if (consolidated && inner == "sharded") continue;
      Status added = Add(root, JoinPath(directory, inner), directory, out);
      if (!added && !IsOutOfReach(added.error())) return Fail(std::move(added).error());
    }
    if (out.empty()) return out;
    for (const dcp::Form& form : forms_) {
      CKPT_ASSIGN_OR_RETURN(const auto latest, form.latest(*root, directory));
      for (StepCandidate& step : out) step.latest = step.latest || (latest && step.id == *latest);
    }
    return out;
  }

  SaveState StateOf(const StepCandidate& step, const SourceOptions& options,
                    const SaveHistory& history) const override {
    auto parts = CheckParts(step);
    if (!parts) return SaveState::Begun(std::move(parts).error());
    SavePlaces places{.own = step.Own(), .format = FormatOrder::kDcp};
    for (const PartFiles& part : *parts)
      places.parts.push_back(JoinPath(step.directory, part.directory));
    return StateOfSave(step, places, options, history);
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const override {
    CKPT_ASSIGN_OR_RETURN(std::vector<PartFiles> parts, dcp::ListParts(*step.root, step.directory));
    if (options.weights_only) {
      std::erase_if(parts,
                    [](const PartFiles& part) { return dcp::IsOptimizerPart(part.directory); });
    }
    return dcp::Reader(step, options, std::move(parts), forms_).Read();
  }

 private:
  // The parts, each of which has metadata.
  static Result<std::vector<PartFiles>> CheckParts(const StepCandidate& step) {
    CKPT_ASSIGN_OR_RETURN(std::vector<PartFiles> parts, dcp::ListParts(*step.root, step.directory));
    for (const PartFiles& part : parts) {
      if (part.metadata || !part.ranks.empty() || !part.shards.empty()) continue;
      return Fail(ErrorCode::kInvalid,
                  StrCat(step.root->PathOf(JoinPath(step.directory, part.directory)),
                         ": no .metadata, which is written last: the save did not finish"));
    }
    if (parts.empty()) return Fail(ErrorCode::kInvalid, StrCat(step.Path(), ": no .metadata"));
    return parts;
  }

  static Status Add(const std::shared_ptr<const Root>& root, const std::string& directory,
                    const std::string& save, std::vector<StepCandidate>& out) {
    CKPT_ASSIGN_OR_RETURN(const std::vector<PartFiles> parts, dcp::ListParts(*root, directory));
    if (parts.empty()) return {};
    CKPT_ASSIGN_OR_RETURN(StepCandidate step, StepAt(root, directory, save));
    out.push_back(std::move(step));
    return {};
  }

  const std::vector<dcp::Form> forms_;
};

}  // namespace

std::unique_ptr<Source> MakeDcpSource(std::vector<dcp::Form> forms) {
  return std::make_unique<DcpSource>(std::move(forms));
}

}  // namespace ckptfs
