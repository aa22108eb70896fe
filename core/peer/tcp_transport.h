// SPDX-License-Identifier: Apache-2.0
//
// TcpTransport sends frames over TCP.  An address names one interface of this machine, so that
// traffic never takes another network than the one that was meant:
//
//   address = host [":" port]       a name, an IPv4 address, or an IPv6 one in brackets
//
// Links that are made here leave from the interface of `from`, if it is given.
//
// Thread safety, lifetime: as of peer_transport.h.
// Units: times without any progress.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/peer/peer_transport.h"

namespace ckptfs {

struct TcpAddress {
  std::string host;
  uint16_t port = 0;  // 0: any that is free
};
// kInvalid with the rule.
Result<TcpAddress> ParseTcpAddress(std::string_view text);

class TcpTransport final : public PeerTransport {
 public:
  struct Options {
    std::string from = {};                       // host of the interface; empty: any
    std::chrono::milliseconds patience{10'000};  // without progress
  };
  TcpTransport();
  explicit TcpTransport(Options options) : options_(std::move(options)) {}

  Result<std::unique_ptr<PeerLink>> Connect(const std::string& address) override;
  // Refuses an address that stands for all interfaces.
  Result<std::unique_ptr<PeerListener>> Listen(const std::string& address) override;

 private:
  const Options options_;
};

}  // namespace ckptfs
