// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal_source.h"

#include "core/base/strings.h"
#include "formats/deepspeed/step_directories.h"
#include "formats/deepspeed/universal/placed.h"

namespace ckptfs {
namespace {

using deepspeed::StepFiles;

Result<bool> IsUniversal(const Root& root, const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const bool states, deepspeed::HasUniversalStates(root, directory));
  if (!states) return false;
  CKPT_ASSIGN_OR_RETURN(const StepFiles files, deepspeed::ListStep(root, directory));
  if (!files.model.empty() || !files.stage3_model.empty()) return true;
  return HasFile(root, JoinPath(directory, "zero/optimizer_state.pt"));
}

class DeepSpeedUniversalSource : public Source {
 public:
  std::string_view name() const override { return "deepspeed_universal"; }

  Result<std::vector<StepCandidate>> Find(const std::shared_ptr<const Root>& root,
                                          const std::string& directory) const override {
    CKPT_ASSIGN_OR_RETURN(std::vector<StepCandidate> steps,
                          deepspeed::FindSteps(root, directory, "latest_universal", IsUniversal));
    for (StepCandidate& step : steps) step.converted = true;
    return steps;
  }

  SaveState StateOf(const StepCandidate& step, const SourceOptions&,
                    const SaveHistory&) const override {
    if (Status named = deepspeed::CheckPointer(step); !named) {
      return SaveState{SavePhase::kAbsent, {}, std::move(named).error()};
    }
    Status whole = CheckFiles(step);
    return whole ? SaveState{} : SaveState::Begun(std::move(whole).error());
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const override {
    CKPT_RETURN_IF_ERROR(deepspeed::CheckNoModelKey(step, options));
    CKPT_ASSIGN_OR_RETURN(StepFiles files, deepspeed::ListStep(*step.root, step.directory));
    Assembler assembler;
    CKPT_ASSIGN_OR_RETURN(const auto listed,
                          deepspeed::universal::List(step, options, std::move(files), assembler));
    CKPT_ASSIGN_OR_RETURN(const auto parsed, Parse(listed));
    return Place(listed, parsed, std::move(assembler));
  }

 private:
  // ds_to_universal writes optimizer_state.pt after the parameters and copies
  // the model states last.
  static Status CheckFiles(const StepCandidate& step) {
    CKPT_ASSIGN_OR_RETURN(const StepFiles files, deepspeed::ListStep(*step.root, step.directory));
    if (files.model.count(0) == 0 && files.stage3_model.count({0, 0}) == 0) {
      return Fail(ErrorCode::kInvalid, StrCat(step.Path(), ": no model states of rank 0"));
    }
    CKPT_ASSIGN_OR_RETURN(const bool state,
                          HasFile(*step.root, JoinPath(step.directory, "zero/optimizer_state.pt")));
    if (state) return {};
    return Fail(ErrorCode::kInvalid, StrCat(step.Path(), "/zero: no optimizer_state.pt"));
  }
};

}  // namespace

std::unique_ptr<Source> MakeDeepSpeedUniversalSource() {
  return std::make_unique<DeepSpeedUniversalSource>();
}

}  // namespace ckptfs
