// SPDX-License-Identifier: Apache-2.0
#include "core/state/assembler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "core/base/strings.h"
#include "core/io/file_root.h"
#include "core/state/coverage.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

// An assembler with one fp32 parameter and blobs of a MiB each.
struct Fixture {
  Assembler assembler;
  ParameterIndex parameter{};
  AtomIndex atom{};

  explicit Fixture(const Shape& shape, int blobs = 8) {
    assembler.AddRoot(std::make_shared<FileRoot>("/nowhere"));
    for (int i = 0; i < blobs; ++i) {
      Blob blob;
      blob.path = StrCat("rank", i);
      blob.stamp.size = 1 << 20;
      assembler.AddBlob(std::move(blob));
    }
    Parameter one;
    one.name = "w";
    one.shape = shape;
    parameter = *assembler.AddParameter(one);
    atom = *assembler.AddAtom(parameter, "", "master", DType::kF32, shape);
  }

  void Put(uint32_t copy, uint32_t local, uint64_t begin, uint64_t end, uint32_t blob,
           uint64_t offset = 0, DType dtype = DType::kF32) {
    assembler.AddFragment(atom, copy, local, Fragment{begin, end, BlobIndex{blob}, offset, dtype});
  }

  std::string Refusal() {
    auto model = std::move(assembler).Finish();
    return model ? "" : model.error().message;
  }
};

TEST(AssemblerTest, CompressesRanksIntoSeries) {
  Fixture f({1000});
  const uint32_t local = f.assembler.AddLocal(f.atom, 0, WholeTensor({1000}));
  for (uint32_t r = 0; r < 7; ++r) f.Put(0, local, r * 128, (r + 1) * 128, r, 64);
  f.Put(0, local, 896, 1000, 7, 64);
  auto model = std::move(f.assembler).Finish();
  ASSERT_TRUE(model) << model.error().message;
  const Gather& gather = model->atoms[0].source.gathers.at(0);
  ASSERT_EQ(gather.series.size(), 2u);
  EXPECT_EQ(gather.series[0].count, 7u);
  EXPECT_EQ(gather.series[0].At(3).blob, BlobIndex{3});
  EXPECT_TRUE(ProveCoverage(gather, {1000}));
}

TEST(AssemblerTest, NamesTheGapAndTheFilesBesideIt) {
  Fixture f({100});
  const uint32_t local = f.assembler.AddLocal(f.atom, 0, WholeTensor({100}));
  f.Put(0, local, 0, 40, 0);
  f.Put(0, local, 50, 100, 1);
  const std::string refusal = f.Refusal();
  EXPECT_THAT(refusal, HasSubstr("'w' (master)"));
  EXPECT_THAT(refusal, HasSubstr("[40, 50)"));
  EXPECT_THAT(refusal, HasSubstr("rank0"));
  EXPECT_THAT(refusal, HasSubstr("rank1"));
}

TEST(AssemblerTest, NamesTheMissingEnd) {
  Fixture f({100});
  const uint32_t local = f.assembler.AddLocal(f.atom, 0, WholeTensor({100}));
  f.Put(0, local, 0, 99, 0);
  EXPECT_THAT(f.Refusal(), HasSubstr("[99, 100)"));
}

TEST(AssemblerTest, NamesTheOverlap) {
  Fixture f({100});
  const uint32_t local = f.assembler.AddLocal(f.atom, 0, WholeTensor({100}));
  f.Put(0, local, 0, 60, 2);
  f.Put(0, local, 50, 100, 3);
  const std::string refusal = f.Refusal();
  EXPECT_THAT(refusal, HasSubstr("stored twice"));
  EXPECT_THAT(refusal, HasSubstr("rank2"));
  EXPECT_THAT(refusal, HasSubstr("rank3"));
}

TEST(AssemblerTest, RefusesWhatNoFileHolds) {
  Fixture f({100});
  EXPECT_THAT(f.Refusal(), HasSubstr("no file holds it"));
}

TEST(AssemblerTest, RefusesFragmentsBeyondTheFile) {
  Fixture f({100});
  const uint32_t local = f.assembler.AddLocal(f.atom, 0, WholeTensor({100}));
  f.Put(0, local, 0, 100, 0, (1 << 20) - 399);
  EXPECT_THAT(f.Refusal(), HasSubstr("lie beyond the 1048576 bytes of rank0"));
}

TEST(AssemblerTest, RefusesAnotherDType) {
  Fixture f({100});
  const uint32_t local = f.assembler.AddLocal(f.atom, 0, WholeTensor({100}));
  f.Put(0, local, 0, 50, 0);
  f.Put(0, local, 50, 100, 1, 0, DType::kBF16);
  EXPECT_THAT(f.Refusal(), HasSubstr("rank1 stores bf16"));
}

TEST(AssemblerTest, SeveralCopiesMustBeDeclared) {
  const auto build = [](Fixture& f) {
    for (uint32_t copy = 0; copy < 2; ++copy) {
      const uint32_t local = f.assembler.AddLocal(f.atom, copy, WholeTensor({4}));
      f.Put(copy, local, 0, 4, copy);
    }
  };
  Fixture undeclared({4});
  build(undeclared);
  EXPECT_THAT(undeclared.Refusal(), HasSubstr("nothing declares them equal"));
  Fixture replicas({4});
  build(replicas);
  replicas.assembler.DeclareReplicas(replicas.atom);
  auto model = std::move(replicas.assembler).Finish();
  ASSERT_TRUE(model);
  EXPECT_EQ(model->atoms[0].source.kind, SourceKind::kReplicas);
  Fixture average({4});
  build(average);
  average.assembler.DeclareAverage(average.atom);
  model = std::move(average.assembler).Finish();
  ASSERT_TRUE(model);
  EXPECT_EQ(model->atoms[0].source.kind, SourceKind::kAverage);
}

TEST(AssemblerTest, ContradictingShapesAreRefused) {
  Fixture f({4, 4});
  Parameter other;
  other.name = "w";
  other.shape = {4, 5};
  EXPECT_FALSE(f.assembler.AddParameter(other));
  EXPECT_FALSE(f.assembler.AddAtom(f.parameter, "", "master", DType::kF32, {16}));
  EXPECT_TRUE(f.assembler.AddAtom(f.parameter, "", "master", DType::kF32, {4, 4}));
}

TEST(AssemblerTest, NamesOfHalfACharacterAreRefused) {
  Fixture fixture({4});
  Parameter other;
  other.shape = {4};
  for (const char* good : {"w\xc3\xa9", "w\xed\x95\x9c"}) {  // e acute, a syllable of Hangul
    other.name = good;
    EXPECT_TRUE(fixture.assembler.AddParameter(other));
  }
  other.name = "w\xed\xa0\x80";
  EXPECT_THAT(fixture.assembler.AddParameter(other).error().message, HasSubstr("lone surrogate"));
  EXPECT_FALSE(fixture.assembler.AddAtom(fixture.parameter, "", "\xed\xb2\x80", DType::kF32, {4}));
}

TEST(AssemblerTest, TwoValuesOfOneScalarAreRefused) {
  Fixture f({4});
  const AtomIndex step =
      *f.assembler.AddAtom(f.parameter, "", "step", DType::kF32, {}, Relation::kScalar);
  EXPECT_TRUE(f.assembler.SetInline(step, std::string("\0\0\0\0", 4), false));
  EXPECT_TRUE(f.assembler.SetInline(step, std::string("\0\0\0\0", 4), false));
  EXPECT_FALSE(f.assembler.SetInline(step, std::string("\0\0\0\1", 4), false));
  EXPECT_FALSE(f.assembler.SetInline(step, "12345", false));
}

// A 2-D atom cut along dim 1 over two ranks, padded rows in the locals.
TEST(AssemblerTest, PaddingNeedsNoFragment) {
  Fixture f({3, 4});
  for (uint64_t r = 0; r < 2; ++r) {
    LocalTensor local;
    local.shape = {4, 2};
    local.pieces.push_back(Piece{{3, 2}, {0, 2 * r}, 0, {2, 1}, 1.0});
    const uint32_t index = f.assembler.AddLocal(f.atom, 0, local);
    f.Put(0, index, 0, 6, static_cast<uint32_t>(r));
  }
  EXPECT_EQ(f.Refusal(), "");
}

TEST(AssemblerTest, OverlappingBoxesAreRefused) {
  Fixture f({4, 4});
  for (uint64_t r = 0; r < 2; ++r) {
    LocalTensor local;
    local.shape = {4, 2};
    local.pieces.push_back(Piece{{4, 2}, {0, r}, 0, {2, 1}, 1.0});
    const uint32_t index = f.assembler.AddLocal(f.atom, 0, local);
    f.Put(0, index, 0, 8, static_cast<uint32_t>(r));
  }
  EXPECT_THAT(f.Refusal(), HasSubstr("both hold"));
}

// Random cuts, added in random order, are covered exactly when none is left out.
TEST(AssemblerTest, RandomCutsProveCoverage) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const uint64_t size = 1 + random() % 400;
    std::vector<uint64_t> cuts{0, size};
    for (int i = random() % 12; i > 0; --i) cuts.push_back(random() % (size + 1));
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    std::vector<size_t> order(cuts.size() - 1);
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    const bool drop = random() % 2 == 0;
    Fixture f({size});
    const uint32_t local = f.assembler.AddLocal(f.atom, 0, WholeTensor({size}));
    for (size_t k = drop ? 1 : 0; k < order.size(); ++k) {
      f.Put(0, local, cuts[order[k]], cuts[order[k] + 1], random() % 8, 16 * (random() % 64));
    }
    EXPECT_EQ(f.Refusal().empty(), !drop) << "round " << round;
  }
}

TEST(CoverageTest, InterleavedSeriesAreUntangled) {
  std::vector<FragmentSeries> series;
  series.push_back(FragmentSeries{0, 4, 0, 20, 10, 0, 1, 0, 0, DType::kF32});
  series.push_back(FragmentSeries{0, 4, 10, 20, 10, 4, 1, 0, 0, DType::kF32});
  NormaliseSeries(series);
  Gather gather{{WholeTensor({80})}, series};
  EXPECT_TRUE(ProveCoverage(gather, {80}));
  uint64_t at = 0;
  for (const FragmentSeries& s : series) {
    for (uint32_t k = 0; k < s.count; ++k) {
      EXPECT_EQ(s.At(k).flat_begin, at);
      EXPECT_EQ(static_cast<uint32_t>(s.At(k).blob), (at / 10) % 2 * 4 + at / 20);
      at += 10;
    }
  }
  EXPECT_EQ(at, 80u);
}

TEST(CoverageTest, HostileSeriesAreRefused) {
  const auto prove = [](FragmentSeries s) {
    return static_cast<bool>(ProveCoverage(Gather{{WholeTensor({8})}, {s}}, {8}));
  };
  EXPECT_TRUE(prove({0, 1, 0, 0, 8, 0, 0, 0, 0, DType::kF32}));
  EXPECT_FALSE(prove({1, 1, 0, 0, 8, 0, 0, 0, 0, DType::kF32}));
  EXPECT_FALSE(prove({0, 0, 0, 0, 8, 0, 0, 0, 0, DType::kF32}));
  EXPECT_FALSE(prove({0, 2, 0, UINT64_MAX, 4, 0, 0, 0, 0, DType::kF32}));
  EXPECT_FALSE(prove({0, UINT32_MAX, 0, 1, 1, 0, 0, 0, 0, DType::kF32}));
  EXPECT_FALSE(prove({0, 2, 0, 2, 4, 0, 0, 0, 0, DType::kF32}));
}

// Each is compared with none of the others: so many would take minutes.
TEST(AssemblerTest, AliasesAreKeptOnceInTheirOrder) {
  Fixture f({});
  ASSERT_TRUE(f.assembler.SetInline(f.atom, std::string(4, '\0'), false));
  constexpr int kNames = 100'000;
  for (int round = 0; round < 2; ++round) {
    for (int i = kNames; i > 0; --i) f.assembler.AddAlias(std::to_string(i), f.parameter);
  }
  const auto model = std::move(f.assembler).Finish();
  ASSERT_TRUE(model) << model.error().message;
  ASSERT_EQ(model->aliases.size(), size_t{kNames});
  EXPECT_EQ(model->aliases.front().name, std::to_string(kNames));
  EXPECT_EQ(model->aliases.back().name, "1");
}

TEST(AssemblerTest, AnAliasOfTwoParametersIsRefused) {
  Fixture f({});
  ASSERT_TRUE(f.assembler.SetInline(f.atom, std::string(4, '\0'), false));
  Parameter other;
  other.name = "v";
  f.assembler.AddAlias("tied", f.parameter);
  f.assembler.AddAlias("tied", *f.assembler.AddParameter(other));
  EXPECT_THAT(f.Refusal(), HasSubstr("alias 'tied' stands for two parameters"));
}

TEST(AssemblerTest, FilesStayInsideTheRoot) {
  const TemporaryDirectory root;
  const TemporaryDirectory outside;
  root.Write("a/file", "12345");
  outside.Write("secret", "x");
  ASSERT_EQ(symlink((outside.path() + "/secret").c_str(), (root.path() + "/out").c_str()), 0);
  ASSERT_EQ(symlink("a/file", (root.path() + "/in").c_str()), 0);
  Assembler assembler;
  const uint32_t index = assembler.AddRoot(std::make_shared<FileRoot>(root.path()));
  const auto file = assembler.AddFile(index, "a/file");
  ASSERT_TRUE(file) << file.error().message;
  EXPECT_EQ(assembler.blob(*file).stamp.size, 5u);
  EXPECT_EQ(assembler.blob(*file).fingerprint, DigestOf(std::string_view("12345")));
  EXPECT_EQ(*assembler.AddFile(index, "a/file"), *file);
  EXPECT_TRUE(assembler.AddFile(index, "in"));
  for (const char* bad :
       {"", "/etc/passwd", "../x", "a/../a/file", "a//file", "out", "a", "none"}) {
    EXPECT_FALSE(assembler.AddFile(index, bad)) << bad;
  }
}

}  // namespace
}  // namespace ckptfs
