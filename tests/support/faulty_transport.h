// SPDX-License-Identifier: Apache-2.0
//
// FaultyTransport is a PeerTransport over another one whose links fail at the n-th call, are
// late, or change a byte of what is sent.
//
// Thread safety: as the transport below; faults are set before or between calls.

#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/peer/peer_transport.h"

namespace ckptfs {

struct LinkFaults {
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> fail_at{-1};        // the call that fails, counted from 0, and all after it
  std::atomic<int64_t> flip_at{-1};        // the payload byte sent that is changed, counted from 0
  std::atomic<int64_t> sent{0};            // payload bytes
  std::atomic<int64_t> flip_received{-1};  // the payload byte received that is changed
  std::atomic<int64_t> received{0};
  std::atomic<int> late_ms{0};  // before each call

  Status Call() {
    if (late_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(late_ms));
    const int64_t call = calls++;
    if (fail_at < 0 || call < fail_at) return {};
    return Fail(ErrorCode::kIo, "the link was made to fail");
  }
};

class FaultyTransport final : public PeerTransport {
 public:
  FaultyTransport(PeerTransport& below, std::shared_ptr<LinkFaults> faults)
      : below_(below), faults_(std::move(faults)) {}

  Result<std::unique_ptr<PeerLink>> Connect(const std::string& address) override {
    CKPT_RETURN_IF_ERROR(faults_->Call());
    CKPT_ASSIGN_OR_RETURN(auto link, below_.Connect(address));
    return std::make_unique<Link>(std::move(link), faults_);
  }
  Result<std::unique_ptr<PeerListener>> Listen(const std::string& address) override {
    return below_.Listen(address);
  }

 private:
  class Link final : public PeerLink {
   public:
    Link(std::unique_ptr<PeerLink> below, std::shared_ptr<LinkFaults> faults)
        : below_(std::move(below)), faults_(std::move(faults)) {}
    Status Send(PeerFrame frame, PeerSpans payload) override {
      if (auto status = faults_->Call(); !status) {
        below_->Close();
        return status;
      }
      std::vector<std::byte> bytes;
      for (const auto& span : payload) bytes.insert(bytes.end(), span.begin(), span.end());
      const int64_t flip = faults_->flip_at - faults_->sent;
      if (flip >= 0 && flip < static_cast<int64_t>(bytes.size())) bytes[flip] ^= std::byte{4};
      faults_->sent += static_cast<int64_t>(bytes.size());
      const std::span<const std::byte> all(bytes);
      return below_->Send(std::move(frame), std::span(&all, 1));
    }
    Result<PeerFrame> Receive(uint64_t max_text, std::chrono::milliseconds wait) override {
      CKPT_RETURN_IF_ERROR(faults_->Call());
      return below_->Receive(max_text, wait);
    }
    Status ReceivePayload(std::span<std::byte> out) override {
      CKPT_RETURN_IF_ERROR(faults_->Call());
      CKPT_RETURN_IF_ERROR(below_->ReceivePayload(out));
      const int64_t flip = faults_->flip_received - faults_->received;
      if (flip >= 0 && flip < static_cast<int64_t>(out.size())) out[flip] ^= std::byte{4};
      faults_->received += static_cast<int64_t>(out.size());
      return {};
    }
    void Close() override { below_->Close(); }
    std::string about() const override { return below_->about(); }

   private:
    const std::unique_ptr<PeerLink> below_;
    const std::shared_ptr<LinkFaults> faults_;
  };

  PeerTransport& below_;
  const std::shared_ptr<LinkFaults> faults_;
};

}  // namespace ckptfs
