// SPDX-License-Identifier: Apache-2.0

#include "core/blob/frame.h"

#include <gtest/gtest.h>

#include "core/base/crc32.h"
#include "core/io/file_root.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/watched_root.h"

namespace ckptfs {
namespace {

class FrameTest : public testing::Test {
 protected:
  FrameTest() {
    for (size_t i = 0; i < 600; ++i) bytes_ += static_cast<char>(i * 7 + i / 256);
  }
  std::vector<FileRecord> Records() const {
    std::vector<FileRecord> records = {
        {"a", 10, 200, {}}, {"none", 210, 0, {}}, {"b", 300, 250, {}}};
    for (FileRecord& record : records) {
      record.crc = Crc32(0, std::as_bytes(std::span(bytes_)).subspan(record.offset, record.length));
    }
    return records;
  }
  std::shared_ptr<const File> Open(const std::string& bytes) {
    return *OpenLocalFile(directory_.Write("file", bytes));
  }
  Digest FrameOf(const std::vector<FileRecord>& records) {
    return *FrameDigestOf(*Open(bytes_), records);
  }

  TemporaryDirectory directory_;
  std::string bytes_;
};

TEST_F(FrameTest, EveryByteIsInItOrInARecord) {
  const Digest frame = FrameOf(Records());
  ASSERT_NE(frame, Digest{});
  const auto holds = [&](const std::string& bytes) {
    return *HoldsFrame(*Open(bytes), frame, Records(), [] { return Status(); });
  };
  EXPECT_TRUE(holds(bytes_));
  for (size_t at = 0; at < bytes_.size(); ++at) {
    std::string changed = bytes_;
    changed[at] ^= 1;
    EXPECT_FALSE(holds(changed)) << at;
  }
  EXPECT_FALSE(holds(bytes_ + "x"));
}

TEST_F(FrameTest, OtherRecordsAreAnotherFrame) {
  const Digest frame = FrameOf(Records());
  std::vector<FileRecord> records = Records();
  std::swap(records[0], records[2]);  // in any order
  EXPECT_EQ(FrameOf(records), frame);
  records = Records();
  records[0].length -= 1;
  EXPECT_NE(FrameOf(records), frame);
  records = Records();
  *records[0].crc ^= 1;
  EXPECT_NE(FrameOf(records), frame);
}

TEST_F(FrameTest, ThereIsNoneThatCouldNotBeTrusted) {
  EXPECT_EQ(FrameOf({}), Digest{});
  std::vector<FileRecord> records = Records();
  records[2].crc.reset();
  EXPECT_EQ(FrameOf(records), Digest{});
  records = Records();
  records[2].offset = 150;  // overlaps
  EXPECT_EQ(FrameOf(records), Digest{});
  records = Records();
  records[2].length = ~uint64_t{0} - 100;
  EXPECT_EQ(FrameOf(records), Digest{});
}

// Thousands of records of nothing are what a rank of ZeRO-3 has for its weights.
TEST_F(FrameTest, ManyGapsCloseTogetherAreFewRequests) {
  bytes_.resize(200'000);
  std::vector<FileRecord> records;
  for (uint64_t at = 100; at < 190'000; at += 100) records.push_back({"", at, at % 3, 0});
  directory_.Write("file", bytes_);
  WatchedRoot root(std::make_shared<FileRoot>(directory_.path()));
  const auto file = *root.Open("file");
  root.Watch();
  EXPECT_EQ(*FrameDigestOf(*file, records), FrameOf(records));
  size_t requests = 0;
  for (const IoCall& call : root.calls()) requests += call.ranges.size();
  EXPECT_LE(requests, 2u);
  const Digest frame = FrameOf(records);
  for (const uint64_t at : {0, 99, 50'050, 189'999, 199'999}) {  // of no record
    bytes_[at] ^= 1;
    EXPECT_NE(FrameOf(records), frame) << at;
    bytes_[at] ^= 1;
  }
}

TEST_F(FrameTest, WhatIsReadForItIsBounded) {
  bytes_.resize(kMaxFrameBytes + 500);
  EXPECT_EQ(FrameOf(Records()), Digest{});
}

}  // namespace
}  // namespace ckptfs
