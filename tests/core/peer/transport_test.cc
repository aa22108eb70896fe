// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include "core/peer/tcp_transport.h"
#include "tests/conformance/peer_transport_suite.h"
#include "tests/support/faulty_transport.h"

namespace ckptfs {
namespace {

TcpTransport::Options Quick() {
  return {.from = "127.0.0.1", .patience = std::chrono::milliseconds(300)};
}

class TcpFixture {
 public:
  PeerTransport& transport() { return tcp_; }
  std::string address() const { return "127.0.0.1"; }

 private:
  TcpTransport tcp_{Quick()};
};

class FaultyFixture {
 public:
  PeerTransport& transport() { return faulty_; }
  std::string address() const { return "127.0.0.1:0"; }

 private:
  TcpTransport tcp_{Quick()};
  FaultyTransport faulty_{tcp_, std::make_shared<LinkFaults>()};
};

INSTANTIATE_TYPED_TEST_SUITE_P(Tcp, PeerTransportSuite, TcpFixture);
INSTANTIATE_TYPED_TEST_SUITE_P(Faulty, PeerTransportSuite, FaultyFixture);

TEST(TcpAddress, IsHostAndPort) {
  EXPECT_EQ(ParseTcpAddress("10.0.0.1:7000")->port, 7000);
  EXPECT_EQ(ParseTcpAddress("node7")->host, "node7");
  EXPECT_EQ(ParseTcpAddress("[fe80::1]:9")->host, "fe80::1");
  EXPECT_EQ(ParseTcpAddress("[::1]")->port, 0);
  for (const char* wrong : {"", ":7", "a:", "a:b", "a:70000", "a:1:2", "[::1", "[::1]x", "::1"}) {
    EXPECT_FALSE(ParseTcpAddress(wrong)) << wrong;
  }
}

TEST(TcpTransport, AnAddressOfAllInterfacesIsRefused) {
  TcpTransport tcp;
  for (const char* all : {"0.0.0.0:0", "[::]:0"}) {
    const auto listener = tcp.Listen(all);
    ASSERT_FALSE(listener) << all;
    EXPECT_NE(listener.error().message.find("all interfaces"), std::string::npos)
        << listener.error().message;
  }
}

}  // namespace
}  // namespace ckptfs
