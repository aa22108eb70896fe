// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/job/job_state.h"

#include <algorithm>
#include <array>
#include <bit>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/state/model_config.h"
#include "formats/megatron/args_config.h"
#include "formats/megatron/group_rule.h"
#include "formats/tools/model_files.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::megatron {
namespace {

// The tensors that have a state, by their numbers.
std::vector<size_t> TrainedOf(const StateDict& dict) {
  std::set<std::string_view> names;
  for (const StateDict::State& state : dict.states) {
    names.insert(std::get<std::string>(state.owner));
  }
  std::vector<size_t> out;
  for (size_t i = 0; i < dict.tensors.size(); ++i) {
    if (names.contains(dict.tensors[i].name)) out.push_back(i);
  }
  return out;
}

// Counts are of groups (or of all), and a state's of its parameter.
void AddSteps(const std::vector<CommonGroup>& groups, std::optional<int64_t> common_step,
              const std::vector<std::vector<size_t>>& members, StepModel& header, StateDict& dict) {
  std::set<std::string> counted;
  for (const StateDict::State& state : dict.states) {
    if (state.kind == "step") counted.insert(std::get<std::string>(state.owner));
  }
  const auto add = [&](size_t tensor, int64_t step) {
    const std::string& name = dict.tensors[tensor].name;
    if (!counted.contains(name)) dict.states.push_back(StepState(name, step));
  };
  std::set<int64_t> counts;
  for (const CommonGroup& group : groups) {
    if (group.step) counts.insert(*group.step);
  }
  if (common_step) counts.insert(*common_step);
  if (counts.size() == 1) {
    for (const size_t i : TrainedOf(dict)) add(i, *counts.begin());
    return;
  }
  for (size_t g = 0; g < members.size(); ++g) {
    for (const size_t i : members[g]) {
      if (groups[g].step) add(i, *groups[g].step);
    }
  }
  if (counts.empty() || !members.empty()) return;
  LeaveOut(header, {LeftOutPart::kOptimizer, "the counts of steps",
                    "groups have different ones, and nothing says which parameters "
                    "are in which",
                    ""});
}

}  // namespace

bool NormsDecay(const CommonState& job) {
  const FamilyVariables arguments = job.Arguments();
  const auto said = arguments.find(std::string(kDecayOfNorms));
  return said != arguments.end() && said->second != 0;
}

std::optional<std::vector<std::vector<size_t>>> MembersOf(
    const std::vector<CommonGroup>& groups, const std::vector<StateDict::Tensor>& tensors,
    bool norms_decay) {
  const bool apart = std::ranges::any_of(groups, &CommonGroup::experts);
  std::vector<std::vector<size_t>> members(groups.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool experts = apart && IsExperts(tensors[i].name);
    std::vector<size_t> all, fit;
    for (size_t g = 0; g < groups.size(); ++g) {
      if (groups[g].experts != experts) continue;
      all.push_back(g);
      const bool decays = Decays(tensors[i].name, tensors[i].shape, norms_decay);
      if (groups[g].decays == decays) fit.push_back(g);
    }
    if (all.size() == 1) fit = all;  // it must be in one
    if (fit.size() != 1) return std::nullopt;
    members[fit.front()].push_back(i);
  }
  return members;
}

StateDict::State StepState(std::string parameter, int64_t step) {
  StateDict::State out{0, std::move(parameter), "step"};
  out.scalar = [step]() -> Result<std::optional<ScalarValue>> {
    const auto bytes = std::bit_cast<std::array<char, sizeof(step)>>(step);
    return ScalarValue{DType::kI64, {}, std::string(bytes.data(), bytes.size()), true};
  };
  return out;
}

Status AddGroups(const std::vector<CommonGroup>& groups, std::optional<int64_t> common_step,
                 const CommonState& job, StepModel& header, StateDict& dict) {
  if (groups.empty() || dict.states.empty()) return {};
  const std::vector<size_t> numbers = TrainedOf(dict);  // what has no state is not trained
  std::vector<StateDict::Tensor> tensors;
  for (const size_t i : numbers) {
    tensors.push_back({dict.tensors[i].name, dict.tensors[i].dtype, dict.tensors[i].shape, {}});
  }
  auto members = MembersOf(groups, tensors, NormsDecay(job));
  if (!members) {
    LeaveOut(header, {LeftOutPart::kOptimizer, "the hyper-parameters of the optimizer's groups",
                      "nothing says which parameters are in which of its groups, and Megatron's "
                      "own rule (weight decay for all but biases and vectors) leaves several ways",
                      ""});
    AddSteps(groups, common_step, {}, header, dict);
    return {};
  }
  if (std::ranges::count_if(*members, [](const auto& group) { return !group.empty(); }) > 1) {
    header.notes.push_back(
        "the optimizer's groups have the parameters that Megatron's own rule gives them (weight "
        "decay for all but biases and vectors): the save does not say which each has");
  }
  for (auto& group : *members) {
    for (size_t& i : group) i = numbers[i];
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    StateDict::Group added{0, "", {}};
    CKPT_ASSIGN_OR_RETURN(added.hyper_parameters, HyperParametersOf(groups[g].dict));
    for (const size_t i : (*members)[g]) {
      added.members.push_back({dict.tensors[i].name, std::nullopt});
    }
    if (!added.members.empty()) dict.groups.push_back(std::move(added));
  }
  AddSteps(groups, common_step, *members, header, dict);
  return {};
}

Status AddDocuments(const CommonState& common,
                    const std::function<bool(std::string_view key)>& is_other, StepModel& header) {
  for (const auto& [key, value] : common.root().Items()) {
    const auto name = key.String();
    if (!name || is_other(*name)) continue;
    auto document = MakeDocument(StrCat("client/", *name), "", value, common.file(), common.blob());
    if (!document) {
      const ErrorCode code = document.error().code;
      if (code != ErrorCode::kInvalid && code != ErrorCode::kUnsupported) {
        return Fail(std::move(document).error());
      }
      LeaveOut(header, {LeftOutPart::kDocument, StrCat("'", *name, "'"),
                        std::move(document).error().message, ""});
      continue;
    }
    header.documents.push_back(*std::move(document));
  }
  return {};
}

void CarryConfigOf(const CommonState& common, const std::vector<StateDict::Tensor>& tensors,
                   Assembler& assembler) {
  MadeConfig made = ConfigOfArguments(common.args(), tensors);
  if (!made.json.empty()) return CarryConfig(assembler, std::move(made.json));
  assembler.header().notes.push_back(
      StrCat("no config.json can be made of the job's arguments: ", made.why,
             "; huggingface/ needs one (`--hf-config DIR` gives one)"));
}

std::optional<Layout> LayoutOf(const CommonState& common) {
  const auto degree = [&](std::string_view name) {
    const auto number = common.Argument(name);
    return number && *number > 0 && *number < (1 << 16) ? static_cast<uint32_t>(*number) : 1;
  };
  Layout layout;
  layout.tp = degree("tensor_model_parallel_size");
  layout.pp = degree("pipeline_model_parallel_size");
  layout.dp = degree("data_parallel_size");
  layout.cp = degree("context_parallel_size");
  layout.ep = degree("expert_model_parallel_size");
  layout.etp = layout.ep > 1 ? degree("expert_tensor_parallel_size") : 1;
  const auto legal = Layout::ParseExactly(layout.ToString());
  return legal ? std::optional(*legal) : std::nullopt;
}

}  // namespace ckptfs::megatron
