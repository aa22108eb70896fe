// SPDX-License-Identifier: Apache-2.0

#include "core/io/near_reads.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/io/file_root.h"
#include "core/io/memory_root.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/watched_root.h"

namespace ckptfs {
namespace {

using Ranges = std::vector<std::pair<uint64_t, size_t>>;  // offset, length

std::string SomeBytes(size_t size) {
  std::string text(size, '\0');
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * 2654435761u >> 13);
  return text;
}

class NearReadsTest : public testing::Test {
 protected:
  NearReadsTest() {
    EXPECT_TRUE(memory_->PublishIfAbsent("file", std::as_bytes(std::span(bytes_))));
  }

  // Checks the bytes that ReadNear reads of each range; returns the ranges that were asked for.
  std::vector<std::pair<uint64_t, uint64_t>> Asked(const Ranges& ranges) {
    const auto file = *root_.Open("file");
    std::vector<std::string> out;
    for (const auto& [offset, length] : ranges) out.emplace_back(length, '?');
    std::vector<ReadRequest> requests;
    for (size_t i = 0; i < ranges.size(); ++i) {
      requests.push_back({ranges[i].first, std::as_writable_bytes(std::span(out[i]))});
    }
    root_.Watch();
    const auto count = ReadNear(*file, requests);
    EXPECT_TRUE(count.has_value());
    std::vector<std::pair<uint64_t, uint64_t>> asked;
    for (const IoCall& call : root_.calls()) {
      for (const Extent& range : call.ranges) asked.emplace_back(range.begin, range.end);
    }
    EXPECT_EQ(count.value_or(0), asked.size());
    for (size_t i = 0; i < ranges.size(); ++i) {
      EXPECT_EQ(out[i], bytes_.substr(ranges[i].first, ranges[i].second)) << i;
    }
    return asked;
  }

  const std::string bytes_ = SomeBytes(size_t{4} << 20);
  std::shared_ptr<MemoryRoot> memory_ = std::make_shared<MemoryRoot>("memory");
  WatchedRoot root_{memory_};
};

TEST_F(NearReadsTest, NeighboursAreOneRequest) {
  EXPECT_EQ(Asked({{10, 20}, {100, 5}, {105, 0}, {4000, 7}}),
            (std::vector<std::pair<uint64_t, uint64_t>>{{10, 4007}}));
  EXPECT_EQ(Asked({{10, 20}, {100'000, 5}, {100'200, 5}}),
            (std::vector<std::pair<uint64_t, uint64_t>>{{10, 30}, {100'000, 100'205}}));
  Ranges many;
  for (uint64_t at = 0; at < bytes_.size(); at += 128) many.emplace_back(at, 32);
  EXPECT_LE(Asked(many).size(), 5u);  // a MiB each
  EXPECT_TRUE(Asked({}).empty());
}

TEST_F(NearReadsTest, AnyOrderIsReadRightly) {
  Asked({{5000, 10}, {4990, 30}, {0, 5}, {2, 9}, {2, 9}, {1, 1}, {5000, 100}, {4999, 1}});
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    Ranges ranges;
    for (int i = 0; i < 300; ++i) {
      const size_t length = random() % (i % 50 == 0 ? 2'000'000 : 300);
      const uint64_t near = i == 0 ? 0 : ranges.back().first + random() % 9000;
      const uint64_t at = i % 7 == 0 ? random() : near;
      ranges.emplace_back(at % (bytes_.size() - length), length);
    }
    Asked(ranges);
  }
}

TEST_F(NearReadsTest, WhatIsNotThereIsAnError) {
  const auto file = *root_.Open("file");
  std::byte out[8];
  for (const uint64_t at : {bytes_.size() - 4, bytes_.size(), ~uint64_t{0} - 3}) {
    const ReadRequest requests[] = {{0, std::span(out).first(4)}, {at, out}};
    const auto read = ReadNear(*file, requests);
    ASSERT_FALSE(read.has_value()) << at;
    EXPECT_EQ(read.error().code, ErrorCode::kDataLoss);
  }
  root_.Watch(1);
  const ReadRequest one{0, out};
  EXPECT_EQ(ReadNear(*file, {&one, 1}).error().code, ErrorCode::kIo);
}

// Many requests of a local file, of which all, some and none are in memory.
TEST(LocalFileTest, ManyRequestsAreReadWhereverTheirBytesAre) {
  const TemporaryDirectory directory;
  const std::string bytes = SomeBytes(size_t{1} << 20);
  const std::string path = directory.Write("file", bytes);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::fsync(descriptor), 0);
  const auto file = *OpenLocalFile(path);
  const auto read = [&](uint64_t step) -> Result<std::string> {
    std::string out(100 * 40, '?');
    std::vector<ReadRequest> requests;
    for (size_t i = 0; i < 100; ++i) {
      requests.push_back({i * step, std::as_writable_bytes(std::span(out)).subspan(i * 40, 40)});
    }
    CKPT_RETURN_IF_ERROR(file->ReadAt(requests));
    return out;
  };
  const auto expected = [&](uint64_t step) {
    std::string out;
    for (size_t i = 0; i < 100; ++i) out += bytes.substr(i * step, 40);
    return out;
  };
  for (const off_t from : {off_t{0}, off_t{4096 * 7}, off_t{500'000}, off_t{1} << 20}) {
    EXPECT_EQ(read(10'000).value_or(""), expected(10'000)) << from;
    ASSERT_EQ(::posix_fadvise(descriptor, from, 0, POSIX_FADV_DONTNEED), 0);
    EXPECT_EQ(read(10'000).value_or(""), expected(10'000)) << from;
    EXPECT_EQ(read(4090).value_or(""), expected(4090)) << from;  // across pages
  }
  ASSERT_EQ(::ftruncate(descriptor, 700'020), 0);  // in the middle of one
  EXPECT_EQ(read(10'000).error().code, ErrorCode::kDataLoss);
  EXPECT_EQ(read(5'000).value_or(""), expected(5'000));
  ::close(descriptor);
}

}  // namespace
}  // namespace ckptfs
