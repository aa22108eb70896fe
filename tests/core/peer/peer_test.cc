// SPDX-License-Identifier: Apache-2.0
//
// Two daemons' ends of a link: greetings, offers and reads, with hostile and failing peers.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <future>
#include <limits>
#include <random>

#include "core/io/file_storage.h"
#include "core/io/memory_root.h"
#include "core/peer/peer_keys.h"
#include "tests/core/peer/peers.h"
#include "tests/support/faulty_transport.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

TEST(PeerKeys, OneKeyAStoreForItsOwnerAlone) {
  const TemporaryDirectory folder;
  auto storage = FileStorage::Open(folder.path() + "/store", true);
  ASSERT_TRUE(storage);
  const auto key = StorePeerKey(**storage);
  ASSERT_TRUE(key) << key.error().message;
  EXPECT_EQ(StorePeerKey(**storage)->bytes, key->bytes);
  const std::string path = folder.path() + "/store/keys/peers";
  struct stat status {};
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  EXPECT_EQ(StorePeerKey(**storage).error().code, ErrorCode::kPermission);
  MemoryRoot other("another store");
  EXPECT_NE(StorePeerKey(other)->bytes, key->bytes);
}

TEST(PeerKeys, ADamagedKeyIsRefused) {
  MemoryRoot storage("store");
  const std::string text = "not a key";
  ASSERT_TRUE(storage.PublishIfAbsent(kPeerKeyName, std::as_bytes(std::span(text))));
  EXPECT_EQ(StorePeerKey(storage).error().code, ErrorCode::kDataLoss);
}

TEST(Peers, WhoDoesNotHaveTheKeyIsRefused) {
  ServedShelf there(IdentityOf(1));
  ASSERT_TRUE(there.Connect(IdentityOf(2)));
  PeerIdentity wrong = IdentityOf(2);
  wrong.key.bytes[31] ^= std::byte{1};
  EXPECT_EQ(there.Connect(wrong).error().code, ErrorCode::kPermission) << "the wrong key";
  PeerIdentity other = IdentityOf(2);
  other.store = {6, 6};
  EXPECT_EQ(there.Connect(other).error().code, ErrorCode::kPermission) << "another store";
  const auto another =
      PeerClient::Connect(there.tcp, there.server->address(), {9, 9}, IdentityOf(2));
  EXPECT_EQ(another.error().code, ErrorCode::kPermission) << "another daemon than was asked for";
}

// It answers a hello with what it was sent, or with a proof of another greeting.
TEST(Peers, AnAnswerWithoutTheKeyIsRefused) {
  TcpTransport tcp;
  auto listener = tcp.Listen("127.0.0.1");
  ASSERT_TRUE(listener);
  auto liar = std::async(std::launch::async, [&] {
    auto link = (*listener)->Accept();
    const auto hello = (*link)->Receive(kMaxGreetingText, std::chrono::seconds(5));
    PeerFrame challenge{.word = PeerWord::kChallenge, .digest = {1, 1}};
    challenge.text = hello->text.substr(0, 32) + std::string(32, '\0');
    (void)(*link)->Send(challenge, {});
    return (*link)->Receive(kMaxGreetingText, std::chrono::seconds(5));
  });
  const auto client = PeerClient::Connect(tcp, (*listener)->address(), {1, 1}, IdentityOf(2));
  EXPECT_EQ(client.error().code, ErrorCode::kPermission);
  EXPECT_FALSE(liar.get()) << "it is given nothing";
}

TEST(Peers, AStrangerSaysNothingElse) {
  ServedShelf there(IdentityOf(1));
  for (const PeerWord word :
       {PeerWord::kList, PeerWord::kProof, PeerWord::kOffer, PeerWord::kGet}) {
    auto link = there.tcp.Connect(there.server->address());
    ASSERT_TRUE(link);
    ASSERT_TRUE((*link)->Send({.word = word}, {}));
    EXPECT_FALSE((*link)->Receive(kMaxPeerText, std::chrono::seconds(5)));
  }
}

TEST(Peers, StrangersDoNotTakeAllLinks) {
  ServedShelf there(IdentityOf(1));
  auto known = there.Connect(IdentityOf(2));
  ASSERT_TRUE(known);
  std::vector<std::unique_ptr<PeerLink>> strangers;
  for (int i = 0; i < 40; ++i) {
    auto link = there.tcp.Connect(there.server->address());
    ASSERT_TRUE(link);
    strangers.push_back(*std::move(link));
  }
  EXPECT_FALSE(there.Connect(IdentityOf(3))) << "links in a greeting are counted";
  EXPECT_LE(there.server->links(), 33u);
  EXPECT_TRUE((*known)->List());
  strangers.clear();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!there.Connect(IdentityOf(3)) && std::chrono::steady_clock::now() < end) {
  }
  EXPECT_TRUE(there.Connect(IdentityOf(3)));
}

// Links that have been closed by the other end.
bool Closed(PeerLink& link) {
  const auto frame = link.Receive(kMaxPeerText, std::chrono::seconds(60));
  return !frame && frame.error().code == ErrorCode::kNotFound;
}

TEST(Peers, AGreetingThatIsNotOverInTimeEndsItsLink) {
  PeerServerOptions options;
  options.greeting = std::chrono::milliseconds(50);
  ServedShelf there(IdentityOf(1), 1000, std::move(options));
  auto silent = there.tcp.Connect(there.server->address());
  ASSERT_TRUE(silent);
  EXPECT_TRUE(Closed(**silent)) << "it says nothing";
  auto half = there.tcp.Connect(there.server->address());
  ASSERT_TRUE(half);
  PeerFrame hello{.word = PeerWord::kHello, .digest = {2, 2}};
  hello.text = std::string(32, 'r');
  hello.text.append(16, '\0');
  hello.text[39] = hello.text[47] = 5;  // the store {5, 5}
  (void)(*half)->Send(hello, {});
  (void)(*half)->Receive(kMaxGreetingText, std::chrono::seconds(60));  // its challenge, perhaps
  EXPECT_FALSE((*half)->Receive(kMaxGreetingText, std::chrono::seconds(60))) << "it proves nothing";
}

TEST(Peers, ALinkThatAsksNothingForLongIsClosed) {
  PeerServerOptions options;
  options.idle = std::chrono::milliseconds(50);
  ServedShelf there(IdentityOf(1), 1000, std::move(options));
  auto link = there.tcp.Connect(there.server->address());
  ASSERT_TRUE(link);
  ASSERT_TRUE(GreetPeer(**link, IdentityOf(2)));
  EXPECT_TRUE(Closed(**link));
}

TEST(Peers, AFileWhoseNextChunkDoesNotComeIsLetGo) {
  PeerServerOptions options;
  options.next_chunk = std::chrono::milliseconds(50);
  ServedShelf there(IdentityOf(1), uint64_t{64} << 20, std::move(options));
  const std::string bytes = BytesOfSeed(1, 1'000'000);
  auto link = there.tcp.Connect(there.server->address());
  ASSERT_TRUE(link);
  ASSERT_TRUE(GreetPeer(**link, IdentityOf(2)));
  PeerFrame offer{.word = PeerWord::kOffer};
  offer.text = RenderUnit({PartOf(bytes), {}, 0});
  ASSERT_TRUE((*link)->Send(offer, {}));
  ASSERT_EQ((*link)->Receive(kMaxPeerText, std::chrono::seconds(60))->word, PeerWord::kWanted);
  const auto piece = std::as_bytes(std::span(bytes)).first(1000);
  ASSERT_TRUE((*link)->Send({.word = PeerWord::kChunk}, std::span(&piece, 1)));
  EXPECT_TRUE(Closed(**link));
  EXPECT_EQ(there.shelf.used(), 0u);
}

TEST(Peers, RandomBytesEndALinkAndNothingElse) {
  ServedShelf there(IdentityOf(1));
  auto client = there.Connect(IdentityOf(2));
  ASSERT_TRUE(client);
  std::mt19937 random(3);
  for (int i = 0; i < 50; ++i) {
    auto link = there.tcp.Connect(there.server->address());
    ASSERT_TRUE(link);
    if (i % 2 == 0) {
      ASSERT_TRUE(GreetPeer(**link, IdentityOf(3)));
    }
    PeerFrame frame{.word = static_cast<PeerWord>(1 + random() % 20)};
    frame.rank = random() % 3;
    frame.offset = random() % 2 == 0 ? random() : ~uint64_t{0};
    frame.length = random() % 2 == 0 ? random() : ~uint64_t{0};
    frame.text.assign(random() % 200, static_cast<char>(random()));
    const std::string junk(random() % 5 == 0 ? 100 : 0, 'j');
    const std::span<const std::byte> payload = std::as_bytes(std::span(junk));
    (void)(*link)->Send(frame, std::span(&payload, 1));
  }
  const auto parts = (*client)->List();
  ASSERT_TRUE(parts) << parts.error().message;
  EXPECT_TRUE(parts->empty());
}

TEST(Peers, AFileIsHeldDescribedAndRead) {
  ServedShelf there(IdentityOf(1));
  PeerShelf mine(uint64_t{64} << 20);
  const std::string bytes = BytesOfSeed(3, 3'000'001);
  const PreparedPart part = PartOf(bytes, 1);
  const auto file = Put(mine, bytes, part);
  auto client = *there.Connect(IdentityOf(2));
  const Status offered = OfferTo(*client, file);
  ASSERT_TRUE(offered) << offered.error().message;
  EXPECT_EQ(there.server->received_bytes(), bytes.size());
  EXPECT_TRUE(OfferTo(*client, file)) << "it is not sent again";
  EXPECT_EQ(there.server->received_bytes(), bytes.size());
  const std::string directory = part.Directory();
  EXPECT_EQ(client->Describe(directory, 1, 0)->part.ranks, part.ranks);
  EXPECT_EQ(client->List()->at(0).state, ShelvedState::kHeld);
  ASSERT_TRUE(client->Protect(directory, 1, 0));
  EXPECT_EQ(client->List()->at(0).state, ShelvedState::kProtected);
  std::string got(1'000'001, '?');
  ASSERT_TRUE(client->Get(directory, 1, 0, 2'000'000,
                          std::as_writable_bytes(std::span(got)).first(1'000'001)));
  EXPECT_EQ(got, bytes.substr(2'000'000));
  EXPECT_EQ(
      client->Get(directory, 0, 0, 0, std::as_writable_bytes(std::span(got)).first(1)).error().code,
      ErrorCode::kNotFound);
  EXPECT_FALSE(client->broken()) << "a refusal ends nothing";
  ASSERT_TRUE(client->LetGo(directory, 1, 0));
  EXPECT_TRUE(client->List()->empty());
  EXPECT_EQ(there.shelf.used(), 0u);
}

TEST(Peers, AChangedByteIsNeverHeld) {
  ServedShelf there(IdentityOf(1));
  PeerShelf mine(uint64_t{64} << 20);
  const std::string bytes = BytesOfSeed(4, 2'500'000);
  const auto file = Put(mine, bytes, PartOf(bytes));
  for (const int64_t at : {int64_t{0}, int64_t{1'300'000}, int64_t{2'499'999}}) {
    auto faults = std::make_shared<LinkFaults>();
    faults->flip_at = at;
    FaultyTransport faulty(there.tcp, faults);
    auto client = there.Connect(IdentityOf(2), &faulty);
    ASSERT_TRUE(client);
    EXPECT_EQ(OfferTo(**client, file).error().code, ErrorCode::kDataLoss) << at;
    EXPECT_TRUE((*client)->List()->empty());
    EXPECT_EQ(there.shelf.used(), 0u);
  }
}

TEST(Peers, ALinkThatFailsAtAnyCallLeavesNothingHalf) {
  PeerShelf mine(uint64_t{64} << 20);
  const std::string bytes = BytesOfSeed(5, 2'500'000);
  const auto file = Put(mine, bytes, PartOf(bytes));
  int failed = 0;
  for (int64_t call = 0; failed == call; ++call) {
    ServedShelf there(IdentityOf(1));
    auto faults = std::make_shared<LinkFaults>();
    faults->fail_at = call;
    FaultyTransport faulty(there.tcp, faults);
    auto client = there.Connect(IdentityOf(2), &faulty);
    const bool held = client && OfferTo(**client, file);
    failed += held ? 0 : 1;
    client = Fail(ErrorCode::kIo, "");
    auto again = there.Connect(IdentityOf(3));
    ASSERT_TRUE(again);
    const auto parts = (*again)->List();
    ASSERT_TRUE(parts);
    EXPECT_EQ(parts->size(), held ? 1u : parts->size());
    ASSERT_TRUE(OfferTo(**again, file)) << "call " << call;
  }
  EXPECT_GE(failed, 8);
}

TEST(Peers, OneThatIsFullSaysSo) {
  ServedShelf there(IdentityOf(1), 1'000'000);
  PeerShelf mine(uint64_t{64} << 20);
  const std::string small = BytesOfSeed(6, 600'000);
  auto client = *there.Connect(IdentityOf(2));
  ASSERT_TRUE(OfferTo(*client, Put(mine, small, PartOf(small, 0))));
  const Status full = OfferTo(*client, Put(mine, small, PartOf(small, 1)));
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().code, ErrorCode::kExhausted);
  EXPECT_NE(full.error().message.find("--peer-memory"), std::string::npos);
  ASSERT_TRUE(client->LetGo(PartOf(small, 0).Directory(), 0, 0));
  EXPECT_TRUE(OfferTo(*client, mine.Find(PartOf(small, 1).Directory(), 1)));
}

TEST(PeerShelf, HoldsSoManyFilesAndNoMore) {
  PeerShelf shelf(uint64_t{64} << 20, 3);
  for (uint32_t rank = 0; rank < 3; ++rank) Put(shelf, "abc", PartOf("abc", rank));
  const auto more = shelf.Begin({PartOf("abc", 3), {}, 0});
  EXPECT_EQ(more.error().code, ErrorCode::kExhausted);
  EXPECT_NE(more.error().message.find("3 files are held already"), std::string::npos);
  ASSERT_TRUE(shelf.Remove(PartOf("abc", 1).Directory(), 1));
  EXPECT_TRUE(shelf.Begin({PartOf("abc", 3), {}, 0}));
}

// With names as long as they may be, of letters that are written as three.
TEST(PeerShelf, AListOfAsManyAsItHoldsFitsIntoAFrame) {
  ShelvedPart part = ShelvedOf({PartOf("abc"), {}, 0}, ShelvedState::kProtected);
  part.name.run = std::string(255, '%');
  part.name.job = std::string(255, '%');
  part.mtime_ns = std::numeric_limits<int64_t>::min();
  part.name.attempt = part.bytes = part.step = std::numeric_limits<uint64_t>::max();
  part.shape = {127, 128};
  part.unit = 254;
  const std::string one = RenderShelved({part}), two = RenderShelved({part, part});
  EXPECT_LE(one.size() + kMostShelvedFiles * (two.size() - one.size()), kMaxPeerText);
}

TEST(PeerShelf, AFileWithoutAByteIsRefused) {
  PeerShelf shelf(uint64_t{64} << 20);
  EXPECT_EQ(shelf.Begin({PartOf(""), {}, 0}).error().code, ErrorCode::kInvalid);
  EXPECT_EQ(shelf.used(), 0u);
}

TEST(PeerShelf, WhatIsNotItsRecordIsNotShelved) {
  PeerShelf shelf(1 << 20);
  const std::string bytes = BytesOfSeed(7, 300'000);
  auto file = shelf.Begin({PartOf(bytes), {}, 0});
  ASSERT_TRUE(file);  // its memory is zeros
  EXPECT_EQ(shelf.Shelve(*std::move(file)).error().code, ErrorCode::kDataLoss);
  EXPECT_EQ(shelf.used(), 0u);
  const auto kept = Put(shelf, bytes, PartOf(bytes));
  EXPECT_EQ(shelf.Begin({PartOf(bytes), {}, 0}).error().code, ErrorCode::kExists);
  ASSERT_TRUE(shelf.Remove(PartOf(bytes).Directory(), 0));
  EXPECT_EQ(shelf.used(), bytes.size()) << "somebody reads it";
}

}  // namespace
}  // namespace ckptfs
