// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/torch_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "core/base/strings.h"
#include "formats/huggingface/optimizer_choice.h"
#include "formats/torch/pickle_writer.h"

namespace ckptfs::huggingface {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Values of a torch file, made bottom up.
class Maker {
 public:
  using Items = std::vector<std::pair<std::string, NodeId>>;

  NodeId Tensor(const Shape& shape, DType dtype = DType::kF32) {
    TensorNode node;
    node.dtype = dtype;
    node.storage_key = std::to_string(keys_++);
    node.storage_elements = ElementCount(shape).value();
    node.shape = shape;
    node.strides = RowMajorStrides(shape);
    return builder_.Tensor(node);
  }
  NodeId Dict(const Items& items) {
    std::vector<std::pair<NodeId, NodeId>> nodes;
    for (const auto& [key, value] : items) {
      const NodeId name = builder_.String(key);
      nodes.emplace_back(name, value);
    }
    return builder_.Dict(nodes);
  }
  NodeId Module(const std::string& prefix = "") {
    const NodeId weight = Tensor({8, 4});
    const NodeId bias = Tensor({8});
    return Dict({{prefix + "0.weight", weight}, {prefix + "0.bias", bias}});
  }
  NodeId Optimizer(const std::vector<std::string>& names = {}) {
    std::vector<NodeId> params;
    for (const std::string& name : names) params.push_back(builder_.String(name));
    const NodeId list = builder_.List(std::move(params));
    const NodeId group = Dict({{"params", list}});
    const NodeId groups = builder_.List({group});
    const NodeId state = Dict({});
    return Dict({{"state", state}, {"param_groups", groups}});
  }
  // One group of so many members, mentioned as often.
  NodeId OptimizerOfOneGroup(size_t count) {
    const NodeId name = builder_.String("0.weight");
    const NodeId list = builder_.List(std::vector<NodeId>(count, name));
    const NodeId group = Dict({{"params", list}});
    const NodeId groups = builder_.List(std::vector<NodeId>(count, group));
    const NodeId state = Dict({});
    return Dict({{"state", state}, {"param_groups", groups}});
  }
  NodeId Pickled() {
    const NodeId state = Dict({{"_parameters", Dict({})}, {"_modules", Dict({})}});
    const NodeId cls = builder_.Global("ultralytics.nn.tasks", "DetectionModel");
    const NodeId none = builder_.Tuple({});
    return builder_.Object(cls, none, state);
  }
  PickleBuilder& builder() { return builder_; }
  PickleTree Finish(NodeId root) { return std::move(builder_).Finish(root); }

 private:
  PickleBuilder builder_;
  size_t keys_ = 0;
};

using MakeState = std::function<NodeId(Maker&)>;

PickleTree TreeOf(const MakeState& make) {
  Maker maker;
  const NodeId root = make(maker);
  return maker.Finish(root);
}

std::string Chosen(const MakeState& make, std::string_view asked = "") {
  const PickleTree tree = TreeOf(make);
  const auto model = TorchState(RootOf(tree)).Choose(asked);
  if (!model) return model.error().message;
  std::string out = StrCat("<", model->key, ">");
  for (const auto& [name, value] : model->tensors) out += StrCat(" ", name);
  return out;
}

std::vector<std::string> Beside(const MakeState& make, std::string_view asked = "") {
  const PickleTree tree = TreeOf(make);
  const auto model = TorchState(RootOf(tree)).Choose(asked);
  std::vector<std::string> out;
  for (const auto& part : model ? model->beside : std::vector<TorchState::Part>()) {
    out.push_back(StrCat(part.key, " ", static_cast<int>(part.kind)));
  }
  return out;
}

TEST(TorchStateTest, TheStateDictIsTheModelWhereverItStands) {
  const auto at = [](const std::string& key) -> MakeState {
    return [=](Maker& m) {
      return m.Dict({{"best", m.Tensor({})}, {key, m.Module()}, {"epoch", m.builder().Int(3)}});
    };
  };
  for (const char* key : {"model", "net", "params", "generator"}) {
    EXPECT_EQ(Chosen(at(key)), StrCat("<", key, "> 0.weight 0.bias"));
  }
  EXPECT_EQ(Chosen([](Maker& m) { return m.Module(); }), "<> 0.weight 0.bias");
  EXPECT_EQ(Chosen([](Maker& m) {
              return m.Dict({{"state", m.Dict({{"model", m.Module()}})}});
            }),
            "<state.model> 0.weight 0.bias");
  EXPECT_EQ(Chosen([](Maker& m) {
              return m.builder().List({m.builder().Int(1), m.Module()});
            }),
            "<1> 0.weight 0.bias");
}

// If each mention were looked through, this would take minutes.
TEST(TorchStateTest, AGroupMentionedOftenIsLookedAtOnce) {
  EXPECT_EQ(Chosen([](Maker& m) {
              return m.Dict({{"model", m.Module()}, {"optimizer", m.OptimizerOfOneGroup(50'000)}});
            }),
            "<model> 0.weight 0.bias");
}

TEST(TorchStateTest, WhatStandsBesideIsSplitAroundOptimizersAndModels) {
  const MakeState whole = [](Maker& m) {
    const NodeId inner = m.Dict({{"optimizer", m.Optimizer()}, {"lr", m.builder().Int(1)}});
    return m.Dict(
        {{"model", m.Module()}, {"ema", m.Module()}, {"trainer", inner}, {"args", m.Dict({})}});
  };
  EXPECT_THAT(Beside(whole), ElementsAre("ema 2", "trainer.optimizer 1", "trainer.lr 0", "args 0"));
  EXPECT_THAT(Beside([](Maker& m) {
                const NodeId model = m.Module();
                return m.Dict({{"model", model}, {"state_dict", model}});
              }),
              IsEmpty());
}

TEST(TorchStateTest, AStateThatWasFlattenedIsSplitAtItsFirstWords) {
  const MakeState flat = [](Maker& m) {
    return m.Dict({{"model.0.weight", m.Tensor({8, 4})},
                   {"model.0.bias", m.Tensor({8})},
                   {"optimizer.state.0.exp_avg", m.Tensor({8, 4})}});
  };
  EXPECT_EQ(Chosen(flat), "<model> 0.weight 0.bias");
  EXPECT_THAT(Beside(flat), ElementsAre("optimizer.state.0.exp_avg 0"));
  const MakeState modules = [](Maker& m) {
    return m.Dict({{"model.0.weight", m.Tensor({8, 4})},
                   {"lm_head.weight", m.Tensor({8, 4})},
                   {"optimizer.state.0.exp_avg", m.Tensor({8, 4})}});
  };
  EXPECT_THAT(Chosen(modules), HasSubstr("'model', 'lm_head'"));
}

TEST(TorchStateTest, AnOptimizersWordAloneFlattensNothing) {
  const MakeState part = [](Maker& m) {
    return m.Dict({{"encoder.weight", m.Tensor({8, 4})},
                   {"optimizer.weight", m.Tensor({8, 4})},
                   {"optimizer.bias", m.Tensor({8})}});
  };
  EXPECT_EQ(Chosen(part), "<> encoder.weight optimizer.weight optimizer.bias");
  const MakeState list = [](Maker& m) {
    return m.Dict({{"encoder.weight", m.Tensor({8, 4})},
                   {"optimizers.0.weight", m.Tensor({8, 4})},
                   {"optimizers.0.bias", m.Tensor({8})}});
  };
  EXPECT_EQ(Chosen(list), "<> encoder.weight optimizers.0.weight optimizers.0.bias");
  const MakeState named = [](Maker& m) {
    return m.Dict({{"model.0.weight", m.Tensor({8, 4})},
                   {"model.0.bias", m.Tensor({8})},
                   {"optim.exp_avg.0.weight", m.Tensor({8, 4})},
                   {"optim.step", m.Tensor({})}});
  };
  EXPECT_EQ(Chosen(named), "<model> 0.weight 0.bias");
  const MakeState numbered = [](Maker& m) {
    return m.Dict({{"model.0.weight", m.Tensor({8, 4})},
                   {"model.0.bias", m.Tensor({8})},
                   {"optim.0.exp_avg", m.Tensor({8, 4})},
                   {"optim.0.exp_avg_sq", m.Tensor({8, 4})},
                   {"optim.0.step", m.Tensor({})}});
  };
  EXPECT_EQ(Chosen(numbered), "<model> 0.weight 0.bias");
}

TEST(TorchStateTest, WhatHasAModelsNameIsNotPassedOver) {
  const MakeState numbers = [](Maker& m) {
    const NodeId list = m.builder().List({m.Tensor({8, 4})});
    return m.Dict({{"model", list}, {"head", m.Module()}});
  };
  EXPECT_THAT(Chosen(numbers), HasSubstr("'model' has a model's name"));
  const MakeState plain = [](Maker& m) {
    const NodeId name = m.builder().String("resnet50");
    return m.Dict({{"model", name}, {"head", m.Module()}});
  };
  EXPECT_EQ(Chosen(plain), "<head> 0.weight 0.bias");
}

TEST(TorchStateTest, AUnionIsTakenForWhoAsksAndForAnOptimizersNames) {
  const auto parts = [](const std::vector<std::string>& names) -> MakeState {
    return [=](Maker& m) {
      const NodeId both = m.Dict({{"encoder", m.Module()}, {"decoder", m.Module()}});
      return m.Dict({{"parts", both}, {"optimizer", m.Optimizer(names)}});
    };
  };
  EXPECT_THAT(Chosen(parts({})), HasSubstr("'parts.encoder', 'parts.decoder'"));
  const std::string all = "<parts> encoder.0.weight encoder.0.bias decoder.0.weight decoder.0.bias";
  EXPECT_EQ(Chosen(parts({}), "parts"), all);
  EXPECT_EQ(Chosen(parts({"encoder.0.weight", "decoder.0.weight"})), all);
}

TEST(TorchStateTest, WhatIsNotAModelIsNamed) {
  EXPECT_THAT(Chosen([](Maker& m) {
                return m.Dict({{"model", m.Pickled()}, {"best", m.Tensor({})}});
              }),
              HasSubstr("'model' is a pickled module (ultralytics.nn.tasks.DetectionModel)"));
  EXPECT_THAT(Chosen([](Maker& m) {
                return m.Dict({{"model", m.Pickled()}, {"mean", m.Tensor({3})}});
              }),
              HasSubstr("DetectionModel"));
  EXPECT_THAT(Chosen([](Maker& m) { return m.Tensor({3, 4}); }), HasSubstr("a tensor by itself"));
  EXPECT_THAT(Chosen([](Maker& m) { return m.Optimizer(); }), HasSubstr("is an optimizer's"));
  EXPECT_THAT(Chosen([](Maker& m) {
                return m.Dict({{"epoch", m.builder().Int(1)}});
              }),
              HasSubstr("it holds 'epoch'"));
}

// A pickle may nest and share as it likes.
TEST(TorchStateTest, DeepAndSharedDictsEnd) {
  EXPECT_THAT(Chosen([](Maker& m) {
                NodeId inner = m.Module();
                for (int i = 0; i < 100; ++i) inner = m.Dict({{"a", inner}, {"b", inner}});
                return inner;
              }),
              HasSubstr("not hold a dict of named tensors"));
  const std::string longest(5000, 'x');
  EXPECT_THAT(Chosen([&](Maker& m) {
                return m.Dict({{longest, m.Dict({{longest, m.Module()}})}});
              }),
              HasSubstr("not hold a dict of named tensors"));
}

std::string Optimizers(const MakeState& make, const WeightsFile* weights) {
  const PickleTree tree = TreeOf(make);
  const OptimizerChoice choice = ChooseOptimizer(RootOf(tree), "x.pt", weights);
  if (choice.dict) return "taken";
  std::string out;
  for (const LeftOut& one : choice.left_out)
    out += StrCat(one.what, ": ", one.why, "; ", one.remedy, "\n");
  return out;
}

TEST(OptimizerChoiceTest, TheOnlyOneOfAModelThatIsTrainedIsTaken) {
  WeightsFile weights;
  weights.model = "state_dict";
  const MakeState one = [](Maker& m) { return m.Dict({{"optimizer", m.Optimizer()}}); };
  EXPECT_EQ(Optimizers(one, &weights), "taken");
  EXPECT_EQ(Optimizers([](Maker& m) { return m.Optimizer(); }, nullptr), "taken");
  EXPECT_THAT(Optimizers(
                  [](Maker& m) {
                    return m.Dict({{"a", m.Optimizer()}, {"b", m.Optimizer()}});
                  },
                  &weights),
              HasSubstr("'b': the file has several optimizers"));
  weights.twins = {"critic"};
  EXPECT_THAT(Optimizers(one, &weights), HasSubstr("'critic' has the names and shapes"));
  weights.twins = {"state_dict_ema"};
  EXPECT_EQ(Optimizers(one, &weights), "taken");
  weights.model = "state_dict_ema";
  EXPECT_THAT(Optimizers(one, &weights), HasSubstr("an average, which an optimizer does not "
                                                   "train"));
  EXPECT_EQ(Optimizers([](Maker& m) { return m.Dict({}); }, &weights), "");
  EXPECT_THAT(Optimizers([](Maker& m) { return m.Dict({}); }, nullptr),
              HasSubstr("not hold the state_dict() of an optimizer"));
}

TEST(OptimizerChoiceTest, WhatStandsBesideTheOneInAFileOfItsOwnIsNamed) {
  const PickleTree tree = TreeOf([](Maker& m) {
    return m.Dict({{"base", m.Optimizer()}, {"masks", m.Module()}});
  });
  const OptimizerChoice choice = ChooseOptimizer(RootOf(tree), "optimizer.pt", nullptr);
  EXPECT_TRUE(choice.dict);
  ASSERT_EQ(choice.left_out.size(), 1U);
  EXPECT_EQ(choice.left_out[0].what, "'masks'");
  EXPECT_THAT(choice.left_out[0].why, HasSubstr("beside 'base'"));
}

TEST(OptimizerChoiceTest, AnAverageThatATrainerSavesAsTheModelHasNone) {
  WeightsFile weights;
  weights.model = "state_dict";
  weights.twins = {"current_model_state"};
  const MakeState average = [](Maker& m) {
    return m.Dict({{"state_dict", m.Module()},
                   {"current_model_state", m.Module()},
                   {"optimizer_states", m.builder().List({m.Optimizer()})}});
  };
  EXPECT_THAT(Optimizers(average, &weights), HasSubstr("--model current_model_state"));
  weights.model = "current_model_state";
  weights.twins = {"state_dict"};
  EXPECT_EQ(Optimizers(average, &weights), "taken");
}

}  // namespace
}  // namespace ckptfs::huggingface
