// SPDX-License-Identifier: Apache-2.0
//
// PeerTransport is the seam over how frames get to another machine's daemon: TCP, and later
// what moves memory by itself.  A PeerLink is one connection.
//
// Rules for all: a frame arrives whole, once and in order, or the link has failed for good; a
// peer that is slow makes a call fail after a bounded time without progress, never wait for
// ever; Close makes every call of another thread fail soon.
//
// Thread safety: Send by one thread and Receive by one thread at a time; Close and about() by any.
// Lifetime: links and listeners are independent of the transport that made them.
// Units: bytes.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/base/result.h"
#include "core/peer/peer_protocol.h"

namespace ckptfs {

using PeerSpans = std::span<const std::span<const std::byte>>;

class PeerLink {
 public:
  virtual ~PeerLink() = default;
  // Sends the frame with that payload, whose size it fills in.
  // REQUIRES: the payload is within kMaxPeerPayload.  BLOCKS: on the network.
  virtual Status Send(PeerFrame frame, PeerSpans payload) = 0;
  // Returns the next frame.  Its payload, if it has one, is to be taken by ReceivePayload before
  // the next call.  kInvalid for what is not a frame, or has a text longer than `max_text`;
  // kNotFound if the peer has left between two frames, as for Send; kIo if none begins within
  // `wait`.
  // BLOCKS: on the network.
  virtual Result<PeerFrame> Receive(uint64_t max_text, std::chrono::milliseconds wait) = 0;
  // Takes the next bytes of the payload.  BLOCKS: on the network.
  virtual Status ReceivePayload(std::span<std::byte> out) = 0;
  // From then on no call waits any more; without a time each call has its own bounds alone.
  virtual void EndBy(std::optional<std::chrono::steady_clock::time_point> /*end*/) {}
  virtual void Close() = 0;
  // "10.0.0.1:7000 -> 10.0.0.2:7000", for people.
  virtual std::string about() const = 0;
};

class PeerListener {
 public:
  virtual ~PeerListener() = default;
  // kNotFound once it was closed.  BLOCKS: until a peer connects.
  virtual Result<std::unique_ptr<PeerLink>> Accept() = 0;
  virtual void Close() = 0;
  // The address at which peers reach it.
  virtual std::string address() const = 0;
};

class PeerTransport {
 public:
  virtual ~PeerTransport() = default;
  virtual Result<std::unique_ptr<PeerLink>> Connect(const std::string& address) = 0;
  // kInvalid if peers could not be told the address.
  virtual Result<std::unique_ptr<PeerListener>> Listen(const std::string& address) = 0;
};

}  // namespace ckptfs
