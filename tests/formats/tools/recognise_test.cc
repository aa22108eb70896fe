// SPDX-License-Identifier: Apache-2.0
#include "formats/tools/recognise.h"

#include <gmock/gmock.h>

#include <filesystem>

#include "core/adopt/scan.h"
#include "core/io/file_root.h"
#include "formats/registry.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;
namespace files = std::filesystem;

struct RecogniseTest : testing::Test {
  TemporaryDirectory directory;

  void Write(std::initializer_list<const char*> paths) {
    for (const char* path : paths) directory.Write(path, "");
  }
  std::string What(const std::string& path) {
    const auto what = RecogniseUnread(FileRoot(directory.path()), path);
    EXPECT_TRUE(what) << what.error().message;
    return what && *what && !(*what)->step ? (*what)->what : "";
  }
};

TEST_F(RecogniseTest, EveryShapeByItsName) {
  Write({"dist/.metadata", "dist/common.pt", "dist/metadata.json", "dist/__0_0.distcp",
         "zarr/common.pt", "zarr/metadata.json", "legacy/mp_rank_00/model_rng.pt",
         "legacy3d/mp_rank_00_001/optim.pt", "nemo1/mp_rank_00/megatron.ckpt", "nemo2/weights/x",
         "nemo2/context/io.json", "m.nemo", "x.gguf", "titan/metadata.pkl", "titan/model_0.pt",
         "orbax/_CHECKPOINT_METADATA"});
  EXPECT_EQ(What("dist"), "Megatron torch_dist, but its metadata.json does not say so");
  EXPECT_THAT(What("zarr"), HasSubstr("Megatron dist_checkpointing (zarr): not readable yet"));
  EXPECT_THAT(What("legacy"), HasSubstr("Megatron legacy (model_rng.pt and optim.pt"));
  EXPECT_THAT(What("legacy3d"), HasSubstr("Megatron legacy"));
  EXPECT_THAT(What("nemo1"), HasSubstr("NeMo 1"));
  EXPECT_THAT(What("nemo2"), HasSubstr("NeMo 2"));
  EXPECT_THAT(What("m.nemo"), HasSubstr("tar xf"));
  EXPECT_THAT(What("x.gguf"), HasSubstr("GGUF"));
  EXPECT_THAT(What("titan"), HasSubstr("torch_checkpointing (metadata.pkl): not readable yet"));
  EXPECT_THAT(What("orbax"), HasSubstr("Orbax"));
}

TEST_F(RecogniseTest, AStepThatHasNothingOfOneYet) {
  Write({"checkpoint-500/config.json", "checkpoint-600/model-00001-of-00002.safetensors"});
  files::create_directories(directory.path() + "/global_step7");
  const auto begun = [&](const std::string& path) {
    return **RecogniseUnread(FileRoot(directory.path()), path);
  };
  EXPECT_EQ(begun("checkpoint-500").what, "no weights yet");
  EXPECT_EQ(begun("checkpoint-500").step, 500u);
  EXPECT_THAT(begun("checkpoint-600").what, HasSubstr("not yet the index"));
  EXPECT_EQ(begun("global_step7").step, 7u);
}

TEST_F(RecogniseTest, OthersAreNothing) {
  Write({"global_step5/mp_rank_00_model_states.pt", "logs/events", "model/weights/x",
         "hf/metadata.json", "mp/mp_rank_00/notes", "checkpoint.txt", "a.txt"});
  files::create_directories(directory.path() + "/empty");
  for (const char* path : {"global_step5", "logs", "model", "hf", "mp", "empty", "a.txt"}) {
    EXPECT_EQ(What(path), "") << path;
  }
}

TEST_F(RecogniseTest, WhatIsUnreadIsSaidOnceAndRefusesNothingElse) {
  for (const std::string step : {"0000100", "0000200", "0000300", "0000400"}) {
    directory.Write("run/iter_" + step + "/common.pt", "");
    directory.Write("run/iter_" + step + "/metadata.json", "");
  }
  const auto sources = MakeSources();
  const auto scan = ScanPlace(*PlaceOf(directory.path() + "/run"), sources, HintsOfTools());
  ASSERT_FALSE(scan);
  EXPECT_EQ(scan.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(scan.error().message,
            directory.path() +
                "/run: 4 directories (iter_0000100, iter_0000200, iter_0000300, "
                "...): Megatron dist_checkpointing (zarr): not readable yet");
  const auto one =
      ScanPlace(*PlaceOf(directory.path() + "/run/iter_0000100"), sources, HintsOfTools());
  ASSERT_FALSE(one);
  EXPECT_EQ(
      one.error().message,
      directory.path() + "/run/iter_0000100: Megatron dist_checkpointing (zarr): not readable yet");
}

}  // namespace
}  // namespace ckptfs
