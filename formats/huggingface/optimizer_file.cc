// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/optimizer_file.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "formats/deepspeed/state_names.h"

namespace ckptfs::huggingface {
namespace {

using deepspeed::HyperGroup;
using deepspeed::NamedShape;
using deepspeed::PartitionStates;

// Trainer's and accelerate's; what is of a second optimizer or model has a number.
constexpr std::array<std::string_view, 2> kNames = {"optimizer.pt", "optimizer.bin"};
constexpr std::array<std::string_view, 4> kSecond = {"optimizer_1.bin", "model_1.safetensors",
                                                     "pytorch_model_1.bin", "model_1.safetensors.index.json"};
constexpr std::string_view kLightning = "optimizer_states";

// States that are as large as their parameter in every optimizer of torch.
constexpr std::array<std::string_view, 5> kWhole = {"exp_avg", "exp_avg_sq", "momentum_buffer",
                                                    "square_avg", "sum"};

// The numbers of states whose keys are names: in the order of the groups.
Status NumberNames(PickleRef groups, OptimizerFile& out, std::map<std::string, int64_t>& numbers) {
  for (size_t g = 0; g < out.groups.size(); ++g) {
    const PickleRef members = groups.at(g)["params"];
    for (size_t i = 0; i < out.groups[g].members.size(); ++i) {
      const auto name = members.at(i).String();
      if (!name) continue;
      const auto number = static_cast<int64_t>(numbers.size());
      if (!numbers.emplace(*name, number).second) {
        return Refuse("'", *name, "' is twice in the optimizer's groups");
      }
      out.groups[g].members[i] = number;
    }
  }
  return {};
}

Status ReadNames(PickleRef groups, OptimizerFile& out) {
  for (size_t g = 0; g < out.groups.size(); ++g) {
    out.names.emplace_back();
    const PickleRef given = groups.at(g)["param_names"];
    const PickleRef members = groups.at(g)["params"];
    for (size_t i = 0; i < out.groups[g].members.size(); ++i) {
      const auto key = members.at(i).String();
      const auto name = key ? key : given && given.IsSequence() ? given.at(i).String() : key;
      if (name) out.names.back().emplace_back(*name);
    }
    if (out.names.back().size() != out.groups[g].members.size()) out.names.back().clear();
  }
  return {};
}

// The shape of the parameter that a state is of, if it has one that tells.
std::optional<Shape> ShapeOf(const OptimizerFile& optimizer, int64_t member) {
  const auto state = optimizer.states.find(member);
  if (state == optimizer.states.end()) return std::nullopt;
  for (const NamedTensor& entry : state->second.flat) {
    const bool whole = std::find(kWhole.begin(), kWhole.end(), entry.name) != kWhole.end();
    if (whole) return entry.tensor.shape();
  }
  return std::nullopt;
}

// Each state that of the only parameter of its shape.
Result<std::vector<std::vector<std::string>>> OnlyOnesOfTheirShape(
    const std::vector<std::vector<std::optional<Shape>>>& groups,
    const std::vector<NamedShape>& parameters) {
  std::map<Shape, std::vector<const std::string*>> by_shape;
  for (const NamedShape& parameter : parameters) {
    by_shape[parameter.shape].push_back(&parameter.name);
  }
  std::vector<std::vector<std::string>> out;
  std::set<Shape> used;
  for (const auto& group : groups) {
    out.emplace_back();
    for (const std::optional<Shape>& shape : group) {
      if (!shape)
        return Fail(ErrorCode::kUnsupported, "a state has no shape that would tell whose it is");
      const auto found = by_shape.find(*shape);
      if (found == by_shape.end() || !used.insert(*shape).second) {
        return Fail(ErrorCode::kUnsupported, StrCat("no parameter of shape ", ShapeToString(*shape),
                                                    " is left for a state"));
      }
      if (found->second.size() > 1) {
        return Fail(ErrorCode::kUnsupported,
                    StrCat("nothing there tells the states of '", *found->second[0], "' and '",
                           *found->second[1], "' apart, which have one shape"));
      }
      out.back().push_back(*found->second[0]);
    }
  }
  return out;
}

// What the file says, checked.
Status CheckGiven(const OptimizerFile& optimizer, const std::vector<NamedShape>& parameters) {
  std::map<std::string_view, const Shape*> shapes;
  for (const NamedShape& parameter : parameters) shapes.emplace(parameter.name, &parameter.shape);
  std::set<std::string_view> seen;
  for (size_t g = 0; g < optimizer.names.size(); ++g) {
    for (size_t i = 0; i < optimizer.names[g].size(); ++i) {
      const std::string& name = optimizer.names[g][i];
      const auto found = shapes.find(name);
      const auto shape = ShapeOf(optimizer, optimizer.groups[g].members[i]);
      const bool fits = found != shapes.end() && (!shape || *shape == *found->second);
      if (fits && seen.insert(name).second) continue;
      return Fail(ErrorCode::kUnsupported,
                  StrCat("the optimizer's '", name, "' is not a parameter of the model",
                         found == shapes.end() ? "" : " of the state's shape"));
    }
  }
  return {};
}

}  // namespace

std::string OptimizerFileAmong(const std::vector<std::string>& names) {
  const auto has = [&](std::string_view name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (std::ranges::any_of(kSecond, has)) return "";
  const auto name = std::ranges::find_if(kNames, has);
  return name == kNames.end() ? "" : std::string(*name);
}

bool IsOptimizerFile(std::string_view name) {
  return std::ranges::find(kNames, name) != kNames.end();
}

PickleRef OptimizerDictOf(PickleRef root) {
  if (root["state"] && root["param_groups"]) return root;
  const PickleRef several = root[kLightning];
  const bool one = several && several.IsSequence() && several.size() == 1;
  return one && several.at(0)["param_groups"] ? several.at(0) : PickleRef();
}

Result<OptimizerFile> ReadOptimizerFile(PickleRef dict, const TorchFile& file, BlobIndex blob) {
  OptimizerFile out;
  const PickleRef groups = dict["param_groups"];
  CKPT_ASSIGN_OR_RETURN(out.groups, deepspeed::ReadHyperGroups(groups));
  std::map<std::string, int64_t> numbers;
  CKPT_RETURN_IF_ERROR(NumberNames(groups, out, numbers));
  CKPT_RETURN_IF_ERROR(ReadNames(groups, out));
  const PickleRef states = dict["state"];
  if (!states.IsDict()) return Refuse("'state' is not a dict");
  std::set<int64_t> members;
  for (const HyperGroup& group : out.groups) {
    members.insert(group.members.begin(), group.members.end());
  }
  for (const auto& [key, value] : states.Items()) {
    auto number = key.Int();
    if (const auto name = key.String()) {
      const auto known = numbers.find(std::string(*name));
      if (known != numbers.end()) number = known->second;
    }
    if (!number || !members.contains(*number)) {
      return Refuse("an optimizer state belongs to no parameter of 'param_groups'");
    }
    CKPT_ASSIGN_OR_RETURN(PartitionStates state, deepspeed::ReadStateDict(value, file, blob));
    out.states.emplace(*number, std::move(state));
  }
  return out;
}

Result<std::vector<std::vector<std::string>>> NamesOfMembers(
    const OptimizerFile& optimizer, const std::vector<NamedShape>& parameters,
    ParameterOrder order) {
  bool given = !optimizer.groups.empty();
  std::vector<std::vector<std::optional<Shape>>> shapes;
  for (size_t g = 0; g < optimizer.groups.size(); ++g) {
    const std::vector<int64_t>& members = optimizer.groups[g].members;
    given = given && optimizer.names[g].size() == members.size();
    shapes.emplace_back();
    for (const int64_t member : members) shapes.back().push_back(ShapeOf(optimizer, member));
  }
  if (given) {
    CKPT_RETURN_IF_ERROR(CheckGiven(optimizer, parameters));
    return optimizer.names;
  }
  if (order == ParameterOrder::kUnknown) return OnlyOnesOfTheirShape(shapes, parameters);
  auto matched = deepspeed::MatchStates(parameters, shapes);
  if (!matched || order == ParameterOrder::kGiven) return matched;
  // Optimizers are given sorted names, too (a set of decayed ones).
  std::vector<NamedShape> sorted = parameters;
  std::ranges::sort(sorted, {}, &NamedShape::name);
  const auto other = deepspeed::MatchStates(sorted, shapes);
  if (other && *other != *matched) {
    return Fail(ErrorCode::kUnsupported,
                "the order of the model and that of the sorted names both fit the states' shapes");
  }
  return matched;
}

}  // namespace ckptfs::huggingface
