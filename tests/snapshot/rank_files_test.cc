// SPDX-License-Identifier: Apache-2.0
#include "formats/rank_file/rank_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "core/base/strings.h"
#include "core/io/memory_root.h"
#include "core/state/rank_file.h"
#include "formats/families/shipped.h"
#include "snapshot/trainer/capture.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

// The empty dict, in protocol 2.
const std::string kEmptyDict("\x80\x02}.", 4);
// {"num_attention_heads": 4}
const std::string kArgs("\x80\x02}X\x13\x00\x00\x00num_attention_headsK\x04s.", 31);
const std::string kZeros(1 << 16, '\0');

CapturedTensor StateOf(std::string parameter, std::string kind, Shape shape,
                       DType dtype = DType::kF32) {
  CapturedTensor tensor;
  tensor.parameter = std::move(parameter);
  tensor.kind = std::move(kind);
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  tensor.from = reinterpret_cast<const std::byte*>(kZeros.data());
  return tensor;
}

CapturedTensor Pickle(const std::string& key, const std::string& bytes) {
  CapturedTensor tensor = StateOf("", "", {bytes.size()}, DType::kU8);
  tensor.key = key;
  tensor.from = reinterpret_cast<const std::byte*>(bytes.data());
  return tensor;
}

constexpr const char* kQuery = "model.layers.0.self_attn.q_proj.weight";

// A world of two: rank 0 has the weights, rank 1 the moments.
std::vector<Capture> SampleRanks() {
  std::vector<Capture> ranks(2);
  for (Capture& rank : ranks) rank.step = 7;
  ranks[0].tensors = {StateOf(kQuery, "weight", {8, 4}),
                      StateOf("model.norm.weight", "weight", {4}), Pickle("g", kEmptyDict),
                      Pickle("d", kArgs)};
  ranks[0].parameters = {{kQuery, "trainable"}, {"model.norm.weight", "frozen"}};
  ranks[0].aliases = {{"second", "model.norm.weight"}};
  ranks[0].groups = {{"", {kQuery}, "g"}};
  ranks[0].documents = {{"args", "", "d", {}}};
  ranks[1].tensors = {StateOf(kQuery, "exp_avg", {8, 4}), StateOf(kQuery, "step", {})};
  return ranks;
}

Result<StepModel> ReadFiles(const std::vector<std::string>& files) {
  auto root = std::make_shared<MemoryRoot>("memory");
  std::vector<std::string> paths;
  for (const std::string& file : files) {
    auto bytes = std::make_shared<std::string>(file);
    paths.push_back(StrCat("d/", paths.size()));
    EXPECT_TRUE(root->Add(paths.back(), {std::as_bytes(std::span(*bytes))}, bytes, {}));
  }
  const FamilySet families = *ShippedFamilies();
  SourceOptions options;
  options.families = &families;
  return ReadRankFiles(root, paths, options);
}

Result<StepModel> Read(std::vector<Capture> ranks, uint32_t world = 2) {
  std::vector<std::string> files;
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    auto file = CaptureFile::Make(std::move(ranks[rank]), rank, world);
    EXPECT_TRUE(file) << file.error().message;
    std::string& bytes = files.emplace_back(file->bytes(), '\0');
    for (const bool lazy : {false, true}) {
      for (const CopyRun& run : file->Runs(0, file->bytes(), lazy)) {
        std::memcpy(bytes.data() + run.at, run.from, run.bytes);
      }
    }
  }
  return ReadFiles(files);
}

TEST(RankFilesTest, TheRanksFilesMakeOneModel) {
  const auto model = Read(SampleRanks());
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->id, "7");
  EXPECT_EQ(model->iteration, 7u);
  EXPECT_EQ(model->layout.dp, 2u);
  EXPECT_EQ(model->family, "llama");
  ASSERT_EQ(model->parameters.size(), 2u);
  EXPECT_EQ(model->parameters[0].name, kQuery);
  EXPECT_EQ(model->parameters[0].pattern.kind, PatternKind::kShard);
  EXPECT_EQ(model->parameters[0].pattern.cuts[0].unit, 2u);  // 8 rows, 4 heads
  EXPECT_EQ(model->parameters[1].role, Role::kFrozen);
  EXPECT_EQ(model->atoms.size(), 4u);
  const auto step = model->FindAtom(ParameterIndex{0}, "step");
  ASSERT_TRUE(step);
  EXPECT_EQ(model->atom(*step).relation, Relation::kScalar);
  EXPECT_EQ(model->atom(*step).source.inline_bytes, std::string(4, '\0'));
  EXPECT_TRUE(model->FindParameter("second"));
  EXPECT_EQ(model->groups.size(), 1u);
  EXPECT_NE(model->FindDocument("args"), nullptr);
}

TEST(RankFilesTest, AModelWithoutFloatsIsOne) {
  std::vector<Capture> ranks(1);
  ranks[0].tensors = {StateOf("seen", "weight", {1}, DType::kI64)};
  ranks[0].parameters = {{"seen", "buffer"}};
  const auto model = Read(std::move(ranks), 1);
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_FALSE(model->model_dtype);
}

std::string Refusal(const std::function<void(std::vector<Capture>&)>& edit, uint32_t world = 2) {
  std::vector<Capture> ranks = SampleRanks();
  edit(ranks);
  const auto model = Read(std::move(ranks), world);
  return model ? "none" : model.error().message;
}

TEST(RankFilesTest, WhatIsMissingDoubleOrContradictoryIsRefused) {
  EXPECT_THAT(Refusal([](auto& r) { r[0].tensors.erase(r[0].tensors.begin()); }),
              HasSubstr("the ranks do not hold the weight"));
  EXPECT_THAT(Refusal([](auto& r) { r[1].tensors.push_back(r[0].tensors[0]); }),
              HasSubstr("two ranks hold"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].tensors.push_back(r[1].tensors[0]); }),
              HasSubstr("held twice"));
  EXPECT_THAT(Refusal([](auto& r) { r[1].step = 8; }), HasSubstr("to step 8"));
  EXPECT_THAT(Refusal([](auto& r) { r.pop_back(); }), HasSubstr("belongs to rank 0 of 2, not to "
                                                                "rank 0 of 1"));
  EXPECT_THAT(Refusal([](auto&) {}, 3), HasSubstr("to rank 0 of 3"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].parameters[0].role = "queen"; }),
              HasSubstr("'queen' is not a role"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].parameters.pop_back(); }), HasSubstr("no rank declares"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].parameters.push_back(r[0].parameters[0]); }),
              HasSubstr("two parameters"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].groups[0].parameters = {"x"}; }), HasSubstr("'x'"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].groups[0].pickle = "d"; }), HasSubstr("mentioned twice"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].documents.clear(); }),
              HasSubstr("nothing says what tensor 'd' is"));
  EXPECT_THAT(Refusal([](auto& r) { r[0].documents[0].tensors = {"nowhere"}; }),
              HasSubstr("'nowhere'"));
  EXPECT_THAT(Refusal([](auto& r) {
                r[0].aliases = {{kQuery, "model.norm.weight"}};
              }),
              HasSubstr("an alias"));
}

TEST(RankFilesTest, PicklesAreReadAsData) {
  static const std::string cut_short = "\x80\x02}";
  static const std::string only_list("\x80\x02].", 4);
  static const std::string of_tensor(
      "\x80\x02X\x01\x00\x00\x00"
      "5Q.",
      10);  // persistent id "5"
  const auto with = [](size_t which, const std::string& bytes) {
    return Refusal([&](auto& r) {
      CapturedTensor& tensor = r[0].tensors[which];
      tensor.from = reinterpret_cast<const std::byte*>(bytes.data());
      tensor.shape = {bytes.size()};
    });
  };
  EXPECT_THAT(with(2, cut_short), HasSubstr("g"));
  EXPECT_THAT(with(2, only_list), HasSubstr("not a dict"));
  EXPECT_THAT(with(3, cut_short), HasSubstr("d"));
  EXPECT_THAT(with(3, of_tensor), HasSubstr("no tensor '5'"));
}

// Elements [begin, end) of dim 0 of a state.
CapturedTensor Rows(CapturedTensor tensor, uint64_t begin, uint64_t end) {
  StatePart part{tensor.shape, {{{begin}, {end}, {0}}}, {}, {}};
  for (size_t d = 1; d < tensor.shape.size(); ++d) {
    part.pieces[0].begin.push_back(0);
    part.pieces[0].end.push_back(tensor.shape[d]);
    part.pieces[0].at.push_back(0);
  }
  tensor.shape[0] = end - begin;
  tensor.part = std::move(part);
  return tensor;
}

CapturedTensor Flat(CapturedTensor tensor, uint64_t begin, uint64_t end) {
  tensor.part = StatePart{tensor.shape, {}, {}, {{begin, end}}};
  tensor.shape = {end - begin};
  return tensor;
}

// Two ranks; each has parts of the query's weight and master, rank 1 a norm that
// rank 0 does not know.
std::vector<Capture> ShardedRanks() {
  std::vector<Capture> ranks(2);
  const CapturedTensor weight = StateOf(kQuery, "weight", {8, 4});
  const CapturedTensor master = StateOf(kQuery, "master", {8, 4});
  ranks[0].tensors = {Rows(weight, 0, 5), Flat(master, 0, 17), Pickle("g", kEmptyDict)};
  ranks[1].tensors = {Rows(weight, 5, 8), Flat(master, 17, 32),
                      StateOf("model.norm.weight", "weight", {4}), Pickle("g", kEmptyDict)};
  for (Capture& rank : ranks) rank.parameters = {{kQuery, "trainable"}};
  ranks[1].parameters.push_back({"model.norm.weight", "trainable"});
  ranks[0].groups = {{"", {kQuery}, "g"}};
  ranks[1].groups = {{"", {kQuery, "model.norm.weight"}, "g"}};
  ranks[0].layout = "dp2_zero3";
  return ranks;
}

std::string ShardedRefusal(const std::function<void(std::vector<Capture>&)>& edit) {
  std::vector<Capture> ranks = ShardedRanks();
  edit(ranks);
  const auto model = Read(std::move(ranks));
  return model ? "none" : model.error().message;
}

TEST(RankFilesTest, PartsOfAllRanksAreTheStateOnce) {
  const auto model = Read(ShardedRanks());
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->layout.ToString(), "dp2_zero3");
  ASSERT_EQ(model->parameters.size(), 2u);
  EXPECT_EQ(model->parameters[0].shape, (Shape{8, 4}));
  EXPECT_EQ(model->parameters[1].name, "model.norm.weight");
  ASSERT_EQ(model->groups.size(), 1u);
  EXPECT_EQ(model->groups[0].parameters.size(), 2u);
  const Atom& weight = model->atom(*model->FindAtom(ParameterIndex{0}, "weight"));
  EXPECT_EQ(weight.relation, Relation::kSame);
  EXPECT_EQ(weight.source.gathers.at(0).locals.size(), 1u);
  const Atom& master = model->atom(*model->FindAtom(ParameterIndex{0}, "master"));
  EXPECT_EQ(master.source.gathers.at(0).locals.size(), 1u);
}

TEST(RankFilesTest, ARangeOfAPieceIsWhatTwoKindsOfShardingLeave) {
  // Columns [2, 4) of the query, whose 16 elements two ranks share; padding behind.
  const auto half = [](uint64_t column, uint64_t begin, uint64_t end) {
    CapturedTensor tensor = Flat(StateOf(kQuery, "exp_avg", {8, 4}), begin, end);
    tensor.key = StrCat("half", column, "/", begin);
    tensor.part->pieces = {{{0, column}, {8, column + 2}, {0, 0}}};
    tensor.part->local_shape = Shape{9, 2};
    return tensor;
  };
  const auto with = [&](uint64_t last) {
    return ShardedRefusal([&](auto& ranks) {
      ranks[0].tensors.insert(ranks[0].tensors.end(), {half(0, 0, 9), half(2, 0, 9)});
      ranks[1].tensors.insert(ranks[1].tensors.end(), {half(0, 9, 18), half(2, 9, last)});
    });
  };
  EXPECT_EQ(with(18), "none");
  EXPECT_EQ(with(16), "none");  // without the padding
  EXPECT_THAT(with(15),
              AllOf(HasSubstr("'" + std::string(kQuery) + "' (exp_avg)"), HasSubstr("in no file")));
}

TEST(RankFilesTest, PartsThatAreNotTheStateOnceAreRefused) {
  const CapturedTensor weight = StateOf(kQuery, "weight", {8, 4});
  const CapturedTensor master = StateOf(kQuery, "master", {8, 4});
  EXPECT_THAT(ShardedRefusal([&](auto& r) { r[1].tensors[0] = Rows(weight, 6, 8); }),
              AllOf(HasSubstr(kQuery), HasSubstr("hold 28 of the 32 elements")));
  EXPECT_THAT(ShardedRefusal([&](auto& r) { r[1].tensors[0] = Rows(weight, 4, 8); }),
              AllOf(HasSubstr(kQuery), HasSubstr("both hold")));
  EXPECT_THAT(ShardedRefusal([&](auto& r) { r[1].tensors[1] = Flat(master, 18, 32); }),
              AllOf(HasSubstr("(master)"), HasSubstr("elements [17, 18)"), HasSubstr("no file")));
  EXPECT_THAT(ShardedRefusal([&](auto& r) { r[1].tensors[1] = Flat(master, 16, 32); }),
              AllOf(HasSubstr("(master)"), HasSubstr("stored twice")));
  EXPECT_THAT(ShardedRefusal([&](auto& r) { r[1].tensors[1] = Rows(master, 5, 8); }),
              AllOf(HasSubstr("(master)"), HasSubstr("both hold")));
  EXPECT_THAT(ShardedRefusal([&](auto& r) { r[1].tensors[0] = weight; }),
              HasSubstr("two ranks hold the weight"));
  EXPECT_THAT(ShardedRefusal([&](auto& r) { r[1].tensors[1] = master; }),
              HasSubstr("is held twice"));
  EXPECT_THAT(ShardedRefusal([&](auto& r) {
                r[1].tensors[0] = Rows(StateOf(kQuery, "weight", {9, 4}), 5, 8);
              }),
              HasSubstr("has shape [8, 4] on one rank and [9, 4] on another"));
  EXPECT_THAT(ShardedRefusal([&](auto& r) {
                r[1].tensors[1] = Flat(StateOf(kQuery, "master", {8, 4}, DType::kBF16), 17, 32);
              }),
              HasSubstr("in another"));
  EXPECT_THAT(ShardedRefusal([&](auto& r) {
                r[0].tensors.push_back(Flat(StateOf(kQuery, "step", {}), 0, 1));
              }),
              HasSubstr("part of a number"));
}

TEST(RankFilesTest, RanksThatContradictEachOtherAreRefused) {
  EXPECT_THAT(ShardedRefusal([](auto& r) { r[1].parameters[0].role = "frozen"; }),
              HasSubstr("another role on rank 1"));
  EXPECT_THAT(ShardedRefusal([](auto& r) { r[1].tensors[3] = Pickle("g", kArgs); }),
              HasSubstr("other hyper-parameters"));
  EXPECT_THAT(ShardedRefusal([](auto& r) {
                r[1].tensors.push_back(Pickle("h", kEmptyDict));
                r[1].groups = {{"", {"model.norm.weight"}, "g"}, {"", {kQuery}, "h"}};
              }),
              HasSubstr("is in two groups"));
  EXPECT_THAT(ShardedRefusal([](auto& r) {
                r[0].aliases = {{"second", kQuery}};
                r[1].aliases = {{"second", "model.norm.weight"}};
              }),
              HasSubstr("stands for two parameters"));
  EXPECT_EQ(ShardedRefusal([](auto& r) {
              r[0].alike = {{"all", 2}, {"mine", 1}};
              r[1].alike = {{"all", 2}};
            }),
            "none");
  EXPECT_THAT(ShardedRefusal([](auto& r) {
                r[0].alike = {{"all", 2}};
                r[1].alike = {{"less", 2}};
              }),
              HasSubstr("only 1 of 2 ranks"));
  EXPECT_THAT(ShardedRefusal([](auto& r) {
                r[0].alike = {{"all", 2}, {"bytes:all:1", 2}};
                r[1].alike = {{"all", 2}, {"bytes:all:2", 2}};
              }),
              HasSubstr("only 1 of 2 ranks that must hold the same bytes do: replicas came apart"));
  EXPECT_THAT(ShardedRefusal([](auto& r) {
                r[0].alike = {{"all", 2}, {"bytes:all:1", 2}};
                r[1].alike = {{"less", 2}, {"bytes:less:1", 2}};
              }),
              HasSubstr("that share states out hold the same states"));
  EXPECT_THAT(ShardedRefusal([](auto& r) {
                r[1].alike = {{"all", 2}};
              }),
              HasSubstr("only 1 of 2 ranks"));
  const auto after = [](const std::string& first, const std::string& second) {
    return ShardedRefusal([&](auto& r) {
      r[0].alike = {{"since:0:" + first, 1}};
      r[1].alike = {{"since:1:" + second, 1}};
    });
  };
  EXPECT_EQ(after("3:10", "3:10"), "none");
  EXPECT_EQ(after("3:10", "4:2"), "none");  // one of them missed a save
  EXPECT_THAT(after("3:10", "3:11"), HasSubstr("rank 0 was updated 10 times since it saved step 3, "
                                               "but rank 1 11 times"));
  EXPECT_THAT(after("-1:0", "-1:1"), HasSubstr("since the job began"));
  EXPECT_THAT(ShardedRefusal([](auto& r) { r[1].layout = "dp2"; }), HasSubstr("has layout 'dp2'"));
  EXPECT_THAT(ShardedRefusal([](auto& r) { r[0].layout = "dp3"; }), HasSubstr("has 3 ranks"));
  EXPECT_THAT(ShardedRefusal([](auto& r) { r[0].layout = "../x"; }), HasSubstr("../x"));
}

// ---- hand-made entries -------------------------------------------------------

// Returns the refusal of a file of one tensor of shape [2, 4] whose entry has this in it.
std::string EntryRefusal(const std::string& in_tensor, const std::string& version = "2",
                         const std::string& in_entry = "") {
  const std::string entry =
      StrCat(R"({"version":)", version, R"(,"rank":0,"world":1,"step":7,"framework":"",)",
             R"("framework_version":"",)", in_entry, R"("tensors":{"w":{"parameter":"p",)",
             R"("kind":"weight","optimizer":"","number":false)", in_tensor,
             R"(}},"parameters":[{"name":"p","role":"trainable"}]})");
  std::vector<SafetensorsEntry> tensors{{"w", DType::kF32, {2, 4}, 0, 0}};
  auto header = RenderSafetensorsHeader({{kRankFileKey, entry}}, tensors);
  EXPECT_TRUE(header);
  const auto model = ReadFiles({*header + std::string(32, '\0')});
  return model ? "none" : model.error().message;
}

std::string PieceRefusal(const std::string& shape, const std::string& box, const std::string& at) {
  return EntryRefusal(
      StrCat(R"(,"shape":)", shape, R"(,"pieces":[{"box":)", box, R"(,"at":)", at, "}]"));
}

TEST(RankFilesTest, BoxesStayInWhatTheyAreOf) {
  EXPECT_EQ(EntryRefusal(""), "none");
  EXPECT_EQ(EntryRefusal("", "1"), "none");
  EXPECT_EQ(PieceRefusal("[2,4]", "[[0,2],[0,4]]", "[0,0]"), "none");
  EXPECT_THAT(PieceRefusal("[2,4]", "[[-1,1],[0,4]]", "[0,0]"), HasSubstr("not a number"));
  EXPECT_THAT(PieceRefusal("[2,4]", "[[0.5,1],[0,4]]", "[0,0]"), HasSubstr("not a number"));
  EXPECT_THAT(PieceRefusal("[2,4]", "[[2,0],[0,4]]", "[0,0]"), HasSubstr("lies beyond the "
                                                                         "state's 2"));
  EXPECT_THAT(PieceRefusal("[2,4]", "[[1,3],[0,4]]", "[0,0]"), HasSubstr("lies beyond the "
                                                                         "state's 2"));
  EXPECT_THAT(PieceRefusal("[2,4]", "[[0,2],[0,4]]", "[1,0]"), HasSubstr("lies beyond the "
                                                                         "tensor's 2"));
  EXPECT_THAT(PieceRefusal("[2,4]", "[[0,2],[0,4]]", "[18446744073709551615,0]"),
              HasSubstr("lies beyond the tensor's"));
  EXPECT_THAT(PieceRefusal("[2,4]", "[[0,18446744073709551616],[0,4]]", "[0,0]"),
              HasSubstr("not a number"));
  EXPECT_THAT(PieceRefusal("[2,4]", "[[0,2,3],[0,4]]", "[0,0]"), HasSubstr("a begin and an end"));
  EXPECT_THAT(PieceRefusal("[2,4]", "[[0,2]]", "[0]"), HasSubstr("the 2 dimensions"));
  EXPECT_THAT(PieceRefusal("[8]", "[[0,8]]", "[0]"), HasSubstr("the 1 dimensions"));
  EXPECT_THAT(PieceRefusal("[9223372036854775808,4]", "[[0,2],[0,4]]", "[0,0]"),
              HasSubstr("more than 2^63"));
  EXPECT_THAT(PieceRefusal("[4611686018427387904,1]", "[[0,2],[0,1]]", "[0,0]"),
              HasSubstr("hold 2 of the 4611686018427387904"));
  EXPECT_THAT(EntryRefusal(R"(,"shape":[4,4],"pieces":[{"box":[[0,2],[0,4]],"at":[0,0]},)"
                           R"({"box":[[2,4],[0,4]],"at":[0,0]}])"),
              HasSubstr("two boxes lie on the same elements"));
}

TEST(RankFilesTest, FlatRangesStayInWhatTheyAreOf) {
  const auto flat = [](const std::string& range, const std::string& more = "") {
    return EntryRefusal(StrCat(R"(,"shape":[2,4],"flat":)", range, more));
  };
  EXPECT_THAT(flat("[0,9]"), HasSubstr("lies beyond the 8 elements"));
  EXPECT_THAT(flat("[5,3]"), HasSubstr("lies beyond the 8 elements"));
  EXPECT_THAT(flat("[-1,7]"), HasSubstr("not a number"));
  EXPECT_THAT(flat("[9223372036854775807,9223372036854775815]"), HasSubstr("lies beyond the 8"));
  EXPECT_THAT(flat("[0,8]"), HasSubstr("[2, 4] is not one row"));
  EXPECT_THAT(flat("[0]"), HasSubstr("a begin and an end"));
  EXPECT_THAT(flat("[0,8]", R"(,"local_shape":[8])"),
              HasSubstr("must have a local shape if, and only if"));
  EXPECT_THAT(flat("[0,8]", R"(,"pieces":[{"box":[[0,2],[0,4]],"at":[0,0]}])"),
              HasSubstr("must have a local shape if, and only if"));
}

// The bytes of all ranks, in a note of the step.  A file of before has no such number.
TEST(RankFilesTest, WhatIsNotProvedIsNoted) {
  for (const auto& [first, second, noted] :
       {std::tuple(uint64_t{0}, uint64_t{0}, ""),
        std::tuple(uint64_t{0}, uint64_t{4096}, "4096 bytes"),
        std::tuple(uint64_t{3}, UINT64_MAX, "18446744073709551615 bytes")}) {
    std::vector<Capture> ranks = SampleRanks();
    std::vector<std::string> files;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      auto file = *CaptureFile::Make(std::move(ranks[rank]), rank, 2);
      file.SayUnproved(rank == 0 ? first : second);
      std::string& bytes = files.emplace_back(file.bytes(), '\0');
      for (const CopyRun& run : file.Runs(0, file.bytes(), false)) {
        std::memcpy(bytes.data() + run.at, run.from, run.bytes);
      }
    }
    const auto model = ReadFiles(files);
    ASSERT_TRUE(model) << model.error().message;
    std::vector<std::string> notes;
    for (const std::string& note : model->notes) {
      if (note.starts_with("unproved: ")) notes.push_back(note);
    }
    ASSERT_EQ(notes.size(), *noted == '\0' ? 0u : 1u);
    if (!notes.empty()) {
      EXPECT_THAT(notes[0], HasSubstr(noted));
    }
    std::string damaged = files[1];
    const std::string key = StrCat("\"", kUnprovedKey, "\":\"");
    damaged[damaged.find(key) + key.size() + kUnprovedDigits - 1] = 'x';
    const auto refused = ReadFiles({files[0], damaged});
    ASSERT_FALSE(refused);
    EXPECT_THAT(refused.error().message, HasSubstr("is not a number of bytes"));
  }
}

TEST(RankFilesTest, AnOrderNamesEachDimensionOnce) {
  const auto ordered = [](const std::string& shape, const std::string& order,
                          const std::string& more = "", const std::string& version = "3") {
    return EntryRefusal(StrCat(R"(,"shape":)", shape, R"(,"order":)", order, more), version);
  };
  EXPECT_EQ(ordered("[4,2]", "[1,0]"), "none");
  EXPECT_EQ(ordered("[2,4]", "[0,1]"), "none");
  EXPECT_THAT(ordered("[2,4]", "[1,0]"), HasSubstr("in that order is not of shape [2, 4]"));
  for (const char* order : {"[0,0]", "[0]", "[0,2]", "[1,0,2]"}) {
    EXPECT_THAT(ordered("[4,2]", order), HasSubstr("each dimension once")) << order;
  }
  EXPECT_THAT(ordered("[4,2]", "[]"), HasSubstr("'order' is empty"));
  EXPECT_THAT(ordered("[4,2]", "[-1,0]"), HasSubstr("not a number"));
  EXPECT_THAT(ordered("[4,2]", "{}"), HasSubstr("not a list"));
  EXPECT_THAT(ordered("[8]", "[0]", R"(,"flat":[0,8])"),
              HasSubstr("both a flat range and an order"));
  EXPECT_THAT(ordered("[4,2]", "[1,0]", "", "2"), HasSubstr("version 2 has no 'order'"));
  const std::string piece = R"(,"pieces":[{"box":[[0,4],[0,2]],"at":[0,0]}])";
  EXPECT_EQ(ordered("[4,2]", "[1,0]", piece), "none");
  EXPECT_THAT(ordered("[4,2]", "[0,1]", piece), HasSubstr("beyond the tensor's 2"));
}

// Square rows that lie turned have the extents of rows that do not: the order alone tells them
// apart.
TEST(RankFilesTest, RowsThatLieTurnedAreReadTurned) {
  std::vector<Capture> ranks(2);
  for (uint64_t rank = 0; rank < 2; ++rank) {
    CapturedTensor tensor = StateOf("w", "weight", {4, 4});
    tensor.part.emplace();
    tensor.part->shape = {8, 4};
    tensor.part->pieces = {{{4 * rank, 0}, {4 * rank + 4, 4}, {0, 0}}};
    tensor.part->order = {1, 0};
    ranks[rank].step = 7;
    ranks[rank].tensors = {tensor};
    ranks[rank].parameters = {{"w", "frozen"}};
  }
  const auto model = Read(std::move(ranks));
  ASSERT_TRUE(model) << model.error().message;
  const Atom& weight = model->atom(*model->FindAtom(ParameterIndex{0}, "weight"));
  ASSERT_EQ(weight.source.gathers.at(0).locals.size(), 2u);
  for (const LocalTensor& local : weight.source.gathers.at(0).locals) {
    ASSERT_EQ(local.pieces.size(), 1u);
    EXPECT_EQ(local.pieces[0].local_strides, (std::vector<uint64_t>{1, 4}));
  }
}

TEST(RankFilesTest, WhatIsNotUnderstoodIsRefused) {
  EXPECT_THAT(EntryRefusal(R"(,"stride":2)"), HasSubstr("'stride' is not understood"));
  EXPECT_THAT(EntryRefusal("", "2", R"("mesh":[2],)"), HasSubstr("'mesh' is not understood"));
  EXPECT_THAT(EntryRefusal(R"(,"shape":[2,4])"), HasSubstr("neither pieces nor"));
  EXPECT_THAT(EntryRefusal(R"(,"pieces":[])"), HasSubstr("'shape' is not a list"));
  EXPECT_THAT(EntryRefusal(R"(,"shape":[2,4],"pieces":{})"), HasSubstr("'pieces' is not a list"));
  EXPECT_THAT(
      EntryRefusal(R"(,"shape":[2,4],"pieces":[{"box":[[0,2],[0,4]],"at":[0,0],"scale":2}])"),
      HasSubstr("'scale' is not understood"));
  EXPECT_THAT(EntryRefusal(R"(,"shape":[2,4],"flat":[0,8])", "1"), HasSubstr("is not understood"));
  EXPECT_THAT(EntryRefusal("", "1", R"("layout":"dp1",)"), HasSubstr("version 1 has no"));
  EXPECT_THAT(EntryRefusal("", "1", R"("alike":[],)"), HasSubstr("version 1 has no 'alike'"));
  EXPECT_THAT(EntryRefusal("", "2", R"("alike":[["x"]],)"), HasSubstr("not pairs"));
  EXPECT_THAT(EntryRefusal("", "2", R"("alike":[["x",-1]],)"),
              HasSubstr("'alike' is not a number"));
  EXPECT_THAT(EntryRefusal("", "2", R"("alike":[["x",2]],)"), HasSubstr("only 1 of 2"));
  EXPECT_EQ(EntryRefusal("", "2", R"("alike":[["x",1]],)"), "none");
  EXPECT_THAT(EntryRefusal("", "4"), HasSubstr("version 4"));
  EXPECT_THAT(EntryRefusal("", "0"), HasSubstr("version 0"));
}

TEST(RankFilesTest, ACaptureSaysWhatItsPartsAreOrIsNone) {
  const auto make = [](CapturedTensor tensor) {
    Capture capture;
    capture.tensors = {std::move(tensor)};
    const auto file = CaptureFile::Make(std::move(capture), 0, 1);
    return file ? "none" : file.error().message;
  };
  const CapturedTensor weight = StateOf(kQuery, "weight", {8, 4});
  EXPECT_EQ(make(Rows(weight, 2, 8)), "none");
  EXPECT_EQ(make(Rows(weight, 8, 8)), "none");
  CapturedTensor wrong = Flat(weight, 2, 8);
  wrong.shape = {5};
  EXPECT_THAT(make(wrong), HasSubstr("not one row of the 6 elements"));
}

}  // namespace
}  // namespace ckptfs
