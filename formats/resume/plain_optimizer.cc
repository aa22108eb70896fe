// SPDX-License-Identifier: Apache-2.0

#include "formats/resume/plain_optimizer.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/model/step_counts.h"
#include "core/view/reader_demands.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/optimizer/hyper_parameters.h"
#include "formats/optimizer/member_order.h"
#include "formats/tools/source_traits.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

using Items = std::vector<std::pair<NodeId, NodeId>>;

template <class... Words>
tl::unexpected<Error> Refuse(const Words&... words) {
  return Fail(ErrorCode::kUnsupported, StrCat(words...));
}

// Only an engine's step is resumed without an engine by numbers.
Status CheckOrder(const StepModel& step) {
  if (TraitsOf(step).member_order) return CheckMemberOrder(step);
  return Refuse(
      "a universal directory does not say in which order the optimizer had its "
      "parameters");
}

// load_state_dict of torch.optim.Optimizer takes any state, and compares nothing.
constexpr ReaderDemands kTorchOptimizer = {
    .reader = "a torch optimizer of a training without DeepSpeed",
    .remedy = "dcp/ has every state",
    .own_shapes = false,  // their parts of the source's ranks would have to be put together
    .optimizers = false,
};

class Renderer {
 public:
  explicit Renderer(const ShownState& shown) : shown_(shown), step_(shown.step()) {}

  Result<ArchiveContent> Render() && {
    std::vector<NodeId> groups;
    for (size_t g = 0; g < step_.groups.size(); ++g) {
      auto group = AddGroup(shown_.groups()[g]);
      if (!group) return Fail(std::move(group).error().WithContext(StrCat("group ", g)));
      groups.push_back(*group);
    }
    PickleBuilder& pickle = archive_.pickle();
    const NodeId state = pickle.Dict(state_);
    const NodeId root =
        pickle.Dict({{pickle.String("state"), state},
                     {pickle.String("param_groups"), pickle.List(std::move(groups))}});
    return std::move(archive_).Finish(root);
  }

 private:
  // torch's optimizers count their steps in a 0-d fp32 tensor.
  Result<NodeId> Step(double number) {
    CKPT_ASSIGN_OR_RETURN(std::string count, StepBytes(number));
    auto bytes = std::make_shared<const std::string>(std::move(count));
    return archive_.Tensor(DType::kF32, {}, {{bytes->size(), LiteralSegment{std::move(bytes)}}});
  }

  Result<NodeId> State(AtomIndex index) {
    const Atom& atom = step_.atom(index);
    const auto number = NumberOf(atom);
    if (atom.kind == "step" && number) return Step(*number);
    if (atom.relation == Relation::kScalar) return archive_.Scalar(step_, index);
    return archive_.WholeAtom(step_, index, atom.dtype);
  }

  // A parameter that never had a gradient has no state, as in torch's own.
  Status AddStates(ParameterIndex parameter, std::optional<double> group_step) {
    const StatesByKind states = shown_.StatesOf(parameter);
    const int64_t number = next_++;
    if (states.empty()) return {};
    PickleBuilder& pickle = archive_.pickle();
    Items items;
    if (group_step && !states.contains("step")) {
      CKPT_ASSIGN_OR_RETURN(const NodeId value, Step(*group_step));
      items.emplace_back(pickle.String("step"), value);
    }
    for (const auto& [kind, atom] : states) {
      CKPT_ASSIGN_OR_RETURN(const NodeId value, State(atom));
      items.emplace_back(pickle.String(kind), value);
    }
    state_.emplace_back(pickle.Int(number), pickle.Dict(items));
    return {};
  }

  Result<NodeId> AddGroup(const ShownGroup& group) {
    if (group.recorded->hyper_parameters.empty()) {
      return Refuse("the step does not have its learning rate and other hyper-parameters");
    }
    CKPT_ASSIGN_OR_RETURN(const PickleTree tree,
                          TorchHyperParameters(shown_, group, /*trusted=*/false));
    const PickleRef dict = RootOf(tree);
    PickleBuilder& pickle = archive_.pickle();
    Items items;
    for (const auto& [key, value] : dict.Items()) {
      if (key.String() == "step") continue;  // of each parameter
      const NodeId name = pickle.Copy(key);
      items.emplace_back(name, pickle.Copy(value));
    }
    std::vector<NodeId> members;
    for (const ParameterIndex p : group.recorded->parameters) {
      members.push_back(pickle.Int(next_));
      CKPT_RETURN_IF_ERROR(AddStates(p, dict["step"].Number()));
    }
    items.emplace_back(pickle.String("params"), pickle.List(std::move(members)));
    return pickle.Dict(items);
  }

  const ShownState& shown_;
  const StepModel& step_;
  ArchiveBuilder archive_;
  Items state_;
  int64_t next_ = 0;
};

}  // namespace

Result<ArchiveContent> PlainOptimizer(const ShownState& shown) {
  CKPT_RETURN_IF_ERROR(CheckOrder(shown.step()));
  CKPT_RETURN_IF_ERROR(CheckDemands(shown, kTorchOptimizer, Layout{}));
  return Renderer(shown).Render();
}

}  // namespace ckptfs
