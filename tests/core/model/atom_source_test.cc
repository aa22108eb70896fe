// SPDX-License-Identifier: Apache-2.0

#include "core/model/atom_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "core/base/strings.h"
#include "core/model/step_model.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A gather of 4 elements in each of `blobs`, one after the other.
Gather GatherOf(uint32_t first, uint32_t blobs) {
  FragmentSeries series;
  series.count = blobs;
  series.elements = series.flat_step = 4;
  series.blob = first;
  series.blob_step = blobs > 1 ? 2 : 0;
  return Gather{{WholeTensor({4 * blobs})}, {series}};
}

AtomSource One() {
  AtomSource source;
  source.gathers = {GatherOf(0, 1)};
  return source;
}

TEST(AtomSourceTest, WhatIsReadAndWhatIsComparedFollowTheKind) {
  const std::vector<Gather> two = {GatherOf(0, 1), GatherOf(1, 1)};
  const AtomSource replicas = ReplicaSource(two);
  const AtomSource average = AverageSource(two);
  EXPECT_EQ(GathersRead(One()).size(), 1u);
  EXPECT_EQ(GathersRead(replicas).size(), 1u);
  EXPECT_EQ(GathersRead(average).size(), 2u);
  EXPECT_TRUE(GathersRead(CastSource(AtomIndex{3})).empty());
  EXPECT_EQ(GatherCopied(replicas), &replicas.gathers[0]);
  EXPECT_EQ(GatherCopied(average), nullptr);
  EXPECT_EQ(GatherCopied(CastSource(AtomIndex{3})), nullptr);
  EXPECT_EQ(GatherCopied(AtomSource{}), nullptr);
  EXPECT_TRUE(EqualCopies(One()).empty());
  EXPECT_EQ(EqualCopies(replicas).size(), 2u);
  EXPECT_TRUE(EqualCopies(average).empty());
  EXPECT_TRUE(AllCopies(One()).empty());
  EXPECT_EQ(AllCopies(average).size(), 2u);
  EXPECT_TRUE(IsAveraged(average));
  EXPECT_FALSE(IsAveraged(replicas));
}

TEST(AtomSourceTest, WhatIsComputedOrInlineIsInNoFile) {
  const AtomSource cast = CastSource(AtomIndex{3});
  const AtomSource number = InlineSource(std::string("\1\0\0\0", 4), true);
  EXPECT_EQ(DerivedFrom(cast), AtomIndex{3});
  EXPECT_EQ(DerivedFrom(One()), std::nullopt);
  EXPECT_TRUE(IsStoredInFiles(One()));
  EXPECT_FALSE(IsStoredInFiles(cast));
  EXPECT_FALSE(IsStoredInFiles(number));
  EXPECT_TRUE(IsPythonNumber(number));
  EXPECT_FALSE(IsPythonNumber(InlineSource("1", false)));
}

TEST(AtomSourceTest, ACopyGoesFirstAndLeavesNoTrace) {
  AtomSource source = One();
  ASSERT_TRUE(IsCopyable(source));
  PutCopyFirst(source, GatherOf(9, 1));
  EXPECT_EQ(GathersRead(source).front().series.front().blob, 9u);
  EXPECT_EQ(EqualCopies(source).size(), 2u);
  TakeFirstCopy(source);
  EXPECT_EQ(source.kind, SourceKind::kGather);
  EXPECT_EQ(source.gathers.front().series.front().blob, 0u);
  EXPECT_FALSE(IsCopyable(CastSource(AtomIndex{0})));
  EXPECT_FALSE(IsCopyable(AverageSource({GatherOf(0, 1), GatherOf(1, 1)})));
}

TEST(AtomSourceTest, BlobsOfASeriesAreVisitedUntilOneIsWanted) {
  AtomSource source;
  source.gathers = {GatherOf(1, 3)};
  std::vector<uint32_t> seen;
  EXPECT_FALSE(AnyBlobOf(source, [&](uint32_t blob) {
    seen.push_back(blob);
    return false;
  }));
  EXPECT_THAT(seen, ElementsAre(1, 3, 5));
  EXPECT_TRUE(AnyBlobOf(source, [](uint32_t blob) { return blob == 3; }));
}

TEST(AtomSourceTest, NumbersThatNobodyWritesAreRefusedByName) {
  std::set<int> known;
  for (int number = 0; number < 256; ++number) {
    if (SourceKindOf(static_cast<uint8_t>(number))) known.insert(number);
  }
  EXPECT_THAT(known, ElementsAre(0, 1, 2, 3, 6));
  EXPECT_THAT(SourceKindOf(4).error().message, HasSubstr("kind 4 (values with scales per block)"));
  EXPECT_EQ(SourceKindOf(5).error().code, ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace ckptfs
