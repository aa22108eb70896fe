// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/state_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/strings.h"

namespace ckptfs::dcp {
namespace {

using testing::ElementsAre;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;

// A state dict as DCP flattens it; paths as its planner saves them, or none.
class State {
 public:
  explicit State(bool paths = true) : paths_(paths) { metadata_.has_paths = paths; }

  State& Tensor(std::vector<std::string> path, const Shape& shape = {4, 4},
                DType dtype = DType::kF32) {
    TensorEntry entry;
    entry.name = Joined(path);
    entry.dtype = dtype;
    entry.shape = shape;
    metadata_.tensors.push_back(std::move(entry));
    metadata_.tensor_paths.push_back(PathOf(path));
    return *this;
  }
  State& Object(std::vector<std::string> path) {
    metadata_.objects.push_back({Joined(path), {}});
    metadata_.object_paths.push_back(PathOf(path));
    return *this;
  }
  // A model of two parameters in the dict at the path.
  State& Module(const std::vector<std::string>& at) {
    for (const char* name : {"0.weight", "0.bias"}) {
      std::vector<std::string> path = at;
      path.emplace_back(name);
      Tensor(std::move(path));
    }
    return *this;
  }
  State& Optimizer(const std::vector<std::string>& at, const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      std::vector<std::string> path = at;
      path.insert(path.end(), {"state", name, "exp_avg"});
      Tensor(std::move(path));
    }
    std::vector<std::string> path = at;
    path.insert(path.end(), {"param_groups", "0", "lr"});
    return Object(std::move(path));
  }

  Result<StateKeys> Read(std::string_view model = "", bool optimizers = true) const {
    return ReadStateKeys(metadata_, optimizers, model);
  }
  // "prefix: names of the weights" and "| names of the states".
  std::string Said(std::string_view model = "", bool optimizers = true) const {
    const auto keys = Read(model, optimizers);
    if (!keys) return keys.error().message;
    std::string out = StrCat("<", keys->model, ">");
    for (const auto& weight : keys->weights) out += StrCat(" ", weight.name);
    for (const auto& state : keys->states)
      out += StrCat(" | ", std::get<std::string>(state.owner), "/", state.kind);
    return out;
  }

 private:
  static std::string Joined(const std::vector<std::string>& path) {
    std::string out;
    for (const std::string& one : path) out += StrCat(out.empty() ? "" : ".", one);
    return out;
  }
  std::vector<PathElement> PathOf(const std::vector<std::string>& path) const {
    std::vector<PathElement> out;
    for (const std::string& one : paths_ ? path : std::vector<std::string>())
      out.push_back({one, false});
    return out;
  }

  const bool paths_;
  DcpMetadata metadata_;
};

const std::vector<std::string> kNames = {"0.weight", "0.bias"};
constexpr const char* kModel = " 0.weight 0.bias";
constexpr const char* kTrained = " 0.weight 0.bias | 0.weight/exp_avg | 0.bias/exp_avg";

TEST(StateKeysTest, ADictOfAnyNameIsTheModel) {
  for (const char* key : {"model", "net", "generator", "transformer", "ema"}) {
    EXPECT_EQ(State().Module({key}).Tensor({"best"}, {}).Object({"step"}).Said(),
              StrCat("<", key, ".>", kModel));
  }
  EXPECT_EQ(State().Module({"a", "b"}).Said(), StrCat("<a.b.>", kModel));
  EXPECT_EQ(State().Module({}).Object({"step"}).Said(), StrCat("<>", kModel));
  EXPECT_EQ(State().Tensor({"rng"}, {16}, DType::kU8).Said(), "<>");
}

TEST(StateKeysTest, AveragesAndOtherModelsAreNotWeights) {
  EXPECT_EQ(State().Module({"ema"}).Module({"model"}).Said(), StrCat("<model.>", kModel));
  EXPECT_EQ(State().Module({"ema", "model"}).Module({}).Said(), StrCat("<>", kModel));
  const auto keys = State().Module({"critic"}).Module({"model"}).Read();
  ASSERT_TRUE(keys);
  EXPECT_THAT(keys->other_models, ElementsAre(Field(&TrainableModule::key, "critic")));
  EXPECT_THAT(State().Module({"actor"}).Module({"critic"}).Said(), HasSubstr("'actor', 'critic'"));
  EXPECT_EQ(State().Module({"actor"}).Module({"critic"}).Said("critic"),
            StrCat("<critic.>", kModel));
  EXPECT_EQ(State().Module({"parts", "a"}).Module({"parts", "b"}).Said("parts"),
            "<parts.> a.0.weight a.0.bias b.0.weight b.0.bias");
}

TEST(StateKeysTest, AnOptimizersNamesTellTheModel) {
  EXPECT_EQ(State().Module({"model"}).Optimizer({"optim"}, kNames).Said(),
            StrCat("<model.>", kTrained));
  EXPECT_EQ(State().Module({}).Optimizer({"optim"}, kNames).Said(), StrCat("<>", kTrained));
  State nested;
  nested.Module({"parts", "a"}).Module({"parts", "b"}).Optimizer({"optim"}, {"a.0.weight"});
  EXPECT_EQ(nested.Said(), "<parts.> a.0.weight a.0.bias b.0.weight b.0.bias | a.0.weight/exp_avg");
}

TEST(StateKeysTest, AnOptimizerIsToldByItsGroupsAsWellAsByAWord) {
  EXPECT_EQ(State().Module({"mine"}).Optimizer({"adam"}, kNames).Said(),
            StrCat("<mine.>", kTrained));
  State without;
  without.Module({"model"}).Tensor({"adam", "state", "0.weight", "exp_avg"});
  ASSERT_EQ(without.Read()->unknown.size(), 1u);
  EXPECT_THAT(without.Read()->unknown[0].why, HasSubstr("nothing before it names an optimizer"));
  EXPECT_EQ(without.Said("", false), StrCat("<model.>", kModel));
}

TEST(StateKeysTest, KeysWithoutPathsAreTheTopsOrAnOptimizersNames) {
  EXPECT_EQ(State(false).Module({"model"}).Said(), "<> model.0.weight model.0.bias");
  State flat(false);
  flat.Module({"model"}).Optimizer({"optim"}, kNames);
  EXPECT_EQ(flat.Said(), StrCat("<model.>", kTrained));
  State own(false);
  own.Module({"model"}).Optimizer({"optim"}, {"model.0.weight"});
  EXPECT_EQ(own.Said(), "<> model.0.weight model.0.bias | model.0.weight/exp_avg");
}

TEST(StateKeysTest, AnAdaptersNameIsOnTheOptimizersSideAlone) {
  State state;
  state.Tensor({"model", "q.lora_A.weight"}).Tensor({"model", "q.lora_B.weight"});
  state.Optimizer({"optimizer"}, {"q.lora_A.own.weight", "q.lora_B.own.weight"});
  EXPECT_EQ(state.Said(),
            "<model.> q.lora_A.weight q.lora_B.weight | q.lora_A.weight/exp_avg | "
            "q.lora_B.weight/exp_avg");
  EXPECT_EQ(state.Read()->adapter, "own");
  // The file has the weights of one adapter; nothing tells which of two.
  state.Optimizer({"optimizer"}, {"q.lora_A.other.weight"});
  ASSERT_EQ(state.Read()->unknown.size(), 3u);
  EXPECT_THAT(state.Read()->unknown[0].why, HasSubstr("a parameter that the model does not have"));
}

// get_optimizer_state_dict(net.body, ...) calls parameters as the body does.
TEST(StateKeysTest, APartOfTheModelThatWasTrainedByItselfHasItsOwnNames) {
  State state;
  state.Tensor({"model", "head.w"}).Tensor({"model", "body.head.w"}).Tensor({"model", "body.x.w"});
  state.Optimizer({"optimizer"}, {"head.w", "x.w"});
  EXPECT_EQ(state.Said(),
            "<model.> head.w body.head.w body.x.w | body.head.w/exp_avg | body.x.w/exp_avg");
  EXPECT_EQ(state.Read()->before.at(""), "body.");
  // Two parts would do.
  state.Tensor({"model", "other.head.w"}).Tensor({"model", "other.x.w"});
  EXPECT_TRUE(state.Read()->before.empty());
}

}  // namespace
}  // namespace ckptfs::dcp
