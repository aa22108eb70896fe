// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "core/adopt/scan.h"
#include "core/blob/safetensors_header.h"
#include "core/io/file_root.h"
#include "formats/dcp/chunk_archives.h"
#include "formats/dcp/entries.h"
#include "formats/families/shipped.h"
#include "tests/formats/dcp/dcp_maker.h"
#include "tests/support/stored_elements.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/watched_root.h"

namespace ckptfs::dcp {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::IsSupersetOf;

constexpr const char* kFile = "__0_0.distcp";
constexpr const char* kOther = "__1_0.distcp";

// Two ranks, a weight cut along dim 0, one along dim 1, one whole; Adam's states of the
// first; groups and client state.
DcpMaker Honest() {
  DcpMaker made;
  made.AddTensor("model.a.weight", {5, 4}, 100, {{{0, 0}, {3, 4}, kFile}, {{3, 0}, {2, 4}, kOther}},
                 {"model", "a.weight"});
  made.AddTensor("model.b.weight", {2, 4}, 200, {{{0, 0}, {2, 2}, kFile}, {{0, 2}, {2, 2}, kOther}},
                 {"model", "b.weight"});
  made.AddTensor("model.norm", {3}, 300, {{{0}, {3}, kFile}}, {"model", "norm"});
  made.AddTensor("optim.state.a.weight.exp_avg", {5, 4}, 400,
                 {{{0, 0}, {3, 4}, kFile}, {{3, 0}, {2, 4}, kOther}},
                 {"optim", "state", "a.weight", "exp_avg"});
  made.AddTensor("optim.state.a.weight.step", {}, 7, {{{}, {}, kFile}},
                 {"optim", "state", "a.weight", "step"});
  made.AddObject("optim.param_groups.0.params", NamesArchive({"a.weight", "b.weight"}), kOther,
                 {"optim", "param_groups", "0", "params"});
  made.AddObject("optim.param_groups.0.lr", NumberArchive(3), kOther,
                 {"optim", "param_groups", "0", "lr"});
  made.AddObject("train_state.step", NumberArchive(12), kFile, {"train_state", "step"});
  return made;
}

class DcpSourceTest : public testing::Test {
 protected:
  DcpSourceTest() : source_(MakeDcpSource()), families_(ShippedFamilies().value()) {
    options_.families = &families_;
    path_ = directory_.path() + "/run/ckpt";
    std::filesystem::create_directories(path_);
  }

  void Write(const std::string& name, const std::string& bytes) {
    directory_.Write("run/ckpt/" + name, bytes);
  }
  void WriteAll(const DcpMaker& made) {
    for (const auto& [name, bytes] : made.files) Write(name, bytes);
    Write(".metadata", made.Metadata());
  }

  Result<StepModel> Read() {
    CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(path_));
    CKPT_ASSIGN_OR_RETURN(const auto found, source_->Find(place.root, place.directory));
    if (found.size() != 1)
      return Fail(ErrorCode::kNotFound, std::to_string(found.size()) + " steps");
    CKPT_RETURN_IF_ERROR(source_->StateOf(found[0], options_, {}).Readable());
    return source_->Read(found[0], options_);
  }
  std::string Refusal() {
    const auto read = Read();
    return read ? "taken" : read.error().message;
  }
  std::string RefusalOf(const std::function<void(DcpMaker&)>& change) {
    DcpMaker made = Honest();
    change(made);
    WriteAll(made);
    return Refusal();
  }

  TemporaryDirectory directory_;
  std::string path_;
  std::unique_ptr<Source> source_;
  FamilySet families_;
  SourceOptions options_;
};

std::vector<std::string> LeftOutOf(const StepModel& step) {
  std::vector<std::string> out;
  for (const LeftOut& one : step.left_out) out.push_back(LeftOutText(one));
  return out;
}

// Those that a view of the step has.
std::vector<std::string> KeysOf(const StepModel& step, std::string_view layout = "dp2") {
  const Layout asked = Layout::Parse(layout).value();
  const auto shown = ShownState::Of(std::make_shared<const StepModel>(step), asked);
  const auto keys = KeysFor(step, asked.keys);
  auto entries = keys ? EntriesOf(*shown, *keys) : Result<std::vector<Entry>>(std::vector<Entry>());
  EXPECT_TRUE(entries) << (entries ? "" : entries.error().message);
  std::vector<std::string> out;
  for (const Entry& entry : *entries) out.push_back(entry.key);
  return out;
}

std::vector<float> Counted(float first, size_t count) {
  std::vector<float> out;
  for (size_t i = 0; i < count; ++i) out.push_back(first + static_cast<float>(i));
  return out;
}

TEST_F(DcpSourceTest, TensorsAreWholeWhateverRanksHeld) {
  WriteAll(Honest());
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->framework, "dcp");
  EXPECT_EQ(step->iteration, 12u);
  EXPECT_EQ(StoredElements(*step, "a.weight", "weight"), Counted(100, 20));
  EXPECT_EQ(StoredElements(*step, "b.weight", "weight"), Counted(200, 8));
  EXPECT_EQ(StoredElements(*step, "norm", "weight"), Counted(300, 3));
  EXPECT_EQ(StoredElements(*step, "a.weight", "exp_avg"), Counted(400, 20));
  // Rows are one local tensor, columns two.
  const auto locals = [&](std::string_view name) {
    return step->atom(*step->FindAtom(*step->FindParameter(name), "weight"))
        .source.gathers[0]
        .locals.size();
  };
  EXPECT_EQ(locals("a.weight"), 1u);
  EXPECT_EQ(locals("b.weight"), 2u);
  const Atom& count = step->atom(*step->FindAtom(*step->FindParameter("a.weight"), "step"));
  float seven = 0;
  std::memcpy(&seven, count.source.inline_bytes.data(), sizeof(seven));
  EXPECT_EQ(seven, 7);
  ASSERT_EQ(step->groups.size(), 1u);
  EXPECT_EQ(step->groups[0].parameters.size(), 2u);
  EXPECT_NE(step->FindDocument("client/train_state"), nullptr);
  EXPECT_EQ(step->facts.keys, KeyShape());  // get_state_dict's
  EXPECT_EQ(step->parameter(*step->FindParameter("norm")).role, Role::kFrozen);
}

TEST_F(DcpSourceTest, WhatContradictsItselfIsRefused) {
  const std::vector<std::pair<std::function<void(DcpMaker&)>, std::string>> cases = {
      {[](DcpMaker& m) { m.entries[0].chunks.pop_back(); }, "elements [12, 20)"},
      {[](DcpMaker& m) { m.entries[1].chunks.pop_back(); }, "hold 4 of the 8"},
      {[](DcpMaker& m) { m.entries[1].chunks[1].offsets[1] = 1; }, "both hold"},
      {[](DcpMaker& m) { m.entries[0].chunks[1].offsets[0] = 4; }, "lies beyond the 5"},
      {[](DcpMaker& m) { m.entries[0].chunks[1].offsets[0] = 2; }, "stored twice"},
      {[](DcpMaker& m) { m.entries[0].dtype = "float64"; }, ".metadata says fp64"},
      {[](DcpMaker& m) { m.entries[2].chunks[0].sizes[0] = 2; }, ".metadata says fp32 [2]"},
      {[](DcpMaker& m) { m.entries[0].dtype = "quint8"; }, "dtype that is not known"},
      {[](DcpMaker& m) { m.entries[0].chunks[0].length -= 9; }, "chunk at byte"},
      {[](DcpMaker& m) { m.entries[0].chunks[0].offset += 1; }, "chunk at byte"},
      {[](DcpMaker& m) { m.entries[0].chunks[0].offset = 1 << 30; },
       "lies beyond the end of the "
       "file"},
      {[](DcpMaker& m) { m.entries[0].chunks[0].file = "../__0_0.distcp"; }, ".."},
      {[](DcpMaker& m) { m.entries[0].chunks[0].file = "/etc/passwd"; }, "/etc/passwd"},
      {[](DcpMaker& m) { m.entries[0].chunks[0].file = "gone.distcp"; }, "missing"},
      {[](DcpMaker& m) { m.entries[2].key = "model._flat_param"; }, "SHARDED_STATE_DICT"},
      {[](DcpMaker& m) { m.transform = "stream.zstd"; }, "stream.zstd"},
      {[](DcpMaker& m) { m.layout = "torch.sparse_coo"; }, "sparse_coo"},
      {[](DcpMaker& m) { m.extra = "checksum"; }, "checksum"},
      {[](DcpMaker& m) { m.entries.push_back(m.entries[2]); }, "there twice"},
  };
  for (const auto& [change, rule] : cases) EXPECT_THAT(RefusalOf(change), HasSubstr(rule));
}

TEST_F(DcpSourceTest, ASaveThatDidNotFinishIsNoStep) {
  DcpMaker made = Honest();
  WriteAll(made);
  std::filesystem::rename(path_ + "/.metadata", path_ + "/.metadata.tmp");
  EXPECT_THAT(Refusal(), HasSubstr("written last"));
}

TEST_F(DcpSourceTest, OtherDirectoriesAreNoSteps) {
  Write("common.pt", "");
  Write("metadata.json", "{}");
  Write(".metadata", "");
  EXPECT_EQ(Refusal(), "0 steps");  // Megatron's
  std::filesystem::remove_all(path_);
  Write("model.safetensors", "broken: for others to tell");
  EXPECT_EQ(Refusal(), "0 steps");
}

TEST_F(DcpSourceTest, ALinkOutOfTheDirectoryIsRefused) {
  WriteAll(Honest());
  std::filesystem::rename(path_ + "/" + kOther, directory_.path() + "/moved");
  std::filesystem::create_symlink(directory_.path() + "/moved", path_ + "/" + kOther);
  EXPECT_THAT(Refusal(), HasSubstr("leaves the checkpoint"));
}

TEST_F(DcpSourceTest, AColumnMajorChunkIsReadByItsStrides) {
  DcpMaker made = Honest();
  MadeEntry& entry = made.AddTensor("model.t", {2, 3}, 0, {}, {"model", "t"});
  // Elements 0..5 of [2, 3], stored column by column.
  entry.chunks.push_back(made.Place(
      {{0, 0}, {2, 3}, kFile}, ArchiveOf({2, 3}, {0, 3, 1, 4, 2, 5}, std::vector<uint64_t>{1, 2})));
  WriteAll(made);
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(StoredElements(*step, "t", "weight"), Counted(0, 6));
}

// Two weights of a shape and one of its own, whose states have numbers; `name` calls the first.
DcpMaker Numbered(const std::string& name = "a") {
  DcpMaker made;
  made.AddTensor("model." + name, {4}, 100, {{{0}, {4}, kFile}}, {"model", name});
  made.AddTensor("model.b", {4}, 200, {{{0}, {4}, kFile}}, {"model", "b"});
  made.AddTensor("optim.state.0.exp_avg", {4}, 300, {{{0}, {4}, kFile}},
                 {"optim", "state", "#0", "exp_avg"});
  made.AddTensor("optim.state.1.exp_avg", {4}, 400, {{{0}, {4}, kFile}},
                 {"optim", "state", "#1", "exp_avg"});
  return made;
}

TEST_F(DcpSourceTest, NumberedStatesAreOfTheOrderThatIsGiven) {
  WriteAll(Numbered());
  const auto unnamed = Read();
  ASSERT_TRUE(unnamed) << unnamed.error().message;
  EXPECT_FALSE(unnamed->FindAtom(*unnamed->FindParameter("a"), "exp_avg"));
  ASSERT_EQ(unnamed->left_out.size(), 1u);
  EXPECT_THAT(unnamed->left_out[0].why, HasSubstr("'a' and which to 'b'"));
  EXPECT_THAT(unnamed->left_out[0].remedy, HasSubstr("--parameter-order"));
  EXPECT_THAT(KeysOf(*unnamed), Contains("optim.state.1.exp_avg"));
  options_.parameter_order = {"b", "a"};
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(StoredElements(*step, "b", "exp_avg"), Counted(300, 4));
  EXPECT_EQ(StoredElements(*step, "a", "exp_avg"), Counted(400, 4));
  EXPECT_TRUE(step->left_out.empty());
  EXPECT_THAT(KeysOf(*step), IsSupersetOf({"optim.state.0.exp_avg", "optim.state.1.exp_avg"}));
  EXPECT_THAT(KeysOf(*step, "nested"), Contains("optim.state.b.exp_avg"));
  options_.parameter_order = {"b", "c"};
  const auto other = Read();
  ASSERT_TRUE(other) << other.error().message;
  ASSERT_EQ(other->left_out.size(), 1u);
  EXPECT_THAT(other->left_out[0].why, HasSubstr("'c' is not a parameter"));
}

// A ParameterList has parameters that are called "0" and "1".
TEST_F(DcpSourceTest, ANumberIsNotTheNameThatLooksLikeIt) {
  WriteAll(Numbered("0"));
  options_.parameter_order = {"b", "0"};
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(StoredElements(*step, "b", "exp_avg"), Counted(300, 4));
  EXPECT_EQ(StoredElements(*step, "0", "exp_avg"), Counted(400, 4));
}

// PEFT's files leave the adapter's name out, its live parameters have it.
TEST_F(DcpSourceTest, AnAdaptersLiveNamesAreThoseOfItsFile) {
  DcpMaker made;
  const std::vector<std::string> names = {"q.lora_A.weight", "q.lora_B.weight", "score.weight",
                                          "emb.lora_embedding_A"};
  const std::vector<std::string> live = {"q.lora_A.own.weight", "q.lora_B.own.weight",
                                         "score.modules_to_save.own.weight",
                                         "emb.lora_embedding_A.own"};
  for (size_t i = 0; i < names.size(); ++i) {
    const float first = static_cast<float>(i) * 10;
    made.AddTensor("model." + names[i], {4}, first, {{{0}, {4}, kFile}}, {"model", names[i]});
    made.AddTensor("optimizer.state." + live[i] + ".exp_avg", {4}, first + 100, {{{0}, {4}, kFile}},
                   {"optimizer", "state", live[i], "exp_avg"});
  }
  made.AddObject("optimizer.param_groups.0.params", NamesArchive(live), kFile,
                 {"optimizer", "param_groups", "0", "params"});
  WriteAll(made);
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(StoredElements(*step, names[i], "exp_avg"),
              Counted(static_cast<float>(i) * 10 + 100, 4));
  }
  ASSERT_EQ(step->groups.size(), 1u);
  EXPECT_EQ(step->groups[0].parameters.size(), names.size());
  EXPECT_EQ(step->facts.keys->state_names.at("q.lora_A.weight"), "q.lora_A.own.weight");
}

// OLMo-core and NeMo Automodel put several directories into one step's.
TEST_F(DcpSourceTest, FoldersOfAStepAreItsParts) {
  DcpMaker both = Honest();
  for (const auto& [name, bytes] : both.files) Write("model_and_optim/" + name, bytes);
  Write("model_and_optim/.metadata", both.Metadata());
  Write("train/rank0.pt", "its own");
  auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(StoredElements(*step, "a.weight", "exp_avg"), Counted(400, 20));
  std::filesystem::remove_all(path_);
  DcpMaker model;
  model.AddTensor("a.weight", {4}, 1, {{{0}, {4}, kFile}}, {"a.weight"});
  DcpMaker optimizer;
  optimizer.AddTensor("optim.state.a.weight.exp_avg", {4}, 5, {{{0}, {4}, kFile}},
                      {"optim", "state", "a.weight", "exp_avg"});
  for (const auto& [folder, made] :
       {std::pair("model/", &model), std::pair("optim/", &optimizer)}) {
    for (const auto& [name, bytes] : made->files) Write(std::string(folder) + name, bytes);
    Write(std::string(folder) + ".metadata", made->Metadata());
  }
  step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(StoredElements(*step, "a.weight", "weight"), Counted(1, 4));
  EXPECT_EQ(StoredElements(*step, "a.weight", "exp_avg"), Counted(5, 4));
}

// transformers saves the model as safetensors and the optimizer by DCP, where the script says.
TEST_F(DcpSourceTest, AnOptimizerBesideSafetensorsHasTheirNames) {
  DcpMaker made;
  const std::string state = "state.a.weight.exp_avg";
  made.AddTensor("optimizer." + state, {4}, 5, {{{0}, {4}, kFile}}, {"optimizer", state});
  std::vector<SafetensorsEntry> entries = {{"a.weight", DType::kF32, {4}}};
  std::string weights = RenderSafetensorsHeader({{"format", "pt"}}, entries).value();
  for (const float value : Counted(1, 4))
    weights.append(reinterpret_cast<const char*>(&value), sizeof(value));
  for (const std::string folder : {"", "optimizer/", "optim/"}) {
    std::filesystem::remove_all(path_);
    Write("model.safetensors", weights);
    for (const auto& [name, bytes] : made.files) Write(folder + name, bytes);
    Write(folder + ".metadata", made.Metadata());
    const auto step = Read();
    ASSERT_TRUE(step) << folder << ": " << step.error().message;
    EXPECT_EQ(StoredElements(*step, "a.weight", "weight"), Counted(1, 4));
    EXPECT_EQ(StoredElements(*step, "a.weight", "exp_avg"), Counted(5, 4));
  }
  // Weights in the DCP directory are those of its optimizer.
  std::filesystem::remove_all(path_);
  WriteAll(Honest());
  Write("model.safetensors", weights);
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(StoredElements(*step, "a.weight", "weight"), Counted(100, 20));
}

// A job saves over the step while it is read: bytes of one save, or an error.
TEST_F(DcpSourceTest, ShardsThatAreReplacedMeanwhileAreThoseOfOneSave) {
  DcpMaker made;
  const std::string state = "state.a.weight.exp_avg";
  made.AddTensor("optimizer." + state, {4}, 5, {{{0}, {4}, kFile}}, {"optimizer", state});
  const auto weights = [](const std::string& note, float first) {
    std::vector<SafetensorsEntry> entries = {{"a.weight", DType::kF32, {4}}};
    std::string file = RenderSafetensorsHeader({{"format", "pt"}, {"note", note}}, entries).value();
    for (const float value : Counted(first, 4))
      file.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return file;
  };
  const std::string before = weights("", 1), after = weights(std::string(4096, 'x'), 9);
  for (uint64_t call = 1; call < 100; ++call) {
    for (const auto& [name, bytes] : made.files) Write("optimizer/" + name, bytes);
    Write("optimizer/.metadata", made.Metadata());
    Write("model.safetensors", before);
    const auto root = std::make_shared<WatchedRoot>(PlaceOf(path_).value().root);
    const auto found = source_->Find(root, PlaceOf(path_).value().directory).value();
    root->Watch();
    root->Before(call, [&] {
      Write("new", after);
      std::filesystem::rename(path_ + "/new", path_ + "/model.safetensors");
    });
    const auto step = source_->Read(found.at(0), options_);
    if (!step) continue;
    const auto& weight = step->atom(*step->FindAtom(*step->FindParameter("a.weight"), "weight"));
    const FragmentSeries& series = weight.source.gathers.at(0).series.at(0);
    const bool old = step->blob(BlobIndex{series.blob}).stamp.size == before.size();
    float first = 0;
    std::memcpy(&first, (old ? before : after).data() + series.offset, sizeof(first));
    EXPECT_EQ(first, old ? 1 : 9) << "call " << call;
  }
}

TEST_F(DcpSourceTest, ADictOfAnyNameIsTheModelAndTwoAreRefused) {
  const auto add = [](DcpMaker& made, const std::string& key, float first) {
    made.AddTensor(key + ".0.weight", {2, 2}, first, {{{0, 0}, {2, 2}, kFile}}, {key, "0.weight"});
  };
  DcpMaker one;
  add(one, "generator", 1);
  one.AddTensor("best", {}, 7, {{{}, {}, kFile}}, {"best"});
  WriteAll(one);
  auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(StoredElements(*step, "0.weight", "weight"), Counted(1, 4));
  EXPECT_FALSE(step->FindParameter("best"));
  DcpMaker two;
  add(two, "generator", 1);
  add(two, "discriminator", 11);
  WriteAll(two);
  EXPECT_THAT(Refusal(), testing::AllOf(HasSubstr("'discriminator'"), HasSubstr("'generator'"),
                                        HasSubstr("--model KEY")));
  options_.model = "discriminator";
  step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(StoredElements(*step, "0.weight", "weight"), Counted(11, 4));
  options_.model = "critic";
  EXPECT_THAT(Refusal(), HasSubstr("--model critic"));
}

TEST_F(DcpSourceTest, ACopyOfTheModelIsAtomsOfItsOwn) {
  DcpMaker made = Honest();
  made.AddTensor("ema.a.weight", {5, 4}, 500, {{{0, 0}, {3, 4}, kFile}, {{3, 0}, {2, 4}, kOther}},
                 {"ema", "a.weight"});
  made.AddTensor("ema.b.weight", {2, 4}, 600, {{{0, 0}, {2, 2}, kFile}, {{0, 2}, {2, 2}, kOther}},
                 {"ema", "b.weight"});
  made.AddTensor("ema.norm", {3}, 700, {{{0}, {3}, kFile}}, {"ema", "norm"});
  made.AddTensor("ema.none", {0, 3}, 0, {{{0, 0}, {0, 3}, kFile}}, {"ema", "none"});
  made.AddTensor("ema.part", {4}, 0, {{{0}, {3}, kFile}}, {"ema", "part"});
  WriteAll(made);
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(StoredElements(*step, "ema.a.weight", kBesideKind), Counted(500, 20));
  EXPECT_EQ(StoredElements(*step, "ema.b.weight", kBesideKind), Counted(600, 8));
  EXPECT_EQ(step->parameter(*step->FindParameter("ema.none")).role, Role::kBeside);
  EXPECT_FALSE(step->FindParameter("ema.norm"));  // in one piece and small: in the document alone
  const Document* document = step->FindDocument("client/ema");
  ASSERT_NE(document, nullptr);
  EXPECT_EQ(document->tensors.size(), 4u);
  EXPECT_THAT(KeysOf(*step),
              IsSupersetOf({"ema.a.weight", "ema.b.weight", "ema.norm", "ema.none"}));
  // A part of which was not saved is left out alone.
  EXPECT_FALSE(step->FindParameter("ema.part"));
  EXPECT_THAT(LeftOutOf(*step), Contains(HasSubstr("ema.part")));
}

TEST_F(DcpSourceTest, WhatIsNotUnderstoodOfAnOptimizerTakesNothingWithIt) {
  const std::vector<std::pair<std::string, std::string>> states = {
      {"optim.state.c.weight.exp_avg", "a parameter that the model does not have"},
      {"adam.state.a.weight.exp_avg", "nothing before it names an optimizer"}};
  for (const auto& [key, why] : states) {
    DcpMaker made = Honest();
    made.AddTensor(key, {5, 4}, 500, {{{0, 0}, {3, 4}, kFile}, {{3, 0}, {2, 4}, kOther}});
    WriteAll(made);
    const auto step = Read();
    ASSERT_TRUE(step) << step.error().message;
    EXPECT_EQ(StoredElements(*step, "a.weight", "exp_avg"), Counted(400, 20));
    EXPECT_EQ(StoredElements(*step, key, kBesideKind), Counted(500, 20));
    EXPECT_THAT(LeftOutOf(*step), Contains(HasSubstr(why)));
    EXPECT_THAT(KeysOf(*step), IsSupersetOf({key, std::string("optim.param_groups.0.lr")}));
  }
}

TEST_F(DcpSourceTest, EveryGroupOfAnOptimizerIsKnownOrNone) {
  DcpMaker made = Honest();
  made.AddObject("optim.param_groups.1.params", NamesArchive({"c.weight"}), kOther,
                 {"optim", "param_groups", "1", "params"});
  WriteAll(made);
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_TRUE(step->groups.empty());
  EXPECT_TRUE(step->FindAtom(*step->FindParameter("a.weight"), "exp_avg"));
  EXPECT_THAT(LeftOutOf(*step), Contains(HasSubstr("'c.weight', which is not a weight")));
  EXPECT_THAT(KeysOf(*step), IsSupersetOf({"optim.param_groups.0.lr", "optim.param_groups.0.params",
                                           "optim.param_groups.1.params"}));
}

TEST_F(DcpSourceTest, AStateThatIsNotANumberIsADocumentOfItsParameter) {
  DcpMaker made = Honest();
  made.AddObject("optim.state.a.weight.old.1", NamesArchive({"x"}), kFile);
  made.AddTensor("optim.state.a.weight.old.0", {2}, 9, {{{0}, {2}, kFile}});
  made.AddObject("model.a._extra_state", NamesArchive({"y"}), kFile, {"model", "a._extra_state"});
  WriteAll(made);
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_THAT(KeysOf(*step), IsSupersetOf({"optim.state.a.weight.old.0",
                                           "optim.state.a.weight.old.1", "model.a._extra_state"}));
  EXPECT_THAT(KeysOf(*step, "titan"), Contains("optimizer.state.a.weight.old.1"));
}

TEST_F(DcpSourceTest, FlattenedStatesMakeGroupsOfEqualHyperParameters) {
  DcpMaker made;
  for (const char* name : {"layers.0.weight", "layers.1.weight", "norm"}) {
    made.AddTensor(name, {4}, 1, {{{0}, {4}, kFile}}, {name});
    const std::string state = std::string("state.") + name + ".exp_avg";
    made.AddTensor("optimizer." + state, {4}, 2, {{{0}, {4}, kFile}}, {"optimizer", state});
    const std::string rate = std::string("param_groups.") + name + ".lr";
    made.AddObject("optimizer." + rate, NumberArchive(std::string(name) == "norm" ? 1 : 2), kFile,
                   {"optimizer", rate});
  }
  WriteAll(made);
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->parameters.size(), 3u);
  ASSERT_EQ(step->groups.size(), 2u);
  EXPECT_EQ(step->groups[0].parameters.size(), 2u);
}

TEST_F(DcpSourceTest, EqualArchivesAreParsedOnceAndOthersByThemselves) {
  std::string bytes;
  const Shape sizes = {2, 3};
  std::vector<ChunkAsked> asked;
  const auto add = [&](const std::string& archive) {
    asked.push_back({bytes.size(), archive.size(), DType::kF32, sizes});
    bytes += archive;
  };
  for (float i = 0; i < 2000; ++i) add(ArchiveOf(sizes, std::vector<float>(6, i)));
  directory_.Write("file", bytes);
  const FileRoot root(directory_.path());
  auto found = LocateChunks(*root.Open("file"), BlobIndex{}, asked);
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(found->parsed, 1u);
  for (size_t i = 0; i < asked.size(); ++i) {
    float value = -1;
    std::memcpy(&value, bytes.data() + found->dense[i], sizeof(value));
    EXPECT_EQ(value, static_cast<float>(i));
  }
  // Any other byte of a frame is noticed.
  const std::string other = ArchiveOf(sizes, std::vector<float>(6, 5), std::vector<uint64_t>{1, 2});
  ASSERT_EQ(other.size(), asked[1999].length);
  bytes.replace(asked[1999].offset, other.size(), other);
  directory_.Write("file", bytes);
  found = LocateChunks(*root.Open("file"), BlobIndex{}, asked);
  ASSERT_TRUE(found) << found.error().message;
  ASSERT_EQ(found->strided.size(), 1u);
  EXPECT_EQ(found->strided[0].first, 1999u);
}

TEST_F(DcpSourceTest, NoByteOfAnArchivesFrameIsPassedOver) {
  const Shape sizes = {3};
  const std::string archive = ArchiveOf(sizes, {1, 2, 3});
  const std::vector<ChunkAsked> both = {{0, archive.size(), DType::kF32, sizes},
                                        {archive.size(), archive.size(), DType::kF32, sizes}};
  const FileRoot root(directory_.path());
  for (size_t i = 0; i < archive.size(); ++i) {
    std::string changed = archive;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    directory_.Write("file", archive + changed);
    const auto together = LocateChunks(*root.Open("file"), BlobIndex{}, both);
    const auto alone = LocateChunks(*root.Open("file"), BlobIndex{}, {&both[1], 1});
    // Comparing chunks gives the same result as parsing each by itself.
    ASSERT_EQ(together.has_value(), alone.has_value()) << i;
    if (!together) continue;
    EXPECT_EQ(together->dense[1], alone->dense[0]) << i;
  }
}

// The file that is written last, and its writer, decide when a followed step is whole.
TEST_F(DcpSourceTest, LightningsOwnFileSealsItsDirectory) {
  WriteAll(Honest());
  const auto seal = [&] {
    const Place place = PlaceOf(path_).value();
    return source_->StateOf(source_->Find(place.root, place.directory).value().at(0), options_, {})
        .phase;
  };
  EXPECT_EQ(seal(), SavePhase::kSealed);
  std::filesystem::rename(path_, directory_.path() + "/run/epoch=0-step=3.ckpt");
  path_ = directory_.path() + "/run/epoch=0-step=3.ckpt";
  EXPECT_EQ(seal(), SavePhase::kBegun);
  directory_.Write("run/epoch=0-step=3.ckpt/meta.pt", "loops");
  EXPECT_EQ(seal(), SavePhase::kSealed);
}

TEST_F(DcpSourceTest, ALogThatGrowsUnsealsNothing) {
  WriteAll(Honest());
  std::this_thread::sleep_for(std::chrono::milliseconds(30));  // a tick of the kernel's clock
  directory_.Write("run/ckpt/train.log", "and on");
  const Place place = PlaceOf(path_).value();
  const StepCandidate step = source_->Find(place.root, place.directory).value().at(0);
  SaveHistory history;
  EXPECT_EQ(source_->StateOf(step, options_, history).phase, SavePhase::kProvisional);
  history.growing = {step.directory + "/train.log"};
  EXPECT_EQ(source_->StateOf(step, options_, history).phase, SavePhase::kSealed);
  history.growing.insert(step.directory + "/.metadata");
  EXPECT_EQ(source_->StateOf(step, options_, history).phase, SavePhase::kProvisional);
}

}  // namespace
}  // namespace ckptfs::dcp
