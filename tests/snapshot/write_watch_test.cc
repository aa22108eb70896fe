// SPDX-License-Identifier: Apache-2.0
#include "snapshot/trainer/write_watch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/base/descriptor.h"

namespace ckptfs {
namespace {

constexpr size_t kPage = 4096;

// Private memory of whole pages, all of it written once.
class Memory {
 public:
  explicit Memory(size_t pages, int flags = MAP_PRIVATE)
      : bytes_(pages * kPage),
        begin_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0)) {
    std::memset(begin_, 1, bytes_);
  }
  ~Memory() { munmap(begin_, bytes_); }
  char* at(size_t byte = 0) const { return static_cast<char*>(begin_) + byte; }
  HostBytes From(size_t begin, size_t end) const {
    return {reinterpret_cast<const std::byte*>(at(begin)), end - begin};
  }
  HostBytes All() const { return From(0, bytes_); }

 private:
  const size_t bytes_;
  void* const begin_;
};

struct WriteWatchTest : testing::Test {
  void SetUp() override {
    const Memory memory(1);
    const HostBytes all = memory.All();
    const auto watch = WriteWatch::Begin({&all, 1});
    if (!watch || watch->Covered(all).empty()) GTEST_SKIP() << "the kernel does not watch writes";
  }
  // As a copy does.
  static std::optional<const std::byte*> Take(WriteWatch& watch, HostBytes bytes) {
    const auto found = watch.FindWritten(bytes);
    if (!found) watch.Release(bytes);
    return found;
  }
  static std::unique_ptr<WriteWatch> Watch(HostBytes bytes) {
    return WriteWatch::Begin({&bytes, 1});
  }
};

TEST_F(WriteWatchTest, EveryPageTellsOfItsWrite) {
  constexpr size_t kPages = 70;
  const Memory memory(kPages);
  for (size_t page = 0; page < kPages; ++page) {
    const auto watch = Watch(memory.All());
    EXPECT_EQ(watch->Covered(memory.All()).size(), kPages * kPage);
    memory.at(page * kPage)[page] ^= 1;
    const auto written = Take(*watch, memory.All());
    ASSERT_TRUE(written) << page;
    EXPECT_EQ(reinterpret_cast<const char*>(*written), memory.at(page * kPage));
  }
  const auto watch = Watch(memory.All());
  EXPECT_FALSE(Take(*watch, memory.All()));
}

// A system call writes for the process.
TEST_F(WriteWatchTest, WritesOfTheKernelAreSeen) {
  const Memory memory(8);
  const auto watch = Watch(memory.All());
  const Descriptor zero(open("/dev/zero", O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(read(zero.get(), memory.at(5 * kPage + 7), 3), 3);
  EXPECT_TRUE(Take(*watch, memory.All()));
}

TEST_F(WriteWatchTest, ReadsAreNotWrites) {
  const Memory memory(8);
  const auto watch = Watch(memory.All());
  EXPECT_EQ(std::string(memory.at(), 8 * kPage), std::string(8 * kPage, '\1'));
  EXPECT_FALSE(Take(*watch, memory.All()));
}

// A write beside a range is not taken for a write to it.
TEST_F(WriteWatchTest, TheEdgesAreNotCovered) {
  const Memory memory(4);
  const HostBytes odd = memory.From(100, 3 * kPage + 100);
  const auto watch = Watch(odd);
  const HostBytes covered = watch->Covered(odd);
  EXPECT_EQ(covered.data(), memory.From(kPage, kPage).data());
  EXPECT_EQ(covered.size(), 2 * kPage);
  memory.at()[99] = memory.at()[3 * kPage + 100] = 7;
  EXPECT_FALSE(Take(*watch, odd));
  EXPECT_TRUE(Watch(memory.From(10, 20))->Covered(memory.From(10, 20)).empty());
}

// Chunk by chunk, cut within pages: what was taken may be written, what was not may not.
TEST_F(WriteWatchTest, WhatWasTakenMayBeWritten) {
  const Memory memory(10);
  const auto watch = Watch(memory.All());
  const size_t cut = 4 * kPage + 50;
  EXPECT_FALSE(Take(*watch, memory.From(0, cut)));
  std::memset(memory.at(), 2, 4 * kPage);
  EXPECT_FALSE(Take(*watch, memory.From(cut, 7 * kPage)));
  memory.at()[9 * kPage] = 2;
  EXPECT_TRUE(Take(*watch, memory.From(7 * kPage, 10 * kPage)));
}

TEST_F(WriteWatchTest, AWriteToThePageThatACutIsInIsSeen) {
  const Memory memory(10);
  const auto watch = Watch(memory.All());
  const size_t cut = 4 * kPage + 50;
  EXPECT_FALSE(Take(*watch, memory.From(0, cut)));
  memory.at()[cut + 1] = 2;
  EXPECT_TRUE(Take(*watch, memory.From(cut, 10 * kPage)));
}

// Two saves without an update between them.
TEST_F(WriteWatchTest, WatchesOfTheSameMemoryAllSeeAWrite) {
  const Memory memory(10);
  const auto first = Watch(memory.All());
  memory.at()[3 * kPage] = 2;
  const auto second = Watch(memory.From(0, 8 * kPage));
  EXPECT_TRUE(Take(*first, memory.From(2 * kPage, 4 * kPage)));
  EXPECT_FALSE(Take(*first, memory.From(4 * kPage, 10 * kPage)));
  EXPECT_FALSE(Take(*second, memory.From(0, 5 * kPage)));  // not lifted by the first
  memory.at()[6 * kPage] = 2;
  EXPECT_TRUE(Take(*second, memory.From(5 * kPage, 8 * kPage)));
}

// Tied weights: one piece of memory is two tensors'.
TEST_F(WriteWatchTest, MemoryThatIsGivenTwiceIsWatchedUntilTheEnd) {
  const Memory memory(10);
  const HostBytes twice[] = {memory.All(), memory.From(2 * kPage, 6 * kPage)};
  const auto watch = WriteWatch::Begin(twice);
  EXPECT_FALSE(Take(*watch, twice[0]));
  EXPECT_FALSE(Take(*watch, twice[1]));
  memory.at()[3 * kPage] = 2;
  EXPECT_TRUE(Take(*watch, twice[1]));
}

// Another process writes it, and the kernel tells nobody.
TEST_F(WriteWatchTest, SharedMemoryIsNotCovered) {
  const Memory shared(4, MAP_SHARED), own(4);
  const HostBytes both[] = {shared.All(), own.All()};
  const auto watch = WriteWatch::Begin(both);
  EXPECT_TRUE(watch->Covered(shared.All()).empty());
  EXPECT_FALSE(watch->Covered(own.All()).empty());
}

// A process may have 65,530 mappings, and the kernel splits one at each end of what it watches.
TEST_F(WriteWatchTest, ManyTensorsOfOneMappingSplitItOnce) {
  constexpr size_t kTensors = 200;
  const Memory memory(3 * kTensors);
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    return std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
  };
  std::vector<HostBytes> tensors;
  for (size_t i = 0; i < kTensors; ++i) {
    tensors.push_back(memory.From(3 * i * kPage, (3 * i + 1) * kPage));
  }
  const auto before = mappings();
  const auto watch = WriteWatch::Begin(tensors);
  EXPECT_FALSE(watch->Covered(tensors.back()).empty());
  EXPECT_LE(mappings(), before + 4);
  memory.at()[4 * kPage] = 2;  // between two
  EXPECT_FALSE(watch->FindWritten(memory.All()));
}

// A page that was not written is the file's, and changes with that.
TEST_F(WriteWatchTest, PrivateMemoryOfAFileIsNotCovered) {
  std::string path = testing::TempDir() + "write_watch.XXXXXX";
  const Descriptor file(mkostemp(path.data(), O_CLOEXEC));
  ASSERT_TRUE(file.valid());
  unlink(path.c_str());
  ASSERT_EQ(ftruncate(file.get(), 4 * kPage), 0);
  void* const mapped = mmap(nullptr, 4 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE, file.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const HostBytes bytes{static_cast<const std::byte*>(mapped), 4 * kPage};
  EXPECT_TRUE(Watch(bytes)->Covered(bytes).empty());
  munmap(mapped, 4 * kPage);
}

TEST_F(WriteWatchTest, MemoryThatWasUnmappedIsTakenForWritten) {
  const Memory memory(6);
  const auto watch = Watch(memory.All());
  ASSERT_EQ(
      mmap(memory.at(2 * kPage), kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
      memory.at(2 * kPage));
  EXPECT_TRUE(Take(*watch, memory.All()));
}

TEST_F(WriteWatchTest, MemoryThatWasNeverWrittenIsWatched) {
  constexpr size_t kBytes = size_t{1} << 20;
  void* const begin =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const HostBytes all(static_cast<const std::byte*>(begin), kBytes);
  const auto watch = Watch(all);
  EXPECT_EQ(*static_cast<const volatile char*>(begin), 0);
  EXPECT_FALSE(Take(*watch, all));
  const auto again = Watch(all);
  static_cast<char*>(begin)[kBytes / 2] = 1;
  EXPECT_TRUE(Take(*again, all));
  munmap(begin, kBytes);
}

// Huge pages are split at the first write to one, and tell of it like others.
TEST_F(WriteWatchTest, HugePagesTellOfTheirWrites) {
  constexpr size_t kHuge = size_t{2} << 20;
  void* const raw = std::aligned_alloc(kHuge, 4 * kHuge);
  madvise(raw, 4 * kHuge, MADV_HUGEPAGE);
  std::memset(raw, 1, 4 * kHuge);
  const HostBytes all(static_cast<const std::byte*>(raw), 4 * kHuge);
  std::mt19937_64 random(1);
  for (int round = 0; round < 20; ++round) {
    const auto watch = Watch(all);
    ASSERT_EQ(watch->Covered(all).size(), all.size());
    const size_t where = random() % all.size();
    if (round % 2 == 1) static_cast<char*>(raw)[where] ^= 1;
    const auto written = Take(*watch, all);
    EXPECT_EQ(written.has_value(), round % 2 == 1);
    const size_t page =
        written ? static_cast<size_t>(*written - all.data()) / kPage : where / kPage;
    EXPECT_EQ(page, where / kPage);
  }
  std::free(raw);
}

// The child's own memory is not its parent's, and the parent's watch goes on.
TEST_F(WriteWatchTest, AChildThatWasForkedWatchesItsOwnMemory) {
  const Memory memory(6);
  const auto watch = Watch(memory.All());
  const pid_t child = fork();
  if (child == 0) {
    memory.at()[0] = 3;
    const Memory own(3);
    const auto its = Watch(own.All());
    own.at()[kPage] = 3;
    _exit(its && Take(*its, own.All()) ? 0 : 1);
  }
  int state = -1;
  waitpid(child, &state, 0);
  EXPECT_EQ(state, 0);
  EXPECT_FALSE(Take(*watch, memory.From(0, 3 * kPage)));
  memory.at()[5 * kPage] = 3;
  EXPECT_TRUE(Take(*watch, memory.From(3 * kPage, 6 * kPage)));
}

}  // namespace
}  // namespace ckptfs
