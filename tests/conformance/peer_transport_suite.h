// SPDX-License-Identifier: Apache-2.0
//
// PeerTransportSuite is what every PeerTransport must do.  An implementation registers a fixture
// type with `PeerTransport& transport()`, `std::string address()` to listen at, and a patience of
// at most a second.

#pragma once

#include <gtest/gtest.h>

#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/peer/peer_transport.h"

namespace ckptfs {

template <class Fixture>
class PeerTransportSuite : public testing::Test {
 protected:
  using LinkPtr = std::unique_ptr<PeerLink>;
  static constexpr std::chrono::seconds kWait{5};

  void SetUp() override {
    auto listener = fixture_.transport().Listen(fixture_.address());
    ASSERT_TRUE(listener) << listener.error().message;
    listener_ = *std::move(listener);
    auto accepted = std::async(std::launch::async, [&] { return listener_->Accept(); });
    auto link = fixture_.transport().Connect(listener_->address());
    ASSERT_TRUE(link) << link.error().message;
    near_ = *std::move(link);
    far_ = *accepted.get();
  }
  Result<PeerFrame> Next(PeerLink& link) { return link.Receive(kMaxPeerText, kWait); }

  Fixture fixture_;
  std::unique_ptr<PeerListener> listener_;
  LinkPtr near_;
  LinkPtr far_;
};

TYPED_TEST_SUITE_P(PeerTransportSuite);

TYPED_TEST_P(PeerTransportSuite, FramesComeWholeAndInOrder) {
  PeerFrame frame{
      .word = PeerWord::kGet, .rank = 7, .offset = 1ull << 40, .length = 12, .digest = {3, 4}};
  frame.text = std::string(300'000, 'x');
  ASSERT_TRUE(this->near_->Send(frame, {}));
  ASSERT_TRUE(this->near_->Send({.word = PeerWord::kList}, {}));
  const auto first = this->Next(*this->far_);
  ASSERT_TRUE(first) << first.error().message;
  EXPECT_EQ(first->word, PeerWord::kGet);
  EXPECT_EQ(first->rank, 7u);
  EXPECT_EQ(first->offset, 1ull << 40);
  EXPECT_EQ(first->length, 12u);
  EXPECT_EQ(first->digest, (Digest{3, 4}));
  EXPECT_EQ(first->text, frame.text);
  EXPECT_EQ(this->Next(*this->far_)->word, PeerWord::kList);
}

TYPED_TEST_P(PeerTransportSuite, APayloadOfSpansIsOneRangeThere) {
  std::string bytes(kMaxPeerPayload, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 >> 3);
  const auto all = std::as_bytes(std::span(bytes));
  const std::vector<std::span<const std::byte>> spans{all.first(5), all.subspan(5, 0),
                                                      all.subspan(5)};
  auto sent = std::async(std::launch::async,
                         [&] { return this->near_->Send({.word = PeerWord::kBytes}, spans); });
  const auto frame = this->Next(*this->far_);
  ASSERT_TRUE(frame);
  ASSERT_EQ(frame->payload_bytes, bytes.size());
  std::string got(bytes.size(), '?');
  const auto out = std::as_writable_bytes(std::span(got));
  ASSERT_TRUE(this->far_->ReceivePayload(out.first(1000)));
  ASSERT_TRUE(this->far_->ReceivePayload(out.subspan(1000)));
  EXPECT_TRUE(sent.get());
  EXPECT_EQ(got, bytes);
}

TYPED_TEST_P(PeerTransportSuite, ATextThatIsTooLongIsRefused) {
  PeerFrame frame{.word = PeerWord::kHello};
  frame.text = std::string(300, 'x');
  ASSERT_TRUE(this->near_->Send(frame, {}));
  const auto got = this->far_->Receive(256, this->kWait);
  ASSERT_FALSE(got);
  EXPECT_EQ(got.error().code, ErrorCode::kInvalid);
}

TYPED_TEST_P(PeerTransportSuite, APeerThatLeavesIsTold) {
  this->near_.reset();
  const auto got = this->Next(*this->far_);
  ASSERT_FALSE(got);
  EXPECT_EQ(got.error().code, ErrorCode::kNotFound);
}

TYPED_TEST_P(PeerTransportSuite, ASilentPeerIsNotWaitedForForEver) {
  const auto got = this->far_->Receive(256, std::chrono::milliseconds(10));
  ASSERT_FALSE(got);
  EXPECT_EQ(got.error().code, ErrorCode::kIo);
  // One that does not read either.
  std::string bytes(kMaxPeerPayload, 'b');
  const std::span<const std::byte> payload = std::as_bytes(std::span(bytes));
  Status sent;
  for (int i = 0; i < 1000 && sent; ++i) {
    sent = this->near_->Send({.word = PeerWord::kChunk}, std::span(&payload, 1));
  }
  EXPECT_FALSE(sent);
}

TYPED_TEST_P(PeerTransportSuite, CloseEndsWhoWaits) {
  auto waiting = std::async(std::launch::async, [&] { return this->Next(*this->far_); });
  this->far_->Close();
  EXPECT_FALSE(waiting.get());
  auto accepting = std::async(std::launch::async, [&] { return this->listener_->Accept(); });
  this->listener_->Close();
  const auto accepted = accepting.get();
  ASSERT_FALSE(accepted);
  EXPECT_EQ(accepted.error().code, ErrorCode::kNotFound);
}

REGISTER_TYPED_TEST_SUITE_P(PeerTransportSuite, FramesComeWholeAndInOrder,
                            APayloadOfSpansIsOneRangeThere, ATextThatIsTooLongIsRefused,
                            APeerThatLeavesIsTold, ASilentPeerIsNotWaitedForForEver,
                            CloseEndsWhoWaits);

}  // namespace ckptfs
