// SPDX-License-Identifier: Apache-2.0
//
// A receiver whose steps a test looks at, and clients that say what they like.
//
// Thread safety: the fixture's methods may be called concurrently; a client is one
// thread's.

#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "mount/daemon/snapshot_status.h"
#include "snapshot/receive/receiver.h"
#include "snapshot/trainer/snapshot_writer.h"
#include "snapshot/wire/protocol.h"
#include "tests/snapshot/landings.h"
#include "tests/snapshot/training.h"
#include "tests/support/late_copier.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs::testing_support {

inline constexpr uint64_t kSmallChunk = 8 << 10;
inline constexpr std::chrono::milliseconds kLong{20'000};

// A daemon that keeps what it receives, or refuses to.
class ReceiverTest : public testing::Test {
 protected:
  struct Kept {
    std::string job;
    uint64_t step = 0;
    std::vector<std::string> files;
  };

  // A process younger than a tick of the kernel's clock is taken for one that began after whoever
  // left it just now (PeerBirth): ranks of one process are of one life once that is over.
  static void SetUpTestSuite() {
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::chrono::seconds(2)) /
                                sysconf(_SC_CLK_TCK));
  }

  // Options for a receiver with a landing of its own, whose saves this keeps.
  ReceiverOptions Options() {
    steps_.keep = [this](const SaveBytes& save) { return Keep(save); };
    steps_.stored = [this](const PartAgain&) -> Result<bool> {
      ++looks_;
      std::this_thread::sleep_for(look_);
      if (failing_looks_ > 0 && failing_looks_-- > 0) return Fail(ErrorCode::kIo, "it is away");
      return stored_.load();
    };
    landing_ = std::make_unique<Landing>(LandingOptions{.steps = &steps_});
    ReceiverOptions options;
    options.store = directory_.path();
    options.memory_bytes = 4 << 20;
    options.chunk_bytes = kSmallChunk;
    options.patience = kLong;
    options.hello = hello_;
    options.landing = landing_.get();
    return options;
  }
  void Start(std::chrono::milliseconds patience = kLong, size_t max_sessions = 64,
             uint64_t memory = 4 << 20) {
    ReceiverOptions options = Options();
    options.memory_bytes = memory;
    options.patience = patience;
    options.max_sessions = max_sessions;
    auto started = Receiver::Start(std::move(options));
    ASSERT_TRUE(started) << started.error().message;
    receiver_ = *std::move(started);
  }
  void TearDown() override {
    Hold(false);
    receiver_.reset();
  }

  virtual Status Keep(const SaveBytes& save) {
    std::unique_lock lock(mutex_);
    moved_.wait(lock, [&] { return !hold_; });
    if (!refusal_.empty()) return Fail(ErrorCode::kIo, refusal_);
    const PreparedPart& part = save.part();
    Kept kept{part.name.job, part.step, {}};
    for (const PreparedRank& rank : part.ranks) {
      const auto file = save.Open(part.PathOf(rank.rank));
      const auto bytes = (*file)->Map();
      EXPECT_TRUE(bytes && *bytes);  // it can be mapped
      const auto all = (*bytes)->bytes();
      kept.files.push_back(
          WithoutProof(std::string(reinterpret_cast<const char*>(all.data()), all.size())));
    }
    kept_.push_back(std::move(kept));
    return {};
  }
  // Keeping waits until it is let go.
  void Hold(bool hold) {
    const std::lock_guard lock(mutex_);
    hold_ = hold;
    moved_.notify_all();
  }
  void RefuseToKeep(std::string why) {
    const std::lock_guard lock(mutex_);
    refusal_ = std::move(why);
  }
  std::vector<Kept> kept() {
    const std::lock_guard lock(mutex_);
    return kept_;
  }

  std::unique_ptr<SnapshotWriter> Writer(uint32_t rank = 0, uint32_t world = 1,
                                         std::function<std::unique_ptr<Copier>()> copier = {},
                                         std::chrono::milliseconds limit = kLong,
                                         uint32_t slots = 2) const {
    return std::make_unique<SnapshotWriter>(
        WriterOptions{directory_.path(), "run", "job", rank, world, slots, limit, copier});
  }
  nlohmann::json status() const { return ToJson(receiver_->status()); }

  TemporaryDirectory directory_;
  FakeSteps steps_;
  std::unique_ptr<Landing> landing_;
  std::unique_ptr<Receiver> receiver_;
  std::mutex mutex_;
  std::condition_variable moved_;
  bool hold_ = false;
  std::string refusal_;
  std::vector<Kept> kept_;
  std::atomic<bool> stored_{false};    // what parts that come again are of
  std::atomic<size_t> looks_{0};       // whether they are
  std::atomic<int> failing_looks_{0};  // so many of the next ones fail
  std::chrono::milliseconds look_{0};
  std::chrono::milliseconds hello_{10'000};
};

// A rank that need not keep to the protocol.
class Client {
 public:
  explicit Client(const std::string& store, std::string job = "")
      : socket_(*ConnectForSnapshots(store)), job_(std::move(job)) {
    static int lives = 0;
    if (job_.empty()) job_ = StrCat("life", ++lives);
  }
  void Say(const SnapshotMessage& message, int passed = -1) const {
    (void)SendSnapshotMessage(socket_.get(), message, passed);
  }
  // The next message; nothing if the daemon closed the connection.
  std::optional<SnapshotMessage> Hear() {
    auto incoming = ReceiveSnapshotMessage(socket_.get(), true);
    if (!incoming || incoming->kind != Incoming::Kind::kMessage) return std::nullopt;
    if (incoming->passed.valid()) memory_ = std::move(incoming->passed);
    return incoming->message;
  }
  // Says hello and maps the arena.
  void Enter(uint64_t length = 20'000) {
    Say(Hello(0, 1, length));
    const auto welcome = Hear();
    ASSERT_TRUE(welcome && welcome->word == SnapshotWord::kWelcome) << welcome->text;
    shape_ = {welcome->length, static_cast<uint32_t>(welcome->sequence)};
    arena_ = *ArenaWriter::Open(memory_.get(), shape_);
  }
  // Comes with an arena of its own making, or of another's.
  void Return(const Descriptor& memory, const ArenaShape& shape, uint32_t rank = 0,
              uint32_t world = 1, bool for_another = false) {
    SnapshotMessage message = Hello(rank, world, shape.chunk_bytes);
    message.step = for_another ? 1 : 0;
    message.word = SnapshotWord::kReturn;
    message.sequence = shape.chunks;
    Say(message, memory.get());
    if (auto arena = ArenaWriter::Open(memory.get(), shape)) arena_ = *std::move(arena);
  }
  SnapshotMessage Hello(uint32_t rank, uint32_t world, uint64_t length) const {
    SnapshotMessage hello{SnapshotWord::kHello};
    hello.rank = rank;
    hello.world = world;
    hello.length = length;
    hello.sequence = 1;
    hello.text = "run\n" + job_;
    return hello;
  }
  SnapshotMessage Begin(uint64_t length) const {
    SnapshotMessage begin{SnapshotWord::kBegin};
    begin.attempt = 1;
    begin.length = length;
    return begin;
  }
  // A chunk as it should be.
  SnapshotMessage Chunk(uint32_t chunk, uint64_t sequence, uint64_t length) const {
    ChunkHeader header;
    header.stream = Stream();
    header.attempt = 1;
    header.sequence = sequence;
    header.length = length;
    arena_->WriteHeader(chunk, header);
    SnapshotMessage message{SnapshotWord::kChunk};
    message.attempt = 1;
    message.sequence = sequence;
    message.chunk = chunk;
    return message;
  }
  const ArenaWriter& arena() const { return *arena_; }
  const ArenaShape& shape() const { return shape_; }
  const Descriptor& memory() const { return memory_; }
  Digest Stream() const { return StreamOf("run", job_); }
  int socket() const { return socket_.get(); }
  bool IsThrownOut() {
    while (const auto message = Hear()) {
      if (message->word == SnapshotWord::kRefused) return !Hear();
    }
    return true;
  }

 private:
  Descriptor socket_;
  std::string job_;
  Descriptor memory_;
  ArenaShape shape_;
  std::unique_ptr<ArenaWriter> arena_;
};

}  // namespace ckptfs::testing_support
