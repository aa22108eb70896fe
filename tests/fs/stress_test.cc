// SPDX-License-Identifier: Apache-2.0
//
// Many threads do everything at once: look up, list, open, read, release,
// forget, while steps come and go and filled files make room for each other.
// Every byte read is compared with rendering everything.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <sstream>
#include <thread>

#include "core/base/strings.h"
#include "fs/serve/page_pool.h"
#include "tests/fs/tree_fixture.h"

namespace ckptfs {
namespace {

using testing::TreeFixture;

constexpr int kThreads = 64;
constexpr std::array<const char*, 3> kLayouts{"tp2", "tp4_dp2", "dp3"};

struct KnownFile {
  std::string path;      // below view/
  std::string expected;  // its bytes
};

std::vector<KnownFile> RenderEverything(uint32_t seed) {
  std::vector<KnownFile> files;
  for (const char* name : kLayouts) {
    const Layout layout = Layout::Parse(name).value();
    for (uint64_t rank = 0; rank < layout.World(); ++rank) {
      for (const char* file : {"model.bin", "small.json", "whole.bin"}) {
        const std::string path = StrCat("rank", rank, "/", file);
        files.push_back({StrCat(name, "/", path), TreeFixture::Expected(seed, layout, path)});
      }
    }
  }
  return files;
}

// A few reads of random ranges through the way the open chose.
void ReadRandomly(Filesystem& fs, const OpenFile& open, const std::string& expected,
                  std::mt19937& random) {
  for (int i = 0; i < 4; ++i) {
    const size_t offset = random() % (expected.size() + 10);
    std::string bytes(random() % 70'000 + 1, '?');
    const size_t due =
        offset >= expected.size() ? 0 : std::min(bytes.size(), expected.size() - offset);
    size_t got = 0;
    if (open.backing_fd >= 0 && i % 2 == 0) {
      got = static_cast<size_t>(
          pread(open.backing_fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)));
    } else {
      const auto read = fs.Read(open.handle, offset, std::as_writable_bytes(std::span(bytes)));
      ASSERT_TRUE(read) << read.error().message;
      got = *read;
    }
    ASSERT_EQ(got, due);
    ASSERT_EQ(std::memcmp(bytes.data(), expected.data() + offset, due), 0)
        << "offset " << offset << ", mode " << ServingModeName(open.mode);
  }
}

// Walks to a file as the kernel does, reads, and gives all references back.
void VisitOnce(Filesystem& fs, const KnownFile& file, const std::string& base, std::mt19937& random,
               std::atomic<uint64_t>& visited) {
  std::vector<InodeNumber> held;
  InodeNumber at = kRootInode;
  std::istringstream components(base + "/" + file.path);
  bool found = true;
  for (std::string name; std::getline(components, name, '/');) {
    if (name.empty()) continue;
    if (random() % 8 == 0) (void)fs.ReadDirectory(at, 0, 50, {});
    const auto next = fs.Lookup(at, name, {});
    if (!next) {
      found = false;
      break;
    }
    at = next->inode;
    held.push_back(at);
  }
  if (found) {
    const auto open = fs.Open(at, O_RDONLY, {});
    if (open) {
      ReadRandomly(fs, *open, file.expected, random);
      fs.Release(open->handle);
      ++visited;
    }
  }
  for (const InodeNumber inode : held) fs.Forget(inode, 1);
}

void ReadWhileStepsComeAndGo(bool passthrough) {
  TreeFixture t;
  t.AddStep("r", "stays", 1, 1);
  FilesystemOptions options;
  options.passthrough = passthrough;
  options.materialise_budget = 6 * kHugePage;  // room for some: the rest evict or stream
  options.invalidate = [](InodeNumber, const std::string&) {};
  Filesystem& fs = t.Mount(std::move(options));
  const std::vector<KnownFile> stays = RenderEverything(1);
  const std::vector<KnownFile> goes = RenderEverything(2);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> visited{0};
  std::thread publisher([&] {
    for (int i = 0; i < 6; ++i) {
      // Every other time the very same step comes back.
      const StepRecord record =
          t.AddStep("r", "goes", 2, 2, 0644, i % 2 == 0 ? "even.bin" : "odd.bin");
      EXPECT_TRUE(fs.Refresh());
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_TRUE(t.store().Remove(record));
      EXPECT_TRUE(fs.Refresh());
      (void)fs.StatusJson();
    }
    stop = true;
  });
  std::vector<std::thread> readers;
  for (int thread = 0; thread < kThreads; ++thread) {
    readers.emplace_back([&, thread] {
      std::mt19937 random(static_cast<unsigned>(thread));
      for (int i = 0; i < 3 || !stop; ++i) {
        const bool fixed = random() % 2 == 0;
        const auto& files = fixed ? stays : goes;
        VisitOnce(fs, files[random() % files.size()],
                  fixed ? "/run/r/step/stays/view" : "/run/r/step/goes/view", random, visited);
      }
    });
  }
  publisher.join();
  for (std::thread& reader : readers) reader.join();
  EXPECT_GE(visited, static_cast<uint64_t>(kThreads));
  const std::string status = fs.StatusJson();
  EXPECT_NE(status.find("\"open_files\": 0"), std::string::npos) << status;
  EXPECT_NE(status.find("\"known_names\": 0"), std::string::npos) << "every reference came back";
}

TEST(StressTest, StreamedFromManyThreads) { ReadWhileStepsComeAndGo(false); }

TEST(StressTest, MaterialisedUnderABudgetFromManyThreads) {
  if (auto pool = PagePool::Create(kHugePage); !pool) GTEST_SKIP() << pool.error().message;
  ReadWhileStepsComeAndGo(true);
}

}  // namespace
}  // namespace ckptfs
