// SPDX-License-Identifier: Apache-2.0

#include "core/view/plan.h"

#include <gtest/gtest.h>

#include "core/view/source_runs.h"

namespace ckptfs {
namespace {

// One fp32 atom [4, 6] in one blob of 96 bytes, and a sub-byte one.
StepModel MakeModel() {
  StepModel model;
  model.roots = {"/nowhere"};
  model.parameters.resize(1);
  model.blobs.resize(1);
  model.blobs[0].stamp.size = 96;
  Atom atom;
  atom.shape = {4, 6};
  Gather gather;
  gather.locals = {WholeTensor(atom.shape)};
  FragmentSeries series;
  series.elements = 24;
  gather.series = {series};
  atom.source.gathers = {gather};
  model.atoms.push_back(atom);
  atom.dtype = DType::kF4;
  model.atoms.push_back(atom);
  Atom derived;
  derived.shape = {4, 6};
  derived.dtype = DType::kBF16;
  derived.source.kind = SourceKind::kCast;
  model.atoms.push_back(derived);
  return model;
}

std::shared_ptr<const LocalTensor> Whole(Shape shape = {4, 6}) {
  return std::make_shared<const LocalTensor>(WholeTensor(shape));
}

Plan OneAtom(uint32_t atom, std::shared_ptr<const LocalTensor> local, uint64_t begin, uint64_t end,
             DType dtype) {
  PlanBuilder builder;
  builder.Atom(AtomIndex{atom}, std::move(local), begin, end, dtype);
  return std::move(builder).Finish();
}

// A packed atom is read from its copy, and comes from many files.
TEST(Plan, OfCopiesTheFirstIsRead) {
  StepModel model = MakeModel();
  for (uint32_t blob = 1; blob < 4; ++blob) {
    model.blobs.push_back(model.blobs[0]);
    model.atoms[0].source.gathers.push_back(model.atoms[0].source.gathers[0]);
    model.atoms[0].source.gathers.back().series[0].blob = blob;
  }
  model.atoms[0].source.kind = SourceKind::kReplicas;
  const auto of = [&](uint32_t atom, BlobUse use) {
    return OneAtom(atom, Whole(), 0, 24, model.atoms[atom].dtype).Blobs(model, use);
  };
  for (const uint32_t atom : {0u, 2u}) {  // the second is cast from the first
    EXPECT_EQ(of(atom, BlobUse::kAny).size(), 4u);
    EXPECT_EQ(of(atom, BlobUse::kRead), std::vector{BlobIndex{0}});
  }
  model.atoms[0].source.kind = SourceKind::kAverage;
  EXPECT_EQ(of(0, BlobUse::kRead).size(), 4u);
}

TEST(Plan, SegmentsFollowEachOtherAndEmptyOnesAreDropped) {
  PlanBuilder builder;
  builder.Literal(std::string("head"));
  builder.Zeros(0);
  builder.Atom(AtomIndex{0}, Whole(), 0, 24, DType::kBF16);
  builder.BlobRange(BlobIndex{0}, 1, 7);
  const Plan plan = std::move(builder).Finish();
  EXPECT_EQ(plan.size(), 4u + 48 + 7);
  ASSERT_EQ(plan.segments().size(), 3u);
  EXPECT_EQ(plan.FindSegment(0), 0u);
  EXPECT_EQ(plan.FindSegment(3), 0u);
  EXPECT_EQ(plan.FindSegment(4), 1u);
  EXPECT_EQ(plan.FindSegment(58), 2u);
  ASSERT_NE(LiteralOf(plan.segments()[0]), nullptr);
  EXPECT_EQ(*LiteralOf(plan.segments()[0]), "head");
  EXPECT_EQ(LiteralOf(plan.segments()[1]), nullptr);
  EXPECT_EQ(LiteralOf(plan.segments()[2]), nullptr);
  EXPECT_TRUE(plan.Validate(MakeModel()));
  EXPECT_GT(plan.MemoryBytes(), 0u);
}

TEST(Plan, WholeBlobIsOneSegmentOfAllBytes) {
  const StepModel model = MakeModel();
  const auto plan_of = [](uint64_t offset, uint64_t length, bool more) {
    PlanBuilder builder;
    builder.BlobRange(BlobIndex{0}, offset, length);
    if (more) builder.Zeros(1);
    return std::move(builder).Finish();
  };
  EXPECT_EQ(plan_of(0, 96, false).WholeBlob(model), BlobIndex{0});
  EXPECT_FALSE(plan_of(0, 95, false).WholeBlob(model));
  EXPECT_FALSE(plan_of(1, 95, false).WholeBlob(model));
  EXPECT_FALSE(plan_of(0, 96, true).WholeBlob(model));
}

TEST(Plan, ValidateNamesWhatDoesNotFit) {
  const StepModel model = MakeModel();
  const auto refused = [&model](const Plan& plan, std::string_view rule) {
    const Status valid = plan.Validate(model);
    return !valid && valid.error().message.find(rule) != std::string::npos;
  };
  EXPECT_TRUE(refused(OneAtom(9, Whole(), 0, 24, DType::kF32), "no such atom"));
  EXPECT_TRUE(refused(OneAtom(0, Whole({5, 6}), 0, 24, DType::kF32), "leaves the atom"));
  EXPECT_TRUE(refused(OneAtom(0, Whole(), 0, 24, DType::kI32), "no cast from fp32 to int32"));
  EXPECT_TRUE(refused(OneAtom(0, nullptr, 0, 24, DType::kF32), "local tensor"));
  auto doubled = std::make_shared<LocalTensor>(WholeTensor({4, 6}));
  doubled->pieces[0].local_strides[0] = 0;
  EXPECT_TRUE(refused(OneAtom(0, doubled, 0, 24, DType::kF32), "stride 0"));
  PlanBuilder builder;
  builder.BlobRange(BlobIndex{0}, 90, 7);
  EXPECT_TRUE(refused(std::move(builder).Finish(), "bytes 90 + 7"));
}

TEST(Plan, SubByteValuesAreShownWholeOnly) {
  const StepModel model = MakeModel();
  EXPECT_TRUE(OneAtom(1, Whole(), 0, 24, DType::kF4).Validate(model));
  EXPECT_EQ(OneAtom(1, Whole(), 0, 24, DType::kF4).size(), 12u);
  EXPECT_FALSE(OneAtom(1, Whole(), 0, 22, DType::kF4).Validate(model));
  EXPECT_FALSE(OneAtom(1, Whole(), 0, 24, DType::kF32).Validate(model));
}

TEST(Plan, DerivedAtomsMustAgreeInShapeAndEndSomewhere) {
  StepModel model = MakeModel();
  EXPECT_TRUE(OneAtom(2, Whole(), 0, 24, DType::kF32).Validate(model));
  model.atoms[2].source.of = AtomIndex{2};  // of itself
  EXPECT_FALSE(OneAtom(2, Whole(), 0, 24, DType::kF32).Validate(model));
  model.atoms[2].source.of = AtomIndex{7};
  EXPECT_FALSE(OneAtom(2, Whole(), 0, 24, DType::kF32).Validate(model));
}

TEST(FragmentCursor, FindsByArithmeticAndKnowsGaps) {
  Gather gather;
  gather.locals.resize(2);
  FragmentSeries series;
  series.local = 1;
  series.flat_begin = 10;
  series.flat_step = 8;
  series.elements = 5;
  series.count = 1000000;
  series.blob = 3;
  series.blob_step = 2;
  series.offset = 100;
  series.offset_step = -4;
  gather.series = {series};
  FragmentCursor cursor(gather, 1);
  EXPECT_FALSE(cursor.Seek(9));
  ASSERT_TRUE(cursor.Seek(10 + 8 * 7 + 4));
  EXPECT_EQ(cursor.blob(), BlobIndex{17});
  EXPECT_EQ(cursor.OffsetOf(10 + 8 * 7 + 4), 100u - 28 + 16);
  EXPECT_EQ(cursor.end(), 10u + 8 * 7 + 5);
  EXPECT_FALSE(cursor.Seek(10 + 8 * 7 + 5));
  EXPECT_FALSE(cursor.Seek(10 + 8 * uint64_t{1000000}));
  FragmentCursor other(gather, 0);
  EXPECT_FALSE(other.Seek(10));
}

}  // namespace
}  // namespace ckptfs
