// SPDX-License-Identifier: Apache-2.0

#include "core/jobs/verify.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/blob/file_stamp.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

constexpr uint64_t kElements = 2000000;  // more than one buffer

// Two replicas of one fp32 atom in files "a" and "b".
class VerifyTest : public testing::Test {
 protected:
  VerifyTest() : values_(kElements, 1.5f) {
    model_.roots = {directory_.path()};
    model_.parameters.resize(1);
    model_.parameters[0].name = std::string("layers.0.norm");
    Atom atom;
    atom.kind = std::string("weight");
    atom.shape = {kElements};
    atom.source.kind = SourceKind::kReplicas;
    for (const char* name : {"a", "b"}) {
      Gather gather;
      gather.locals = {WholeTensor(atom.shape)};
      FragmentSeries series;
      series.elements = kElements;
      series.blob = static_cast<uint32_t>(model_.blobs.size());
      gather.series = {series};
      atom.source.gathers.push_back(gather);
      model_.blobs.emplace_back();
      model_.blobs.back().path = std::string(name);
      Write(name);
    }
    model_.atoms.push_back(atom);
  }

  void Write(const char* name) {
    const auto* bytes = reinterpret_cast<const char*>(values_.data());
    const std::string path = directory_.Write(name, {bytes, values_.size() * sizeof(float)});
    model_.blobs[name[0] - 'a'].stamp = *StampOfFile(path);
  }
  VerifyReport Run(bool finite = false) {
    const auto blobs = BlobReader::Create(model_, {});
    VerifyOptions options;
    options.finite = finite;
    const auto report = VerifyStep(model_, *blobs, options);
    EXPECT_TRUE(report);
    return *report;
  }
  bool Says(const VerifyReport& report, std::string_view text) {
    for (const VerifyDefect& defect : report.defects) {
      if ((defect.subject + ": " + defect.rule).find(text) != std::string::npos) return true;
    }
    return false;
  }

  TemporaryDirectory directory_;
  StepModel model_;
  std::vector<float> values_;
};

TEST_F(VerifyTest, AGoodStepHasNoDefects) {
  const VerifyReport report = Run(true);
  EXPECT_EQ(report.defect_count, 0u);
  EXPECT_EQ(report.blobs, 2u);
  EXPECT_EQ(report.blob_bytes, 2 * kElements * 4);
  EXPECT_EQ(report.atoms_compared, 1u);
  EXPECT_EQ(report.atoms_read, 1u);
  EXPECT_EQ(report.atoms_finite, 1u);
  EXPECT_EQ(report.digests[0], DigestOf(std::as_bytes(std::span(values_))));
}

TEST_F(VerifyTest, ReplicasThatDifferAreNamedWithElementAndFiles) {
  values_[1999999] = 2;
  Write("b");
  const VerifyReport report = Run();
  EXPECT_EQ(report.defect_count, 1u);
  EXPECT_TRUE(Says(report, "layers.0.norm (weight)"));
  EXPECT_TRUE(Says(report, "element 1999999"));
  EXPECT_TRUE(Says(report, directory_.path() + "/a"));
  EXPECT_TRUE(Says(report, directory_.path() + "/b"));
}

TEST_F(VerifyTest, NanAndInfinityAreFoundOnRequest) {
  values_[1234567] = std::numeric_limits<float>::quiet_NaN();
  Write("a");
  Write("b");
  EXPECT_EQ(Run(false).defect_count, 0u);
  EXPECT_TRUE(Says(Run(true), "element 1234567 is NaN in " + directory_.path() + "/a"));
  values_[1234567] = -std::numeric_limits<float>::infinity();
  Write("a");
  Write("b");
  EXPECT_TRUE(Says(Run(true), "element 1234567 is infinite"));
}

TEST_F(VerifyTest, RecordedDigestsAreCompared) {
  model_.blobs[0].content = DigestOf("something else");
  EXPECT_TRUE(Says(Run(), "content digest"));
}

TEST_F(VerifyTest, MissingAndChangedFilesAreDefects) {
  directory_.Write("a", "short");
  std::filesystem::remove(directory_.path() + "/b");
  const VerifyReport report = Run();
  EXPECT_TRUE(Says(report, "/a changed since it was adopted"));
  EXPECT_TRUE(Says(report, "/b"));
  EXPECT_GE(report.defect_count, 2u);
}

TEST_F(VerifyTest, ElementsStoredNowhereAreDefects) {
  model_.atoms[0].source.kind = SourceKind::kAverage;
  model_.atoms[0].source.gathers[1].series[0].elements = kElements - 1;
  EXPECT_TRUE(Says(Run(), "stored nowhere"));
}

}  // namespace
}  // namespace ckptfs
