// SPDX-License-Identifier: Apache-2.0
#include "core/ingest/ingest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "core/base/strings.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

// Every subdirectory "stepN" is a step; a file "broken" in it makes Read fail,
// the lack of "done" makes it incomplete.
class FakeSource : public Source {
 public:
  std::string_view name() const override { return "fake"; }

  Result<std::vector<StepCandidate>> Find(const std::string& path) const override {
    std::vector<StepCandidate> out;
    if (std::filesystem::path(path).filename().string().starts_with("step")) {
      return std::vector<StepCandidate>{Candidate(path, path)};
    }
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.path().filename().string().starts_with("step")) {
        out.push_back(Candidate(entry.path().string(), path));
      }
    }
    return out;
  }
  Status Complete(const StepCandidate& step) const override {
    if (std::filesystem::exists(step.directory + "/done")) return {};
    return Fail(ErrorCode::kInvalid, step.directory + ": no file done");
  }
  Result<StepModel> Read(const StepCandidate& step, const SourceOptions&) const override {
    if (std::filesystem::exists(step.directory + "/broken")) {
      return Fail(ErrorCode::kInvalid, "broken");
    }
    StepModel model;
    model.id = step.id;
    model.iteration = step.iteration;
    return model;
  }

 private:
  static StepCandidate Candidate(const std::string& directory, const std::string& root) {
    StepCandidate out;
    out.directory = directory;
    out.root = root;
    out.id = std::filesystem::path(directory).filename().string();
    out.iteration = std::stoull(out.id.substr(4));
    return out;
  }
};

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

TEST_F(IngestTest, OneBrokenStepRefusesAll) {
  directory.Write("step1/done", "");
  directory.Write("step2/done", "");
  directory.Write("step2/broken", "");
  const auto result = Ingest(directory.path());
  ASSERT_FALSE(result);
  EXPECT_THAT(result.error().message, HasSubstr("step2: broken"));
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
