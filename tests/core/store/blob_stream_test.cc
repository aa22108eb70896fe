// SPDX-License-Identifier: Apache-2.0
#include "core/store/blob_stream.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <future>
#include <random>
#include <thread>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/io/file_root.h"
#include "core/io/file_storage.h"
#include "core/io/memory_root.h"
#include "core/store/blob_copy.h"
#include "core/store/store.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

constexpr uint64_t kSize = (uint64_t{13} << 20) + 12'345;
constexpr char kPath[] = "snapshots/a/rank-00000.safetensors";

std::shared_ptr<std::string> Truth(uint64_t size = kSize, unsigned seed = 1) {
  std::mt19937_64 random(seed);
  auto bytes = std::make_shared<std::string>(size, '\0');
  for (uint64_t at = 0; at + 8 <= size; at += 8) {
    const uint64_t number = random();
    std::memcpy(bytes->data() + at, &number, 8);
  }
  return bytes;
}

Blob BlobOf(const std::string& bytes, const std::string& path = kPath) {
  Blob blob;
  blob.path = path;
  blob.stamp.size = bytes.size();
  blob.chunk_bytes = kChunkBytes;
  blob.chunks = ChunkDigestsOf(bytes);
  return blob;
}

// Where the whole bytes are, for who has to copy them.
std::shared_ptr<MemoryRoot> RootOf(const std::shared_ptr<std::string>& bytes) {
  auto root = std::make_shared<MemoryRoot>("memory");
  EXPECT_TRUE(root->Add(kPath, {std::as_bytes(std::span(*bytes))}, bytes, {}));
  return root;
}

// In parts whose ends lie anywhere.
void AddAll(BlobStream& stream, std::string_view bytes, uint64_t part = 1'234'567) {
  const auto all = std::as_bytes(std::span(bytes));
  for (uint64_t at = 0; at < all.size(); at += part) {
    stream.Add(all.subspan(at, std::min<uint64_t>(part, all.size() - at)));
  }
}

size_t Unfinished(const TemporaryDirectory& directory) {
  const std::filesystem::directory_iterator files(directory.path() + "/.tmp");
  return static_cast<size_t>(std::distance(begin(files), end(files)));
}

bool Comes(const std::function<bool()>& done) {
  for (int i = 0; i < 1000 && !done(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  return done();
}

// A store on a real directory that counts what is asked of it.
struct Counted {
  Counted()
      : faulty(std::make_shared<FaultyStorage>(*FileStorage::Open(directory.path(), true))),
        store(*Store::OpenOn(faulty, true, directory.path())) {}
  // Its writer is there, and that many pieces are written.
  bool Wrote(uint64_t before, uint64_t pieces) const {
    return Comes([&] { return faulty->calls() >= before + 2 + pieces; });
  }
  const TemporaryDirectory directory;
  const std::shared_ptr<FaultyStorage> faulty;
  const std::unique_ptr<Store> store;
};

// Pieces that are written are not read again; all others are.
TEST(BlobStreamTest, WhatIsWrittenOnTheWayIsTheBlob) {
  for (const uint64_t size : {kSize, uint64_t{8} << 20, (uint64_t{4} << 20) + 1}) {
    for (const uint64_t part : {uint64_t{1'234'567}, uint64_t{5'000'001}, uint64_t{16} << 20}) {
      for (const uint64_t begun : {size, size / 2}) {
        const Counted counted;
        const auto truth = Truth(size);
        const uint64_t before = counted.faulty->calls();
        const auto stream = counted.store->StreamBlob(kPath, size, truth);
        ASSERT_TRUE(stream);
        AddAll(*stream, std::string_view(*truth).substr(0, begun), part);
        const uint64_t whole = begun == size ? size : begun / kCopyBytes * kCopyBytes;
        const uint64_t pieces = CeilDiv(whole, kCopyBytes);
        ASSERT_TRUE(pieces == 0 || counted.Wrote(before, pieces));
        const auto rest = std::make_shared<std::string>(*truth);
        std::fill_n(rest->begin(), whole, '\0');
        const Status stored = counted.store->StoreBlob(*RootOf(rest), BlobOf(*truth));
        ASSERT_TRUE(stored) << stored.error().message;
        EXPECT_TRUE(*ReadWhole(FileRoot(counted.store->blobs()), kPath, size) == *truth);
        EXPECT_EQ(Unfinished(counted.directory), 0u);
      }
    }
  }
}

TEST(BlobStreamTest, OtherBytesThanWereSaidAreRefused) {
  const TemporaryDirectory directory;
  const auto store = *Store::Open(directory.path(), true);
  const auto truth = Truth();
  const Blob blob = BlobOf(*truth);
  (*truth)[9 << 20] ^= 1;
  const auto stream = store->StreamBlob(kPath, kSize, truth);
  AddAll(*stream, *truth);
  const Status stored = store->StoreBlob(*RootOf(truth), blob);
  ASSERT_FALSE(stored);
  EXPECT_EQ(stored.error().code, ErrorCode::kDataLoss);
  EXPECT_FALSE(std::filesystem::exists(StrCat(store->blobs(), "/", kPath)));
}

// A failure is not an error of the step: the blob is copied whole.
void ExpectCopied(const std::function<void(FaultyStorage&)>& breaks) {
  const auto disk = std::make_shared<MemoryRoot>("storage");
  const auto faulty = std::make_shared<FaultyStorage>(disk);
  const auto store = *Store::OpenOn(faulty);
  const auto truth = Truth();
  const auto stream = store->StreamBlob(kPath, kSize, truth);
  breaks(*faulty);
  AddAll(*stream, *truth);
  // Nothing else is begun that could take from it what it lacks.
  ASSERT_TRUE(Comes([&] { return store->StreamBlob("snapshots/b/x", kSize, truth) == nullptr; }));
  const Status stored = store->StoreBlob(*RootOf(truth), BlobOf(*truth));
  ASSERT_TRUE(stored) << stored.error().message;
  EXPECT_TRUE(*ReadWhole(*disk, StrCat("blobs/", kPath), kSize) == *truth);
  EXPECT_NE(store->StreamBlob("snapshots/b/x", kSize, truth), nullptr);
}

TEST(BlobStreamTest, WhereverItFailsTheBlobIsCopied) {
  for (uint64_t at = 1; at <= 6; ++at) {
    SCOPED_TRACE(at);
    for (const ErrorCode code : {ErrorCode::kIo, ErrorCode::kExhausted}) {
      ExpectCopied([&](FaultyStorage& storage) { storage.FailAt(at, code); });
    }
  }
}

TEST(BlobStreamTest, AThrownErrorIsAFailure) {
  for (uint64_t at = 1; at <= 6; ++at) {
    SCOPED_TRACE(at);
    ExpectCopied([&](FaultyStorage& storage) { storage.ThrowAt(at); });
  }
}

TEST(BlobStreamTest, WhatIsNotWantedAnyMoreLeavesNothing) {
  const TemporaryDirectory directory;
  const auto store = *Store::Open(directory.path(), true);
  const auto truth = Truth();
  auto stream = store->StreamBlob(kPath, kSize, truth);
  stream->Add(std::as_bytes(std::span(*truth)).first(6 << 20));
  ASSERT_TRUE(Comes([&] { return Unfinished(directory) == 1; }));
  stream.reset();
  EXPECT_TRUE(Comes([&] { return Unfinished(directory) == 0; }));
  // Its bytes are, though.
  ASSERT_TRUE(store->StoreBlob(*RootOf(truth), BlobOf(*truth)));
}

TEST(BlobStreamTest, BytesThatHaveGoneAreNotRead) {
  const TemporaryDirectory directory;
  const auto store = *Store::Open(directory.path(), true);
  auto bytes = Truth();
  const auto kept = Truth();
  const auto stream = store->StreamBlob(kPath, kSize, bytes);
  const auto all = std::as_bytes(std::span(*bytes));
  stream->Add(all.first(5 << 20));
  const auto rest = all.subspan(5 << 20);
  bytes.reset();
  stream->Add(rest);
  ASSERT_TRUE(store->StoreBlob(*RootOf(kept), BlobOf(*kept)));
  EXPECT_TRUE(*ReadWhole(FileRoot(store->blobs()), kPath, kSize) == *kept);
}

// A save that lacks space, wherever it does, gets that of those which come after it.
TEST(BlobStreamTest, SpaceIsGivenBack) {
  for (uint64_t at = 1; at <= 3; ++at) {
    const Counted counted;
    const auto truth = Truth();
    const uint64_t before = counted.faulty->calls();
    const auto later = counted.store->StreamBlob("snapshots/b/x", kSize, truth);
    later->Add(std::as_bytes(std::span(*truth)).first(5 << 20));
    ASSERT_TRUE(counted.Wrote(before, 1));
    counted.faulty->FailAt(at, ErrorCode::kExhausted);
    const Status stored = counted.store->StoreBlob(*RootOf(truth), BlobOf(*truth));
    ASSERT_FALSE(stored);
    EXPECT_TRUE(Comes([&] { return Unfinished(counted.directory) == 0; }));
    EXPECT_TRUE(counted.store->StoreBlob(*RootOf(truth), BlobOf(*truth)));
  }
}

// Says which thread let go of it.
class LastWriter final : public StorageWriter {
 public:
  explicit LastWriter(std::promise<std::thread::id>& last) : last_(last) {}
  ~LastWriter() override { last_.set_value(std::this_thread::get_id()); }
  Status Reserve(uint64_t) override { return {}; }
  Status WriteAt(uint64_t, std::span<const std::byte>) override {
    written = true;
    return {};
  }
  Status Close() override { return {}; }
  static inline std::atomic<bool> written{false};

 private:
  std::promise<std::thread::id>& last_;
};

// A store that hangs must not hold who drops a save, or moves it to a spool.
TEST(BlobStreamTest, WhoLetsGoOfItDoesNotTouchTheStore) {
  BlobStreams streams;
  const auto truth = Truth();
  std::promise<std::thread::id> last;
  auto stream = streams.Begin(kPath, kSize, truth, [&]() -> Result<std::unique_ptr<StorageWriter>> {
    return std::make_unique<LastWriter>(last);
  });
  stream->Add(std::as_bytes(std::span(*truth)).first(5 << 20));
  ASSERT_TRUE(Comes([] { return LastWriter::written.load(); }));
  stream.reset();
  EXPECT_NE(last.get_future().get(), std::this_thread::get_id());
}

TEST(BlobStreamTest, SmallOnesAndTooManyAreNotBegun) {
  const auto store = *Store::OpenOn(std::make_shared<MemoryRoot>("storage"));
  const auto truth = Truth(10);
  EXPECT_EQ(store->StreamBlob(kPath, 4 << 20, truth), nullptr);
  std::vector<std::shared_ptr<BlobStream>> streams;
  for (int i = 0; i < 100; ++i) {
    auto stream = store->StreamBlob(StrCat("snapshots/a/", i), kSize, truth);
    if (!stream) break;
    streams.push_back(std::move(stream));
  }
  EXPECT_EQ(streams.size(), 64u);
  streams.pop_back();
  EXPECT_NE(store->StreamBlob("snapshots/a/b", kSize, truth), nullptr);
  EXPECT_EQ(store->StreamBlob("snapshots/a/0", kSize, truth), nullptr) << "it is being written";
}

// Any seed: many at once, of which some are let go, late, changed, or never whole.
TEST(BlobStreamTest, WhateverHappensABlobIsTheTruthOrNotThere) {
  const TemporaryDirectory directory;
  const auto store = *Store::Open(directory.path(), true);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 24; ++seed) {
    threads.emplace_back([&store, seed] {
      std::mt19937 random(seed);
      const uint64_t size = (uint64_t{4} << 20) + random() % (6 << 20);
      const std::string path = StrCat("snapshots/", seed, "/x");
      const auto truth = Truth(size, seed);
      const Blob blob = BlobOf(*truth, path);
      const bool changes = seed % 5 == 0;
      if (changes) (*truth)[random() % size] ^= 4;
      MemoryRoot root("memory");
      ASSERT_TRUE(root.Add(path, {std::as_bytes(std::span(*truth))}, truth, {}));
      auto stream = store->StreamBlob(path, size, truth);
      const std::string_view some(truth->data(), seed % 4 == 0 ? size / 2 : size);
      if (stream) AddAll(*stream, some, 1 + random() % size);
      if (seed % 3 == 0) stream.reset();
      const Status stored = store->StoreBlob(root, blob);
      EXPECT_EQ(stored.has_value(), !changes) << seed;
      if (changes) return;
      EXPECT_TRUE(*ReadWhole(FileRoot(store->blobs()), path, size) == *truth) << seed;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ListFilesBelow(FileRoot(directory.path()), "blobs")->size(), 19u);
}

}  // namespace
}  // namespace ckptfs
