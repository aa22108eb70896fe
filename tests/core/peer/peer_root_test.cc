// SPDX-License-Identifier: Apache-2.0
//
// A step that several daemons hold: what is whole, and how its bytes are read.

#include "core/peer/peer_root.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <map>
#include <set>

#include "core/io/memory_root.h"
#include "core/peer/memory_attempts.h"
#include "core/peer/placement.h"
#include "tests/core/peer/peers.h"
#include "tests/support/faulty_transport.h"
#include "tests/support/storage_text.h"

namespace ckptfs {
namespace {

ShelvedPart Shelved(uint32_t rank, uint64_t attempt = 1,
                    ShelvedState state = ShelvedState::kProtected) {
  const PreparedPart part = PartOf(BytesOfSeed(rank, 1000), rank, attempt, 2);
  return ShelvedOf(part, part.ranks[0], state);
}

TEST(MemoryAttempts, AreWholeWithEveryRankAndProtectedByTheirOwners) {
  const Digest a{1, 1}, b{2, 2};
  auto attempts = AttemptsOn({{a, {Shelved(0)}}, {b, {Shelved(0)}}});
  ASSERT_EQ(attempts.size(), 1u);
  EXPECT_FALSE(attempts[0].whole());
  EXPECT_EQ(attempts[0].Hindrance(), "no node that answers holds rank 1");
  EXPECT_EQ(attempts[0].ranks.at(0).nodes, (std::vector<Digest>{a, b}));
  attempts = AttemptsOn({{a, {Shelved(0)}}, {b, {Shelved(1, 1, ShelvedState::kHeld)}}});
  EXPECT_TRUE(attempts[0].whole());
  EXPECT_FALSE(attempts[0].is_protected());
  EXPECT_EQ(attempts[0].Hindrance(), "not protected yet: rank 1");
  EXPECT_EQ(NewestProtected(attempts, "run"), nullptr);
  attempts = AttemptsOn({{a, {Shelved(0), Shelved(1)}}, {b, {Shelved(0, 2), Shelved(1, 2)}}});
  ASSERT_EQ(attempts.size(), 2u);
  EXPECT_EQ(NewestProtected(attempts, "run")->name.attempt, 2u);
  EXPECT_EQ(NewestProtected(attempts, "other"), nullptr);
}

TEST(MemoryAttempts, WhatTwoNodesSayDifferentlyIsNotBelieved) {
  const Digest a{1, 1}, b{2, 2};
  ShelvedPart other = Shelved(1);
  other.chunks.low ^= 1;
  auto attempts = AttemptsOn({{a, {Shelved(0), Shelved(1)}}, {b, {other}}});
  EXPECT_EQ(attempts[0].Hindrance(), "nodes hold different files of rank 1");
  EXPECT_EQ(NewestProtected(attempts, "run"), nullptr);
  other = Shelved(1);
  other.world = 3;
  attempts = AttemptsOn({{a, {Shelved(0)}}, {b, {other}}});
  EXPECT_FALSE(attempts[0].wrong.empty());
}

TEST(MemoryAttempts, SavesOfOneLifeAreOrderedByTheirNumberWhateverClocksSay) {
  MemoryAttempt early, late;
  early.name = {"run", "job", 1, {1, 1}};
  late.name = {"run", "job", 2, {1, 1}};
  early.mtime_ns = 100;
  late.mtime_ns = 5;
  EXPECT_TRUE(IsEarlier(early, late));
  EXPECT_FALSE(IsEarlier(late, early));
  late.name.life = {2, 2};
  EXPECT_TRUE(IsEarlier(late, early)) << "of another life: by time";
  late.mtime_ns = 0;
  EXPECT_FALSE(IsEarlier(late, early)) << "it has no time yet";
}

// Two ranks: the first on the own shelf and on a peer, the second on two peers.
class PeerRootTest : public testing::Test {
 protected:
  PeerRootTest() {
    Put(mine_, bytes_[0], part(0));
    Put(one_.shelf, bytes_[0], part(0));
    Put(one_.shelf, bytes_[1], part(1));
    Put(two_.shelf, bytes_[1], part(1));
    pool_->Set(
        {{{1, 1}, one_.server->address(), "one", ""}, {{2, 2}, two_.server->address(), "two", ""}});
  }
  PreparedPart part(uint32_t rank) const { return PartOf(bytes_[rank], rank, 1, 2); }
  Result<std::shared_ptr<PeerRoot>> Open() {
    PeerShelves shelves = pool_->ListAll();
    shelves[{9, 9}] = mine_.List();
    const auto attempts = AttemptsOn(shelves);
    return PeerRoot::Open(attempts.at(0), {&mine_, pool_, store_, [this](std::string_view line) {
                                             lines_ += StrCat(line, "\n");
                                           }});
  }
  std::string Read(const PeerRoot& root, uint32_t rank, uint64_t at, size_t count) const {
    return ReadObject(root, part(rank).PathOf(rank), at, count);
  }

  std::string lines_;
  const std::string bytes_[2] = {BytesOfSeed(1, 3'000'123), BytesOfSeed(2, 2'700'000)};
  PeerShelf mine_{uint64_t{64} << 20};
  ServedShelf one_{IdentityOf(1)};
  ServedShelf two_{IdentityOf(2)};
  TcpTransport tcp_{{.from = "127.0.0.1", .patience = std::chrono::milliseconds(1000)}};
  std::shared_ptr<LinkFaults> faults_ = std::make_shared<LinkFaults>();
  std::shared_ptr<FaultyTransport> faulty_ = std::make_shared<FaultyTransport>(tcp_, faults_);
  std::shared_ptr<MemoryRoot> store_ = std::make_shared<MemoryRoot>("store");
  std::shared_ptr<PeerPool> pool_ = std::make_shared<PeerPool>(
      faulty_, IdentityOf(9), [this](std::string_view line) { lines_ += StrCat(line, "\n"); },
      std::chrono::milliseconds(0));
};

TEST_F(PeerRootTest, AnyRangeIsTheRightBytes) {
  const auto root = Open();
  ASSERT_TRUE(root) << root.error().message;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ((*root)->Stat(part(rank).PathOf(rank))->stamp.size, bytes_[rank].size());
    for (const auto& [at, count] : std::vector<std::pair<uint64_t, size_t>>{{0, 1},
                                                                            {0, 2'700'000},
                                                                            {262'143, 2},
                                                                            {1'048'575, 1'048'578},
                                                                            {2'699'999, 1},
                                                                            {5, 0}}) {
      EXPECT_EQ(Read(**root, rank, at, count), bytes_[rank].substr(at, count)) << rank << " " << at;
    }
    EXPECT_EQ(Read(**root, rank, bytes_[rank].size(), 1), ErrorCodeName(ErrorCode::kDataLoss));
  }
  EXPECT_EQ((*root)->List(part(0).Directory())->size(), 2u);
  EXPECT_EQ(ReadObject(**root, "snapshots/x/rank-00000.safetensors"),
            ErrorCodeName(ErrorCode::kNotFound));
}

TEST_F(PeerRootTest, APeerThatGoesIsReplacedByAnotherThenByTheStore) {
  const auto root = Open();
  ASSERT_TRUE(root);
  one_.server.reset();
  EXPECT_EQ(Read(**root, 1, 0, 2'700'000), bytes_[1]);
  two_.server.reset();
  EXPECT_EQ(Read(**root, 1, 0, 100), ErrorCodeName(ErrorCode::kDataLoss));
  const auto bytes = std::as_bytes(std::span(bytes_[1]));
  ASSERT_TRUE(store_->PublishIfAbsent(part(1).PathOf(1), bytes));
  EXPECT_EQ(Read(**root, 1, 0, 2'700'000), bytes_[1]);
  EXPECT_EQ(Read(**root, 0, 0, 100), bytes_[0].substr(0, 100)) << "its own copy is there";
}

TEST_F(PeerRootTest, APoolThatIsStoppedAsksAgainWhenItGoesOn) {
  const auto root = Open();
  ASSERT_TRUE(root);
  pool_->Stop();
  EXPECT_EQ(Read(**root, 1, 0, 100), ErrorCodeName(ErrorCode::kDataLoss));
  EXPECT_TRUE(pool_->ListAll().empty());
  pool_->Resume();
  EXPECT_EQ(Read(**root, 1, 0, 100), bytes_[1].substr(0, 100));
  EXPECT_EQ(lines_, "");
}

// It takes questions and never answers.
TEST(PeerPoolTest, StopEndsAQuestionToASilentPeer) {
  TcpTransport tcp;
  auto listener = tcp.Listen("127.0.0.1");
  ASSERT_TRUE(listener);
  std::promise<void> was_asked;
  auto silent = std::async(std::launch::async, [&] {
    auto link = (*listener)->Accept();
    (void)AnswerPeer(**link, IdentityOf(1));
    (void)(*link)->Receive(kMaxPeerText, std::chrono::seconds(5));
    was_asked.set_value();
    (void)(*link)->Receive(kMaxPeerText, std::chrono::seconds(20));
  });
  PeerPool pool(std::make_shared<TcpTransport>(), IdentityOf(9), {});
  pool.Set({{{1, 1}, (*listener)->address(), "one", ""}});
  auto asked = std::async(std::launch::async, [&] {
    return pool.Ask({1, 1}, [](PeerClient& client) -> Status {
      CKPT_RETURN_IF_ERROR(client.Show("run"));  // which may take thirty seconds
      return {};
    });
  });
  was_asked.get_future().wait();
  const auto begin = std::chrono::steady_clock::now();
  pool.Stop();
  EXPECT_FALSE(asked.get());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  silent.get();
}

TEST_F(PeerRootTest, AChangedByteIsNeverGivenOut) {
  const auto root = Open();
  ASSERT_TRUE(root);
  faults_->received = 0;
  faults_->flip_received = 300'000;
  EXPECT_EQ(Read(**root, 1, 0, 2'700'000), bytes_[1]);
  EXPECT_NE(lines_.find("chunk 1 of node"), std::string::npos) << lines_;
  // The one that is left changes it, too: there is an error, and no bytes.
  faults_->received = 0;
  faults_->flip_received = 300'000;
  EXPECT_EQ(Read(**root, 1, 0, 2'700'000), ErrorCodeName(ErrorCode::kDataLoss));
}

TEST_F(PeerRootTest, AStoreWithOtherBytesIsNotUsed) {
  const auto root = Open();
  ASSERT_TRUE(root);
  one_.server.reset();
  two_.server.reset();
  std::string wrong = bytes_[1];
  wrong[2'000'000] ^= 1;
  ASSERT_TRUE(store_->PublishIfAbsent(part(1).PathOf(1), std::as_bytes(std::span(wrong))));
  EXPECT_EQ(Read(**root, 1, 1'900'000, 200'000), ErrorCodeName(ErrorCode::kDataLoss));
  EXPECT_NE(lines_.find("of the store"), std::string::npos) << lines_;
}

// Each node of six has a rank's file, and holders by PlaceNodes().
class SixNodes {
 public:
  explicit SixNodes(std::string_view scheme) {
    for (uint64_t i = 0; i < 6; ++i) {
      nodes.push_back(std::make_unique<ServedShelf>(IdentityOf(i + 1)));
      names.push_back({nodes[i]->identity.node.Hex(), i < 3 ? "rack1" : "rack2"});
      bytes.push_back(BytesOfSeed(i, 300'000 + i));
    }
    const auto groups = PlaceNodes(names, ProtectScheme::Parse(scheme).value()).value();
    for (const PeerGroup& group : groups) {
      for (const PeerStripe& stripe : StripesOf(group)) {
        const size_t owner = IndexOf(group.members[stripe.data.front()]);
        Hold(owner, owner);
        for (const size_t member : stripe.parity) Hold(IndexOf(group.members[member]), owner);
      }
    }
  }
  size_t IndexOf(const PeerNode& node) const {
    size_t i = 0;
    while (names[i].name != node.name) ++i;
    return i;
  }
  PreparedPart part(uint32_t rank) const { return PartOf(bytes[rank], rank, 1, 6); }
  void Hold(size_t node, size_t rank) {
    Put(nodes[node]->shelf, bytes[rank], part(static_cast<uint32_t>(rank)));
    nodes[node]->shelf.Protect(part(0).Directory(), static_cast<uint32_t>(rank));
    holders[rank].insert(node);
  }
  // True if all six files can be read, and are right, where these nodes are dead.
  bool Survives(const std::set<size_t>& dead) {
    std::vector<PeerRecord> alive;
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (!dead.contains(i))
        alive.push_back({nodes[i]->identity.node, nodes[i]->server->address(), "", ""});
    }
    const auto pool = std::make_shared<PeerPool>(tcp, IdentityOf(99), [](std::string_view) {});
    pool->Set(alive);
    PeerShelf empty(0);  // of a machine that takes a dead one's place
    const auto attempts = AttemptsOn(pool->ListAll());
    const MemoryAttempt* const newest = NewestProtected(attempts, "run");
    if (newest == nullptr) return false;
    const auto root = PeerRoot::Open(*newest, {&empty, pool, nullptr, {}});
    EXPECT_TRUE(root);
    for (uint32_t rank = 0; rank < 6; ++rank) {
      EXPECT_EQ(ReadObject(**root, part(rank).PathOf(rank), 0, bytes[rank].size()), bytes[rank]);
    }
    return true;
  }

  std::vector<std::unique_ptr<ServedShelf>> nodes;
  std::vector<PeerNode> names;
  std::vector<std::string> bytes;
  std::map<size_t, std::set<size_t>> holders;  // by rank
  std::shared_ptr<TcpTransport> tcp = std::make_shared<TcpTransport>();
};

TEST(SixNodesTest, AnyOneAndAnyTwoMayDieWhereTheSchemeSaysSo) {
  for (const char* scheme : {"copy", "copy:2"}) {
    SixNodes six(scheme);
    int lost = 0;
    for (size_t a = 0; a < 6; ++a) {
      for (size_t b = a; b < 6; ++b) {
        const std::set<size_t> dead{a, b};
        const bool expected =
            std::none_of(six.holders.begin(), six.holders.end(), [&](const auto& rank) {
              return std::includes(dead.begin(), dead.end(), rank.second.begin(),
                                   rank.second.end());
            });
        EXPECT_EQ(six.Survives(dead), expected) << scheme << " " << a << " " << b;
        EXPECT_TRUE(expected || (a != b && std::string_view(scheme) == "copy"))
            << scheme << " " << a << " " << b;
        lost += expected ? 0 : 1;
      }
    }
    EXPECT_EQ(lost, std::string_view(scheme) == "copy" ? 3 : 0)
        << "pairs that hold each other's copies";
  }
}

TEST_F(PeerRootTest, ALateLinkAndOneThatFailsCostNoBytes) {
  const auto root = Open();
  ASSERT_TRUE(root);
  faults_->late_ms = 1;
  for (int64_t call = 0; call < 8; ++call) {
    faults_->calls = 0;
    faults_->fail_at = call;
    const std::string got = Read(**root, 1, 0, 2'700'000);
    EXPECT_TRUE(got == bytes_[1] || got == ErrorCodeName(ErrorCode::kDataLoss)) << call;
  }
  faults_->fail_at = -1;
  EXPECT_EQ(Read(**root, 1, 0, 2'700'000), bytes_[1]);
}

}  // namespace
}  // namespace ckptfs
