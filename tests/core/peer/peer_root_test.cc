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
#include "core/peer/spread_file.h"
#include "tests/core/peer/peers.h"
#include "tests/support/faulty_transport.h"
#include "tests/support/storage_text.h"

namespace ckptfs {
namespace {

ShelvedPart Shelved(uint32_t rank, uint64_t attempt = 1,
                    ShelvedState state = ShelvedState::kProtected) {
  const PreparedPart part = PartOf(BytesOfSeed(rank, 1000), rank, attempt, 2);
  return ShelvedOf({part, {}, 0}, state);
}

TEST(MemoryAttempts, AreWholeWithEveryRankAndProtectedByTheirOwners) {
  const Digest a{1, 1}, b{2, 2};
  auto attempts = AttemptsOn({{a, {Shelved(0)}}, {b, {Shelved(0)}}});
  ASSERT_EQ(attempts.size(), 1u);
  EXPECT_FALSE(attempts[0].whole());
  EXPECT_EQ(attempts[0].Hindrance(), "no nodes that answer hold rank 1");
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

// Each of some nodes has a rank's file, and gives it to others as PlaceNodes() says.
class SpreadNodes {
 public:
  explicit SpreadNodes(std::string_view scheme, size_t bytes_of_each = 1'400'000,
                       size_t count = 6) {
    std::vector<PeerNode> names;
    for (uint64_t i = 0; i < count; ++i) {
      nodes.push_back(std::make_unique<ServedShelf>(IdentityOf(i + 1)));
      names.push_back({nodes[i]->identity.node.Hex(), i < count / 2 ? "rack1" : "rack2"});
      bytes.push_back(BytesOfSeed(i, bytes_of_each + i));
    }
    const auto index_of = [&](const PeerNode& node) {
      return static_cast<size_t>(std::find(names.begin(), names.end(), node) - names.begin());
    };
    const auto groups = PlaceNodes(names, ProtectScheme::Parse(scheme).value()).value();
    for (const PeerGroup& group : groups) {
      for (size_t member = 0; member < group.members.size(); ++member) {
        const size_t owner = index_of(group.members[member]);
        shapes[owner] = group.shape;
        for (const size_t holder : UnitHolders(group, member))
          holders[owner].push_back(index_of(group.members[holder]));
        Spread(owner);
      }
    }
  }
  PreparedPart part(uint32_t rank) const {
    return PartOf(bytes[rank], rank, 1, static_cast<uint32_t>(nodes.size()));
  }
  std::shared_ptr<PeerPool> PoolWithout(const std::set<size_t>& dead) {
    auto pool = std::make_shared<PeerPool>(
        faulty, IdentityOf(99), [](std::string_view) {}, std::chrono::milliseconds(0));
    std::vector<PeerRecord> alive;
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (!dead.contains(i))
        alive.push_back({nodes[i]->identity.node, nodes[i]->server->address(), "", ""});
    }
    pool->Set(alive);
    return pool;
  }
  void Spread(size_t owner) {
    PeerShelf& shelf = nodes[owner]->shelf;
    const auto rank = static_cast<uint32_t>(owner);
    files.erase(owner);
    SpreadFile& file =
        files.try_emplace(owner, shelf, Put(shelf, bytes[owner], part(rank))).first->second;
    file.Cut(shapes[owner]);
    const auto pool = PoolWithout({});
    const HeldFile::AskNode ask = [&](const Digest& node, const auto& question) {
      return pool->Ask(node, question);
    };
    std::set<Digest> all;
    for (const auto& node : nodes) all.insert(node->identity.node);
    for (const uint32_t unit : file.Missing(all)) {
      const Digest node = nodes[holders[owner][unit]]->identity.node;
      const Status sent = file.Send(unit, node, ask, {});
      EXPECT_TRUE(sent) << sent.error().message;
      nodes[holders[owner][unit]]->shelf.Protect(part(0).Directory(), rank,
                                                 file.shape()->SlotOf(unit));
    }
    EXPECT_TRUE(file.Missing(all).empty());
    EXPECT_TRUE(file.KeepUnit());
    file.Protect();
  }
  // Reads as a machine that has nothing itself, where these nodes are dead; null: it is lost.
  std::shared_ptr<PeerRoot> RootWithout(const std::set<size_t>& dead) {
    PeerShelf empty(0);
    const auto pool = PoolWithout(dead);
    const auto attempts = AttemptsOn(pool->ListAll());
    const MemoryAttempt* const newest = NewestProtected(attempts, "run");
    if (newest == nullptr) return nullptr;
    const auto root = PeerRoot::Open(
        *newest, {&empty, pool, nullptr, [this](std::string_view line) { lines += line; }});
    EXPECT_TRUE(root) << root.error().message;
    return *root;
  }
  std::string Read(const PeerRoot& root, uint32_t rank) const {
    return ReadObject(root, part(rank).PathOf(rank), 0, bytes[rank].size());
  }
  // True if all files can be read, and are right, where these nodes are dead.
  bool Survives(const std::set<size_t>& dead) {
    const auto root = RootWithout(dead);
    for (uint32_t rank = 0; root && rank < nodes.size(); ++rank)
      EXPECT_EQ(Read(*root, rank), bytes[rank]) << "rank " << rank;
    return root != nullptr;
  }
  // True if of each file as many units are left as its shape needs.
  bool SchemeSurvives(const std::set<size_t>& dead) {
    return std::all_of(holders.begin(), holders.end(), [&](const auto& one) {
      const auto lost = std::count_if(one.second.begin(), one.second.end(),
                                      [&](size_t node) { return dead.contains(node); });
      return lost <= shapes[one.first].parity;
    });
  }

  std::vector<std::unique_ptr<ServedShelf>> nodes;
  std::vector<std::string> bytes;
  std::string lines;
  std::map<size_t, StripeShape> shapes;
  std::map<size_t, std::vector<size_t>> holders;  // by owner, in the order of units
  std::map<size_t, SpreadFile> files;
  TcpTransport tcp;
  std::shared_ptr<LinkFaults> faults = std::make_shared<LinkFaults>();
  std::shared_ptr<FaultyTransport> faulty = std::make_shared<FaultyTransport>(tcp, faults);
};

TEST(SixNodesTest, AnyOneAndAnyTwoMayDieWhereTheSchemeSaysSo) {
  const std::map<std::string, int> pairs_that_lose = {{"copy", 3},   {"copy:2", 0},  {"ec:4+2", 0},
                                                      {"ec:2+2", 0}, {"ec:4+1", 15}, {"ec:2+1", 6}};
  for (const auto& [scheme, expected] : pairs_that_lose) {
    SpreadNodes six(scheme);
    int lost = 0;
    for (size_t a = 0; a < 6; ++a) {
      for (size_t b = a; b < 6; ++b) {
        const bool survives = six.Survives({a, b});
        EXPECT_EQ(survives, six.SchemeSurvives({a, b})) << scheme << " " << a << " " << b;
        EXPECT_TRUE(survives || a != b) << scheme << ": one node";
        lost += survives ? 0 : 1;
      }
    }
    EXPECT_EQ(lost, expected) << scheme;
  }
}

TEST(SixNodesTest, ThreeAreMoreThanTwoParityUnitsBear) {
  SpreadNodes six("ec:4+2");
  for (size_t c = 2; c < 6; ++c) EXPECT_FALSE(six.Survives({0, 1, c}));
}

// Such a file has fewer chunks than the stripe has data units.
TEST(SixNodesTest, SmallFilesOutliveAsManyDeaths) {
  for (const size_t bytes : {1, 262'144, 600'000}) {
    SpreadNodes six("ec:4+2", bytes);
    for (size_t a = 0; a < 6; ++a)
      for (size_t b = a + 1; b < 6; ++b) EXPECT_TRUE(six.Survives({a, b})) << bytes;
  }
}

TEST(SixNodesTest, AStripeTakesTheMemoryThatThePlanSays) {
  SpreadNodes six("ec:4+2", 8 * kChunkBytes);  // two whole rows
  for (const auto& node : six.nodes)
    EXPECT_NEAR(static_cast<double>(node->shelf.used()), 1.5 * 8 * kChunkBytes, kChunkBytes);
}

TEST(SixNodesTest, AUnitIsCalculatedFromOthersForANodeThatTakesItsPlace) {
  SpreadNodes six("ec:4+2");
  for (const uint32_t unit : {1u, 5u}) {  // of data, and of parity
    const size_t gone = six.holders[0][unit];
    ASSERT_TRUE(six.nodes[gone]->shelf.Remove(six.part(0).Directory(), 0, unit + 1));
    six.files.at(0).Forget(six.nodes[gone]->identity.node);
    ServedShelf fresh(IdentityOf(50 + unit));
    const auto pool = six.PoolWithout({gone});
    auto alive = pool->present();
    alive.push_back({fresh.identity.node, fresh.server->address(), "", ""});
    pool->Set(alive);
    const HeldFile::AskNode ask = [&](const Digest& node, const auto& question) {
      return pool->Ask(node, question);
    };
    const Status sent = six.files.at(0).Send(unit, fresh.identity.node, ask, {});
    ASSERT_TRUE(sent) << sent.error().message;
    const auto file = fresh.shelf.Find(six.part(0).Directory(), 0, unit + 1);
    ASSERT_TRUE(file) << "its digests are those of the record";
    EXPECT_EQ(file->record().unit, unit);
    six.Spread(0);
  }
}

TEST(SixNodesTest, AFlippedBitOfAUnitIsNamedAndNeverGivenOut) {
  SpreadNodes six("ec:4+2");
  const auto root = six.RootWithout({});
  ASSERT_TRUE(root);
  six.faults->received = 0;
  six.faults->flip_received = 300'000;
  EXPECT_EQ(six.Read(*root, 3), six.bytes[3]);
  EXPECT_NE(six.lines.find("of unit "), std::string::npos) << six.lines;
  EXPECT_NE(six.lines.find("is not what its record says"), std::string::npos) << six.lines;
  // Two nodes are dead: nothing may be wrong any more, and nothing wrong is given out.
  const auto less = six.RootWithout({4, 5});
  ASSERT_TRUE(less);
  six.faults->received = 0;
  six.faults->flip_received = 300'000;
  EXPECT_EQ(six.Read(*less, 3), ErrorCodeName(ErrorCode::kDataLoss));
}

TEST(SixNodesTest, ManyReadersOfALostUnitGetTheirBytes) {
  SpreadNodes six("ec:4+2");
  const auto root = six.RootWithout({0, 1});
  ASSERT_TRUE(root);
  std::vector<std::future<std::string>> readers;
  for (int i = 0; i < 8; ++i)
    readers.push_back(std::async(std::launch::async, [&] { return six.Read(*root, 0); }));
  for (auto& reader : readers) EXPECT_EQ(reader.get(), six.bytes[0]);
  // Rows are fetched once, whoever wants them: four chunks of the first, two of the last.
  EXPECT_LE(six.faults->received, static_cast<int64_t>(6 * kChunkBytes));
}

TEST(MemoryAttempts, UnitsOfAFileAreToldApartFromOthers) {
  const PreparedPart part = PartOf(BytesOfSeed(0, 1'000'000), 0, 1, 1);
  const auto shelved = [&](StripeShape shape, uint32_t unit, uint64_t parity) {
    ShelvedPart one = ShelvedOf({part, {}, 0}, ShelvedState::kProtected);
    one.shape = shape;
    one.unit = unit;
    one.parity_chunks = {parity, parity};
    return one;
  };
  const auto of = [&](const std::vector<ShelvedPart>& parts) {
    PeerShelves shelves;
    for (uint64_t i = 0; i < parts.size(); ++i) shelves[{i + 1, 0}] = {parts[i]};
    return AttemptsOn(shelves).at(0);
  };
  EXPECT_FALSE(of({shelved({2, 1}, 0, 7)}).whole());
  EXPECT_EQ(of({shelved({2, 1}, 0, 7)}).Hindrance(), "no nodes that answer hold rank 0");
  EXPECT_FALSE(of({shelved({2, 1}, 0, 7), shelved({2, 1}, 0, 7)}).whole()) << "the same unit";
  EXPECT_TRUE(of({shelved({2, 1}, 0, 7), shelved({2, 1}, 2, 7)}).is_protected());
  EXPECT_FALSE(of({shelved({2, 1}, 0, 7), shelved({2, 1}, 2, 8)}).whole()) << "parity";
  EXPECT_FALSE(of({shelved({2, 1}, 0, 7), shelved({2, 2}, 2, 7)}).whole()) << "shapes";
  // Its owner began to cut it anew: what was protected still is.
  ShelvedPart anew = shelved({3, 1}, 1, 9);
  anew.state = ShelvedState::kHeld;
  for (const auto& parts : {std::vector{anew, shelved({2, 1}, 0, 7), shelved({2, 1}, 2, 7)},
                            std::vector{shelved({2, 1}, 1, 7), shelved({2, 1}, 2, 7), anew}}) {
    const MemoryAttempt attempt = of(parts);
    EXPECT_TRUE(attempt.is_protected()) << attempt.Hindrance();
    EXPECT_EQ(attempt.ranks.at(0).shape, (StripeShape{2, 1}));
    EXPECT_EQ(attempt.ranks.at(0).units.size(), 2U);
  }
  EXPECT_FALSE(of({anew, shelved({2, 1}, 0, 7)}).is_protected());
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
