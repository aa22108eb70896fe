// SPDX-License-Identifier: Apache-2.0

#include "core/blob/blob_reader.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "core/base/strings.h"
#include "core/io/bus_guard.h"
#include "tests/support/stamp_of_file.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

class BlobReaderTest : public testing::Test {
 protected:
  BlobReaderTest() { model_.roots = {directory_.path()}; }

  BlobIndex Add(const std::string& name, const std::string& bytes) {
    const std::string path = directory_.Write(name, bytes);
    Blob blob;
    blob.path = name;
    blob.stamp = *StampOfFile(path);
    model_.blobs.push_back(blob);
    return BlobIndex{static_cast<uint32_t>(model_.blobs.size() - 1)};
  }
  std::unique_ptr<BlobReader> Open(int interval_ms = 0, size_t max_open = 16) {
    BlobReader::Options options;
    options.check_interval = std::chrono::milliseconds(interval_ms);
    options.max_open = max_open;
    return BlobReader::Create(model_, options);
  }
  std::string Read(BlobReader& reader, BlobIndex blob, uint64_t offset, size_t length) {
    std::string out(length, '?');
    const Status read = reader.Read(blob, offset, std::as_writable_bytes(std::span(out)));
    return read ? out : StrCat(ErrorCodeName(read.error().code), ": ", read.error().message);
  }

  TemporaryDirectory directory_;
  StepModel model_;
};

TEST_F(BlobReaderTest, ReadsRangesAndRefusesOthers) {
  const BlobIndex blob = Add("a", "0123456789");
  const BlobIndex empty = Add("empty", "");
  const auto reader = Open();
  EXPECT_EQ(Read(*reader, blob, 3, 4), "3456");
  EXPECT_EQ(Read(*reader, blob, 10, 0), "");
  EXPECT_EQ(Read(*reader, empty, 0, 0), "");
  for (auto [offset, length] : {std::pair<uint64_t, size_t>{8, 3}, {11, 0}, {~uint64_t{0}, 2}}) {
    std::string out(length, '?');
    const Status read = reader->Read(blob, offset, std::as_writable_bytes(std::span(out)));
    ASSERT_FALSE(read);
    EXPECT_EQ(read.error().code, ErrorCode::kDataLoss);
    EXPECT_NE(read.error().message.find(directory_.path() + "/a"), std::string::npos);
  }
  EXPECT_FALSE(reader->Hold(BlobIndex{2}));
  EXPECT_EQ(reader->bytes_read(), 4u);
}

TEST_F(BlobReaderTest, MovedRoots) {
  const BlobIndex blob = Add("a", "here");
  model_.roots = {"/where/it/was/adopted"};
  BlobReader::Options options;
  options.roots = {{"/where/it/was/adopted", directory_.path()}};
  const auto reader = BlobReader::Create(model_, options);
  EXPECT_EQ(Read(*reader, blob, 0, 4), "here");
  EXPECT_EQ(reader->PathOf(blob), directory_.path() + "/a");
}

TEST_F(BlobReaderTest, AReplacedFileIsStaleAndNamed) {
  const BlobIndex blob = Add("a", "old bytes");
  const auto reader = Open();
  EXPECT_EQ(Read(*reader, blob, 0, 3), "old");
  const std::string other = directory_.Write("b", "new bytes");
  ASSERT_EQ(rename(other.c_str(), (directory_.path() + "/a").c_str()), 0);
  const std::string answer = Read(*reader, blob, 0, 3);
  EXPECT_TRUE(answer.starts_with(ErrorCodeName(ErrorCode::kStale))) << answer;
  EXPECT_NE(answer.find("/a changed"), std::string::npos) << answer;
  EXPECT_NE(answer.find("inode"), std::string::npos) << answer;
  EXPECT_EQ(Read(*reader, blob, 0, 3), answer);  // and stays so
}

TEST_F(BlobReaderTest, AFileChangedBeforeItWasOpenedIsStale) {
  const BlobIndex blob = Add("a", "old");
  directory_.Write("a", "newer");
  const auto reader = Open(100000);
  EXPECT_NE(Read(*reader, blob, 0, 3).find("size was 3 and is 5"), std::string::npos);
}

TEST_F(BlobReaderTest, ADeletedFileIsAnError) {
  const BlobIndex blob = Add("a", "old");
  const auto reader = Open();
  EXPECT_EQ(Read(*reader, blob, 0, 3), "old");
  unlink((directory_.path() + "/a").c_str());
  EXPECT_TRUE(Read(*reader, blob, 0, 3).starts_with(ErrorCodeName(ErrorCode::kNotFound)));
}

TEST_F(BlobReaderTest, AFifoInTheFilesPlaceDoesNotHang) {
  const BlobIndex blob = Add("a", "old");
  const std::string path = directory_.path() + "/a";
  unlink(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const auto reader = Open();
  EXPECT_EQ(reader->Hold(blob).error().code, ErrorCode::kInvalid);
  EXPECT_EQ(reader->Check(blob).error().code, ErrorCode::kInvalid);
}

// The stamp is not compared again within the interval: only the guard stands
// between the reader and a bus error.
TEST_F(BlobReaderTest, TruncationUnderAMappingIsAnErrorNotASignal) {
  const BlobIndex blob = Add("a", std::string(1 << 20, 'x'));
  const auto reader = Open(1000000);
  EXPECT_EQ(Read(*reader, blob, 1 << 19, 3), "xxx");
  ASSERT_EQ(truncate((directory_.path() + "/a").c_str(), 100), 0);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        const std::string answer = Read(*reader, blob, 1 << 18, 1 << 19);
        const bool lost = answer.starts_with(ErrorCodeName(ErrorCode::kDataLoss)) &&
                          answer.find(directory_.path() + "/a") != std::string::npos;
        if (!lost) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(BlobReaderTest, MappingsAreBoundedAndHeldOnesStay) {
  std::vector<BlobIndex> blobs;
  for (int i = 0; i < 40; ++i) blobs.push_back(Add(StrCat("f", i), StrCat("file ", i)));
  const auto reader = Open(100000, 4);
  const auto held = *reader->Hold(blobs[0]);
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 40; ++i) {
      const std::string expected = StrCat("file ", i);
      ASSERT_EQ(Read(*reader, blobs[static_cast<size_t>(i)], 0, expected.size()), expected);
    }
  }
  EXPECT_EQ(static_cast<char>(held->mapped()[5]), '0');
  std::string maps;
  std::getline(std::ifstream("/proc/self/maps"), maps, '\0');
  size_t mapped = 0;
  for (size_t at = 0; (at = maps.find(directory_.path(), at)) != std::string::npos; ++at) ++mapped;
  EXPECT_LE(mapped, 6u);
  EXPECT_GE(mapped, 1u);
}

TEST(BusGuard, NestsAndReportsTheAddress) {
  const int fd = memfd_create("test", 0);
  ASSERT_EQ(ftruncate(fd, 8192), 0);
  auto* bytes = static_cast<std::byte*>(mmap(nullptr, 8192, PROT_READ, MAP_SHARED, fd, 0));
  ASSERT_EQ(ftruncate(fd, 4096), 0);
  const auto touch = [](void* at) { (void)*static_cast<volatile std::byte*>(at); };
  const std::byte* fault = nullptr;
  EXPECT_TRUE(RunGuarded(touch, bytes, &fault));
  EXPECT_FALSE(RunGuarded(touch, bytes + 5000, &fault));
  EXPECT_GE(fault, bytes + 4096);
  EXPECT_LE(fault, bytes + 5000);
  struct Nested {
    std::byte* bytes;
    bool inner_came_back;
  } nested{bytes, true};
  const auto outer = [](void* context) {
    auto& mine = *static_cast<Nested*>(context);
    const std::byte* inner_fault = nullptr;
    mine.inner_came_back = RunGuarded([](void* at) { (void)*static_cast<volatile std::byte*>(at); },
                                      mine.bytes + 5000, &inner_fault);
  };
  EXPECT_TRUE(RunGuarded(outer, &nested, &fault));
  EXPECT_FALSE(nested.inner_came_back);
  munmap(bytes, 8192);
  close(fd);
}

// A bus error of somebody else's still ends the process, as it would without us.
// Installs our handler over the one that is there, and faults outside a guard.
void FaultUnguarded() {
  const std::byte* fault = nullptr;
  if (!RunGuarded([](void*) {}, nullptr, &fault)) _exit(1);
  const int fd = memfd_create("test", 0);
  if (ftruncate(fd, 4096) != 0) _exit(1);
  auto* bytes = static_cast<volatile char*>(mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0));
  if (ftruncate(fd, 0) != 0) _exit(1);
  (void)bytes[0];
  _exit(0);
}

// A process of its own, as the handler is installed once; sanitizers have a
// handler from the start.
TEST(BusGuardDeathTest, OtherBusErrorsEndTheProcess) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        signal(SIGBUS, SIG_DFL);
        FaultUnguarded();
      },
      testing::KilledBySignal(SIGBUS), "");
}

TEST(BusGuardDeathTest, ASignalThatSomebodySentIsNoFault) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        signal(SIGBUS, SIG_DFL);
        const std::byte* fault = nullptr;
        RunGuarded([](void*) { raise(SIGBUS); }, nullptr, &fault);
        _exit(0);
      },
      testing::KilledBySignal(SIGBUS), "");
}

TEST(BusGuardDeathTest, OtherBusErrorsArePassedToTheHandlerBefore) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        signal(SIGBUS, [](int) { _exit(42); });
        FaultUnguarded();
      },
      testing::ExitedWithCode(42), "");
}

}  // namespace
}  // namespace ckptfs
