// SPDX-License-Identifier: Apache-2.0
#include "formats/tools/save_order.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <memory>
#include <set>

#include "core/adopt/scan.h"
#include "core/base/strings.h"
#include "core/io/file_root.h"
#include "core/io/file_stamp.h"
#include "formats/registry.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/watched_root.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

// A run, its steps in the directories that are named, and what is said of them.
struct SaveOrderTest : testing::Test {
  TemporaryDirectory directory;
  SourceOptions options;
  std::shared_ptr<const std::set<std::string>> before;  // the files that a follower took

  void Write(const std::string& step, const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      directory.Write("run/" + step + "/" + name, "");
      SetTime("run/" + step + "/" + name, clock_ += 1'000'000);
    }
  }
  StepCandidate Step(const std::string& name) const {
    StepCandidate out;
    const Place place = *PlaceOf(directory.path() + "/run/" + name);
    out.root = place.root;
    out.directory = place.directory;
    return out;
  }
  SaveState StateOf(const std::string& name, const std::vector<std::string>& growing = {}) const {
    StepCandidate step = Step(name);
    step.mtime_ns = Newest();
    SaveHistory history{{}, before};
    for (const std::string& file : growing) history.growing.insert(step.directory + "/" + file);
    return StateOfSave(step, SavePlaces{step.directory, FormatOrder::kNone, Parts(step)}, options,
                       history);
  }
  SavePhase PhaseOf(const std::string& name, const std::vector<std::string>& growing = {}) const {
    return StateOf(name, growing).phase;
  }
  // The file that is missed for certain; "" of a whole step.
  std::string Missed(const std::string& name) const {
    const SaveState state = StateOf(name);
    EXPECT_EQ(state.missing.has_value(), state.phase == SavePhase::kBegun);
    if (!state.missing) return "";
    EXPECT_EQ(state.missing->code, ErrorCode::kInvalid);
    const std::string& message = state.missing->message;
    EXPECT_THAT(message, StartsWith(directory.path() + "/run/" + name + ": no "));
    EXPECT_THAT(message, HasSubstr("the save was cut off (`adopt --weights-only`"));
    const std::string rest = message.substr(message.find(": no ") + 5);
    const std::string file = rest.substr(0, rest.find(','));
    EXPECT_THAT(state.last, testing::EndsWith("/" + file));
    return file;
  }
  int64_t Newest() const { return clock_; }

  int64_t clock_ = NowNs();

 private:
  // A DCP step has one part, its directory; other steps do not have parts.
  static std::vector<std::string> Parts(const StepCandidate& step) {
    const bool dcp = HasFile(*step.root, JoinPath(step.directory, ".metadata")).value_or(false);
    return dcp ? std::vector{step.directory} : std::vector<std::string>();
  }
  void SetTime(const std::string& path, int64_t ns) const {
    const timespec time{ns / 1'000'000'000, ns % 1'000'000'000};
    const timespec times[2] = {time, time};
    ASSERT_EQ(::utimensat(AT_FDCWD, (directory.path() + "/" + path).c_str(), times, 0), 0);
  }
};

// Each step asks which tool saved the steps before it.
TEST_F(SaveOrderTest, ARunIsListedOnceForAllItsSteps) {
  constexpr int kSteps = 40;
  for (int i = 0; i < kSteps; ++i) Write(StrCat("step_", i), {"model.safetensors"});
  Write("step_20", {"random_states_0.pkl"});
  const auto root = std::make_shared<WatchedRoot>(std::make_shared<FileRoot>(directory.path()));
  const SaveHistory history{.listings = std::make_shared<RunListings>()};
  for (int i = 0; i < kSteps; ++i) {
    StepCandidate step;
    step.root = root;
    step.directory = StrCat("run/step_", i);
    const SaveState state = StateOfSave(step, SavePlaces{.own = step.directory}, options, history);
    const bool begun = i == 21 || i == 22;  // the two that are looked at tell no more than that
    EXPECT_EQ(state.phase == SavePhase::kBegun, begun) << i;
  }
  const auto calls = root->calls();
  EXPECT_EQ(std::ranges::count_if(calls,
                                  [&](const IoCall& call) {
                                    return call.name == "list" &&
                                           call.path == directory.path() + "/run";
                                  }),
            1);
  EXPECT_EQ(StateOf("step_21").phase, SavePhase::kBegun);  // with a listing of its own
}

// A directory that went away is passed over, for this step and for others.
TEST_F(SaveOrderTest, StepsThatWentAwayMakeWayForThoseBefore) {
  Write("step_1", {"random_states_0.pkl"});
  for (int i = 2; i < 8; ++i) Write(StrCat("step_", i), {"model.safetensors"});
  const auto root = std::make_shared<FileRoot>(directory.path());
  const SaveHistory history{.listings = std::make_shared<RunListings>()};
  const auto begun = [&](int i) {
    StepCandidate step;
    step.root = root;
    step.directory = StrCat("run/step_", i);
    return StateOfSave(step, SavePlaces{.own = step.directory}, options, history).phase ==
           SavePhase::kBegun;
  };
  EXPECT_FALSE(begun(7));
  for (int i = 2; i < 6; ++i) {
    std::filesystem::remove_all(StrCat(directory.path(), "/run/step_", i));
  }
  EXPECT_TRUE(begun(7));
  EXPECT_TRUE(begun(6));
}

TEST_F(SaveOrderTest, TrainersStateIsItsLast) {
  Write("checkpoint-5", {"model.safetensors", "training_args.bin", "global_step5/x", "latest"});
  EXPECT_EQ(Missed("checkpoint-5"), "trainer_state.json");
  Write("checkpoint-5", {"optimizer.pt", "scheduler.pt", "rng_state.pth"});
  EXPECT_EQ(Missed("checkpoint-5"), "trainer_state.json");
  EXPECT_EQ(PhaseOf("checkpoint-5"), SavePhase::kBegun);
  Write("checkpoint-5", {"trainer_state.json"});
  EXPECT_EQ(Missed("checkpoint-5"), "");
  EXPECT_EQ(PhaseOf("checkpoint-5"), SavePhase::kSealed);
  EXPECT_EQ(PhaseOf("checkpoint-5", {"train.log"}), SavePhase::kSealed);
  EXPECT_EQ(PhaseOf("checkpoint-5", {"trainer_state.json"}), SavePhase::kProvisional);
  Write("checkpoint-5", {"rng_state_1.pth"});  // of a rank that is late
  EXPECT_EQ(PhaseOf("checkpoint-5"), SavePhase::kProvisional);
}

TEST_F(SaveOrderTest, OfShardsThereAreTrainersOrAcceleratesLast) {
  Write("checkpoint-5", {"pytorch_model_fsdp_0/.metadata"});
  EXPECT_EQ(Missed("checkpoint-5"), "trainer_state.json");
  Write("checkpoint-5", {"optimizer_0/.metadata", "scheduler.pt", "trainer_state.json"});
  EXPECT_EQ(Missed("checkpoint-5"), "");
  Write("checkpoint-6", {"pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"});
  EXPECT_EQ(Missed("checkpoint-6"), "trainer_state.json");  // as of the one before it
  // accelerate's, by a script that names its steps so.
  Write("checkpoint-7", {"pytorch_model_fsdp_0/.metadata", "random_states_0.pkl"});
  EXPECT_EQ(Missed("checkpoint-7"), "");
  Write("step_5", {"pytorch_model_fsdp_0/.metadata"});
  EXPECT_EQ(Missed("step_5"), "random_states_0.pkl");
  Write("step_5", {"optimizer_0/.metadata", "scheduler.bin"});
  EXPECT_EQ(Missed("step_5"), "");  // may be a script's own save_fsdp_model and save_fsdp_optimizer
  Write("step_4", {"random_states_1.pkl"});  // of a node that does not see rank 0's
  EXPECT_EQ(Missed("step_4"), "");
  EXPECT_EQ(Missed("step_5"), "random_states_0.pkl");
  Write("whole", {"pytorch_model_fsdp.bin"});
  EXPECT_EQ(Missed("whole"), "random_states_0.pkl");
}

TEST_F(SaveOrderTest, AcceleratesRandomStatesAreItsLast) {
  Write("tag", {"pytorch_model/mp_rank_00_model_states.pt", "latest"});
  EXPECT_EQ(Missed("tag"), "random_states_0.pkl");
  EXPECT_EQ(PhaseOf("tag"), SavePhase::kBegun);
  Write("tag", {"random_states_0.pkl"});
  EXPECT_EQ(Missed("tag"), "");
  EXPECT_EQ(PhaseOf("tag"), SavePhase::kProvisional);  // objects of the job's own may follow
  Write("step_1", {"model.safetensors", "random_states_0.pkl"});
  Write("step_2", {"model.safetensors", "random_states_0.pkl"});
  EXPECT_EQ(PhaseOf("step_2"), SavePhase::kSealed);  // as the step before tells
}

TEST_F(SaveOrderTest, WhatIsThereMayBeAScriptsAndTheStepsBeforeTell) {
  Write("step_10", {"model.safetensors", "optimizer.bin"});
  EXPECT_EQ(Missed("step_10"), "");  // may be somebody's save_pretrained
  Write("step_9", {"model.safetensors", "optimizer.bin", "random_states_0.pkl"});
  EXPECT_EQ(Missed("step_10"), "random_states_0.pkl");
  Write("epoch_10", {"model.safetensors"});
  EXPECT_EQ(Missed("epoch_10"), "");  // of another kind
  Write("step_8", {"model.safetensors"});
  EXPECT_EQ(Missed("step_8"), "");  // retention left a part of it, and it is not the newest
  Write("checkpoint-9", {"model.safetensors", "trainer_state.json"});
  Write("checkpoint-10", {"model.safetensors"});
  EXPECT_EQ(Missed("checkpoint-10"), "trainer_state.json");
  Write("model", {"model.safetensors"});
  EXPECT_EQ(Missed("model"), "");
}

TEST_F(SaveOrderTest, WithoutATraceOfAToolNothingIsMissed) {
  // A script's own engine.save_checkpoint, dcp.save and save_pretrained under such names.
  Write("checkpoint-5", {"latest", "global_step5/mp_rank_00_model_states.pt"});
  Write("checkpoint-6", {".metadata", "__0_0.distcp"});
  Write("checkpoint_7", {"config.json", "model.safetensors", "optimizer.bin"});
  for (const char* name : {"checkpoint-5", "checkpoint-6", "checkpoint_7"})
    EXPECT_EQ(Missed(name), "") << name;
}

TEST_F(SaveOrderTest, LightningsOwnFileIsTheLastOfItsDirectory) {
  Write("epoch=0-step=5.ckpt", {".metadata", "__0_0.distcp"});
  EXPECT_EQ(Missed("epoch=0-step=5.ckpt"), "meta.pt");
  Write("epoch=0-step=5.ckpt", {"meta.pt"});
  EXPECT_EQ(Missed("epoch=0-step=5.ckpt"), "");
  Write("mine.ckpt", {".metadata", "__0_0.distcp"});
  EXPECT_EQ(Missed("mine.ckpt"), "");
  Write("epoch=0-step=6.ckpt", {"checkpoint/mp_rank_00_model_states.pt", "latest"});
  EXPECT_EQ(Missed("epoch=0-step=6.ckpt"), "");
}

TEST_F(SaveOrderTest, ObjectsThatAccelerateSavedBeforeAreWaitedFor) {
  Write("step_1", {"model.safetensors", "random_states_0.pkl", "custom_checkpoint_0.pkl"});
  Write("step_2", {"model.safetensors", "random_states_0.pkl"});
  EXPECT_EQ(PhaseOf("step_2"), SavePhase::kAllButLast);
  EXPECT_EQ(Missed("step_2"), "");  // the next run may have none
  Write("step_2", {"custom_checkpoint_0.pkl"});
  EXPECT_EQ(PhaseOf("step_2"), SavePhase::kSealed);
  EXPECT_EQ(PhaseOf("step_2", {"custom_checkpoint_0.pkl"}), SavePhase::kProvisional);
  // One that the tool deleted, as total_limit=1 has it.
  before = std::make_shared<const std::set<std::string>>(
      std::set<std::string>{"run/x_1/custom_checkpoint_0.pkl"});
  Write("x_2", {"model.safetensors", "random_states_0.pkl"});
  EXPECT_EQ(PhaseOf("x_2"), SavePhase::kAllButLast);
  Write("x_2", {"custom_checkpoint_0.pkl"});
  EXPECT_EQ(PhaseOf("x_2"), SavePhase::kSealed);
  Write("step_2", {"random_states_1.pkl"});  // of a rank that is late
  EXPECT_EQ(PhaseOf("step_2"), SavePhase::kProvisional);
}

// Programs that copy keep the times of what they copy, and not the order in which it was written.
TEST_F(SaveOrderTest, WhatWasCopiedSealsNothing) {
  Write("checkpoint-5", {"model.safetensors", "trainer_state.json"});
  EXPECT_EQ(PhaseOf("checkpoint-5"), SavePhase::kSealed);
  clock_ -= 3'600'000'000'000;
  Write("checkpoint-5", {"model.safetensors", "trainer_state.json"});
  EXPECT_EQ(PhaseOf("checkpoint-5"), SavePhase::kProvisional);
}

TEST_F(SaveOrderTest, PartsOfFilesAreKnownByTheirNames) {
  const ToolNames& names = NamesOfTools();
  for (const char* name :
       {".model.safetensors.AbC12x", "optimizer.pt.6eF0aBcD", "model.safetensors.1a2b3c4d.partial",
        ".metadata.tmp", "model.bin.incomplete"}) {
    EXPECT_TRUE(names.IsPart(name)) << name;
  }
  for (const char* name :
       {"model.safetensors.index.json", ".gitattributes", "model.safetensors", "model.pt.md5",
        "trainer_state.json", "optimizer.pt", ".metadata", "notes.12345678"}) {
    EXPECT_FALSE(names.IsPart(name)) << name;
  }
}

TEST_F(SaveOrderTest, ByItsNameAloneAStepLacksItsLast) {
  Write("checkpoint-5", {"model.safetensors"});
  EXPECT_EQ(PhaseOf("checkpoint-5"), SavePhase::kAllButLast);
  EXPECT_THAT(StateOf("checkpoint-5").last, testing::EndsWith("checkpoint-5/trainer_state.json"));
  Write("mine.ckpt", {".metadata", "__0_0.distcp"});
  EXPECT_EQ(PhaseOf("mine.ckpt"), SavePhase::kAllButLast);
  Write("model", {"model.safetensors"});
  EXPECT_EQ(PhaseOf("model"), SavePhase::kProvisional);
  EXPECT_EQ(StateOf("model").last, "");
}

TEST_F(SaveOrderTest, WhoAsksForWeightsIsNotAskedForMore) {
  Write("checkpoint-5", {"model.safetensors", "training_args.bin"});
  options.weights_only = true;
  EXPECT_EQ(Missed("checkpoint-5"), "");
}

TEST_F(SaveOrderTest, OneFileIsWhole) {
  Write(".", {"epoch=0-step=5.ckpt"});
  EXPECT_EQ(Missed("epoch=0-step=5.ckpt"), "");
}

// DeepSpeed's pointer seals a tag, and what a tool writes around that comes after it.
TEST_F(SaveOrderTest, DeepSpeedsPointerSealsATag) {
  const auto sources = MakeSources();
  const auto seal = [&](const std::string& own, const std::string& below = "") {
    StepCandidate step = Step(own);
    step.own = step.directory;
    step.directory += below;
    step.mtime_ns = Newest();
    for (const auto& source : sources) {
      if (source->name() == "deepspeed") return source->StateOf(step, options, {{}, before}).phase;
    }
    return SavePhase::kProvisional;
  };
  Write("global_step5", {"mp_rank_00_model_states.pt"});
  EXPECT_EQ(seal("global_step5"), SavePhase::kProvisional);  // it can be told not to write one
  Write(".", {"latest"});
  EXPECT_EQ(seal("global_step5"), SavePhase::kSealed);
  Write("global_step6", {"mp_rank_00_model_states.pt"});
  EXPECT_EQ(seal("global_step6"), SavePhase::kProvisional);  // the pointer is of an earlier one
  Write("checkpoint-5", {"global_step5/mp_rank_00_model_states.pt", "latest", "training_args.bin"});
  EXPECT_EQ(seal("checkpoint-5", "/global_step5"), SavePhase::kBegun);
  Write("checkpoint-5", {"trainer_state.json"});
  EXPECT_EQ(seal("checkpoint-5", "/global_step5"), SavePhase::kSealed);
}

// A link to the whole step is not a step before it, and an endless run is not walked.
TEST_F(SaveOrderTest, LinksAndManyStepsTellNothingWrong) {
  Write("elsewhere/step_1", {"random_states_0.pkl"});
  std::filesystem::create_directory_symlink("elsewhere/step_1", directory.path() + "/run/step_1");
  Write("step_2", {"model.safetensors"});
  EXPECT_EQ(Missed("step_2"), "");
  Write("step_100", {"random_states_0.pkl"});
  for (int i = 101; i < 110; ++i) Write(StrCat("step_", i), {"model.safetensors"});
  EXPECT_EQ(Missed("step_102"), "random_states_0.pkl");
  EXPECT_EQ(Missed("step_109"), "");
}

}  // namespace
}  // namespace ckptfs
