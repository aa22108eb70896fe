// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/zip_archive.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/io/file_root.h"
#include "formats/torch/torch_file.h"
#include "tests/formats/torch/zip_maker.h"
#include "tests/support/open_torch_file.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/watched_root.h"

namespace ckptfs {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class ZipArchiveTest : public ::testing::Test {
 protected:
  ~ZipArchiveTest() override { ::close(fd_); }

  Result<TorchFile> OpenBytes(const std::string& bytes) {
    EXPECT_EQ(::ftruncate(fd_, 0), 0);
    EXPECT_EQ(::pwrite(fd_, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    return OpenTorchFile(path_);
  }
  Result<TorchFile> OpenMade(const MadeZip& made) { return OpenBytes(MakeZip(made)); }

  // The refusal names the file and the rule.
  void ExpectRefused(const MadeZip& made, const std::string& rule) {
    auto file = OpenMade(made);
    ASSERT_FALSE(file.has_value()) << rule;
    EXPECT_EQ(file.error().code, ErrorCode::kInvalid);
    EXPECT_THAT(file.error().message, StartsWith(path_));
    EXPECT_THAT(file.error().message, HasSubstr(rule));
  }

  int fd_ = ::memfd_create("zip", MFD_CLOEXEC);
  std::string path_ = "/proc/self/fd/" + std::to_string(fd_);
};

TEST_F(ZipArchiveTest, OpensAnHonestZip) {
  auto file = OpenMade(OneTensorZip());
  ASSERT_TRUE(file.has_value()) << file.error().message;
  const TensorNode* tensor = file->root()["t"].Tensor();
  ASSERT_NE(tensor, nullptr);
  auto located = file->Locate(*tensor, BlobIndex{});
  ASSERT_TRUE(located.has_value()) << located.error().message;
  auto at = located->Bytes();
  ASSERT_TRUE(at.has_value());
  EXPECT_EQ(at->length, 16u);
  std::string bytes = MakeZip(OneTensorZip());
  EXPECT_EQ(bytes.substr(at->offset, at->length), std::string(16, '\7'));
}

TEST_F(ZipArchiveTest, OpensZip64AndComments) {
  MadeZip made = OneTensorZip();
  for (MadeRecord& record : made.records) record.zip64 = true;
  made.end64 = true;
  EXPECT_TRUE(OpenMade(made).has_value());
  made.comment = std::string(60000, 'c');
  EXPECT_TRUE(OpenMade(made).has_value());
}

TEST_F(ZipArchiveTest, DescriptorsNeedNoLocalSize) {
  MadeZip made = OneTensorZip();
  made.records[2].flags |= zip::kFlagDescriptor;
  made.records[2].local_size = 0;
  EXPECT_TRUE(OpenMade(made).has_value());
}

// Thousands of records of nothing are what a rank of ZeRO-3 has for its weights.
TEST_F(ZipArchiveTest, HeadersCloseTogetherAreFewRequests) {
  MadeZip made;
  for (int i = 0; i < 5000; ++i) {
    made.records.push_back(
        {.name = "x/data/" + std::to_string(i), .payload = std::string(i % 3, 'p')});
  }
  made.records[4000].payload = std::string(100'000, 'q');
  const TemporaryDirectory directory;
  const std::string bytes = MakeZip(made);
  directory.Write("zip", bytes);
  WatchedRoot root(std::make_shared<FileRoot>(directory.path()));
  const auto file = *root.Open("zip");
  root.Watch();
  const auto archive = ZipArchive::Open(FileRange(*file));
  ASSERT_TRUE(archive.has_value()) << archive.error().message;
  size_t requests = 0;
  for (const IoCall& call : root.calls()) requests += call.ranges.size();
  EXPECT_LE(requests, 10u);
  ASSERT_EQ(archive->records().size(), made.records.size());
  for (size_t i = 0; i < made.records.size(); ++i) {
    const ZipRecord& record = archive->records()[i];
    EXPECT_EQ(record.name, made.records[i].name);
    EXPECT_EQ(bytes.substr(record.offset, record.length), made.records[i].payload) << i;
  }
  for (const size_t i : {size_t{0}, size_t{1830}, size_t{4001}, size_t{4999}}) {
    MadeZip lies = made;
    lies.records[i].local_name = "x/data/y" + std::to_string(i);
    ExpectRefused(lies, "'x/data/" + std::to_string(i) + "': its local header has another name");
  }
}

TEST_F(ZipArchiveTest, RefusesHostileNames) {
  for (std::string name : {"x/../../etc/passwd", "..", "/etc/passwd", "x\\..\\y", "x/.."}) {
    MadeZip made = OneTensorZip();
    made.records.push_back({.name = name, .payload = "p"});
    ExpectRefused(made, name == "/etc/passwd" || name[1] == '\\' ? "absolute names" : "'..'");
  }
  MadeZip made = OneTensorZip();
  made.records.push_back({.name = std::string("x/\0y", 4), .payload = "p"});
  ExpectRefused(made, "NUL");
  made.records.back().name = "";
  ExpectRefused(made, "without a name");
}

TEST_F(ZipArchiveTest, RefusesDuplicatesAndOverlaps) {
  MadeZip made = OneTensorZip();
  made.records.push_back({.name = "x/data/0", .payload = std::string(16, '\1')});
  ExpectRefused(made, "two zip records are named 'x/data/0'");

  made = OneTensorZip();
  made.records[2].payload = std::string(16, '\7');
  made.records[2].central_size = 40;  // reaches into the next record
  made.records[2].local_size = 40;
  ExpectRefused(made, "overlap");

  made = OneTensorZip();
  made.records.push_back(made.records[2]);  // two names, one place
  made.records[4].name = "x/data/1";
  made.records[4].header_offset = 0;
  ExpectRefused(made, "another name");
}

// Its code is compressed.
TEST_F(ZipArchiveTest, SaysThatAnArchiveIsTorchScripts) {
  MadeZip made = OneTensorZip();
  made.records[2].name = "x/code/__torch__/net.py";
  made.records[2].method = 8;
  ExpectRefused(made, "code of TorchScript");
}

TEST_F(ZipArchiveTest, RefusesCompressionAndEncryption) {
  for (uint16_t method : {8, 12, 93, 99}) {
    MadeZip made = OneTensorZip();
    made.records[2].method = method;
    ExpectRefused(made, "compressed");
  }
  for (uint16_t flag : {zip::kFlagEncrypted, zip::kFlagStrongEncryption, zip::kFlagMasked}) {
    MadeZip made = OneTensorZip();
    made.records[2].flags |= flag;
    ExpectRefused(made, "encrypted");
  }
}

TEST_F(ZipArchiveTest, RefusesImpossibleSizes) {
  for (uint64_t size :
       {uint64_t{1} << 63, ~uint64_t{0}, (uint64_t{1} << 32) - 2, uint64_t{1} << 32}) {
    MadeZip made = OneTensorZip();
    made.records[2].zip64 = true;
    made.records[2].local_size = zip::kBig32;
    made.records[2].central_size = size;
    ExpectRefused(made, "reach beyond");
    made.records[2].central_size = std::nullopt;
    made.records[2].header_offset = size;
    ExpectRefused(made, "beyond the central directory");
  }
  MadeZip made = OneTensorZip();
  made.records[2].local_size = 12;
  ExpectRefused(made, "another size");
  made.records[2].local_size = std::nullopt;
  made.records[2].central_original = 1000;
  ExpectRefused(made, "differ");
}

TEST_F(ZipArchiveTest, RefusesLyingEndRecords) {
  for (bool end64 : {false, true}) {
    MadeZip made = OneTensorZip();
    made.end64 = end64;
    made.directory_offset = end64 ? uint64_t{1} << 63 : 0xfffffff0;
    ExpectRefused(made, "beyond its end record");
    made.directory_offset = 1;
    ExpectRefused(made, "damaged");
    made.directory_offset = std::nullopt;
    made.directory_bytes = end64 ? ~uint64_t{0} : 0xfffffff0;
    ExpectRefused(made, "beyond its end record");
    made.directory_bytes = std::nullopt;
    made.count = 60000;
    ExpectRefused(made, "more zip records");
    made.count = 3;
    ExpectRefused(made, "more bytes in the central directory");
  }
  MadeZip made = OneTensorZip();
  made.end64 = true;
  made.end64_offset = ~uint64_t{0} - 10;
  ExpectRefused(made, "zip64 end record");
  made.end64_offset = 0;
  ExpectRefused(made, "no zip64 end record");
}

TEST_F(ZipArchiveTest, RefusesWhatIsNoTorchFile) {
  ExpectRefused({.records = {{.name = "x/other", .payload = "p"}}}, "no record data.pkl");
  ExpectRefused({.records = {{.name = "data.pkl", .payload = "N."}}}, "no top folder");
  MadeZip made = OneTensorZip();
  made.records[1].payload = "middle";
  ExpectRefused(made, "byteorder");
  auto empty = OpenBytes("");
  EXPECT_THAT(empty.error().message, HasSubstr("empty"));
  EXPECT_FALSE(OpenBytes("PK\3\4").has_value());
  EXPECT_FALSE(OpenBytes(std::string(100000, ' ')).has_value());
  EXPECT_EQ(OpenTorchFile("/nonexistent/x.pt").error().code, ErrorCode::kNotFound);
  EXPECT_EQ(OpenTorchFile("/dev/null").error().code, ErrorCode::kInvalid);
  EXPECT_EQ(OpenTorchFile("/tmp").error().code, ErrorCode::kInvalid);
}

// An archive inside a file is what it is alone, but for where its bytes lie.
TEST_F(ZipArchiveTest, AnArchiveMayLieAnywhereInAFile) {
  const std::string zip = MakeZip(OneTensorZip());
  const auto alone = OpenBytes(zip);
  ASSERT_TRUE(alone) << alone.error().message;
  EXPECT_FALSE(OpenBytes(std::string(1000, 'x') + zip + std::string(77, 'y')));
  const auto file = OpenLocalFile(path_);
  ASSERT_TRUE(file);
  const auto inside = TorchFile::Open(*file, Extent{1000, 1000 + zip.size()});
  ASSERT_TRUE(inside) << inside.error().message;
  const TensorNode& tensor = alone->tree().tensors.front();
  EXPECT_EQ(inside->Locate(tensor, BlobIndex{})->Bytes()->offset,
            alone->Locate(tensor, BlobIndex{})->Bytes()->offset + 1000);
  for (const Extent& wrong : {Extent{1000, 1000 + zip.size() + 1}, Extent{999, 999 + zip.size()},
                              Extent{5, 4}, Extent{0, 1 << 20}}) {
    const auto refused = TorchFile::Open(*file, wrong);
    ASSERT_FALSE(refused) << wrong.begin;
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalid);
    EXPECT_THAT(refused.error().message, StartsWith(path_));
  }
}

TEST_F(ZipArchiveTest, NamesWhatIsUnsupported) {
  MadeZip made = OneTensorZip();
  made.records[1].payload = "big";
  made.records[1].local_size = std::nullopt;
  auto file = OpenMade(made);
  EXPECT_EQ(file.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(file.error().message, HasSubstr("big-endian"));
  made = OneTensorZip();
  made.records.push_back({.name = "x/constants.pkl", .payload = "N."});
  EXPECT_THAT(OpenMade(made).error().message, HasSubstr("TorchScript"));
}

TEST_F(ZipArchiveTest, EveryTruncationIsRefused) {
  for (bool end64 : {false, true}) {
    MadeZip made = OneTensorZip();
    made.end64 = end64;
    std::string whole = MakeZip(made);
    for (size_t length = 0; length < whole.size(); ++length) {
      auto file = OpenBytes(whole.substr(0, length));
      ASSERT_FALSE(file.has_value()) << length;
      ASSERT_THAT(file.error().message, StartsWith(path_));
    }
  }
}

// Flipped bits either are refused or leave locations inside the file.
TEST_F(ZipArchiveTest, EveryFlippedBitIsSafe) {
  MadeZip made = OneTensorZip();
  made.end64 = true;
  made.records[2].zip64 = true;
  std::string whole = MakeZip(made);
  ASSERT_TRUE(OpenBytes(whole).has_value());
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string bytes = whole;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
    auto file = OpenBytes(bytes);
    if (!file) continue;
    for (const TensorNode& tensor : file->tree().tensors) {
      auto located = file->Locate(tensor, BlobIndex{});
      if (!located) continue;
      const Fragment all = located->As(WholeTensor(tensor.shape)).value().fragment;
      ASSERT_LE(all.offset + all.flat_end * ByteWidth(all.dtype), bytes.size()) << bit;
    }
  }
}

TEST_F(ZipArchiveTest, TensorsMustFitTheirStorage) {
  auto fits = [&](std::string pickle) {
    MadeZip made = OneTensorZip();
    made.records[0].payload = std::move(pickle);
    auto file = OpenMade(made);
    return file && file->Locate(*file->root()["t"].Tensor(), BlobIndex{}).has_value();
  };
  EXPECT_TRUE(fits(OneTensorPickle(4, 0, 1, 4)));
  EXPECT_TRUE(fits(OneTensorPickle(2, 1, 2, 4)));
  EXPECT_TRUE(fits(OneTensorPickle(200, 3, 0, 4)));
  EXPECT_TRUE(fits(OneTensorPickle(0, 4, 1, 4)));
  EXPECT_FALSE(fits(OneTensorPickle(5, 0, 1, 4)));
  EXPECT_FALSE(fits(OneTensorPickle(4, 1, 1, 4)));
  EXPECT_FALSE(fits(OneTensorPickle(3, 0, 2, 4)));
  EXPECT_FALSE(fits(OneTensorPickle(0, 5, 1, 4)));
  EXPECT_FALSE(fits(OneTensorPickle(4, 0, 1, 5)));  // record too short
  EXPECT_FALSE(fits(OneTensorPickle(3, 0, 1, 3)));  // record too long
}

TEST_F(ZipArchiveTest, ManyRecordsOpenWhole) {
  MadeZip made = OneTensorZip();
  for (int i = 1; i < 10000; ++i) {
    made.records.push_back({.name = "x/data/" + std::to_string(i), .payload = "12345678"});
  }
  auto file = OpenMade(made);
  ASSERT_TRUE(file.has_value()) << file.error().message;
  EXPECT_EQ(file->storage_count(), 10000u);
}

}  // namespace
}  // namespace ckptfs
