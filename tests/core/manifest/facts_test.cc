// SPDX-License-Identifier: Apache-2.0
//
// Facts of a step in its manifest: as a table, hostile ones, and as the documents that builds
// before wrote.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/strings.h"
#include "core/manifest/manifest.h"
#include "core/manifest/manifest_format.h"
#include "core/manifest/old_facts.h"
#include "tests/core/store/sample_model.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;
using testing_support::SampleModel;

ModelFile TextFile(std::string name, std::string text) {
  return {std::move(name), std::make_shared<const std::string>(std::move(text))};
}

StepFacts AllFacts() {
  StepFacts facts;
  KeyShape& keys = facts.keys.emplace();
  keys.model = "";
  keys.optimizer = "app.optim";
  keys.optimizers = {{"a", "optim.a"}, {"b", ""}};
  keys.flat = true;
  keys.numbers = {{"a", {{"embed.weight", 1}, {"stacked", 0}}}, {"b", {}}};
  keys.tensors = {{"optim.a.lr", {DType::kF32, {}}}, {"optim.b.lr", {DType::kF64, {1, 1}}}};
  keys.state_names = {{"embed.weight", "embed.own.weight"}};
  keys.kinds = {{"al.5", {{"al", {}}, {"", 5}}}, {"al.x", {{"al", {}}, {"x", {}}}}};
  facts.tool = {"trainer", "run/checkpoint-5"};
  facts.model_files.files = {TextFile("1_Pooling/config.json", "{}"),
                             TextFile("config.json", ""),
                             {"tokenizer.json", BlobIndex{1}}};
  facts.modules = {false, {{"a._extra_state", {4}}, {"b._extra_state", {2, 3}}}};
  facts.config_made = true;
  facts.safetensors = {{BlobIndex{0}, 8}, {BlobIndex{1}, 16}};
  return facts;
}

std::string Printed(const StepModel& model) {
  auto bytes = RenderManifest(model);
  EXPECT_TRUE(bytes) << bytes.error().message;
  return bytes ? *bytes : std::string();
}

TEST(FactsTest, EveryFactSurvives) {
  StepModel before = SampleModel();
  const std::string without = Printed(before);
  before.facts = AllFacts();
  before.groups.front().number = 7;
  before.left_out = {{LeftOutPart::kOptimizer, "'a'", "why", "", 0, "adam"},
                     {LeftOutPart::kOptimizer, "'b'", "why", "", 0, ""},
                     {LeftOutPart::kOptimizer, "'c'", "why", "", 0, {}}};
  const auto after = ParseManifest(Printed(before));
  ASSERT_TRUE(after) << after.error().message;
  EXPECT_EQ(after->facts, before.facts);
  EXPECT_EQ(after->groups.front().number, 7u);
  EXPECT_EQ(after->left_out, before.left_out);
  EXPECT_EQ(Printed(*after), Printed(before));
  EXPECT_EQ(Printed(SampleModel()), without);
  EXPECT_EQ(ParseManifest(without)->facts, StepFacts());
}

TEST(FactsTest, HostileFactsAreRefused) {
  const std::pair<std::string, std::function<void(StepFacts&)>> cases[] = {
      {"a tool without a name", [](StepFacts& f) { f.tool->tool = ""; }},
      {"'..' component", [](StepFacts& f) { f.tool->own = "a/../../b"; }},
      {"relative", [](StepFacts& f) { f.model_files.files[0].name = "/config.json"; }},
      {"'..' component", [](StepFacts& f) { f.model_files.files[0].name = "../config.json"; }},
      {"too deep", [](StepFacts& f) { f.model_files.files[0].name = "a/b/c.json"; }},
      {"not sorted",
       [](StepFacts& f) { std::swap(f.model_files.files[0], f.model_files.files[1]); }},
      {"not sorted", [](StepFacts& f) { f.model_files.files[1].name = "1_Pooling/config.json"; }},
      {"lies in no blob", [](StepFacts& f) { f.model_files.files[2].body = BlobIndex{3}; }},
      {"0 parts",
       [](StepFacts& f) {
         f.modules->objects["a._extra_state"] = {4, 0};
       }},
      {"1099511627776 parts",
       [](StepFacts& f) {
         f.modules->objects["b._extra_state"] = {1 << 20, 1 << 20};
       }},
      {"more than 2^63",
       [](StepFacts& f) { f.modules->objects["b._extra_state"] = Shape(9, 1 << 20); }},
      {"begin outside", [](StepFacts& f) { f.safetensors[BlobIndex{9}] = 8; }},
      {"begin outside", [](StepFacts& f) { f.safetensors[BlobIndex{0}] = uint64_t{1} << 62; }},
      {"not where it stands", [](StepFacts& f) { f.keys->kinds["al.5"].clear(); }},
      {"not where it stands", [](StepFacts& f) { f.keys->kinds[""] = {}; }},
      {"not where it stands", [](StepFacts& f) { f.keys->kinds["al.5"][1].index = 6; }},
      {"one element", [](StepFacts& f) { f.keys->tensors["optim.a.lr"].second = {2}; }},
  };
  for (const auto& [why, edit] : cases) {
    StepModel model = SampleModel();
    model.facts = AllFacts();
    edit(model.facts);
    const auto after = ParseManifest(Printed(model));
    ASSERT_FALSE(after) << why;
    EXPECT_THAT(after.error().message, HasSubstr(why));
  }
}

// A payload with flipped bytes is refused, or is a manifest like any other.
void ExpectSoundUnderFlips(const std::string& bytes, int rounds) {
  const std::string payload = bytes.substr(kManifestHeaderSize);
  std::mt19937 random(7);
  for (int round = 0; round < rounds; ++round) {
    std::string damaged = payload;
    for (int flips = 1 + round % 3; flips > 0; --flips) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    const auto step = ParseManifest(WrapManifest(damaged));
    if (!step) continue;
    const auto again = ParseManifest(Printed(*step));
    ASSERT_TRUE(again) << again.error().message;
    EXPECT_EQ(again->facts, step->facts);
  }
}

TEST(FactsTest, DamagedFactsAreRefusedOrSound) {
  StepModel model;
  model.roots = {"/r"};
  model.blobs = SampleModel().blobs;
  for (Blob& blob : model.blobs) blob.root = 0;
  model.facts = AllFacts();
  ASSERT_TRUE(ParseManifest(Printed(model)));
  ExpectSoundUnderFlips(Printed(model), 20000);
}

// ---- documents of builds before ---------------------------------------------------------

// tests/golden/<name>: builds of before wrote them, of a Trainer's directory, and of a state dict
// whose optimizer numbers its parameters and has states in dicts and a tensor as lr.
std::string GoldenBytes(const std::string& name) {
  std::ifstream file(StrCat(CKPTFS_TEST_DATA, "/golden/", name), std::ios::binary);
  std::stringstream stream;
  stream << file.rdbuf();
  return stream.str();
}

StepModel Golden(const std::string& name) {
  auto step = ParseManifest(GoldenBytes(name));
  EXPECT_TRUE(step) << step.error().message;
  return step ? *std::move(step) : StepModel();
}

TEST(FactsTest, FilesAndToolAreTakenOutOfTheDocumentsOfBefore) {
  const StepModel step = Golden("manifest_v2_tool_documents.bin");
  EXPECT_TRUE(step.documents.empty());
  EXPECT_EQ(step.facts.tool, (ToolDirectory{"trainer", "checkpoint-5"}));
  const auto& files = step.facts.model_files;
  ASSERT_EQ(files.files.size(), 2u);
  EXPECT_THAT(*files.config(), HasSubstr("\"model_type\": \"llama\""));
  EXPECT_EQ(step.blob(std::get<BlobIndex>(files.Find("tokenizer.json")->body)).path,
            "checkpoint-5/tokenizer.json");
  EXPECT_FALSE(step.facts.config_made);
  ASSERT_EQ(step.facts.safetensors.size(), 1u);
  EXPECT_EQ(step.blob(step.facts.safetensors.begin()->first).path,
            "checkpoint-5/model.safetensors");
  EXPECT_EQ(ParseManifest(Printed(step))->facts, step.facts);
}

TEST(FactsTest, KeysAreTakenOutOfTheDocumentOfBefore) {
  const StepModel step = Golden("manifest_v2_keys_document.bin");
  ASSERT_EQ(step.documents.size(), 1u);
  EXPECT_EQ(step.documents.front().key, "client/iteration");
  KeyShape keys{.model = "net", .optimizer = "opt"};
  keys.numbers = {{"", {{"bias", 0}, {"weight", 1}}}};
  keys.tensors = {{"opt.param_groups.0.lr", {DType::kF32, {}}},
                  {"opt.param_groups.1.lr", {DType::kF32, {}}}};
  keys.kinds = {{"al.x.0", {{"al", {}}, {"x", {}}, {"", 0}}},
                {"al.x.1", {{"al", {}}, {"x", {}}, {"", 1}}}};
  EXPECT_EQ(step.facts.keys, keys);
}

TEST(FactsTest, DamagedDocumentsOfBeforeAreRefusedOrSound) {
  for (const char* name : {"manifest_v2_tool_documents.bin", "manifest_v2_keys_document.bin"}) {
    ExpectSoundUnderFlips(GoldenBytes(name), 5000);
  }
}

// Returns a step as earlier builds wrote it: with a document that they printed, without the table.
StepModel TakenFrom(std::string key, std::string pickle) {
  StepModel step = SampleModel();
  step.documents = {{std::move(key), "", StrCat("\x80\x02", pickle), {}}};
  TakeOldFacts(step);
  return step;
}

TEST(FactsTest, OtherDocumentsOfBeforeAreTaken) {
  EXPECT_TRUE(TakenFrom("made_config", "\x88.").facts.config_made);
  const StepModel apart = TakenFrom("group_numbers",
                                    "](K\x03"
                                    "e.");
  EXPECT_TRUE(apart.documents.empty());
  EXPECT_EQ(apart.groups.front().number, 3u);
  const auto text = [](std::string_view word) {
    return StrCat("X", std::string(1, static_cast<char>(word.size())), std::string(3, '\0'), word);
  };
  const StepModel spelled = TakenFrom(
      "ckptfs.dcp",
      StrCat("}(", text("model"), text("m"), text("optimizers"), "}(", text(""), text("o"), "uu."));
  KeyShape keys{.model = "m"};
  keys.optimizers = {{"", "o"}};
  EXPECT_EQ(spelled.facts.keys, keys);
}

TEST(FactsTest, DocumentsOfAnotherFormAreTheJobs) {
  const std::pair<std::string, std::string> cases[] = {
      {"safetensors_files", "}(K\x07K\x08u."},              // {7: 8}: no such blob
      {"safetensors_files", "}(K\x01J\xff\xff\xff\xffu."},  // {1: -1}
      {"safetensors_files", "}(K\x01K\x08."},               // cut
      {"safetensors_files", "}(K\x01u."},                   // a key alone
      {"safetensors_files", "u."},
      {"model_files", "K\x01."},
      {"training_tool", "}."},
      {"made_config", "K\x01."},
      {"group_numbers",
       "](K\x01K\x01"
       "e."},  // more than there are groups
      {"dcp/keys", "}."},
      {"dcp/keys", "cos\nsystem\n)R."},
      {"made_config", "h\x05."},
      {"made_config", std::string(100, '(')},
      {"args", "\x88."},
  };
  for (const auto& [key, pickle] : cases) {
    const StepModel step = TakenFrom(key, pickle);
    ASSERT_EQ(step.documents.size(), 1u) << key;
    EXPECT_EQ(step.facts, StepFacts()) << key;
    // It stays the job's: the manifest says that facts are told.
    const auto after = ParseManifest(Printed(step));
    ASSERT_TRUE(after) << after.error().message;
    EXPECT_EQ(after->documents.size(), 1u) << key;
  }
  StepModel own = SampleModel();
  own.documents = {{"made_config", "", "\x80\x02\x88.", {}}};
  EXPECT_FALSE(ParseManifest(Printed(own))->facts.config_made);
}

}  // namespace
}  // namespace ckptfs
