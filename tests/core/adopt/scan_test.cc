// SPDX-License-Identifier: Apache-2.0
#include "core/adopt/scan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/fake_source.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

struct ScanTest : testing::Test {
  TemporaryDirectory directory;
  std::vector<std::unique_ptr<Source>> sources;

  ScanTest() { sources.push_back(std::make_unique<FakeSource>()); }
  Result<IngestResult> Ingest(const std::string& path) {
    CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
    return IngestPlace(place, sources, {}, {{}, FakeNames()});
  }
  Result<std::vector<FoundStep>> ScanPath(const std::string& path) {
    CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
    return Scan(place, sources);
  }
};

TEST_F(ScanTest, BringsStepsInOrderAndNamesIncompleteOnes) {
  directory.Write("step10/done", "");
  directory.Write("step9/done", "");
  directory.Write("step11/other", "");
  const auto result = Ingest(directory.path());
  ASSERT_TRUE(result) << result.error().message;
  ASSERT_EQ(result->steps.size(), 2u);
  EXPECT_EQ(result->steps[0].model.id, "step9");
  EXPECT_EQ(result->steps[1].model.id, "step10");
  ASSERT_EQ(result->skipped.size(), 1u);
  EXPECT_THAT(result->skipped[0], HasSubstr("step11: incomplete"));
}

TEST_F(ScanTest, AMalformedStepIsSkippedAsOneThatWasCutOff) {
  directory.Write("step1/done", "");
  directory.Write("step2/done", "broken\n");
  const auto result = Ingest(directory.path());
  ASSERT_TRUE(result) << result.error().message;
  ASSERT_EQ(result->steps.size(), 1u);
  EXPECT_EQ(result->steps[0].model.id, "step1");
  ASSERT_EQ(result->skipped.size(), 1u);
  EXPECT_THAT(result->skipped[0], HasSubstr("step2: broken"));
}

TEST_F(ScanTest, AMalformedStepThatIsTheLatestIsRefusedAlone) {
  directory.Write("step1/done", "");
  directory.Write("step2/done", "broken\n");
  directory.Write("step2/latest", "");
  const auto result = Ingest(directory.path());
  ASSERT_TRUE(result) << result.error().message;
  ASSERT_EQ(result->steps.size(), 1u);
  EXPECT_TRUE(result->skipped.empty());
  ASSERT_EQ(result->refused.size(), 1u);
  EXPECT_THAT(result->refused[0].message, HasSubstr("step2: broken"));
}

TEST_F(ScanTest, NothingButMalformedStepsIsAnError) {
  directory.Write("step2/done", "broken\n");
  EXPECT_THAT(Ingest(directory.path()).error().message, HasSubstr("step2: broken"));
  EXPECT_THAT(Ingest(directory.path() + "/step2").error().message, HasSubstr("step2: broken"));
}

TEST_F(ScanTest, AStepThatCannotBeReadNowIsRefusedAlone) {
  directory.Write("step1/done", "");
  directory.Write("step2/done", "");
  for (const ErrorCode code : {ErrorCode::kIo, ErrorCode::kPermission, ErrorCode::kUnsupported}) {
    static_cast<FakeSource&>(*sources[0]).FailAt(5, code);  // found, 2 complete, 2 read
    const auto result = Ingest(directory.path());
    ASSERT_TRUE(result);
    EXPECT_EQ(result->steps.size(), 1u);
    ASSERT_EQ(result->refused.size(), 1u);
    EXPECT_EQ(result->refused[0].code, code);
  }
}

TEST_F(ScanTest, AStepThatTwoSourcesClaimIsTheFirstOnes) {
  sources.push_back(std::make_unique<FakeSource>());
  directory.Write("step1/done", "");
  directory.Write("step2/done", "");
  const auto found = ScanPath(directory.path());
  ASSERT_TRUE(found);
  ASSERT_EQ(found->size(), 2u);
  for (const FoundStep& step : *found) EXPECT_EQ(step.source, sources[0].get());
}

TEST_F(ScanTest, TwoPartsOfOneTreeAreOneStep) {
  sources.insert(sources.begin(), std::make_unique<FakeSource>("part"));
  directory.Write("step9/done", "");
  directory.Write("step9/part1/done", "");
  const auto found = ScanPath(directory.path() + "/step9");
  ASSERT_TRUE(found);
  ASSERT_EQ(found->size(), 1u);
  EXPECT_EQ((*found)[0].candidate.id, "part1");  // of the source that is asked first
  // A directory that holds several steps of another kind is not one of them.
  directory.Write("step9/part2/done", "");
  EXPECT_EQ(ScanPath(directory.path() + "/step9")->size(), 3u);
}

// A save directory that is a step itself, of whatever moment: a final model.
struct TopSource : Source {
  std::string_view name() const override { return "top"; }
  SaveState StateOf(const StepCandidate&, const SourceOptions&, const SaveHistory&) const override {
    return {};
  }
  Result<StepModel> Read(const StepCandidate&, const SourceOptions&) const override {
    return StepModel();
  }
  Result<std::vector<StepCandidate>> Find(const std::shared_ptr<const Root>& root,
                                          const std::string& directory) const override {
    StepCandidate top;
    top.root = root;
    top.directory = top.save = directory;
    top.id = "top";
    return std::vector<StepCandidate>{top};
  }
};

TEST_F(ScanTest, AModelBesideOneStepIsAStepOfItsOwn) {
  directory.Write("step9/done", "");
  sources.push_back(std::make_unique<TopSource>());
  ASSERT_EQ(ScanPath(directory.path())->size(), 2u);
  EXPECT_EQ((*ScanPath(directory.path()))[1].candidate.id, "top");
  std::swap(sources[0], sources[1]);
  EXPECT_EQ(ScanPath(directory.path())->size(), 2u);
}

TEST_F(ScanTest, WhatWasConvertedComesBeforeItsOriginal) {
  sources.push_back(std::make_unique<FakeSource>("other"));
  directory.Write("step4/done", "");
  directory.Write("other4/done", "");
  directory.Write("other4/converted", "");
  const auto result = Ingest(directory.path());
  ASSERT_TRUE(result);
  ASSERT_EQ(result->steps.size(), 2u);
  EXPECT_EQ(result->steps.back().model.id, "step4");
}

TEST_F(ScanTest, AnIncompleteTagByItselfIsAnError) {
  directory.Write("step3/x", "");
  EXPECT_THAT(Ingest(directory.path() + "/step3").error().message, HasSubstr("no file done"));
  EXPECT_THAT(Ingest(directory.path()).error().message, HasSubstr("no complete step"));
}

TEST_F(ScanTest, RunsOneLevelBelowAreFoundAndSaid) {
  directory.Write("a/step1/done", "");
  directory.Write("b/checkpoints/step2/done", "");
  directory.Write("c/notes", "");
  const auto result = Ingest(directory.path());
  ASSERT_TRUE(result) << result.error().message;
  ASSERT_EQ(result->steps.size(), 2u);
  ASSERT_EQ(result->said.size(), 1u);
  EXPECT_THAT(result->said[0], HasSubstr("one level below: 2 runs (a, b)"));
  directory.Write("step9/done", "");  // now it has one of its own
  const auto own = Ingest(directory.path());
  ASSERT_TRUE(own) << own.error().message;
  ASSERT_EQ(own->steps.size(), 1u);
  EXPECT_TRUE(own->said.empty());
}

TEST_F(ScanTest, RunsFurtherBelowAreNamedAndNotTaken) {
  directory.Write("logs/run/checkpoints/step1/done", "");
  directory.Write("data/x", "");
  const auto result = Ingest(directory.path());
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, ErrorCode::kNotFound);
  EXPECT_EQ(result.error().needs,
            "there are runs further below: give " + directory.path() + "/logs");
  EXPECT_TRUE(Ingest(directory.path() + "/logs"));
  std::filesystem::remove_all(directory.path() + "/logs/run");
  EXPECT_EQ(Ingest(directory.path()).error().needs, "");
}

TEST_F(ScanTest, AFolderOfStepsIsTheRunsOwn) {
  directory.Write("run/checkpoints/step1/done", "");
  const auto result = Ingest(directory.path() + "/run");
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_TRUE(result->said.empty());
  EXPECT_EQ(result->steps[0].candidate.SavePath(), directory.path() + "/run/checkpoints");
}

TEST_F(ScanTest, WhatIsOnlyRecognisedIsRefusedBesideTheOthers) {
  directory.Write("step1/done", "");
  directory.Write("alien1/x", "");
  directory.Write("alien2/x", "");
  const Recognise recognise = [](const Root& root,
                                 const std::string& path) -> Result<std::optional<Recognised>> {
    const bool alien = LastComponent(root.PathOf(path)).starts_with("alien");
    return alien ? std::optional(Recognised{"alien: not readable yet", {}}) : std::nullopt;
  };
  const auto result = IngestPlace(*PlaceOf(directory.path()), sources, {}, {recognise, {}});
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_EQ(result->steps.size(), 1u);
  ASSERT_EQ(result->refused.size(), 1u);
  EXPECT_EQ(result->refused[0].code, ErrorCode::kUnsupported);
  EXPECT_EQ(result->refused[0].message, directory.path() +
                                            ": 2 directories (alien1, alien2): "
                                            "alien: not readable yet");
  const auto one =
      IngestPlace(*PlaceOf(directory.path() + "/alien1"), sources, {}, {recognise, {}});
  ASSERT_FALSE(one);
  EXPECT_EQ(one.error().message, directory.path() + "/alien1: alien: not readable yet");
}

TEST_F(ScanTest, UnknownPathsSayWhatWasLookedFor) {
  directory.Write("notes/readme.txt", "hello");
  EXPECT_THAT(Ingest(directory.path() + "/notes").error().message, HasSubstr("fake"));
  EXPECT_THAT(Ingest(directory.path() + "/notes").error().message,
              HasSubstr("it holds 1 file (readme.txt)"));
  EXPECT_EQ(Ingest(directory.path() + "/none").error().code, ErrorCode::kNotFound);
  const auto file = Ingest(directory.path() + "/notes/readme.txt");  // weights may be one file
  EXPECT_EQ(file.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(file.error().message, HasSubstr("Not a directory"));
}

}  // namespace
}  // namespace ckptfs
