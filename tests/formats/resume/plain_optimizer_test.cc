// SPDX-License-Identifier: Apache-2.0

#include "formats/resume/plain_optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "formats/deepspeed/document_keys.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "tests/conformance/tiny_step.h"

namespace ckptfs {
namespace {

using ::testing::HasSubstr;

TinyStepOptions TwoGroups() {
  TinyStepOptions options;
  options.groups = 2;
  options.lazy_state = true;
  return options;
}

// The atom whose elements a state is.
AtomIndex AtomOf(const ArchiveContent& content, PickleRef state) {
  const TensorNode* tensor = state.Tensor();
  const ArchiveStorage& storage = content.storages.at(std::stoul(tensor->storage_key));
  const SegmentBody& body = storage.parts.empty() ? storage.body : storage.parts[0].second;
  return std::get<AtomSegment>(body).atom;
}

void SetConfig(StepModel& step, bool dealt) {
  PickleBuilder builder;
  const NodeId key = builder.String("round_robin_gradients");
  const NodeId zero = builder.Dict({{key, builder.Bool(dealt)}});
  const NodeId root = builder.Dict({{builder.String("zero_optimization"), zero}});
  std::erase_if(step.documents, [](const Document& d) { return d.key == deepspeed::kDsConfig; });
  step.documents.push_back({std::string(deepspeed::kDsConfig),
                            "",
                            PrintPickle(std::move(builder).Finish(root)).value(),
                            {}});
  step.BuildIndex();
}

Result<ArchiveContent> Make(const StepModel& step) {
  return PlainOptimizer(*ShownState::Of(std::make_shared<const StepModel>(step), Layout{}));
}

std::string Refusal(const StepModel& step) {
  const auto made = Make(step);
  return made ? "none" : made.error().message;
}

TEST(PlainOptimizerTest, NumbersTheMembersOfEachGroupInItsOrder) {
  TinyStep step(TwoGroups());
  for (Group& group : step.model().groups) {  // not the model's
    std::reverse(group.parameters.begin(), group.parameters.end());
  }
  const auto content = Make(step.model());
  ASSERT_TRUE(content) << content.error().message;
  const PickleRef root = RootOf(content->tree);
  ASSERT_EQ(root["param_groups"].size(), 2u);
  int64_t number = 0;
  size_t without = 0;
  for (size_t g = 0; g < 2; ++g) {
    const PickleRef group = root["param_groups"].at(g);
    EXPECT_TRUE(group["lr"] && group["weight_decay"]);
    const auto& members = step.model().groups[g].parameters;
    ASSERT_EQ(group["params"].size(), members.size());
    for (size_t i = 0; i < members.size(); ++i, ++number) {
      EXPECT_EQ(group["params"].at(i).Int(), number);
      const PickleRef state = root["state"].AtInt(number);
      const auto moment = step.model().FindAtom(members[i], "exp_avg");
      ASSERT_EQ(bool(state), moment.has_value());
      without += !moment;
      if (!moment) continue;
      EXPECT_EQ(AtomOf(*content, state["exp_avg"]), *moment);
      EXPECT_EQ(AtomOf(*content, state["exp_avg_sq"]),
                *step.model().FindAtom(members[i], "exp_avg_sq"));
      EXPECT_TRUE(state["step"].Tensor());
      EXPECT_FALSE(state["master"] || state["weight"]);
    }
  }
  EXPECT_EQ(without, 1u);  // as torch has none of a parameter that never had a gradient
}

TEST(PlainOptimizerTest, AStepThatIsANumberBecomesATensor) {
  TinyStepOptions options;
  options.python_step = true;
  TinyStep step(options);
  const auto content = Make(step.model());
  ASSERT_TRUE(content) << content.error().message;
  const TensorNode* counted = RootOf(content->tree)["state"].AtInt(0)["step"].Tensor();
  ASSERT_NE(counted, nullptr);
  EXPECT_TRUE(counted->shape.empty());
  EXPECT_EQ(counted->dtype, DType::kF32);
}

TEST(PlainOptimizerTest, RefusesWhatIsNotCertain) {
  TinyStep step(TwoGroups());
  StepModel& model = step.model();
  EXPECT_EQ(Refusal(model), "none");
  model.layout.zero = 2;
  EXPECT_THAT(Refusal(model), HasSubstr("does not have the ds_config"));
  SetConfig(model, true);
  EXPECT_THAT(Refusal(model), HasSubstr("round_robin_gradients of the ds_config"));
  PickleBuilder builder;  // older engines kept the name of the file
  const NodeId name = builder.String("ds_config.json");
  model.documents.back().pickle = PrintPickle(std::move(builder).Finish(name)).value();
  EXPECT_THAT(Refusal(model), HasSubstr("does not have the ds_config"));
  SetConfig(model, false);
  EXPECT_EQ(Refusal(model), "none");
  model.layout.tp = 2;
  EXPECT_THAT(Refusal(model), HasSubstr("model-parallel rank"));
  model.layout.tp = 1;
  model.framework = "deepspeed_universal";
  EXPECT_THAT(Refusal(model), HasSubstr("in which order"));
  model.framework = "deepspeed";
  model.groups[1].hyper_parameters.clear();
  EXPECT_THAT(Refusal(model), HasSubstr("group 1: the step does not have its learning rate"));
}

TEST(PlainOptimizerTest, RefusesWhatHasNoPlaceInIt) {
  TinyStepOptions options;
  options.experts = 4;
  EXPECT_THAT(Refusal(TinyStep(options).model()), HasSubstr("experts groups of their own"));
  TinyStep step(TwoGroups());
  for (Atom& atom : step.model().atoms) {
    if (atom.kind == "exp_avg_sq") atom.relation = Relation::kReduced;
  }
  EXPECT_THAT(Refusal(step.model()), HasSubstr("state 'exp_avg_sq' of"));
  TinyStep weights(TwoGroups());
  weights.model().groups.clear();
  EXPECT_THAT(Refusal(weights.model()), HasSubstr("no optimizer"));
}

}  // namespace
}  // namespace ckptfs
