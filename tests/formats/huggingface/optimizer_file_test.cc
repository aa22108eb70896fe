// SPDX-License-Identifier: Apache-2.0
#include "formats/huggingface/optimizer_file.h"

#include <gmock/gmock.h>

#include "core/io/memory_root.h"
#include "formats/deepspeed/torch_optimizer.h"
#include "formats/settle/member_owners.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs::huggingface {
namespace {

using testing::HasSubstr;
using Names = std::vector<std::vector<std::string>>;

// A file of an optimizer as torch saves it: its groups have states of these shapes, by number or by
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

  Result<deepspeed::TorchOptimizer> Read() && {
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
    return deepspeed::ReadTorchOptimizer(file.root(), file, BlobIndex{});
  }

 private:
  ArchiveBuilder archive_;
  NodeId root_{};
};

const std::vector<OwnableParameter> kTwins = {
    {"q.weight", {2, 2}}, {"q.bias", {2}}, {"o.weight", {2, 2}}};

// Names of the members that are taken, and what is left out.
struct Owned {
  std::optional<Names> names;
  std::vector<LeftOut> left_out;
};

Owned OwnersOf(const deepspeed::TorchOptimizer& read, const std::vector<std::string>& order = {}) {
  StateDict dict;
  for (const OwnableParameter& one : kTwins) {
    dict.tensors.push_back({one.name, DType::kF32, one.shape, {}});
  }
  dict.optimizers.push_back({.label = "", .what = "the optimizer in optimizer.pt", .shown = ""});
  deepspeed::AddTo(read, 0, dict);
  SourceOptions options;
  options.parameter_order = order;
  StepModel told;
  const MemberOwners owners = OwnersOfMembers(dict, options, told).value();
  Owned out{std::nullopt, std::move(told.left_out)};
  if (!owners.numbers[0]) return out;
  out.names.emplace();
  for (const std::vector<size_t>& group : owners.groups) {
    out.names->emplace_back();
    for (const size_t p : group) out.names->back().push_back(kTwins[p].name);
  }
  return out;
}

TEST(OptimizerFileTest, NumbersThatNothingProvesLeaveTheOptimizerOut) {
  const Owned owned = OwnersOf(Saved({{{2, 2}, {2}, {2, 2}}}).Read().value());
  EXPECT_FALSE(owned.names);
  ASSERT_EQ(owned.left_out.size(), 1u);
  EXPECT_EQ(owned.left_out[0].part, LeftOutPart::kOptimizer);
  EXPECT_EQ(owned.left_out[0].what, "the optimizer in optimizer.pt");
  EXPECT_THAT(owned.left_out[0].why, HasSubstr("'q.weight' and which to 'o.weight'"));
  EXPECT_THAT(owned.left_out[0].remedy, HasSubstr("--parameter-order"));
  EXPECT_EQ(
      OwnersOf(Saved({{{2, 2}, {2}, {2, 2}}}).Read().value(), {"o.weight", "q.bias", "q.weight"})
          .names,
      (Names{{"o.weight", "q.bias", "q.weight"}}));
}

TEST(OptimizerFileTest, NamesThatTheFileSaysCount) {
  const Names wanted{{"o.weight", "q.bias"}, {"q.weight"}};
  const std::vector<std::vector<Shape>> shapes = {{{2, 2}, {2}}, {{2, 2}}};
  const std::vector<std::string> names = {"o.weight", "q.bias", "q.weight"};
  EXPECT_EQ(OwnersOf(Saved(shapes, {}, names).Read().value()).names, wanted);
  EXPECT_EQ(OwnersOf(Saved(shapes, names).Read().value()).names, wanted);  // FSDP's whole state
}

TEST(OptimizerFileTest, NamesThatAreNotTheModelsAreLeftOutAlone) {
  const std::vector<std::vector<Shape>> shapes = {{{2, 2}, {2}}};
  const Owned gone = OwnersOf(Saved(shapes, {}, {"q.weight", "gone.bias"}).Read().value());
  EXPECT_EQ(gone.names, (Names{{"q.weight"}}));
  ASSERT_EQ(gone.left_out.size(), 1u);
  EXPECT_EQ(gone.left_out[0].what, "the optimizer's 'gone.bias'");
  for (const bool keys : {false, true}) {
    const std::vector<std::string> twice = {"q.weight", "q.weight"};
    const Owned owned =
        OwnersOf((keys ? Saved(shapes, twice) : Saved(shapes, {}, twice)).Read().value());
    EXPECT_FALSE(owned.names);
    ASSERT_EQ(owned.left_out.size(), 1u);
    EXPECT_EQ(owned.left_out[0].more, 1u);
  }
}

TEST(OptimizerFileTest, AStateOfNobodyIsLeftOutAlone) {
  const auto read = Saved({{{2, 2}}}, {}, {}, 7).Read();
  ASSERT_TRUE(read);
  EXPECT_EQ(read->states.size(), 1u);
  ASSERT_EQ(read->left_out.size(), 1u);
  EXPECT_EQ(read->left_out[0].what, "the optimizer's state '7'");
  EXPECT_THAT(read->left_out[0].why, HasSubstr("belongs to no parameter"));
}

TEST(OptimizerFileTest, TheFileAmongOthers) {
  EXPECT_EQ(OptimizerFileAmong({"model.safetensors", "optimizer.pt"}), "optimizer.pt");
  EXPECT_EQ(OptimizerFileAmong({"optimizer.bin", "random_states_0.pkl"}), "optimizer.bin");
  EXPECT_EQ(OptimizerFileAmong({"optimizer.bin", "optimizer_1.bin"}), "");
  EXPECT_EQ(OptimizerFileAmong({"optimizer.bin", "optimizer.pt"}), "");
  EXPECT_EQ(OptimizerFileAmong({"model.safetensors", "model_1.safetensors", "optimizer.bin"}), "");
  EXPECT_EQ(OptimizerFileAmong({"optimizer.bin", "pytorch_model.bin", "pytorch_model_1.bin"}), "");
  EXPECT_EQ(OptimizerFileAmong({"scheduler.pt"}), "");
}

}  // namespace
}  // namespace ckptfs::huggingface
