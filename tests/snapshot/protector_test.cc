// SPDX-License-Identifier: Apache-2.0
//
// A daemon gives parts to other daemons' memory; slow, full or absent peers cost saves nothing.

#include "snapshot/landing/protector.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "core/peer/memory_attempts.h"
#include "mount/daemon/snapshot_status.h"
#include "tests/core/peer/peers.h"
#include "tests/support/faulty_transport.h"

namespace ckptfs {
namespace {

using std::chrono::milliseconds;

// Polls: other threads are at work.
bool Becomes(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(2));
  }
  return true;
}

// A rank's bytes in an arena, of which it is told when it is let go.
struct Arena {
  explicit Arena(std::string what) : bytes(std::move(what)) {}
  ReceivedFile File() {
    ReceivedFile file;
    file.bytes = bytes.size();
    const auto all = std::as_bytes(std::span(bytes));
    file.rope = {all.first(all.size() / 3), all.subspan(all.size() / 3)};
    file.chunks = ChunkDigestsOf(bytes);
    auto lease = std::make_shared<int>(0);
    held = lease;
    file.lease = std::move(lease);
    return file;
  }
  const std::string bytes;
  std::weak_ptr<int> held;
};

class ProtectorTest : public testing::Test {
 protected:
  void Start(const char* scheme = "copy", uint64_t budget = uint64_t{64} << 20) {
    mine_ = std::make_unique<PeerShelf>(budget);
    pool_ = std::make_unique<PeerPool>(
        faulty_, IdentityOf(9), [this](std::string_view) { ++lines_; }, milliseconds(1));
    ProtectorOptions options;
    options.scheme = *ProtectScheme::Parse(scheme);
    options.node = {9, 9};
    options.failure_domain = "nine";
    options.shelf = mine_.get();
    options.pool = pool_.get();
    options.look = [this] {
      PeerShelves shelves = pool_->ListAll();
      shelves[{9, 9}] = mine_->List();
      return AttemptsOn(shelves);
    };
    options.shown = [this](const std::string& run) -> std::string {
      const auto attempts = AttemptsOn({{{9, 9}, mine_->List()}});
      const MemoryAttempt* newest = nullptr;
      for (const MemoryAttempt& attempt : attempts) {
        if (attempt.name.run != run || attempt.step == hidden_) continue;
        if (newest == nullptr || IsEarlier(*newest, attempt)) newest = &attempt;
      }
      return newest == nullptr ? "" : newest->Directory();
    };
    options.time_of = [](const std::string&, const std::string&) { return 1000; };
    options.turn = milliseconds(5);
    options.rate = rate_;
    options.log = [this](std::string_view) { ++lines_; };
    protector_ = std::make_unique<Protector>(std::move(options));
  }
  void TearDown() override { protector_.reset(); }
  std::string Said() const { return ToJson(protector_->status()).dump(); }
  void Peers(const std::vector<const ServedShelf*>& peers) {
    std::vector<PeerRecord> records;
    for (const ServedShelf* peer : peers) {
      records.push_back(
          {peer->identity.node, peer->server->address(), "host", peer->identity.node.Hex()});
    }
    pool_->Set(records);
  }
  // A save of `world` ranks of which this daemon has the first `files.size()`.
  void Save(uint64_t step, std::vector<Arena*> arenas, uint32_t world) {
    std::map<uint32_t, ReceivedFile> files;
    for (uint32_t rank = 0; rank < arenas.size(); ++rank) files[rank] = arenas[rank]->File();
    protector_->Take({"run", "job", step, {1, 2}}, step, world, files);
  }
  static bool Holds(const ServedShelf& peer, uint64_t step, uint32_t rank) {
    for (const ShelvedPart& part : peer.shelf.List()) {
      if (part.step == step && part.rank == rank && part.state == ShelvedState::kProtected)
        return true;
    }
    return false;
  }

  std::atomic<int> lines_{0};
  std::atomic<uint64_t> hidden_{0};  // the step that cannot be shown
  TcpTransport tcp_{{.patience = milliseconds(1000)}};
  std::shared_ptr<LinkFaults> faults_ = std::make_shared<LinkFaults>();
  std::shared_ptr<FaultyTransport> faulty_ = std::make_shared<FaultyTransport>(tcp_, faults_);
  ServedShelf one_{IdentityOf(1)};
  ServedShelf two_{IdentityOf(2)};
  uint64_t rate_ = 0;
  std::unique_ptr<PeerShelf> mine_;
  std::unique_ptr<PeerPool> pool_;
  std::unique_ptr<Protector> protector_;
};

TEST_F(ProtectorTest, ASaveIsHeldByAnotherNodeAndItsArenaIsFree) {
  Start();
  Peers({&one_, &two_});
  Arena first(BytesOfSeed(1, 1'500'000)), second(BytesOfSeed(2, 900'000));
  Save(7, {&first, &second}, 2);
  ASSERT_TRUE(Becomes([&] {
    return (Holds(one_, 7, 0) || Holds(two_, 7, 0)) && (Holds(one_, 7, 1) || Holds(two_, 7, 1));
  })) << Said();
  ASSERT_TRUE(Becomes([&] { return Said().find("\"protected\":1") != std::string::npos; }))
      << Said();
  EXPECT_TRUE(first.held.expired());
  // The next one takes its place everywhere.
  Arena again(BytesOfSeed(3, 1'500'000)), more(BytesOfSeed(4, 900'000));
  Save(8, {&again, &more}, 2);
  EXPECT_TRUE(Becomes([&] {
    return mine_->List().size() == 2 && one_.shelf.List().size() + two_.shelf.List().size() == 2 &&
           Said().find("run/8") != std::string::npos;
  })) << Said();
}

TEST_F(ProtectorTest, TwoCopiesAreOnTwoNodes) {
  Start("copy:2");
  Peers({&one_, &two_});
  Arena arena(BytesOfSeed(1, 600'000));
  Save(7, {&arena}, 1);
  EXPECT_TRUE(Becomes([&] { return Holds(one_, 7, 0) && Holds(two_, 7, 0); })) << Said();
}

// The node's own file is a unit then, too.
TEST_F(ProtectorTest, UnitsAreOnAllNodesOfTheStripeAndTheFileOnNone) {
  Start("ec:2+1");
  Peers({&one_, &two_});
  Arena arena(BytesOfSeed(1, 3'000'000));
  Save(7, {&arena}, 1);
  ASSERT_TRUE(Becomes([&] {
    return Holds(one_, 7, 0) && Holds(two_, 7, 0) &&
           Said().find("\"protected\":1") != std::string::npos;
  })) << Said();
  std::set<uint32_t> units;
  for (const PeerShelf* shelf : {mine_.get(), &one_.shelf, &two_.shelf}) {
    ASSERT_EQ(shelf->List().size(), 1u);
    EXPECT_EQ(shelf->List()[0].shape, (StripeShape{2, 1}));
    units.insert(shelf->List()[0].unit);
  }
  EXPECT_EQ(units, (std::set<uint32_t>{0, 1, 2}));
  Arena again(BytesOfSeed(2, 3'000'000));
  Save(8, {&again}, 1);
  EXPECT_TRUE(Becomes([&] {
    return Holds(one_, 8, 0) && Holds(two_, 8, 0) && mine_->List().size() == 1 &&
           one_.shelf.List().size() == 1 && two_.shelf.List().size() == 1;
  })) << Said();
}

TEST_F(ProtectorTest, AHolderOfAUnitThatGoesIsReplacedFromTheOthers) {
  Start("ec:2+1");
  ServedShelf three(IdentityOf(3));
  Peers({&one_, &two_});
  Arena arena(BytesOfSeed(1, 3'000'000));
  Save(7, {&arena}, 1);
  ASSERT_TRUE(Becomes([&] { return Holds(one_, 7, 0) && Holds(two_, 7, 0); }));
  ASSERT_TRUE(Becomes([&] { return mine_->List().at(0).shape.cuts(); }));
  Peers({&two_, &three});
  EXPECT_TRUE(Becomes([&] { return Holds(three, 7, 0); })) << Said();
}

TEST_F(ProtectorTest, AFileIsCutAnewWhereANodeGoesBeforeItHasItsUnit) {
  Start("ec:2+1");
  ServedShelf three(IdentityOf(3));
  Peers({&one_, &two_, &three});
  three.server.reset();
  Arena arena(BytesOfSeed(1, 3'000'000));
  Save(7, {&arena}, 1);
  ASSERT_TRUE(Becomes([&] { return Holds(one_, 7, 0) && Holds(two_, 7, 0); })) << Said();
  for (const ServedShelf* peer : {&one_, &two_}) {
    ASSERT_EQ(peer->shelf.List().size(), 1U) << "the unit of the wider stripe is taken back";
    EXPECT_EQ(peer->shelf.List()[0].shape, (StripeShape{2, 1}));
  }
}

TEST_F(ProtectorTest, WithoutRoomForAUnitBesideItTheWholeFileStays) {
  Start("ec:2+1", 3'500'000);
  Peers({&one_, &two_});
  Arena arena(BytesOfSeed(1, 3'000'000));
  Save(7, {&arena}, 1);
  ASSERT_TRUE(Becomes([&] { return Holds(one_, 7, 0) && Holds(two_, 7, 0); })) << Said();
  ASSERT_EQ(mine_->List().size(), 1U);
  EXPECT_FALSE(mine_->List()[0].shape.cuts());
  EXPECT_TRUE(Becomes([&] { return mine_->List().at(0).state == ShelvedState::kProtected; }));
}

TEST_F(ProtectorTest, FewerNodesThanAStripeHasUnitsAreSaid) {
  Start("ec:2+1");
  Peers({&one_});
  Arena arena(BytesOfSeed(1, 3'000'000));
  Save(7, {&arena}, 1);
  ASSERT_TRUE(Becomes([&] {
    return Said().find("'ec:2+1' needs 3 nodes; there are 2") != std::string::npos;
  })) << Said();
  EXPECT_TRUE(one_.shelf.List().empty());
  Peers({&one_, &two_});
  EXPECT_TRUE(Becomes([&] { return Holds(one_, 7, 0) && Holds(two_, 7, 0); }));
}

TEST_F(ProtectorTest, WithoutPeersNothingIsHeldUp) {
  Start();
  for (uint64_t step = 1; step <= 50; ++step) {
    Arena arena(BytesOfSeed(step, 300'000));
    Save(step, {&arena}, 1);
    ASSERT_TRUE(Becomes([&] { return arena.held.expired(); })) << step;
  }
  EXPECT_LE(mine_->List().size(), 3u);
  EXPECT_EQ(lines_, 0);
  // Peers that come later get the newest.
  Peers({&one_});
  EXPECT_TRUE(Becomes([&] { return Holds(one_, 50, 0); })) << Said();
}

TEST_F(ProtectorTest, ASlowPeerNeverHoldsAnArena) {
  Start();
  Peers({&one_});
  faults_->late_ms = 50;  // before each piece
  for (uint64_t step = 1; step <= 3; ++step) {
    Arena arena(BytesOfSeed(step, 9'000'000));
    Save(step, {&arena}, 1);
    ASSERT_TRUE(Becomes([&] { return arena.held.expired(); })) << step;
  }
  faults_->late_ms = 0;
  EXPECT_TRUE(Becomes([&] { return Holds(one_, 3, 0); })) << Said();
}

TEST_F(ProtectorTest, ANodeThatIsFullIsPassedOver) {
  ServedShelf full(IdentityOf(3), 1000);
  Start();
  Peers({&full, &one_});
  Arena arena(BytesOfSeed(1, 600'000));
  Save(7, {&arena}, 1);
  EXPECT_TRUE(Becomes([&] { return Holds(one_, 7, 0); })) << Said();
}

TEST_F(ProtectorTest, AShelfThatIsFullCostsALine) {
  Start("copy", 1000);
  Peers({&one_});
  for (uint64_t step = 1; step <= 3; ++step) {
    Arena arena(BytesOfSeed(step, 600'000));
    Save(step, {&arena}, 1);
    ASSERT_TRUE(Becomes([&] { return arena.held.expired(); }));
  }
  EXPECT_TRUE(Becomes([&] { return Said().find("\"full\":3") != std::string::npos; }));
  EXPECT_EQ(lines_, 1);
}

TEST_F(ProtectorTest, AHolderThatGoesIsReplaced) {
  Start();
  Peers({&one_});
  Arena arena(BytesOfSeed(1, 600'000));
  Save(7, {&arena}, 1);
  ASSERT_TRUE(Becomes([&] { return Holds(one_, 7, 0); }));
  Peers({&two_});
  EXPECT_TRUE(Becomes([&] { return Holds(two_, 7, 0); })) << Said();
}

TEST_F(ProtectorTest, AStepThatIsShownStaysUntilTheNextOneIs) {
  hidden_ = 8;
  Start();
  Peers({&one_});
  Arena first(BytesOfSeed(1, 300'000)), second(BytesOfSeed(2, 300'000)),
      third(BytesOfSeed(3, 300'000));
  Save(7, {&first}, 1);
  ASSERT_TRUE(
      Becomes([&] { return Said().find("last_protected\":\"run/7") != std::string::npos; }));
  Save(8, {&second}, 1);
  ASSERT_TRUE(
      Becomes([&] { return Said().find("last_protected\":\"run/8") != std::string::npos; }));
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_TRUE(Holds(one_, 7, 0) && Holds(one_, 8, 0));
  Save(9, {&third}, 1);
  EXPECT_TRUE(Becomes([&] { return Holds(one_, 9, 0) && one_.shelf.List().size() == 1; }))
      << Said();
}

TEST_F(ProtectorTest, ASlowRateDoesNotHoldUpTheEnd) {
  rate_ = 1000;
  Start();
  Peers({&one_});
  Arena arena(BytesOfSeed(1, 3'000'000));
  Save(7, {&arena}, 1);
  ASSERT_TRUE(Becomes([&] { return one_.server->received_bytes() != 0; }));
  const auto begin = std::chrono::steady_clock::now();
  protector_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

// The other rank, on another node, went on to the next save.
TEST_F(ProtectorTest, ASaveThatOthersPassedOverGivesWay) {
  Start();
  Peers({&one_});
  const std::string other = BytesOfSeed(5, 100'000);
  PreparedPart part = PartOf(other, 1, 2, 2);
  part.name = {"run", "job", 2, {1, 2}};
  Put(one_.shelf, other, part);
  Arena first(BytesOfSeed(1, 200'000)), second(BytesOfSeed(2, 200'000));
  Save(1, {&first}, 2);
  ASSERT_TRUE(Becomes([&] { return Said().find("went on without it") != std::string::npos; }))
      << Said();
  Save(2, {&second}, 2);
  EXPECT_TRUE(Becomes([&] { return Holds(one_, 2, 0); })) << Said();
}

}  // namespace
}  // namespace ckptfs
