// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native_view/target_engine.h"

#include <string_view>
#include <utility>

#include "core/base/strings.h"
#include "core/view/reader_demands.h"
#include "core/view/shard.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/deepspeed/engine_dict.h"
#include "formats/deepspeed/engine_settings.h"
#include "formats/deepspeed/expert_names.h"
#include "formats/optimizer/hyper_parameters.h"
#include "formats/tools/source_traits.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs::deepspeed {
namespace {

constexpr std::string_view kUniversal = "an engine with load_universal takes deepspeed/";

// Native files have states as they lie in the engine's memory.
constexpr ReaderDemands kNative = {
    .reader = "a DeepSpeed engine",
    .remedy = "dcp/ and rank<N>/optimizer.safetensors have every state",
    .counts = ReaderDemands::Counts::kPerGroup,
    .flat = true,
    .own_shapes = false,
    .optimizers = false,
};

template <class... Words>
tl::unexpected<Error> Not(const Words&... words) {
  return Fail(Error{ErrorCode::kUnsupported, StrCat(words...)}.Needing(kUniversal));
}

// The layout names an engine of the source's own model.
Status CheckWords(const Layout& layout, const Layout& source) {
  if (layout.zero == 0) {
    return Fail(
        Error{ErrorCode::kUnsupported, "native files are those of an engine with ZeRO"}.Needing(
            "ask for zero1, zero2 or zero3 in the layout"));
  }
  const std::pair<bool, std::string_view> others[] = {
      {layout.pp > 1 || layout.vpp > 1 || !layout.split.empty(), "pipeline stages"},
      {layout.ep > 1 || layout.etp > 1, "expert-parallel ranks"},
      {layout.cp > 1, "a sequence's ranks apart, which dp counts"},
      {(layout.naming != Naming::kAsSource && layout.naming != source.naming) ||
           layout.dialect != Dialect::kAsSource,
       "other names than the source's"},
  };
  for (const auto& [asked, what] : others) {
    if (asked) return Not("native files are not made for ", what);
  }
  return {};
}

// The source tells the order of its optimizer's parameters.
Status CheckSource(const StepModel& step) {
  const SourceTraits& traits = TraitsOf(step);
  if (!traits.engine || !traits.member_order) {
    return Not(
        "an engine flattens its parameters in an order that only DeepSpeed's own saves tell, and "
        "this step is of another form");
  }
  if (step.layout.pp > 1 || step.layout.naming == Naming::kPipe) {
    return Not("the source is a PipelineModule, whose stages have optimizers of their own");
  }
  for (const Parameter& parameter : step.parameters) {
    if (!ExpertOf(parameter.name)) continue;
    return Fail(
        Error{ErrorCode::kUnsupported, "DeepSpeed's own experts lie in groups and files of theirs"}
            .OfParameter(parameter.name)
            .Needing(kUniversal));
  }
  if (step.groups.empty()) return Not("the step has no optimizer");
  return {};
}

// Checks the part that each tensor-parallel rank's engine holds.
Status CheckCuts(const ShownState& shown) {
  const StepModel& step = shown.step();
  const Layout& layout = shown.layout();
  if (layout.tp > 1 && step.layout.tp == 1) {
    return Not("the source's engine cut no parameter, and nothing tells how one of tp", layout.tp,
               " does");
  }
  CKPT_RETURN_IF_ERROR(CheckLayout(step, layout));
  for (const Parameter& parameter : step.parameters) {
    if (layout.tp == 1 || !IsOfModel(parameter)) continue;
    const auto unknown = [&](std::string_view why) {
      return Fail(Error{ErrorCode::kUnsupported, std::string(why)}
                      .OfParameter(parameter.name)
                      .Needing(kUniversal));
    };
    if (parameter.source_pattern && layout.tp != step.layout.tp) {
      return unknown(
          "the source's engine cut it by rules of its own, of which nothing tells what they are at "
          "another tp");
    }
    if (parameter.stacked_experts > 0 || parameter.expert) {
      return unknown("nothing tells how an engine cuts experts over tensor-parallel ranks");
    }
    CKPT_ASSIGN_OR_RETURN(const auto local, LocalOf(step, layout, RankCoordinate{}, parameter));
    for (const Piece& piece : local->pieces) {
      if (piece.scale == 1.0) continue;
      return unknown("it is stored as a multiple, and nothing tells how its states scale with it");
    }
  }
  return {};
}

// A state is one number for a group, or has the elements of all its parameters.
Status CheckNumbers(const ShownState& shown) {
  const StepModel& step = shown.step();
  for (const ShownGroup& group : shown.groups()) {
    for (const auto& [kind, index] : group.kinds) {
      if (kind == "step") continue;
      const Atom& first = step.atom(index);
      for (const ParameterIndex member : group.members) {
        const auto found = step.FindAtom(member, kind);
        if (!found) continue;
        const Atom& other = step.atom(*found);
        const bool number = first.relation == Relation::kScalar;
        const bool same = other.relation == first.relation &&
                          (!number || other.source.inline_bytes == first.source.inline_bytes);
        if (same) continue;
        return Fail(
            Error{ErrorCode::kUnsupported,
                  StrCat("its '", kind, "' is not that of '", step.parameter(first.parameter).name,
                         "', but an engine has one for their group")}
                .OfParameter(step.parameter(member).name));
      }
    }
  }
  return {};
}

// torch puts the file's settings of a group in the place of the engine's.
Status CheckGroups(const ShownState& shown) {
  for (size_t g = 0; g < shown.groups().size(); ++g) {
    const ShownGroup& group = shown.groups()[g];
    const auto name = [&] {
      return group.members.empty() ? "?" : shown.step().parameter(group.members[0]).name;
    };
    if (group.recorded == nullptr) {
      return Not("'", name(), "' is in no group of the source's optimizer");
    }
    if (group.recorded->number) {
      return Not("group ", *group.recorded->number, " of the optimizer ('", name(),
                 "') has other hyper-parameters on one rank than on another");
    }
    CKPT_ASSIGN_OR_RETURN(const PickleTree tree, RecordedHyperParameters(*group.recorded));
    const PickleRef dict = RootOf(tree);
    if (dict.size() == 0) {
      return Not("group ", g, " ('", name(),
                 "', ...) has no hyper-parameters, as in an elastic save, and an engine would lose "
                 "its own");
    }
    if (dict["use_muon"].Bool().value_or(false)) {
      return Not(
          "group ", g, " ('", name(),
          "', ...) is of DeepSpeed's Muon, whose momentum a rank keeps for whole parameters");
    }
  }
  return {};
}

// The loss scale of an fp16 engine is in the file of ZeRO 3, which does without in no other way.
Status CheckScale(const ShownState& shown) {
  const StepModel& step = shown.step();
  if (shown.layout().zero != 3) return {};
  const bool known = step.FindDocument(kLossScaler) != nullptr && !ScalesAnew(shown);
  for (uint32_t i = 0; i < step.parameters.size() && !known; ++i) {
    const auto& weight = shown.FindWeight(ParameterIndex{i});
    if (step.parameters[i].role != Role::kTrainable || !weight) continue;
    if (weight->dtype != DType::kF16) continue;
    return Not(
        "an fp16 engine at ZeRO 3 takes its loss scale from the files, and the source has "
        "none");
  }
  return {};
}

Result<EngineSettings> SettingsOf(const StepModel& step) {
  CKPT_ASSIGN_OR_RETURN(const auto settings, EngineSettingsOf(step));
  if (!settings) {
    return Not(
        "the step does not have the ds_config, which would say how its engine laid out partitions "
        "(round_robin_gradients, sub_group_size)");
  }
  if (!settings->sub_group_size) {
    return Not("sub_group_size of the ds_config is not a number of elements");
  }
  return *settings;
}

// The engines that deal out the parameters of each group.
struct Dealing {
  bool source = false;
  bool target = false;
};

Dealing DealingOf(const ShownState& shown, const EngineSettings& settings, bool bf16) {
  if (!settings.deals) return {};
  const StepModel& step = shown.step();
  const uint32_t stage = shown.layout().zero;
  // BF16_Optimizer never deals (engine.py _do_optimizer_sanity_check); its files lack zero_stage.
  const bool plain = stage == 1 && bf16 && settings.wide_gradients && !settings.offloads;
  const bool flat = step.layout.zero == 1 || step.layout.zero == 2;
  return {flat && step.FindDocument(kZeroStage) != nullptr, stage < 3 && !plain};
}

Result<std::vector<ParameterIndex>> OrderOf(const ShownState& shown, const ShownGroup& group,
                                            const Dealing& dealing) {
  std::vector<ParameterIndex> members = group.members;
  if (dealing.source) {
    if (members != group.recorded->parameters) {
      return Not("round_robin_gradients dealt out parameters that are not trained");
    }
    members = Undealt(members, shown.step().layout.dp);
  }
  return dealing.target ? Dealt(members, shown.layout().dp) : std::move(members);
}

// A line on the engines that take another order and cannot tell.
std::string OtherOrder(const Dealing& dealing) {
  constexpr std::string_view kSilent = "takes other parameters' states and says nothing";
  if (dealing.target) {
    return StrCat(
        "an order of parameters for an engine without round_robin_gradients, which the "
        "source's configuration has: such an engine ",
        kSilent);
  }
  return StrCat(
      "an order of parameters for an engine whose gradients are not added up in fp32: the "
      "source's configuration has round_robin_gradients, which BF16_Optimizer alone "
      "ignores; another engine ",
      kSilent);
}

}  // namespace

std::vector<ParameterIndex> Dealt(const std::vector<ParameterIndex>& members, uint32_t ranks) {
  std::vector<ParameterIndex> out;
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = rank; i < members.size(); i += ranks) out.push_back(members[i]);
  }
  return out;
}

std::vector<ParameterIndex> Undealt(const std::vector<ParameterIndex>& members, uint32_t ranks) {
  std::vector<ParameterIndex> out(members.size());
  size_t at = 0;
  for (size_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = rank; i < members.size(); i += ranks) out[i] = members[at++];
  }
  return out;
}

Result<TargetEngine> TargetEngineOf(const ShownState& shown) {
  const StepModel& step = shown.step();
  const Layout& layout = shown.layout();
  CKPT_RETURN_IF_ERROR(CheckSource(step));
  CKPT_RETURN_IF_ERROR(CheckWords(layout, step.layout));
  CKPT_RETURN_IF_ERROR(CheckCuts(shown));
  CKPT_RETURN_IF_ERROR(CheckGroups(shown));
  CKPT_RETURN_IF_ERROR(CheckDemands(shown, kNative, layout));
  CKPT_RETURN_IF_ERROR(CheckNumbers(shown));
  CKPT_RETURN_IF_ERROR(CheckScale(shown));
  CKPT_ASSIGN_OR_RETURN(const EngineSettings settings, SettingsOf(step));
  TargetEngine out{layout.zero, layout.dp, layout.tp};
  out.bf16 = layout.dtype ? *layout.dtype == DType::kBF16 : settings.bf16;
  out.aligns = settings.aligns;
  out.sub_group_size = *settings.sub_group_size;
  const Dealing dealing = DealingOf(shown, settings, out.bf16);
  for (const ShownGroup& group : shown.groups()) {
    CKPT_ASSIGN_OR_RETURN(auto members, OrderOf(shown, group, dealing));
    out.groups.push_back(std::move(members));
  }
  if (settings.deals && layout.zero < 3) out.others.push_back(OtherOrder(dealing));
  return out;
}

}  // namespace ckptfs::deepspeed
