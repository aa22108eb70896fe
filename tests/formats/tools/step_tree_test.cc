// SPDX-License-Identifier: Apache-2.0
#include "formats/tools/step_tree.h"

#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>

#include "core/adopt/scan.h"
#include "core/base/strings.h"
#include "core/io/file_root.h"
#include "core/io/memory_root.h"
#include "formats/deepspeed/step_directories.h"
#include "formats/registry.h"
#include "formats/tools/recognise.h"
#include "formats/tools/tool_files.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/watched_root.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAre;
namespace files = std::filesystem;

constexpr const char* kModel = "mp_rank_00_model_states.pt";

struct StepTreeTest : testing::Test {
  TemporaryDirectory directory;
  std::vector<std::unique_ptr<Source>> sources = MakeSources();

  std::string At(const std::string& path) const { return directory.path() + "/" + path; }
  void Tag(const std::string& path) { directory.Write(path + "/" + kModel, ""); }
  // "source: run/id iteration" of each step at a path.
  std::vector<std::string> Found(const std::string& path) {
    const auto scan = ScanPlace(*PlaceOf(At(path)), sources, HintsOfTools());
    if (!scan) return {scan.error().message};
    std::vector<std::string> out;
    for (const FoundStep& step : scan->steps) {
      const StepCandidate& one = step.candidate;
      EXPECT_TRUE(one.directory.starts_with(one.Own())) << one.directory;
      out.push_back(StrCat(step.source->name(), ": ", LastComponent(one.SavePath()), "/", one.id,
                           " ", one.iteration));
    }
    return out;
  }
};

TEST_F(StepTreeTest, ATrainersDirectoryIsTheStep) {
  for (const std::string step : {"9", "10"}) {
    const std::string own = "out/checkpoint-" + step;
    Tag(own + "/global_step" + step);
    directory.Write(own + "/latest", "global_step" + step);
    directory.Write(own + "/model.safetensors", "");
    directory.Write(own + "/trainer_state.json", "");
  }
  EXPECT_THAT(Found("out"),
              ElementsAre("deepspeed: out/checkpoint-10 10", "deepspeed: out/checkpoint-9 9"));
  EXPECT_THAT(Found("out/checkpoint-9"), ElementsAre("deepspeed: out/checkpoint-9 9"));
}

TEST_F(StepTreeTest, AConversionBesideTheSaveIsAStepOfItsOwn) {
  Tag("out/checkpoint-9/global_step9");
  Tag("out/checkpoint-9/global_step9_universal");
  files::create_directories(At("out/checkpoint-9/global_step9_universal/zero"));
  EXPECT_THAT(Found("out"),
              UnorderedElementsAre("deepspeed: out/checkpoint-9 9",
                                   "deepspeed_universal: out/checkpoint-9_universal 9"));
}

TEST_F(StepTreeTest, SeveralTagsInOneDirectoryAreSeveralSteps) {
  Tag("out/checkpoint-9/a");
  Tag("out/checkpoint-9/b");
  EXPECT_THAT(Found("out"),
              ElementsAre("deepspeed: out/checkpoint-9-a 9", "deepspeed: out/checkpoint-9-b 9"));
}

// Files beside the tags are the training's own state at the moment of one.
TEST_F(StepTreeTest, WhatLiesBesideSeveralTagsIsOfTheOneThatIsNamed) {
  Tag("out/checkpoint-9/a");
  Tag("out/checkpoint-9/b");
  directory.Write("out/checkpoint-9/trainer_state.json", "{}");
  const auto carried = [&](const std::string& id) {
    Assembler assembler;
    const auto steps = ScanIfAny(*PlaceOf(At("out")), sources);
    for (const FoundStep& step : steps->steps) {
      if (step.candidate.id != id) continue;
      EXPECT_TRUE(deepspeed::CarryBeside(assembler, step.candidate, "latest"));
    }
    const StepModel& header = assembler.header();
    EXPECT_EQ(!header.facts.tool, !header.left_out.empty());
    return !header.facts.tool ? LeftOutText(header.left_out.front()) : "";
  };
  EXPECT_THAT(carried("checkpoint-9-a"), HasSubstr("its latest does not name one of them"));
  directory.Write("out/checkpoint-9/latest", "b");
  EXPECT_THAT(carried("checkpoint-9-a"), HasSubstr("its latest names b"));
  EXPECT_EQ(carried("checkpoint-9-b"), "");
}

TEST_F(StepTreeTest, AcceleratesDirectories) {
  Tag("project/checkpoints/checkpoint_0/pytorch_model");
  Tag("project/checkpoints/checkpoint_1/pytorch_model");
  const std::vector<std::string> steps = {"deepspeed: checkpoints/checkpoint_0 0",
                                          "deepspeed: checkpoints/checkpoint_1 1"};
  EXPECT_EQ(Found("project/checkpoints"), steps);
  EXPECT_EQ(Found("project"), steps);
  for (const std::string step : {"step_5", "best"}) {
    directory.Write("plain/" + step + "/model.safetensors", "");
    directory.Write("plain/" + step + "/optimizer.bin", "");
    directory.Write("plain/" + step + "/random_states_0.pkl", "");
  }
  EXPECT_THAT(Found("plain"),
              ElementsAre("huggingface: plain/best 0", "huggingface: plain/step_5 5"));
  EXPECT_THAT(Found("plain/step_5"), ElementsAre("huggingface: plain/step_5 5"));
  EXPECT_THAT(Found("plain/best"), ElementsAre("huggingface: best/best 0"));
}

TEST_F(StepTreeTest, LightningsFilesAndDirectories) {
  const std::string folder = "logs/version_0/checkpoints/";
  directory.Write(folder + "epoch=0-step=5.ckpt", "");
  directory.Write(folder + "epoch=1-step=10.ckpt", "");
  files::create_symlink("epoch=1-step=10.ckpt", At(folder + "last.ckpt"));
  const std::vector<std::string> steps = {"huggingface: checkpoints/epoch=0-step=5.ckpt 5",
                                          "huggingface: checkpoints/epoch=1-step=10.ckpt 10"};
  EXPECT_EQ(Found("logs/version_0/checkpoints"), steps);
  EXPECT_EQ(Found("logs/version_0"), steps);
  EXPECT_EQ(Found("logs"), steps);
  Tag("deep/epoch=2-step=30.ckpt/checkpoint");
  directory.Write("deep/epoch=2-step=30.ckpt/latest", "checkpoint");
  EXPECT_THAT(Found("deep"), ElementsAre("deepspeed: deep/epoch=2-step=30.ckpt 30"));
  EXPECT_THAT(Found("deep/epoch=2-step=30.ckpt"),
              ElementsAre("deepspeed: deep/epoch=2-step=30.ckpt 30"));
}

TEST_F(StepTreeTest, RunsOneLevelBelowAreSaid) {
  Tag("all/a/global_step1");
  Tag("all/b/checkpoint-2/global_step2");
  directory.Write("all/logs/x", "");
  directory.Write("all/c/iter_0000500/common.pt", "");
  directory.Write("all/c/iter_0000500/metadata.json", "");
  EXPECT_THAT(Found("all"),
              ElementsAre("deepspeed: a/global_step1 1", "deepspeed: b/checkpoint-2 2"));
  const auto scan = ScanPlace(*PlaceOf(At("all")), sources, HintsOfTools());
  ASSERT_TRUE(scan);
  ASSERT_EQ(scan->said.size(), 1u);
  EXPECT_EQ(scan->said[0], At("all") + ": no step of its own; one level below: 3 runs (a, b, c)");
  ASSERT_EQ(scan->unread.size(), 1u);
  EXPECT_THAT(scan->unread[0].message, HasSubstr("all/c/iter_0000500: Megatron"));
}

TEST_F(StepTreeTest, WhatIsNamedAsTheStepsAreAndIsNoneYetIsTold) {
  Tag("out/checkpoint-9/global_step9");
  directory.Write("out/checkpoint-10/config.json", "{}");
  files::create_directories(At("out/checkpoint-11"));
  directory.Write("out/epoch_2/predictions.csv", "");
  const auto begun = [&](const std::string& path) {
    std::vector<std::string> out;
    const auto scan = ScanIfAny(*PlaceOf(At(path)), sources, HintsOfTools());
    for (const BegunStep& step : scan->begun) out.push_back(step.id);
    return out;
  };
  EXPECT_THAT(begun("out"), ElementsAre("checkpoint-10", "checkpoint-11"));
  EXPECT_THAT(Found("out"), ElementsAre("deepspeed: out/checkpoint-9 9"));
  EXPECT_THAT(Found("out/checkpoint-10"),
              ElementsAre(At("out/checkpoint-10") + ": not whole: no weights yet"));
  // A run that is named like a step is not one.
  Tag("sweep/iter_1/global_step5");
  EXPECT_THAT(begun("sweep"), testing::IsEmpty());
  EXPECT_THAT(Found("sweep"), ElementsAre("deepspeed: iter_1/global_step5 5"));
}

TEST_F(StepTreeTest, SecondNamesAndLoopsAreNoSteps) {
  Tag("run/global_step5");
  files::create_directory_symlink("global_step5", At("run/best"));
  files::create_directory_symlink(".", At("run/self"));
  files::create_directory_symlink("..", At("run/up"));
  files::create_directory_symlink("./global_step5/", At("run/newest"));
  EXPECT_THAT(Found("run"), ElementsAre("deepspeed: run/global_step5 5"));
  Tag("elsewhere/global_step6");
  files::create_directory_symlink(At("elsewhere/global_step6"), At("run/global_step6"));
  EXPECT_THAT(Found("run"),
              ElementsAre("deepspeed: run/global_step5 5", "deepspeed: run/global_step6 6"));
  // Where there is nothing, no link is followed to find something.
  files::create_directories(At("none"));
  files::create_directory_symlink(At("run"), At("none/other"));
  files::create_directory_symlink("..", At("none/up"));
  EXPECT_THAT(Found("none"), ElementsAre(HasSubstr("it holds 2 directories (other, up)")));
}

TEST_F(StepTreeTest, WhatCannotBeLookedIntoRefusesNothingElse) {
  if (::geteuid() == 0) GTEST_SKIP() << "root looks into everything";
  Tag("run/global_step5");
  Tag("run/global_step6");
  directory.Write("run/private/x", "");
  for (const char* name : {"run/global_step6", "run/private"}) ::chmod(At(name).c_str(), 0);
  EXPECT_THAT(Found("run"),
              ElementsAre("deepspeed: run/global_step5 5", "deepspeed: run/global_step6 6"));
  for (const char* name : {"run/global_step6", "run/private"}) ::chmod(At(name).c_str(), 0700);
}

// A directory that holds `count` directories of which nobody made one; all else as it is.
class WideRoot final : public Root {
 public:
  WideRoot(std::shared_ptr<const Root> root, std::string wide, size_t count, EntryKind kind)
      : Root(root->name(), false),
        root_(std::move(root)),
        wide_(std::move(wide)),
        count_(count),
        kind_(kind) {}

  Result<std::vector<RootEntry>> List(std::string_view path) const override {
    if (path != wide_) return root_->List(path);
    auto entries = root_->List(path).value_or(std::vector<RootEntry>());
    for (size_t i = 0; i < count_; ++i) entries.push_back({StrCat("x", 1'000'000'000 + i), kind_});
    ++listed;
    return entries;
  }
  Result<EntryStat> Stat(std::string_view path) const override {
    if (path.starts_with(wide_ + "/x")) {
      ++asked;
      return EntryStat{kind_};
    }
    return root_->Stat(path);
  }
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override {
    return root_->Open(path);
  }

  mutable std::atomic<size_t> listed = 0, asked = 0;

 private:
  const std::shared_ptr<const Root> root_;
  const std::string wide_;
  const size_t count_;
  const EntryKind kind_;
};

// "<run>/<id>" of each step, then what is not read and the error.
std::vector<std::string> Said(const std::shared_ptr<const Root>& root, const std::string& path,
                              Sources sources) {
  const auto scan = ScanPlace(Place{root, path}, sources, HintsOfTools());
  if (!scan) return {scan.error().message};
  std::vector<std::string> out;
  for (const FoundStep& step : scan->steps) out.push_back(step.candidate.directory);
  for (const Error& error : scan->unread) out.push_back(error.message);
  return out;
}

TEST_F(StepTreeTest, ManyDirectoriesAreRefusedAndKeepNothingElseOut) {
  Tag("all/run/global_step5");
  const auto files = std::make_shared<FileRoot>(directory.path());
  const auto with = [&](const std::string& wide) {
    return std::make_shared<WideRoot>(files, wide, kMaxStepDirectories + 1, EntryKind::kDirectory);
  };
  const auto too_many = HasSubstr("65537 directories, and ckptfs searches at most");
  EXPECT_THAT(Said(with("all/none"), "all/none", sources), ElementsAre(HasSubstr("all/none")));
  directory.Write("all/run/samples/x", "");
  EXPECT_THAT(Said(with("all/run/samples"), "all/run/samples", sources), ElementsAre(too_many));
  // A job's pictures beside its steps, and beside its run.
  EXPECT_THAT(Said(with("all/run/samples"), "all/run", sources),
              ElementsAre("all/run/global_step5"));
  directory.Write("all/pictures/x", "");
  EXPECT_THAT(Said(with("all/pictures"), "all", sources),
              ElementsAre("all/run/global_step5", too_many));
}

// CKPTFS_LONG=1: a million.
TEST_F(StepTreeTest, ManyFilesAreListedAFewTimesAndNotLookedAtOneByOne) {
  const size_t count = std::getenv("CKPTFS_LONG") != nullptr ? 1'000'000 : 100'000;
  directory.Write("run/x", "");
  const auto files = std::make_shared<FileRoot>(directory.path());
  const WideRoot* root = nullptr;
  const auto with = [&](const std::string& wide) {
    auto made = std::make_shared<WideRoot>(files, wide, count, EntryKind::kFile);
    root = made.get();
    return made;
  };
  const auto none = with("run");
  EXPECT_THAT(Said(none, "run", sources),
              ElementsAre(HasSubstr(StrCat("it holds ", count + 1, " files"))));
  EXPECT_LE(root->listed, 3 * sources.size());
  EXPECT_LE(root->asked, 1u << 16);
  Tag("run/global_step5");
  const auto one = with("run");
  EXPECT_THAT(Said(one, "run", sources), ElementsAre("run/global_step5"));
  EXPECT_LE(root->asked, 1u << 16);
}

// One tree that several formats would claim.
TEST_F(StepTreeTest, WhatSeveralSourcesClaimIsOneStep) {
  const auto dcp = [&](const std::string& path) {
    directory.Write(path + "/.metadata", "");
    directory.Write(path + "/__0_0.distcp", "");
  };
  Tag("one/global_step5");
  dcp("one/global_step5");
  directory.Write("one/global_step5/model.safetensors", "");
  EXPECT_THAT(Found("one"), ElementsAre("deepspeed: one/global_step5 5"));
  EXPECT_THAT(Found("one/global_step5"), ElementsAre("deepspeed: one/global_step5 5"));
  // accelerate with FSDP, whose weights lie beside.
  dcp("two/checkpoint_3/pytorch_model_fsdp_0");
  dcp("two/checkpoint_3/optimizer_0");
  directory.Write("two/checkpoint_3/model.safetensors", "");
  directory.Write("two/checkpoint_3/random_states_0.pkl", "");
  EXPECT_THAT(Found("two"), ElementsAre("dcp: two/checkpoint_3 3"));
  EXPECT_THAT(Found("two/checkpoint_3"), ElementsAre("dcp: two/checkpoint_3 3"));
  // A Trainer's, of two tags, whose weights lie beside, and a run of such.
  Tag("three/checkpoint-5/global_step5");
  Tag("three/checkpoint-5/global_step4");
  directory.Write("three/checkpoint-5/model.safetensors", "");
  directory.Write("three/checkpoint-5/trainer_state.json", "");
  for (const char* at : {"three", "three/checkpoint-5"}) {
    EXPECT_THAT(Found(at), ElementsAre("deepspeed: three/checkpoint-5-global_step4 5",
                                       "deepspeed: three/checkpoint-5-global_step5 5"));
  }
}

// Its weights, and a job's own checkpoints of other moments.
TEST_F(StepTreeTest, OtherStepsInADirectoryHideNothing) {
  directory.Write("run/checkpoint-5/model.safetensors", "");
  for (const std::string step : {"step-5", "step-10"}) {
    directory.Write("run/checkpoint-5/" + step + "/.metadata", "");
    directory.Write("run/checkpoint-5/" + step + "/__0_0.distcp", "");
  }
  EXPECT_THAT(Found("run/checkpoint-5"), testing::Contains(HasSubstr("huggingface: ")));
}

TEST_F(StepTreeTest, ManyFilesAroundAStepAreBounded) {
  const auto memory = std::make_shared<MemoryRoot>("/memory");
  const auto owner = std::make_shared<const std::string>("x");
  const auto add = [&](const std::string& path) {
    ASSERT_TRUE(memory->Add(path, {std::as_bytes(std::span(*owner))}, owner, {0644, 1, 2}));
  };
  const std::string own = "run/step_5";
  add(own + "/random_states_0.pkl");
  add(own + "/1/2/3/kept");
  add(own + "/1/2/3/4/deep");
  add(own + "/checkpoint-7/others");
  add("run/step_6/others");
  StepCandidate step = *ToolStep(memory, own);
  Assembler few;
  ASSERT_TRUE(CarryOwnFiles(few, step));
  std::vector<std::string> paths;
  for (uint32_t i = 0; i < 2; ++i) paths.push_back(few.blob(BlobIndex{i}).path);
  EXPECT_THAT(paths, UnorderedElementsAre("step_5/random_states_0.pkl", "step_5/1/2/3/kept"));
  EXPECT_THAT(few.header().notes, UnorderedElementsAre(HasSubstr("'step_5/checkpoint-7'"),
                                                       HasSubstr("'step_5/1/2/3/4'")));
  for (size_t i = 0; i < kMaxToolFiles; ++i) add(StrCat(own, "/x", i));
  Assembler many;
  ASSERT_TRUE(CarryOwnFiles(many, step));
  EXPECT_THAT(many.header().notes, Contains(HasSubstr("beyond the first 4096")));
}

// Finding steps lists a run a few times; that each of them asks for those before it adds one.
TEST_F(StepTreeTest, ARunIsNotListedAnewForEachStep) {
  constexpr int kSteps = 60;
  for (int i = 0; i < kSteps; ++i) {
    directory.Write(StrCat("run/step_", i, "/model.safetensors"), "");
  }
  const auto root = std::make_shared<WatchedRoot>(std::make_shared<FileRoot>(directory.path()));
  const auto taken = IngestPlace(Place{root, "run"}, sources, {}, HintsOfTools());
  EXPECT_FALSE(taken);  // the files are empty
  EXPECT_LT(std::ranges::count_if(
                root->calls(),
                [&](const IoCall& call) { return call.name == "list" && call.path == At("run"); }),
            20);
}

// Otherwise a user could put another file under the name in between, and have it shown to all.
TEST_F(StepTreeTest, AScriptIsReadAsItWasLookedAt) {
  directory.Write("run/global_step5/zero_to_fp32.py", "a note");
  directory.Write("run/zero_to_fp32.py", "import torch");
  const auto root = std::make_shared<WatchedRoot>(std::make_shared<FileRoot>(directory.path()));
  StepCandidate step;
  step.root = root;
  step.directory = "run/global_step5";
  step.save = "run";
  root->Watch();
  Assembler assembler;
  ASSERT_TRUE(deepspeed::CarryBeside(assembler, step, "latest"));
  ASSERT_EQ(assembler.header().texts.size(), 1u);
  EXPECT_EQ(assembler.header().texts[0].text, "import torch");
  EXPECT_EQ(std::ranges::count_if(root->calls(),
                                  [&](const IoCall& call) {
                                    return call.name == "open" &&
                                           call.path == At("run/zero_to_fp32.py");
                                  }),
            1);
}

}  // namespace
}  // namespace ckptfs
