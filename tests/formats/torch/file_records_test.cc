// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/file_records.h"

#include <gtest/gtest.h>

#include "core/blob/frame.h"
#include "core/blob/touched_files.h"
#include "core/io/file_root.h"
#include "formats/torch/torch_file.h"
#include "tests/formats/torch/zip_maker.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

class FileRecordsTest : public testing::Test {
 protected:
  static MadeZip Summed() {
    MadeZip made = OneTensorZip();
    for (MadeRecord& record : made.records) record.summed = true;
    return made;
  }
  std::shared_ptr<const File> Write(const std::string& bytes) {
    return *OpenLocalFile(directory_.Write("file.pt", bytes));
  }
  // Returns true if the file, when it holds `bytes`, is still the one that was `adopted`.
  bool IsSame(const Blob& adopted, const std::string& bytes) {
    const auto file = Write(bytes);
    const auto same = touched_.IsSame(*file, adopted, file->Identity()->stamp);
    EXPECT_TRUE(same) << same.error().message;
    return same && *same;
  }

  TemporaryDirectory directory_;
  TouchedFiles touched_{{RecordsOfFile, nullptr}};
};

TEST_F(FileRecordsTest, OfAnArchiveTheDirectoryAndOfOthersNone) {
  const auto records = RecordsOfFile(Write(MakeZip(Summed())));
  ASSERT_TRUE(records);
  ASSERT_EQ(records->size(), Summed().records.size());
  EXPECT_TRUE((*records)[0].crc);
  const auto unsummed = RecordsOfFile(Write(MakeZip(OneTensorZip())));
  ASSERT_TRUE(unsummed);
  EXPECT_FALSE((*unsummed)[0].crc);
}

// Not one bit of it can be another: of a payload, a header, the directory, the end.
TEST_F(FileRecordsTest, AFlippedBitOfATouchedArchiveIsFoundInEveryByte) {
  for (const bool zip64 : {false, true}) {
    MadeZip made = Summed();
    made.end64 = zip64;
    made.comment = "written by hand";
    for (MadeRecord& record : made.records) record.zip64 = zip64;
    const std::string bytes = MakeZip(made);
    Blob blob;
    blob.stamp.size = bytes.size();
    blob.frame = *TorchFile::Open(Write(bytes))->Frame();
    ASSERT_TRUE(touched_.CanTell(blob));
    EXPECT_TRUE(IsSame(blob, bytes));
    for (size_t bit = 0; bit < bytes.size() * 8; bit += 9) {
      std::string flipped = bytes;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      const auto file = Write(flipped);
      const auto records = RecordsOfFile(file);
      if (!records) continue;  // no archive any more
      const auto same = HoldsFrame(*file, blob.frame, *records, [] { return Status(); });
      ASSERT_TRUE(same);
      ASSERT_FALSE(*same) << "bit " << bit % 8 << " of byte " << bit / 8;
    }
    EXPECT_FALSE(IsSame(blob, bytes.substr(0, bytes.size() / 2)));
  }
}

TEST_F(FileRecordsTest, WithoutAllChecksumsThereIsNoFrame) {
  for (size_t without = 0; without < Summed().records.size(); ++without) {
    MadeZip made = Summed();
    made.records[without].summed = false;
    const auto opened = TorchFile::Open(Write(MakeZip(made)));
    ASSERT_TRUE(opened) << opened.error().message;
    EXPECT_EQ(*opened->Frame(), Digest{});
  }
  Blob blob;
  EXPECT_FALSE(touched_.CanTell(blob));
}

}  // namespace
}  // namespace ckptfs
