// SPDX-License-Identifier: Apache-2.0
#include "formats/huggingface/optimizer_file.h"

#include <gmock/gmock.h>

#include "core/io/memory_root.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs::huggingface {
namespace {

using deepspeed::NamedShape;
using testing::HasSubstr;
using Names = std::vector<std::vector<std::string>>;

// What torch saves of an optimizer whose groups have states of these shapes, by number or by
// the names in `keys`, and with `names` as param_names.
class Saved {
 public:
  explicit Saved(const std::vector<std::vector<Shape>>& groups, std::vector<std::string> keys = {},
                 std::vector<std::string> names = {}, int64_t more = 0) {
    PickleBuilder& pickle = archive_.pickle();
    std::vector<std::pair<NodeId, NodeId>> states;
    std::vector<NodeId> group_nodes;
    size_t number = 0;
    for (const std::vector<Shape>& group : groups) {
      std::vector<NodeId> members, given;
      for (const Shape& shape : group) {
        const NodeId key =
            keys.empty() ? pickle.Int(static_cast<int64_t>(number)) : pickle.String(keys[number]);
        const uint64_t bytes = *ElementCount(shape) * 4;
        const NodeId tensor = *archive_.Tensor(DType::kF32, shape, {{bytes, ZeroSegment{bytes}}});
        states.emplace_back(key, pickle.Dict({{pickle.String("exp_avg"), tensor}}));
        members.push_back(key);
        if (!names.empty()) given.push_back(pickle.String(names[number]));
        ++number;
      }
      std::vector<std::pair<NodeId, NodeId>> items{{pickle.String("lr"), pickle.Int(1)},
                                                   {pickle.String("params"), pickle.List(members)}};
      if (!given.empty()) items.emplace_back(pickle.String("param_names"), pickle.List(given));
      group_nodes.push_back(pickle.Dict(items));
    }
    if (more != 0) {
      states.emplace_back(pickle.Int(more), pickle.Dict({{pickle.String("step"), pickle.Int(1)}}));
    }
    const NodeId state = pickle.Dict(states);
    root_ = pickle.Dict({{pickle.String("state"), state},
                         {pickle.String("param_groups"), pickle.List(group_nodes)}});
  }

  Result<OptimizerFile> Read() && {
    const NodeId root = root_;
    Plan plan = *std::move(archive_).Finish(root).MakePlan("archive");
    auto bytes = std::make_shared<std::string>();
    for (const Segment& segment : plan.segments()) {
      const auto* literal = std::get_if<LiteralSegment>(&segment.body);
      const size_t length = segment.end - segment.begin;
      *bytes += literal != nullptr ? *literal->bytes : std::string(length, '\0');
    }
    const auto memory = std::make_shared<MemoryRoot>("/memory");
    CKPT_RETURN_IF_ERROR(
        memory->Add("optimizer.pt", {std::as_bytes(std::span(*bytes))}, bytes, {0600, 1, 2}));
    CKPT_ASSIGN_OR_RETURN(auto opened, memory->Open("optimizer.pt"));
    CKPT_ASSIGN_OR_RETURN(const TorchFile file, TorchFile::Open(std::move(opened)));
    return ReadOptimizerFile(OptimizerDictOf(file.root()), file, BlobIndex{});
  }

 private:
  ArchiveBuilder archive_;
  NodeId root_{};
};

Result<Names> NamesOf(Saved saved, const std::vector<NamedShape>& parameters, bool ordered,
                      bool given = false) {
  CKPT_ASSIGN_OR_RETURN(const OptimizerFile read, std::move(saved).Read());
  return NamesOfMembers(read, parameters,
                        given     ? ParameterOrder::kGiven
                        : ordered ? ParameterOrder::kModel
                                  : ParameterOrder::kUnknown);
}

const std::vector<NamedShape> kModel = {
    {"a.weight", {2, 3}}, {"a.bias", {2}}, {"b.weight", {4, 2}}, {"b.bias", {4}}};
const std::vector<NamedShape> kTwins = {
    {"q.weight", {2, 2}}, {"q.bias", {2}}, {"o.weight", {2, 2}}};

TEST(OptimizerFileTest, ShapesOfOnesOwnTellWithoutAnOrder) {
  EXPECT_EQ(*NamesOf(Saved({{{4, 2}, {2, 3}}, {{4}, {2}}}), kModel, false),
            (Names{{"b.weight", "a.weight"}, {"b.bias", "a.bias"}}));
}

TEST(OptimizerFileTest, TwoOfOneShapeAreNotGuessed) {
  const auto names = NamesOf(Saved({{{2, 2}, {2}, {2, 2}}}), kTwins, false);
  ASSERT_FALSE(names);
  EXPECT_EQ(names.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(names.error().message, HasSubstr("'q.weight' and 'o.weight'"));
}

TEST(OptimizerFileTest, TheModelsOrderTellsWhereThereIsOneWay) {
  const std::vector<NamedShape> sorted = {{"a.weight", {2, 2}}, {"b.bias", {2}}, {"c.weight", {2, 2}}};
  EXPECT_EQ(*NamesOf(Saved({{{2, 2}, {2}, {2, 2}}}), sorted, true),
            (Names{{"a.weight", "b.bias", "c.weight"}}));
  EXPECT_EQ(*NamesOf(Saved({{{2, 2}, {2, 2}}, {{2}}}), sorted, true),
            (Names{{"a.weight", "c.weight"}, {"b.bias"}}));
  // One of the twins is frozen, or each is in a group of its own: which, nothing says.
  EXPECT_FALSE(
      NamesOf(Saved({{{2, 2}, {2}}, {}}), {{"q", {2, 2}}, {"o", {2, 2}}, {"x", {2}}}, true));
  EXPECT_FALSE(
      NamesOf(Saved({{{2, 2}}, {{2, 2}, {2}}}), {{"q", {2, 2}}, {"o", {2, 2}}, {"x", {2}}}, true));
}

// An optimizer that is given a sorted set of names is as common as one that is given the model's.
TEST(OptimizerFileTest, SortedNamesThatFitAsWellAreNotRuledOut) {
  for (const auto& shapes : {std::vector<std::vector<Shape>>{{{2, 2}, {2}, {2, 2}}}, {{{2, 2}, {2, 2}}, {{2}}}}) {
    const auto names = NamesOf(Saved(shapes), kTwins, true);
    ASSERT_FALSE(names);
    EXPECT_THAT(names.error().message, HasSubstr("sorted names"));
  }
  EXPECT_EQ(*NamesOf(Saved({{{2, 2}, {2}, {2, 2}}}), kTwins, true, true),
            (Names{{"q.weight", "q.bias", "o.weight"}}));  // as a user says
}

TEST(OptimizerFileTest, NamesThatTheFileSaysCount) {
  const Names wanted{{"o.weight", "q.bias"}, {"q.weight"}};
  const std::vector<std::vector<Shape>> shapes = {{{2, 2}, {2}}, {{2, 2}}};
  const std::vector<std::string> names = {"o.weight", "q.bias", "q.weight"};
  EXPECT_EQ(*NamesOf(Saved(shapes, {}, names), kTwins, false), wanted);
  EXPECT_EQ(*NamesOf(Saved(shapes, names), kTwins, false), wanted);  // FSDP's whole state
}

TEST(OptimizerFileTest, NamesThatAreNotTheModelsAreRefused) {
  const std::vector<std::vector<Shape>> shapes = {{{2, 2}, {2}}};
  for (const std::vector<std::string>& names : {std::vector<std::string>{"q.weight", "gone.bias"},
                                                {"q.bias", "q.weight"},
                                                {"q.weight", "q.weight"}}) {
    const auto given = NamesOf(Saved(shapes, {}, names), kTwins, false);
    ASSERT_FALSE(given) << names[0];
    EXPECT_THAT(given.error().message, HasSubstr("is not a parameter of the model"));
  }
  EXPECT_FALSE(NamesOf(Saved(shapes, {"q.weight", "q.weight"}), kTwins, false));
}

TEST(OptimizerFileTest, AStateOfNobodyIsRefused) {
  const auto read = Saved({{{2, 2}}}, {}, {}, 7).Read();
  ASSERT_FALSE(read);
  EXPECT_THAT(read.error().message, HasSubstr("belongs to no parameter"));
}

TEST(OptimizerFileTest, TheFileAmongOthers) {
  EXPECT_EQ(OptimizerFileAmong({"model.safetensors", "optimizer.pt"}), "optimizer.pt");
  EXPECT_EQ(OptimizerFileAmong({"optimizer.bin", "random_states_0.pkl"}), "optimizer.bin");
  EXPECT_EQ(OptimizerFileAmong({"optimizer.bin", "optimizer_1.bin"}), "");
  EXPECT_EQ(OptimizerFileAmong({"model.safetensors", "model_1.safetensors", "optimizer.bin"}), "");
  EXPECT_EQ(OptimizerFileAmong({"optimizer.bin", "pytorch_model.bin", "pytorch_model_1.bin"}), "");
  EXPECT_EQ(OptimizerFileAmong({"scheduler.pt"}), "");
}

}  // namespace
}  // namespace ckptfs::huggingface
