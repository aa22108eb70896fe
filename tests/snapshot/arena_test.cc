// SPDX-License-Identifier: Apache-2.0
#include "snapshot/wire/arena.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "tests/snapshot/memory_policy.h"

namespace ckptfs {
namespace {

using testing_support::MemoryPolicyOf;

constexpr ArenaShape kSmall{64 << 10, 4};

struct Sides {
  explicit Sides(const ArenaShape& shape = kSmall)
      : memory(*MakeArena(shape)),
        writer(*ArenaWriter::Open(memory.descriptor.get(), shape)),
        reader(*ArenaReader::Open(memory.descriptor.get(), shape)) {}
  ArenaMemory memory;
  std::unique_ptr<ArenaWriter> writer;
  std::unique_ptr<ArenaReader> reader;
};

ChunkHeader Header(uint64_t length) {
  ChunkHeader header;
  header.rank = 3;
  header.step = 12;
  header.attempt = 2;
  header.sequence = 1;
  header.length = length;
  return header;
}

TEST(ArenaTest, WhatOneSideWritesTheOtherReads) {
  Sides sides;
  const auto payload = sides.writer->Payload(2);
  ASSERT_EQ(payload.size(), kSmall.chunk_bytes - kArenaPage);
  std::memset(payload.data(), 7, payload.size());
  sides.writer->WriteHeader(2, Header(1000));
  const ChunkHeader header = sides.reader->CopyHeader(2);
  ASSERT_TRUE(CheckChunkHeader(header, kSmall));
  EXPECT_EQ(header.step, 12u);
  EXPECT_EQ(header.payload, DigestOf(sides.reader->Payload(2).first(1000)));
  EXPECT_FALSE(CheckChunkHeader(sides.reader->CopyHeader(1), kSmall));
}

TEST(ArenaTest, PayloadsLieSideBySideWhereTheyAreMapped) {
  std::shared_ptr<const Mapping> mapping;
  std::string truth;
  {
    Sides sides;
    const uint64_t payload = kSmall.payload_bytes();
    for (const uint32_t chunk : {3u, 0u, 2u}) {
      truth += std::string(payload, static_cast<char>('a' + chunk));
      std::memset(sides.writer->Payload(chunk).data(), 'a' + static_cast<int>(chunk), payload);
    }
    truth.resize(truth.size() - 100);
    mapping = sides.reader->MapPayloads(std::vector<uint32_t>{3, 0, 2}, truth.size());
    ASSERT_TRUE(mapping);
    sides.writer->Payload(0)[5] = std::byte{'x'};  // the same pages, no copy
    truth[payload + 5] = 'x';
  }
  const auto bytes = mapping->bytes();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), truth);
}

TEST(ArenaTest, ItCannotBeShortenedOrMadeLonger) {
  Sides sides;
  const int fd = sides.memory.descriptor.get();
  EXPECT_NE(ftruncate(fd, 0), 0);
  EXPECT_NE(ftruncate(fd, static_cast<off_t>(kSmall.bytes() + 4096)), 0);
  EXPECT_NE(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(ArenaTest, EveryByteOfAHeaderIsChecked) {
  Sides sides;
  sides.writer->WriteHeader(0, Header(1));
  const ChunkHeader good = sides.reader->CopyHeader(0);
  ASSERT_TRUE(CheckChunkHeader(good, kSmall));
  for (size_t i = 0; i < sizeof good; ++i) {
    ChunkHeader bad = good;
    reinterpret_cast<unsigned char*>(&bad)[i] ^= 0x40;
    EXPECT_FALSE(CheckChunkHeader(bad, kSmall)) << i;
  }
  EXPECT_FALSE(CheckChunkHeader(SealedHeader(Header(0)), kSmall));
  EXPECT_FALSE(CheckChunkHeader(SealedHeader(Header(kSmall.payload_bytes() + 1)), kSmall));
  EXPECT_FALSE(CheckChunkHeader(SealedHeader(Header(~uint64_t{0})), kSmall));
}

// A header is checked as it was copied, whatever it becomes.
TEST(ArenaTest, AHeaderThatChangesIsRefusedOrWhole) {
  Sides sides;
  const ChunkHeader a = SealedHeader(Header(1));
  const ChunkHeader b = SealedHeader(Header(4096));
  std::byte* place = sides.writer->Payload(0).data() - kArenaPage;
  std::memcpy(place, &a, sizeof a);
  std::atomic<bool> stop{false};
  std::thread hostile([&] {
    while (!stop) {
      std::memcpy(place, &b, sizeof b);
      std::memcpy(place, &a, sizeof a);
    }
  });
  for (int i = 0; i < 20'000; ++i) {
    const ChunkHeader copied = sides.reader->CopyHeader(0);
    EXPECT_TRUE(!CheckChunkHeader(copied, kSmall) || copied == a || copied == b);
  }
  stop = true;
  hostile.join();
}

TEST(ArenaTest, TheTrainerTakesNoMemoryThatCanBeCutUnderIt) {
  const Descriptor loose(memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(loose.get(), static_cast<off_t>(kSmall.bytes())), 0);
  EXPECT_FALSE(ArenaWriter::Open(loose.get(), kSmall));
  const ArenaMemory memory = *MakeArena(kSmall);
  ArenaShape longer = kSmall;
  ++longer.chunks;
  EXPECT_FALSE(ArenaWriter::Open(memory.descriptor.get(), longer));
  EXPECT_FALSE(ArenaWriter::Open(memory.descriptor.get(), {100, 1}));
  EXPECT_FALSE(ArenaWriter::Open(-1, kSmall));
}

TEST(ArenaTest, ShapesAreChecked) {
  for (const ArenaShape& shape : {ArenaShape{0, 1}, ArenaShape{4096, 1}, ArenaShape{10'000, 1},
                                  ArenaShape{8192, 0}, ArenaShape{uint64_t{1} << 31, 1}}) {
    EXPECT_FALSE(CheckArenaShape(shape)) << shape.chunk_bytes << " " << shape.chunks;
    EXPECT_FALSE(MakeArena(shape));
  }
}

TEST(ArenaTest, AForkedChildDoesNotHaveIt) {
  const ArenaMemory memory = *MakeArena(kSmall);
  const auto writer = *ArenaWriter::Open(memory.descriptor.get(), kSmall);
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    int found = 0;
    for (std::string line; std::getline(maps, line);)
      found += line.find("ckptfs-snap") != line.npos;
    return found;
  };
  EXPECT_EQ(mappings(), 1);
  const pid_t child = fork();
  if (child == 0) _exit(mappings());
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

// Memory has a node before a page of it is there; one that does not exist is nobody's error.
TEST(ArenaTest, MemoryIsOnTheNodeThatIsAskedFor) {
  const auto policy_of = [](std::optional<uint64_t> node) {
    return MemoryPolicyOf(MakeArena(kSmall, node)->descriptor.get());
  };
  EXPECT_EQ(policy_of(0), (std::pair<int, unsigned long>(MPOL_PREFERRED, 1)));
  for (const uint64_t absent : {uint64_t{1000}, uint64_t{1023}, UINT64_MAX - 1}) {
    EXPECT_EQ(policy_of(absent).first, MPOL_DEFAULT) << absent;
  }
  EXPECT_EQ(policy_of(std::nullopt).first, MPOL_DEFAULT);
}

TEST(ArenaTest, LargeOnesBeginAtAHugePage) {
  const ArenaShape shape{kArenaChunkBytes, 1};
  Sides sides(shape);
  const auto begin = reinterpret_cast<uintptr_t>(sides.reader->Payload(0).data()) - kArenaPage;
  EXPECT_EQ(begin % (uintptr_t{2} << 20), 0u);
  RecordProperty("huge_bytes", static_cast<int>(sides.memory.huge_bytes));
}

TEST(ArenaTest, ALargeOneIsOfHugePages) {
  // The kernel does this with memory that has a page.
  constexpr uint64_t kHuge = uint64_t{2} << 20;
  const Descriptor plain(memfd_create("plain", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(plain.get(), kHuge), 0);
  void* const room = mmap(nullptr, 2 * kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto begin = (reinterpret_cast<uintptr_t>(room) + kHuge - 1) / kHuge * kHuge;
  char* const page =
      static_cast<char*>(mmap(reinterpret_cast<void*>(begin), kHuge, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_FIXED, plain.get(), 0));
  *page = 1;
  const bool able = madvise(page, kHuge, 25 /* MADV_COLLAPSE */) == 0;
  munmap(room, 2 * kHuge);
  if (!able) GTEST_SKIP() << "the kernel gives none";
  EXPECT_EQ(MakeArena({kArenaChunkBytes, 1})->huge_bytes, kArenaChunkBytes);
}

}  // namespace
}  // namespace ckptfs
