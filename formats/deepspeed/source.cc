// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/source.h"

#include <algorithm>

#include "core/base/strings.h"
#include "formats/deepspeed/native/placed.h"
#include "formats/deepspeed/step_directories.h"
#include "formats/tools/save_order.h"

namespace ckptfs {
namespace {

using deepspeed::ModelStates;
using deepspeed::RankKey;
using deepspeed::StepFiles;
using deepspeed::native::Named;
using deepspeed::native::Parsed;

Result<bool> IsTag(const Root& root, const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const StepFiles files, deepspeed::ListStep(root, directory));
  if (!files.IsDeepSpeed()) return false;
  CKPT_ASSIGN_OR_RETURN(const bool universal, deepspeed::HasUniversalStates(root, directory));
  return !universal;
}

class DeepSpeedSource : public Source {
 public:
  std::string_view name() const override { return "deepspeed"; }

  Result<std::vector<StepCandidate>> Find(const std::shared_ptr<const Root>& root,
                                          const std::string& directory) const override {
    return deepspeed::FindSteps(root, directory, "latest", IsTag);
  }

  // A tag that was given by itself is whole without what a tool writes around it.
  SaveState StateOf(const StepCandidate& step, const SourceOptions& options,
                    const SaveHistory& history) const override {
    if (Status named = deepspeed::CheckPointer(step); !named) {
      return SaveState{SavePhase::kAbsent, {}, std::move(named).error()};
    }
    auto files = CheckFiles(step, options);
    if (!files) return SaveState::Begun(std::move(files).error());
    const bool around = step.Own() != step.directory;
    SaveState state = StateOfSave(
        step, SavePlaces{around ? step.Own() : "", FormatOrder::kDeepSpeed, {}}, options, history);
    // Model states of ZeRO 3 may have neither buffers nor frozen slices: then no tensor of them is
    // read.
    if (state.phase == SavePhase::kProvisional && !state.last.empty()) {
      state.after.push_back({state.last, std::move(files->paths),
                             "which is written after the files of all ranks", false});
    }
    if (state.missing || files->optimizer) return state;
    return SaveState::Begun(std::move(files->optimizer).error());
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const override {
    CKPT_RETURN_IF_ERROR(deepspeed::CheckNoModelKey(step, options));
    CKPT_ASSIGN_OR_RETURN(StepFiles files, deepspeed::ListStep(*step.root, step.directory));
    if (files.SequenceDegree() > 1) {
      CKPT_ASSIGN_OR_RETURN(const ModelStates first, ReadFirst(step, files));
      SettleRanks(first, files);
    }
    if (files.offloaded) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat(step.Path(),
                         "/offloaded_tensors: optimizer states swapped to NVMe are "
                         "not understood"));
    }
    Assembler assembler;
    const std::vector<std::string> order = deepspeed::NamesInOrder(files);
    CKPT_ASSIGN_OR_RETURN(const deepspeed::TagFiles tag,
                          deepspeed::Register(step, options, std::move(files), order, assembler));
    CKPT_ASSIGN_OR_RETURN(const Parsed parsed, deepspeed::native::Parse(tag));
    CKPT_ASSIGN_OR_RETURN(const Named named, Name(tag, parsed));
    return Place(tag, parsed, named, std::move(assembler));
  }

 private:
  struct Files {
    Status optimizer;                // success: it is there
    std::vector<std::string> paths;  // of all, below the root
  };

  // Returns the degrees and counters of the first model states file.
  static Result<ModelStates> ReadFirst(const StepCandidate& step, const StepFiles& files) {
    if (files.model.empty() && files.stage3_model.empty()) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(step.Path(), ": no *_model_states.pt beside the optimizer states"));
    }
    const std::string& first =
        files.model.empty() ? files.stage3_model.begin()->second : files.model.begin()->second;
    CKPT_ASSIGN_OR_RETURN(auto opened, step.root->Open(JoinPath(step.directory, first)));
    CKPT_ASSIGN_OR_RETURN(const TorchFile file, TorchFile::Open(std::move(opened)));
    return deepspeed::ReadModelStates(file, BlobIndex{}, {false, false});
  }

  // One model-parallel rank with files of several: they are numbered by sequence.
  static void SettleRanks(const ModelStates& first, StepFiles& files) {
    if (first.mp_world == 1 && files.SequenceDegree() > 1) files.DropSequenceRanks();
  }

  // Checks that the files of every rank are there.
  static Result<Files> CheckFiles(const StepCandidate& step, const SourceOptions& options) {
    CKPT_ASSIGN_OR_RETURN(StepFiles files, deepspeed::ListStep(*step.root, step.directory));
    const bool model = !files.model.empty() || !files.stage3_model.empty();
    // A file that is there but damaged is not missing: Read says what is wrong.
    const auto states = ReadFirst(step, files);
    if (model && !states && states.error().code == ErrorCode::kInvalid) return Files{{}, {}};
    if (!states) return Fail(states.error());
    SettleRanks(*states, files);
    CKPT_RETURN_IF_ERROR(CheckRanks(step, files, *states));
    Files out{CheckOptimizer(states->file, files, *states, options), {}};
    for (const std::string& name : deepspeed::NamesInOrder(files)) {
      out.paths.push_back(JoinPath(step.directory, name));
    }
    return out;
  }

  // DeepSpeed writes the model states first: alone they are what a save that
  // was cut off leaves.
  static Status CheckOptimizer(std::string_view path, const StepFiles& files,
                               const ModelStates& states, const SourceOptions& options) {
    // With native experts they hold stage 0's optimizer, too.
    const bool apart = states.sharded || !files.experts.empty();
    if (!apart || !files.optimizer.empty() || !files.expert_optimizer.empty()) return {};
    const bool weights = !files.model.empty();  // stage 3 has them in the optimizer's files
    if (options.weights_only && weights) return {};
    return Fail(ErrorCode::kInvalid,
                StrCat(path,
                       ": the optimizer is in files of its own, but there is no "
                       "*_optim_states.pt beside it: the save was cut off",
                       weights ? " (`adopt --weights-only` takes a step whose optimizer files "
                                 "were removed on purpose)"
                               : ""));
  }

  static Status CheckRanks(const StepCandidate& step, const StepFiles& files,
                           const ModelStates& states) {
    const uint64_t mp_world = states.mp_world > 0 ? states.mp_world : files.ModelRanks();
    const uint64_t dp_world = states.dp_world > 0 ? states.dp_world : files.DataRanks();
    const auto missing = [&](std::string_view what, uint64_t mp, uint64_t dp) -> Status {
      return Fail(ErrorCode::kInvalid,
                  StrCat(step.Path(), ": no ", what, " of data-parallel rank ", dp, " of ",
                         dp_world, ", model-parallel rank ", mp, " of ", mp_world));
    };
    for (uint32_t mp = 0; mp < mp_world; ++mp) {
      if (!files.model.empty() && files.model.count(mp) == 0) {
        return missing("mp_rank model states", mp, 0);
      }
      const bool by_rank = files.model.empty() || !files.optimizer.empty();
      for (uint32_t dp = 0; by_rank && dp < dp_world; ++dp) {
        if (files.model.empty() && files.stage3_model.count(RankKey{mp, dp}) == 0) {
          return missing("zero_pp_rank model states", mp, dp);
        }
        if (!files.optimizer.empty() && files.optimizer.count(RankKey{mp, dp}) == 0) {
          return missing("optimizer states", mp, dp);
        }
      }
    }
    return {};
  }
};

}  // namespace

std::unique_ptr<Source> MakeDeepSpeedSource() { return std::make_unique<DeepSpeedSource>(); }

}  // namespace ckptfs
