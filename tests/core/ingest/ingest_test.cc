// SPDX-License-Identifier: Apache-2.0
#include "core/ingest/ingest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/fake_source.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

struct IngestTest : testing::Test {
  TemporaryDirectory directory;
  std::vector<std::unique_ptr<Source>> sources;

  IngestTest() { sources.push_back(std::make_unique<FakeSource>()); }
  Result<IngestResult> Ingest(const std::string& path) { return IngestPath(path, sources, {}); }
};

TEST_F(IngestTest, BringsStepsInOrderAndNamesIncompleteOnes) {
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

TEST_F(IngestTest, AMalformedStepIsSkippedAsOneThatWasCutOff) {
  directory.Write("step1/done", "");
  directory.Write("step2/done", "broken\n");
  const auto result = Ingest(directory.path());
  ASSERT_TRUE(result) << result.error().message;
  ASSERT_EQ(result->steps.size(), 1u);
  EXPECT_EQ(result->steps[0].model.id, "step1");
  ASSERT_EQ(result->skipped.size(), 1u);
  EXPECT_THAT(result->skipped[0], HasSubstr("step2: broken"));
}

TEST_F(IngestTest, AMalformedStepThatIsTheLatestRefusesAll) {
  directory.Write("step1/done", "");
  directory.Write("step2/done", "broken\n");
  directory.Write("step2/latest", "");
  const auto result = Ingest(directory.path());
  ASSERT_FALSE(result);
  EXPECT_THAT(result.error().message, HasSubstr("step2: broken"));
}

TEST_F(IngestTest, NothingButMalformedStepsIsAnError) {
  directory.Write("step2/done", "broken\n");
  EXPECT_THAT(Ingest(directory.path()).error().message, HasSubstr("step2: broken"));
  EXPECT_THAT(Ingest(directory.path() + "/step2").error().message, HasSubstr("step2: broken"));
}

TEST_F(IngestTest, AStepThatCannotBeReadNowRefusesAll) {
  directory.Write("step1/done", "");
  directory.Write("step2/done", "");
  for (const ErrorCode code : {ErrorCode::kIo, ErrorCode::kPermission, ErrorCode::kUnsupported}) {
    static_cast<FakeSource&>(*sources[0]).FailAt(5, code);  // found, 2 complete, 2 read
    const auto result = Ingest(directory.path());
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, code);
  }
}

TEST_F(IngestTest, AnIncompleteTagByItselfIsAnError) {
  directory.Write("step3/x", "");
  EXPECT_THAT(Ingest(directory.path() + "/step3").error().message, HasSubstr("no file done"));
  EXPECT_THAT(Ingest(directory.path()).error().message, HasSubstr("no complete step"));
}

TEST_F(IngestTest, UnknownPathsSayWhatWasLookedFor) {
  directory.Write("notes/readme.txt", "hello");
  EXPECT_THAT(Ingest(directory.path() + "/notes").error().message, HasSubstr("fake"));
  EXPECT_EQ(Ingest(directory.path() + "/none").error().code, ErrorCode::kNotFound);
  EXPECT_EQ(Ingest(directory.path() + "/notes/readme.txt").error().code, ErrorCode::kInvalid);
}

}  // namespace
}  // namespace ckptfs
