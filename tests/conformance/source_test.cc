// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/source.h"

#include <gmock/gmock.h>

#include "core/adopt/scan.h"
#include "formats/deepspeed/source.h"
#include "formats/deepspeed/universal_source.h"
#include "formats/huggingface/source.h"
#include "formats/megatron/legacy/source.h"
#include "formats/megatron/source.h"
#include "formats/rank_shards/source.h"
#include "formats/registry.h"
#include "tests/conformance/source_suite.h"
#include "tests/support/fake_source.h"

namespace ckptfs {

const std::vector<SourceCase>& SourceCases() {
  static const std::vector<SourceCase> cases = {
      {"deepspeed_golden", MakeDeepSpeedSource, WriteDeepSpeedGolden},
      {"universal_of_golden", MakeDeepSpeedUniversalSource, WriteUniversalOfGolden},
      {"universal_of_tiny_step", MakeDeepSpeedUniversalSource, WriteUniversalOfTinyStep},
      {"universal_of_holes", MakeDeepSpeedUniversalSource, WriteUniversalOfHoles},
      {"huggingface_shards", MakeHuggingFaceSource, WriteHuggingFace},
      {"dcp_of_two_ranks", [] { return MakeDcpSource(); }, WriteDcp},
      {"megatron_of_two_ranks", MakeMegatronSource, WriteMegatron},
      {"megatron_legacy_of_two_ranks", MakeMegatronLegacySource, WriteMegatronLegacy},
      {"rank_shards_golden", MakeRankShardsSource, WriteRankShards},
      {"fake", [] { return std::make_unique<FakeSource>(); }, WriteFake},
  };
  return cases;
}

namespace {

INSTANTIATE_TEST_SUITE_P(Sources, SourceSuite, testing::ValuesIn(SourceCases()),
                         [](const auto& one) { return one.param.name; });

// A new source cannot forget the suite.
TEST(SourceCases, CoverTheRegistry) {
  for (const auto& source : MakeSources()) {
    EXPECT_TRUE(std::any_of(SourceCases().begin(), SourceCases().end(), [&](const auto& one) {
      return one.source()->name() == source->name();
    })) << source->name();
  }
}

// Its optimizer has a state of a parameter that zero/ has no folder of.
TEST(UniversalSourceTest, AStateWithoutAFolderIsRefusedByFileAndName) {
  const TemporaryDirectory directory;
  const SourceSample sample = WriteUniversalWithoutAFolder(directory.path());
  const auto result = IngestPlace(*PlaceOf(sample.save), MakeSources(), {});
  ASSERT_FALSE(result);
  EXPECT_THAT(result.error().message, testing::HasSubstr("optimizer_state.pt: "));
  EXPECT_THAT(result.error().message, testing::HasSubstr("'gone.weight'"));
}

class LateSourceTest : public testing::Test {
 protected:
  LateSourceTest() : sample_(WriteFake(directory_.path())) {
    auto source = std::make_unique<FakeSource>();
    fake_ = source.get();
    sources_.push_back(std::move(source));
  }

  TemporaryDirectory directory_;
  SourceSample sample_;
  std::vector<std::unique_ptr<Source>> sources_;
  FakeSource* fake_ = nullptr;
};

TEST_F(LateSourceTest, ALateSourceIsWaitedFor) {
  fake_->SetDelay(std::chrono::milliseconds(20));
  const auto result = IngestPlace(*PlaceOf(sample_.save), sources_, {});
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_EQ(result->steps.size(), 1u);
}

TEST_F(LateSourceTest, EveryFailingCallIsAnErrorOrASkippedStep) {
  for (uint64_t n = 1; n <= 3; ++n) {
    fake_->FailAt(n);
    const auto result = IngestPlace(*PlaceOf(sample_.save), sources_, {});
    ASSERT_FALSE(result) << n;
    EXPECT_THAT(result.error().message, testing::HasSubstr("injected failure")) << n;
  }
  fake_->FailAt(4);
  EXPECT_TRUE(IngestPlace(*PlaceOf(sample_.save), sources_, {}));
}

}  // namespace
}  // namespace ckptfs
