// SPDX-License-Identifier: Apache-2.0

#include "core/redundancy/redundancy.h"

#include <unistd.h>

#include <fstream>
#include <map>
#include <random>
#include <set>

#include "core/redundancy/comparison_ring.h"
#include "core/redundancy/equal_tensors.h"
#include "core/redundancy/unchanged.h"
#include "gmock/gmock.h"
#include "tests/core/redundancy/stored_step.h"

namespace ckptfs {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Copy = StoredStep::Copy;

std::string Noise(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::string text(size, '\0');
  for (char& letter : text) letter = static_cast<char>(random());
  return text;
}

// All of `values` in one file.
Copy Whole(const std::string& values, uint32_t file) { return {values, {{file, values.size()}}}; }

RedundancyReport Report(const StoredStep& step, StepModel& model) {
  auto report = FindRedundancy(model, *step.Open(), {});
  EXPECT_TRUE(report) << report.error().message;
  return *std::move(report);
}

uint64_t Of(const BySharing& numbers, Sharing sharing) {
  return numbers[static_cast<size_t>(sharing)];
}

TEST(ComparisonRing, EachPairMeetsOnce) {
  EXPECT_TRUE(ComparisonRounds(0).empty());
  EXPECT_TRUE(ComparisonRounds(1).empty());
  for (size_t workers = 2; workers < 20; ++workers) {
    const std::vector<RingRound> rounds = ComparisonRounds(workers);
    EXPECT_EQ(rounds.size(), workers / 2);  // hops of a worker's tensors
    std::set<std::pair<size_t, size_t>> met;
    for (const RingRound& round : rounds) {
      std::map<size_t, size_t> busy;
      for (const auto& [a, b] : round) {
        EXPECT_TRUE(met.insert(std::minmax(a, b)).second);
        EXPECT_LE(++busy[a], 2u);
        EXPECT_LE(++busy[b], 2u);
      }
    }
    EXPECT_EQ(met.size(), workers * (workers - 1) / 2);
  }
}

// Two tensor-parallel ranks: files 0 and 1.
TEST(Redundancy, TellsTheClassesOfATensorParallelStep) {
  StoredStep step(2);
  const std::string norm = Noise(100, 1), half = Noise(40, 2), master = Noise(60, 3);
  step.Add("norm", "weight", {Whole(norm, 0), Whole(norm, 1)});
  step.Add("linear", "weight", {{half, {{0, 20}, {1, 20}}}});
  // Each rank's copy is cut at another element.
  step.Add("norm", "master", {{master, {{0, 60}}}, {master, {{0, 25}, {1, 35}}}});
  step.Finish();
  const RedundancyReport report = Report(step, step.model());

  ASSERT_EQ(report.classes.size(), 2u);
  const ClassRedundancy& weights = report.classes[0];
  EXPECT_EQ(weights.name, "weight");
  EXPECT_EQ(weights.files, 2u);
  EXPECT_EQ(weights.stored, 240u);
  EXPECT_EQ(weights.unique, 140u);
  EXPECT_THAT(weights.tensors, ElementsAre(1, 0, 1));  // none, partial, full
  EXPECT_THAT(weights.bytes, ElementsAre(40, 0, 100));
  const ClassRedundancy& masters = report.classes[1];
  EXPECT_EQ(masters.stored, 120u);
  EXPECT_EQ(masters.unique, 60u);
  // The first 25 elements are in file 0 alone, though twice.
  EXPECT_THAT(masters.tensors, ElementsAre(0, 1, 0));
  EXPECT_THAT(masters.bytes, ElementsAre(25, 0, 35));
  EXPECT_EQ(report.tensors[2].fewest_holders, 1u);
  EXPECT_EQ(report.tensors[2].most_holders, 2u);
  EXPECT_EQ(report.tensors[2].differing, 0u);

  ASSERT_EQ(report.files.size(), 2u);
  EXPECT_EQ(report.files[0].stored, 100u + 20 + 60 + 25);
  EXPECT_EQ(report.files[1].stored, 100u + 20 + 35);
  EXPECT_EQ(report.files[0].kept + report.files[1].kept, 200u);
  EXPECT_EQ(report.files[0].shared, 135u);
  // The largest part goes to the file that keeps least: file 0 has 45 bytes alone, file 1 20.
  EXPECT_EQ(report.files[0].kept, 45u + 35);
  EXPECT_EQ(report.files[1].kept, 20u + 100);
  EXPECT_EQ(report.tensors[0].keeps, (std::vector<KeptPart>{{1, 100}}));
  EXPECT_EQ(report.tensors[2].keeps, (std::vector<KeptPart>{{0, 35}}));
  EXPECT_EQ(report.pairs, (std::vector<SharedPair>{{0, 1, 135}}));
  EXPECT_TRUE(report.equal.empty());
}

TEST(Redundancy, CopiesThatDifferAreNotMerged) {
  StoredStep step(3);
  std::string a = Noise(2 * kCompareUnit, 1), b = a;
  b[kCompareUnit] = static_cast<char>(b[kCompareUnit] + 1);
  step.Add("norm", "weight", {Whole(a, 0), Whole(b, 1), Whole(a, 2)}, SourceKind::kAverage);
  step.Finish();
  const RedundancyReport report = Report(step, step.model());
  const TensorRedundancy& tensor = report.tensors[0];
  EXPECT_EQ(tensor.stored, 6 * kCompareUnit);
  EXPECT_EQ(tensor.unique, 3 * kCompareUnit);  // both versions of the second unit
  EXPECT_EQ(tensor.differing, 3 * kCompareUnit);
  EXPECT_EQ(tensor.sharing, Sharing::kPartial);
  EXPECT_THAT(report.classes[0].bytes, ElementsAre(kCompareUnit, kCompareUnit, kCompareUnit));
}

TEST(Redundancy, EqualBytesOfOtherTensorsAreToldApart) {
  StoredStep step(2);
  const std::string embedding = Noise(5000, 1);
  const AtomIndex embed = step.Add("embed", "weight", {Whole(embedding, 0)});
  const AtomIndex head = step.Add("head", "weight", {Whole(embedding, 1)});
  const AtomIndex bias_a = step.Add("a.bias", "weight", {Whole(std::string(64, '\0'), 0)});
  step.Add("c.bias", "weight", {Whole(std::string(63, '\0') + "\1", 0)});
  const AtomIndex bias_b = step.Add("b.bias", "weight", {Whole(std::string(64, '\0'), 1)});
  step.Finish();
  const RedundancyReport report = Report(step, step.model());
  // Nothing is inferred: no byte of them is redundant.
  EXPECT_EQ(report.classes[0].stored, report.classes[0].unique);
  EXPECT_EQ(Of(report.classes[0].tensors, Sharing::kNone), 5u);
  ASSERT_EQ(report.equal.size(), 2u);
  EXPECT_EQ(report.equal[0].bytes, 5000u);
  EXPECT_FALSE(report.equal[0].constant);
  EXPECT_THAT(report.equal[0].atoms, ElementsAre(embed, head));
  EXPECT_EQ(report.equal[1].bytes, 64u);
  EXPECT_TRUE(report.equal[1].constant);
  EXPECT_THAT(report.equal[1].atoms, ElementsAre(bias_a, bias_b));
}

// Each part has one value throughout, and the whole has two.
TEST(Redundancy, ATensorOfTwoConstantPartsIsNotConstant) {
  StoredStep step(2);
  const std::string parts = std::string(kDigestBlock, '\0') + std::string(kDigestBlock, '\1');
  step.Add("a", "weight", {Whole(parts, 0)});
  step.Add("b", "weight", {Whole(parts, 1)});
  step.Finish();
  const RedundancyReport report = Report(step, step.model());
  ASSERT_EQ(report.equal.size(), 1u);
  EXPECT_FALSE(report.equal[0].constant);
}

// No file holds the bytes of an average.
TEST(Redundancy, AnAverageEqualsNoOtherTensor) {
  StoredStep step(2);
  const std::string a = Noise(100, 1);
  step.Add("a", "weight", {Whole(a, 0), Whole(Noise(100, 2), 1)}, SourceKind::kAverage);
  step.Add("b", "weight", {Whole(a, 1)});
  step.Finish();
  EXPECT_TRUE(Report(step, step.model()).equal.empty());
}

// Equal in all samples (first, middle and last unit), and not equal.
TEST(Redundancy, SamplesAloneMergeNothing) {
  StoredStep step(2);
  const std::string a = Noise(8 * kCompareUnit, 1);
  std::string b = a, c = a;
  b[2 * kCompareUnit] = static_cast<char>(b[2 * kCompareUnit] + 1);
  c[0] = static_cast<char>(c[0] + 1);
  step.Add("a", "weight", {Whole(a, 0)});
  step.Add("b", "weight", {Whole(b, 1)});
  step.Add("c", "weight", {Whole(c, 1)});
  step.Finish();
  const RedundancyReport report = Report(step, step.model());
  EXPECT_TRUE(report.equal.empty());
  // The third is out after its samples.
  EXPECT_EQ(report.bytes_read, 3 * 3 * kCompareUnit + 2 * 8 * kCompareUnit);
}

TEST(Redundancy, TensorsWithoutACompanionAreNotRead) {
  StoredStep step(2);
  step.Add("a", "weight", {Whole(Noise(1000, 1), 0)});
  step.Add("b", "weight", {Whole(Noise(1001, 2), 1)});
  step.Finish();
  EXPECT_EQ(Report(step, step.model()).bytes_read, 0u);
}

TEST(Redundancy, OneStorageUnderTwoNamesIsStoredOnce) {
  StoredStep step(1);
  step.Add("embed", "weight", {Whole(Noise(500, 1), 0)});
  Atom tied = step.model().atoms[0];
  step.model().parameters.emplace_back().name = "head";
  tied.parameter = ParameterIndex{1};
  step.model().atoms.push_back(tied);
  step.Finish();
  const RedundancyReport report = Report(step, step.model());
  EXPECT_EQ(report.files[0].stored, 500u);
  EXPECT_EQ(report.classes[0].stored, 500u);
  EXPECT_TRUE(report.equal.empty());
}

TEST(Redundancy, DocumentsAreComparedOverTheirScopes) {
  StoredStep step(1);
  step.Add("w", "weight", {Whole("abcd", 0)});
  step.Finish();
  const auto add = [&](const char* key, const char* scope, const char* pickle, uint64_t offset) {
    Document document{key, scope, pickle, {}};
    document.tensors.push_back({DType::kU8, {2}, {1}, BlobIndex{0}, offset, std::nullopt});
    step.model().documents.push_back(document);
  };
  for (const char* scope : {"dp0", "dp1", "dp2"}) add("args", scope, "same", 0);
  add("rng", "dp0", "same", 0);
  add("rng", "dp1", "same", 2);  // another tensor
  add("mixed", "dp0", "x", 0);
  add("mixed", "dp1", "x", 0);
  add("mixed", "dp2", "y", 0);
  const ClassRedundancy documents = Report(step, step.model()).classes.back();
  EXPECT_EQ(documents.name, kDocumentClass);
  EXPECT_EQ(documents.files, 3u);
  EXPECT_THAT(documents.tensors, ElementsAre(1, 1, 1));
  EXPECT_EQ(documents.stored, 3u * 6 + 2 * 6 + 3 * 3);
  EXPECT_EQ(documents.unique, 6u + 2 * 6 + 2 * 3);
}

// A step of random cuts against sums made element by element.
TEST(Redundancy, EqualsAnElementwiseOracle) {
  std::mt19937 random(11);
  constexpr uint32_t kFiles = 4;
  StoredStep step(kFiles);
  struct Expected {
    uint64_t unique = 0, stored = 0;
    std::map<std::set<uint32_t>, uint64_t> held;
  };
  std::vector<Expected> expected;
  for (uint32_t t = 0; t < 30; ++t) {
    const size_t size = 1 + random() % (3 * kCompareUnit);
    const std::string values = Noise(size, t);
    std::vector<Copy> copies;
    std::vector<std::vector<uint32_t>> files;  // by copy and element
    for (size_t c = 0; c < 1 + random() % 4; ++c) {
      Copy copy{values, {}};
      std::vector<uint32_t> of;
      while (of.size() < size) {
        const uint64_t run = std::min<uint64_t>(1 + random() % kCompareUnit, size - of.size());
        copy.runs.push_back({static_cast<uint32_t>(random() % kFiles), run});
        of.insert(of.end(), run, copy.runs.back().file);
      }
      if (random() % 3 == 0) copy.values[random() % size] ^= 1;
      copies.push_back(copy);
      files.push_back(of);
    }
    Expected sums;
    for (size_t begin = 0, end; begin < size; begin = end) {
      const auto same_cell = [&](size_t i) {
        for (const auto& of : files)
          if (of[i] != of[begin]) return false;
        return i / kCompareUnit == begin / kCompareUnit;
      };
      for (end = begin; end < size && same_cell(end); ++end) {
      }
      std::map<std::string, std::set<uint32_t>> holders;
      for (size_t c = 0; c < copies.size(); ++c)
        holders[copies[c].values.substr(begin, end - begin)].insert(files[c][begin]);
      for (const auto& [bytes, of] : holders) {
        sums.unique += end - begin;
        sums.held[of] += end - begin;
      }
      sums.stored += (end - begin) * copies.size();
    }
    expected.push_back(sums);
    step.Add("t" + std::to_string(t), "weight", copies);
  }
  step.Finish();
  const RedundancyReport report = Report(step, step.model());
  uint64_t kept = 0, unique = 0;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> pairs;
  for (size_t t = 0; t < expected.size(); ++t) {
    const TensorRedundancy& tensor = report.tensors[t];
    EXPECT_EQ(tensor.unique, expected[t].unique);
    EXPECT_EQ(tensor.stored, expected[t].stored);
    uint64_t full = 0, none = 0, shared = 0;
    for (const auto& [holders, bytes] : expected[t].held) {
      if (holders.size() == kFiles) full += bytes;
      if (holders.size() == 1) none += bytes;
      if (holders.size() > 1) shared += bytes;
      for (const uint32_t a : holders)
        for (const uint32_t b : holders)
          if (a < b) pairs[{a, b}] += bytes;
    }
    const Sharing sharing = full == tensor.unique   ? Sharing::kFull
                            : none == tensor.unique ? Sharing::kNone
                                                    : Sharing::kPartial;
    EXPECT_EQ(tensor.sharing, sharing) << t;
    uint64_t keeps = 0;
    for (const KeptPart& part : tensor.keeps) keeps += part.bytes;
    EXPECT_EQ(keeps, shared);
    unique += tensor.unique;
  }
  for (const FileRedundancy& file : report.files) kept += file.kept;
  EXPECT_EQ(kept, unique);
  std::vector<SharedPair> expected_pairs;
  for (const auto& [pair, bytes] : pairs)
    expected_pairs.push_back({pair.first, pair.second, bytes});
  EXPECT_EQ(report.pairs, expected_pairs);
}

// A change of a file while its copies are compared.
using Harm = std::function<void(const std::string& path)>;

std::string ErrorAfter(const Harm& harm) {
  StoredStep step(2);
  const std::string values = Noise(1000, 1);
  step.Add("a", "weight", {Whole(values, 0), Whole(values, 1)});
  step.Add("b", "weight", {Whole(Noise(77, 2), 1)});
  step.Finish();
  RedundancyOptions options;
  options.progress = [&](std::string_view) {
    return [&](const JobProgress&) { harm(step.PathOf(1)); };
  };
  const auto report = FindRedundancy(step.model(), *step.Open(), options);
  return report ? "no error" : report.error().message;
}

TEST(Redundancy, AFileThatChangesOrVanishesMeanwhileIsNamed) {
  EXPECT_EQ(ErrorAfter([](const std::string&) {}), "no error");
  EXPECT_THAT(ErrorAfter([](const std::string& path) { ::unlink(path.c_str()); }),
              HasSubstr("file1"));
  EXPECT_THAT(
      ErrorAfter([](const std::string& path) { std::ofstream(path, std::ios::app) << "x"; }),
      HasSubstr("file1"));
}

TEST(Redundancy, AFileThatIsAnotherIsRefusedThoughNothingIsReadOfIt) {
  StoredStep step(1);
  step.Add("a", "weight", {Whole(Noise(77, 2), 0)});
  step.Finish();
  std::ofstream(step.PathOf(0), std::ios::app) << "x";
  const auto report = FindRedundancy(step.model(), *step.Open(), {});
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code, ErrorCode::kStale);
  EXPECT_THAT(report.error().message, HasSubstr("file0"));
}

const TensorSince& SinceOf(const StepSince& since, AtomIndex atom) {
  return *std::find_if(since.tensors.begin(), since.tensors.end(),
                       [&](const TensorSince& tensor) { return tensor.atom == atom; });
}

TEST(Unchanged, TellsWhatIsAsInTheStepBefore) {
  const std::string base = Noise(3 * kCompareUnit + 5, 1);
  std::string partly = base;
  partly[kCompareUnit + 1] ^= 1;
  StoredStep before(2), after(3);
  before.Add("frozen", "weight", {Whole(base, 0)});
  before.Add("experts", "weight", {Whole(base, 1)});
  before.Add("adapter", "weight", {Whole(Noise(100, 2), 1)});
  before.Add("resized", "weight", {Whole(Noise(100, 2), 1)});
  before.Finish();
  // Cut over other files, by another name.
  const AtomIndex frozen =
      after.Add("base", "weight", {{base, {{2, 70000}, {0, base.size() - 70000}}}});
  after.model().aliases.push_back({"frozen", ParameterIndex{0}});
  const AtomIndex experts = after.Add("experts", "weight", {Whole(partly, 1)});
  const AtomIndex adapter = after.Add("adapter", "weight", {Whole(Noise(100, 3), 1)});
  const AtomIndex resized = after.Add("resized", "weight", {Whole(Noise(101, 2), 1)});
  const AtomIndex moment = after.Add("adapter", "exp_avg", {Whole(Noise(100, 3), 1)});
  after.Finish();
  const auto a = before.Open(), b = after.Open();
  // By the alias of either side.
  before.model().aliases.push_back({"base", ParameterIndex{0}});
  const std::vector<StepRef> steps = {{&before.model(), a.get()}, {&after.model(), b.get()}};
  const auto told = FindUnchanged(steps, {});
  ASSERT_TRUE(told) << told.error().message;
  ASSERT_EQ(told->size(), 1u);
  const StepSince& since = told->front();
  EXPECT_EQ(SinceOf(since, frozen).since, SinceBefore::kUnchanged);
  EXPECT_EQ(SinceOf(since, experts).since, SinceBefore::kPartly);
  EXPECT_EQ(SinceOf(since, experts).unchanged, base.size() - kCompareUnit);
  EXPECT_EQ(SinceOf(since, adapter).since, SinceBefore::kChanged);
  EXPECT_EQ(SinceOf(since, resized).since, SinceBefore::kFresh);
  EXPECT_EQ(SinceOf(since, moment).since, SinceBefore::kFresh);
  EXPECT_EQ(since.classes[0].unchanged, 2 * base.size() - kCompareUnit);
  EXPECT_EQ(since.classes[0].bytes, 2 * base.size() + 201);
  EXPECT_THAT(since.classes[0].tensors, ElementsAre(1, 1, 1, 1));
  EXPECT_EQ(since.classes[0].shared, 0u);
}

TEST(Unchanged, BytesOfTheStoreThatBothReferToAreNotRead) {
  StoredStep step(1);
  step.Add("frozen", "weight", {Whole(Noise(1000, 1), 0)});
  step.Finish();
  step.model().blobs[0].store_owned = true;
  step.model().blobs[0].stamp = {.size = 1000, .mtime_ns = 0, .ctime_ns = 0, .inode = 0};
  const auto blobs = step.Open();
  const std::vector<StepRef> steps(2, StepRef{&step.model(), blobs.get()});
  const auto told = FindUnchanged(steps, {});
  ASSERT_TRUE(told) << told.error().message;
  EXPECT_EQ(told->front().bytes_read, 0u);
  EXPECT_EQ(told->front().tensors[0].shared, 1000u);
  EXPECT_EQ(told->front().tensors[0].unchanged, 1000u);
  // Nothing is taken for granted of files that others may write.
  StepModel adopted = step.model();
  adopted.blobs[0].store_owned = false;
  const std::vector<StepRef> mixed = {steps[0], StepRef{&adopted, blobs.get()}};
  EXPECT_EQ(FindUnchanged(mixed, {}).value().front().bytes_read, 2000u);
  const std::vector<StepRef> reversed = {mixed[1], mixed[0]};
  EXPECT_EQ(FindUnchanged(reversed, {}).value().front().bytes_read, 2000u);
}

TEST(Unchanged, AFileThatChangedIsNamed) {
  StoredStep before(1), after(1);
  for (StoredStep* step : {&before, &after}) {
    step->Add("w", "weight", {Whole(Noise(1000, 1), 0)});
    step->Finish();
  }
  const auto a = before.Open(), b = after.Open();
  const std::vector<StepRef> steps = {{&before.model(), a.get()}, {&after.model(), b.get()}};
  std::ofstream(after.PathOf(0), std::ios::app) << "x";
  const auto told = FindUnchanged(steps, {});
  ASSERT_FALSE(told);
  EXPECT_THAT(told.error().message, HasSubstr(after.PathOf(0)));
}

}  // namespace
}  // namespace ckptfs
