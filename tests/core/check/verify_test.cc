// SPDX-License-Identifier: Apache-2.0

#include "core/check/verify.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/base/crc32.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/blob/chunk_list.h"
#include "core/io/file_storage.h"
#include "tests/support/stamp_of_file.h"
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
    options.records = records_;
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
  RecordsOf records_;
};

// Three records that share no buffer of the reader's; the second has no sum.
std::vector<FileRecord> RecordsFor(std::span<const std::byte> bytes) {
  const auto sum = [&](uint64_t at, uint64_t length) {
    return Crc32(0, bytes.subspan(at, length));
  };
  return {{"last", 4200000, 3000000, sum(4200000, 3000000)},
          {"first", 7, 4100000, sum(7, 4100000)},
          {"unsummed", 4100007, 99993, std::nullopt},
          {"empty", 5, 0, 0}};
}

TEST_F(VerifyTest, AGoodStepHasNoDefects) {
  const VerifyReport report = Run(true);
  EXPECT_EQ(report.defect_count, 0u);
  EXPECT_EQ(report.blobs, 2u);
  EXPECT_EQ(report.blob_bytes, 2 * kElements * 4);
  EXPECT_EQ(report.atoms_compared, 1u);
  EXPECT_EQ(report.atoms_read, 1u);
  EXPECT_EQ(report.atoms_finite, 1u);
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

TEST_F(VerifyTest, AChunkOfOtherBytesIsNamed) {
  const auto* bytes = reinterpret_cast<const char*>(values_.data());
  for (Blob& blob : model_.blobs) {
    blob.chunk_bytes = kChunkBytes;
    blob.chunks = ChunkDigestsOf({bytes, values_.size() * sizeof(float)});
  }
  const VerifyReport good = Run();
  EXPECT_EQ(good.defect_count, 0u);
  EXPECT_EQ(good.summed_bytes, 2 * values_.size() * sizeof(float));
  values_[1999999] = 2;
  Write("b");
  model_.atoms[0].source.gathers.pop_back();  // nothing else to compare it with
  const VerifyReport report = Run();
  EXPECT_EQ(report.defect_count, 1u);
  EXPECT_TRUE(Says(report, directory_.path() + "/b: the digest of bytes 7864320 to 8000000"));
}

// The blob is proved without the file that has its digests, which tells which chunk is wrong.
TEST_F(VerifyTest, AFileOfDigestsThatIsMissingOrDamagedIsADefectOfItsOwn) {
  const auto* bytes = reinterpret_cast<const char*>(values_.data());
  const auto storage = *FileStorage::Open(directory_.path(), true);
  for (Blob& blob : model_.blobs) {
    blob.chunk_bytes = kChunkBytes;
    blob.chunks = ChunkDigestsOf({bytes, values_.size() * sizeof(float)});
    blob.chunk_list = DigestOfChunks(blob.chunks);
    ASSERT_TRUE(PutChunkList(*storage, "", blob));
    blob.chunks.clear();
  }
  const std::string list = ChunkListPath(model_.blobs[1]);
  EXPECT_EQ(Run().defect_count, 0u);
  const std::string good = *ReadWhole(*storage, list, 1 << 20);
  model_.atoms[0].source.gathers.pop_back();  // nothing else to compare a file with
  values_[1999999] = 2;
  Write("b");
  VerifyReport report = Run();
  EXPECT_EQ(report.defect_count, 1u);
  EXPECT_TRUE(Says(report, directory_.path() + "/b: the digest of bytes 7864320 to 8000000"));

  for (const bool damaged : {false, true}) {
    if (damaged) {
      directory_.Write(list, "x" + good.substr(1));
    } else {
      ASSERT_TRUE(storage->Remove(list));
    }
    const std::string_view how = damaged ? "are damaged" : "are missing";
    report = Run();  // one file is whole, the other is not
    EXPECT_EQ(report.defect_count, 3u);
    EXPECT_TRUE(Says(report, StrCat(directory_.path(), "/", list, ": the digests of a ", how,
                                    "; all bytes of that file are what was stored")));
    EXPECT_TRUE(Says(report, directory_.path() + "/b: its bytes are not what was stored"));
  }
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
  EXPECT_TRUE(Says(report, "/a: changed since it was adopted: size"));
  EXPECT_TRUE(Says(report, "/b"));
  EXPECT_EQ(report.defect_count, 2u);
}

TEST_F(VerifyTest, AChangedFileIsOneDefectForAllItsAtoms) {
  for (int i = 0; i < 20; ++i) {
    Atom cast;
    cast.kind = std::string("master");
    cast.shape = model_.atoms[0].shape;
    cast.source.kind = SourceKind::kCast;
    cast.source.of = AtomIndex{0};
    model_.atoms.push_back(cast);
  }
  EXPECT_EQ(Run().atoms_read, 21u);
  directory_.Write("b", "short");
  const VerifyReport report = Run();
  EXPECT_EQ(report.defect_count, 1u);
  EXPECT_EQ(report.defects[0].subject, directory_.path() + "/b");
}

// Both rows of the weight lie in one; their masters are two.
TEST_F(VerifyTest, AnExpandedWeightIsComparedRowByRow) {
  const uint64_t columns = kElements / 2;
  Atom& weight = model_.atoms[0];
  Atom master = weight;
  weight.shape = master.shape = {2, columns};
  const Piece rows{{2, columns}, {0, 0}, 0, {0, 1}, 1.0};
  weight.source = {};
  weight.source.gathers = {Gather{{LocalTensor{{columns}, {rows}}}, {FragmentSeries{}}}};
  weight.source.gathers[0].series[0].elements = columns;
  master.kind = std::string("master");
  master.source = {};
  master.source.gathers = {Gather{{WholeTensor(master.shape)}, {FragmentSeries{}}}};
  master.source.gathers[0].series[0].elements = kElements;
  master.source.gathers[0].series[0].blob = 1;
  model_.atoms.push_back(master);
  EXPECT_EQ(Run().defect_count, 0u);
  values_[3] = 2.5f;  // of the first row, which the second hid
  Write("b");
  const VerifyReport report = Run();
  EXPECT_EQ(report.defect_count, 1u);
  EXPECT_TRUE(Says(report, "element 3 is 1.5"));
}

TEST_F(VerifyTest, RecordsAreComparedWithTheirChecksums) {
  records_ = [&](const std::shared_ptr<const File>& file) -> Result<std::vector<FileRecord>> {
    auto records = RecordsFor(std::as_bytes(std::span(values_)));
    if (file->name().ends_with("/a")) records.erase(records.begin() + 2);
    return records;
  };
  const VerifyReport good = Run();
  EXPECT_EQ(good.defect_count, 0u);
  EXPECT_EQ(good.summed_bytes, 2 * 7100000u);
  EXPECT_EQ(good.unsummed_blobs, 1u);
  EXPECT_EQ(good.unsummed, directory_.path() + "/b");
  for (const auto& [byte, name] : {std::pair<size_t, const char*>{4194304, ""},  // unsummed
                                   {7, "first"},
                                   {4194300, ""},
                                   {4100006, "first"},
                                   {4200000, "last"},
                                   {7199999, "last"},
                                   {7200000, ""}}) {
    const std::vector<float> whole = values_;
    const auto records = RecordsFor(std::as_bytes(std::span(whole)));
    records_ = [&](const std::shared_ptr<const File>&) -> Result<std::vector<FileRecord>> {
      return records;
    };
    reinterpret_cast<std::byte*>(values_.data())[byte] ^= std::byte{4};
    Write("a");
    Write("b");
    const VerifyReport report = Run();
    EXPECT_EQ(report.defect_count, *name == 0 ? 0u : 2u) << byte;
    if (*name != 0) {
      EXPECT_TRUE(Says(report, directory_.path() + "/a: record '" + name + "' is damaged"));
    }
    values_ = whole;
  }
}

TEST_F(VerifyTest, AFileOfTensorsWhoseRecordsCannotBeListedIsADefect) {
  model_.blobs.push_back(model_.blobs[0]);  // no tensors in this one
  records_ = [](const std::shared_ptr<const File>& file) -> Result<std::vector<FileRecord>> {
    return Fail(ErrorCode::kInvalid, file->name() + ": no zip end record");
  };
  const VerifyReport report = Run();
  EXPECT_EQ(report.defect_count, 2u);
  EXPECT_TRUE(Says(report, directory_.path() + "/b: no zip end record"));
}

TEST_F(VerifyTest, ElementsStoredNowhereAreDefects) {
  model_.atoms[0].source.kind = SourceKind::kAverage;
  model_.atoms[0].source.gathers[1].series[0].elements = kElements - 1;
  EXPECT_TRUE(Says(Run(), "not stored anywhere"));
  model_.atoms.push_back(model_.atoms[0]);  // of two atoms it is two
  EXPECT_EQ(Run().defect_count, 2u);
}

}  // namespace
}  // namespace ckptfs
