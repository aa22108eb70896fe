// SPDX-License-Identifier: Apache-2.0
#include "formats/dcp/view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "formats/dcp/metadata_writer.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle_writer.h"
#include "tests/conformance/tiny_step.h"

namespace ckptfs {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::Not;

Layout LayoutOf(std::string_view text) { return Layout::Parse(text).value(); }

std::set<std::string> KeysOf(const StepModel& step, std::string_view layout) {
  const auto view =
      DcpFormat().Open(ShownState::Of(std::make_shared<const StepModel>(step), LayoutOf(layout)));
  EXPECT_TRUE(view) << (view ? "" : view.error().message);
  const Plan plan = (*view)->MakePlan("dcp/.metadata").value();
  std::string bytes;
  for (const Segment& segment : plan.segments()) {
    const auto& rendered = std::get<RenderedSegment>(segment.body);
    bytes += (*rendered.renderer)(rendered.piece).value();
  }
  const ParsedPickle parsed = ParsePickle(bytes).value();
  std::set<std::string> keys;
  for (const auto& item : RootOf(parsed.tree)["state_dict_metadata"].Items()) {
    keys.emplace(item.first.String().value());
  }
  EXPECT_EQ(RootOf(parsed.tree)["planner_data"].Items().size(), keys.size());
  return keys;
}

TinyStepOptions TwoGroups() {
  TinyStepOptions options;
  options.groups = 2;
  options.lazy_state = true;
  return options;
}

TEST(DcpViewTest, KeysAreThoseOfGetStateDict) {
  const TinyStep step(TwoGroups());
  const auto keys = KeysOf(step.model(), "dp2");
  for (const char* key :
       {"model.embed.weight", "model.head.weight", "model.layers.0.out.bias", "model.layers.0.freq",
        "optim.state.layers.0.qkv.weight.exp_avg", "optim.state.embed.weight.step",
        "optim.param_groups.0.lr", "optim.param_groups.1.betas", "optim.param_groups.1.params"}) {
    EXPECT_THAT(keys, Contains(key));
  }
  EXPECT_THAT(keys, Not(Contains("optim.state.layers.0.out.bias.exp_avg")));  // frozen
  EXPECT_THAT(keys, Not(Contains("optim.state.embed.weight.master")));
  // Never had a gradient: where Adam starts it.
  EXPECT_THAT(keys, Contains("optim.state.layers.0.norm.weight.exp_avg"));
}

TEST(DcpViewTest, OtherKeyShapesByToken) {
  const TinyStep step(TwoGroups());
  const auto flat = KeysOf(step.model(), "flat");
  EXPECT_THAT(flat, Contains("optim.state.embed.weight.exp_avg"));
  EXPECT_THAT(flat, Contains("optim.param_groups.embed.weight.lr"));
  EXPECT_THAT(flat, Not(Contains("optim.param_groups.0.lr")));
  const auto titan = KeysOf(step.model(), "titan");
  EXPECT_THAT(titan, Contains("embed.weight"));
  EXPECT_THAT(titan, Contains("optimizer.state.embed.weight.exp_avg"));
  EXPECT_THAT(titan, Contains("optimizer.param_groups.embed.weight.lr"));
  const auto accelerate = KeysOf(step.model(), "accelerate");
  EXPECT_THAT(accelerate, Contains("model.embed.weight"));
  EXPECT_THAT(accelerate, Contains("optimizer.param_groups.1.lr"));
  EXPECT_EQ(KeysOf(step.model(), "nested"), KeysOf(step.model(), "tp1"));
}

TEST(DcpViewTest, AStepThatAGroupCountsIsEachParameters) {
  const TinyStep tiny((TinyStepOptions()));
  StepModel step = tiny.model();
  std::erase_if(step.atoms, [](const Atom& atom) { return atom.kind == "step"; });
  step.index.reset();
  EXPECT_THAT(KeysOf(step, "tp1"), Not(Contains("optim.state.embed.weight.step")));
  PickleBuilder builder;
  const NodeId root = builder.Dict({{builder.String("step"), builder.Int(7)}});
  step.groups[0].hyper_parameters = PrintPickle(std::move(builder).Finish(root)).value();
  const auto keys = KeysOf(step, "tp1");
  EXPECT_THAT(keys, Contains("optim.state.embed.weight.step"));
  EXPECT_THAT(keys, Contains("optim.param_groups.0.step"));
}

TEST(DcpViewTest, AGroupsStepIsShownWhereItsParametersAgree) {
  const TinyStep tiny((TinyStepOptions()));
  EXPECT_THAT(KeysOf(tiny.model(), "tp1"), Contains("optim.param_groups.0.step"));
  StepModel step = tiny.model();
  for (Atom& atom : step.atoms) {
    if (atom.kind != "step") continue;
    const float other = 6;
    atom.source.inline_bytes.assign(reinterpret_cast<const char*>(&other), sizeof(other));
    break;
  }
  EXPECT_THAT(KeysOf(step, "tp1"), Not(Contains("optim.param_groups.0.step")));
}

TEST(DcpViewTest, TwoValuesOfOneKeyAreRefused) {
  const TinyStep tiny((TinyStepOptions()));
  StepModel step = tiny.model();
  step.aliases.push_back({"temperature", ParameterIndex{0}});
  const auto view =
      DcpFormat().Open(ShownState::Of(std::make_shared<const StepModel>(step), LayoutOf("tp1")));
  ASSERT_FALSE(view);
  EXPECT_EQ(view.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(view.error().message, HasSubstr("'model.temperature'"));
}

TEST(DcpViewTest, NamesThatPickleCannotSayAreRefused) {
  const TinyStep tiny((TinyStepOptions()));
  StepModel step = tiny.model();
  step.aliases.push_back({"\xff", ParameterIndex{0}});
  const auto view =
      DcpFormat().Open(ShownState::Of(std::make_shared<const StepModel>(step), LayoutOf("tp1")));
  ASSERT_FALSE(view);
  EXPECT_THAT(view.error().message, HasSubstr("UTF-8"));
}

Document DocumentOf(const std::string& key, const std::function<NodeId(PickleBuilder&)>& value) {
  PickleBuilder builder;
  const NodeId root = value(builder);
  return {key, "", PrintPickle(std::move(builder).Finish(root)).value(), {}};
}

TEST(DcpViewTest, ValuesOfClassesAreNotShown) {
  const TinyStep tiny((TinyStepOptions()));
  StepModel step = tiny.model();
  step.documents.push_back(DocumentOf("client/seen", [](PickleBuilder& b) {
    const NodeId call = b.Reduce(b.Global("os", "system"), b.Tuple({b.String("true")}));
    return b.Dict({{b.String("bad"), call},
                   {b.String("worse"), b.List({b.Int(1), call})},
                   {b.String("good"), b.Int(1)},
                   {b.Int(7), b.String("seven")},
                   {b.Tuple({}), b.Int(1)}});
  }));
  const auto keys = KeysOf(step, "tp1");
  EXPECT_THAT(keys, testing::IsSupersetOf({"seen.good", "seen.7", "iteration", "global_steps"}));
  EXPECT_THAT(keys, Not(Contains("seen.bad")));
  EXPECT_THAT(keys, Not(Contains("seen.worse")));
  EXPECT_THAT(keys, Not(Contains("client/seen.good")));
}

TEST(DcpViewTest, ADcpStepHasItsOwnKeys) {
  const TinyStep tiny((TinyStepOptions()));
  StepModel step = tiny.model();
  step.framework = "dcp";
  const auto keys_of = [&](const char* model, const char* optimizer, bool flat) {
    step.facts.keys = KeyShape{.model = model, .optimizer = optimizer, .flat = flat};
    return KeysOf(step, "dp2");
  };
  const auto deep = keys_of("app.model", "app.optimizer", false);
  EXPECT_THAT(deep, testing::IsSupersetOf({"app.model.embed.weight",
                                           "app.optimizer.state.embed.weight.exp_avg",
                                           "app.optimizer.param_groups.0.lr"}));
  const auto bare = keys_of("", "optimizer", true);
  EXPECT_THAT(bare, testing::IsSupersetOf({"embed.weight", "optimizer.state.embed.weight.exp_avg",
                                           "optimizer.param_groups.embed.weight.lr"}));
  EXPECT_THAT(KeysOf(step, "dp2_nested"), Contains("model.embed.weight"));
}

TEST(DcpViewTest, ZerosBeginNoStateThatItsOptimizerMayHaveLost) {
  TinyStepOptions options;
  options.lazy_state = true;
  const TinyStep tiny(options);
  const std::string begun = "optim.state.layers.0.norm.weight.exp_avg";
  const auto keys_of = [&](std::optional<std::string> optimizer) {
    StepModel step = tiny.model();
    step.left_out = {{LeftOutPart::kOptimizer, "'a'", "it is a list", "", 0, std::move(optimizer)}};
    return KeysOf(step, "tp1");
  };
  EXPECT_THAT(KeysOf(tiny.model(), "tp1"), Contains(begun));
  EXPECT_THAT(keys_of("another"), Contains(begun));
  EXPECT_THAT(keys_of(""), Not(Contains(begun)));
  EXPECT_THAT(keys_of(std::nullopt), Not(Contains(begun)));
}

TEST(DcpViewTest, DeepDocumentsAreOneValue) {
  const TinyStep tiny((TinyStepOptions()));
  StepModel step = tiny.model();
  step.documents.push_back(DocumentOf("client/deep", [](PickleBuilder& b) {
    NodeId value = b.Int(1);
    for (int i = 0; i < 5000; ++i) value = b.Dict({{b.String("d"), value}});
    return value;
  }));
  const auto keys = KeysOf(step, "tp1");
  const auto deep = std::find_if(keys.begin(), keys.end(),
                                 [](const std::string& key) { return key.starts_with("deep.d"); });
  ASSERT_NE(deep, keys.end());
  EXPECT_LT(deep->size(), 200u);
}

// DeepSpeed's FusedAdam has no words for what torch's AdamW asks for.
TEST(DcpViewTest, WhatAnAdamMustBeIsImplied) {
  const TinyStep tiny((TinyStepOptions()));
  StepModel step = tiny.model();
  const auto with = [&](double decay, bool corrected) {
    PickleBuilder builder;
    const NodeId betas = builder.Tuple({builder.Float(0.9), builder.Float(0.95)});
    const NodeId root =
        builder.Dict({{builder.String("lr"), builder.Float(1)},
                      {builder.String("betas"), betas},
                      {builder.String("eps"), builder.Float(1e-8)},
                      {builder.String("weight_decay"), builder.Float(decay)},
                      {builder.String("bias_correction"), builder.Bool(corrected)}});
    step.groups[0].hyper_parameters = PrintPickle(std::move(builder).Finish(root)).value();
    return KeysOf(step, "tp1");
  };
  const std::string amsgrad = "optim.param_groups.0.amsgrad";
  const std::string decoupled = "optim.param_groups.0.decoupled_weight_decay";
  EXPECT_THAT(with(0, true), testing::IsSupersetOf({amsgrad, decoupled}));
  EXPECT_THAT(with(0.1, true), Contains(amsgrad));
  EXPECT_THAT(with(0.1, true), Not(Contains(decoupled)));  // nobody says which Adam
  EXPECT_THAT(with(0, false), Not(Contains(amsgrad)));
  step.documents.push_back({"ds_config", "", "", {}});
  PickleBuilder builder;
  const NodeId optimizer = builder.Dict({{builder.String("type"), builder.String("AdamW")}});
  const NodeId config = builder.Dict({{builder.String("optimizer"), optimizer}});
  step.documents.back().pickle = PrintPickle(std::move(builder).Finish(config)).value();
  EXPECT_THAT(with(0.1, true), Contains(decoupled));
  step.framework = "torch";
  EXPECT_THAT(with(0.1, true), Not(Contains(amsgrad)));
}

TEST(DcpViewTest, SmallTensorsStayWhole) {
  const TinyStep step((TinyStepOptions()));
  const auto view = DcpFormat().Open(ShownState::Of(step.shared(), LayoutOf("tp2_dp4"))).value();
  EXPECT_EQ(view->List("dcp")->size(), 2u);  // .metadata and one data file
  const auto cut = DcpFormat(64).Open(ShownState::Of(step.shared(), LayoutOf("tp2_dp4"))).value();
  EXPECT_EQ(cut->List("dcp")->size(), 9u);
}

// 1T parameters with their moments on 1,024 ranks: 3.5 million boxes.
std::vector<dcp::Entry> Huge() {
  std::vector<dcp::Entry> entries;
  for (const char* kind : {"weight", "exp_avg", "exp_avg_sq"}) {
    for (int layer = 0; layer < 288; ++layer) {
      for (const auto& [name, rows] : {std::pair("qkv", 24576u), std::pair("o", 8192u),
                                       std::pair("gate_up", 262144u), std::pair("odd", 32003u)}) {
        dcp::Entry entry;
        entry.key = StrCat(kind, ".model.layers.", layer, ".", name);
        entry.path = {{entry.key, {}}};
        entry.tensor = true;
        entry.shape = {rows, 8192};
        entry.body = dcp::Zeros{};
        entries.push_back(std::move(entry));
      }
    }
  }
  return entries;
}

TEST(DcpMetadataTest, MillionsOfChunksAreNotRenderedToBeListed) {
  auto built = dcp::DirectoryIndex::Build(Huge(), {1, 1024});
  ASSERT_TRUE(built) << built.error().message;
  const auto index = std::make_shared<const dcp::DirectoryIndex>(*std::move(built));
  EXPECT_LT(index->MemoryBytes(), 8u << 20);
  const uint64_t size = dcp::MetadataSize(*index);
  EXPECT_GT(size, uint64_t{350} << 20);
  const Plan plan = dcp::MetadataPlan(index);
  EXPECT_EQ(plan.size(), size);
  EXPECT_LT(plan.MemoryBytes(), 4u << 20);
  const auto& segments = plan.segments();
  for (size_t i = 0; i < segments.size(); i += 97) {
    const auto& rendered = std::get<RenderedSegment>(segments[i].body);
    ASSERT_EQ((*rendered.renderer)(rendered.piece)->size(), segments[i].length());
    EXPECT_LT(segments[i].length(), 128u << 10);
  }
}

TEST(DcpMetadataTest, ABoxIsWhereTheIndexSays) {
  const Shape odd = {7, 300};
  std::vector<dcp::Entry> entries;
  for (const char* key : {"a", "b"}) {
    dcp::Entry entry;
    entry.key = key;
    entry.path = {{key, {}}};
    entry.tensor = true;
    entry.shape = odd;
    entry.body = dcp::Zeros{};
    entries.push_back(std::move(entry));
  }
  entries.push_back(entries[0]);
  entries.back().key = "small";
  entries.back().shape = {};
  const auto index = dcp::DirectoryIndex::Build(std::move(entries), {1, 8}, 64).value();
  std::vector<uint64_t> sizes(8, 0);
  for (size_t e = 0; e < 3; ++e) {
    for (uint64_t i = 0; i < index.CutOf(e).count(); ++i) {
      const auto place = index.PlaceOf(e, i);
      EXPECT_EQ(place.offset, sizes[place.rank]) << e << " " << i;
      sizes[place.rank] += place.length;
    }
  }
  for (uint64_t rank = 0; rank < 8; ++rank) EXPECT_EQ(index.FileSize(rank), sizes[rank]) << rank;
  EXPECT_EQ(index.FileSize(7), 0u);  // seven rows
}

TEST(DcpMetadataTest, MoreBoxesThanAnyReaderHoldsAreRefused) {
  std::vector<dcp::Entry> entries = Huge();
  const auto index = dcp::DirectoryIndex::Build(std::move(entries), {1, 32768});
  ASSERT_FALSE(index);
  EXPECT_THAT(index.error().message, HasSubstr("a smaller mesh"));
}

}  // namespace
}  // namespace ckptfs
