// SPDX-License-Identifier: Apache-2.0
//
// Parts, keys and servers for tests of peers.

#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "core/blob/chunk_digests.h"
#include "core/peer/peer_client.h"
#include "core/peer/peer_server.h"
#include "core/peer/peer_shelf.h"
#include "core/peer/tcp_transport.h"

namespace ckptfs {

inline std::string BytesOfSeed(uint64_t seed, size_t count) {
  std::string bytes(count, '\0');
  for (size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<char>((i * 2654435761u + seed * 97) >> 7);
  return bytes;
}

inline PreparedPart PartOf(const std::string& bytes, uint32_t rank = 0, uint64_t attempt = 1,
                           uint32_t world = 4, int64_t mtime_ns = 1000) {
  return {{"run", "job", attempt, Digest{1, 2}},
          attempt,
          world,
          mtime_ns,
          {{rank, bytes.size(), ChunkDigestsOf(bytes)}}};
}

// Shelves a file; the test fails if it cannot be.
inline PeerShelf::FilePtr Put(PeerShelf& shelf, const std::string& bytes,
                              const PreparedPart& part) {
  auto file = shelf.Begin({part, {}, 0});
  EXPECT_TRUE(file) << file.error().message;
  const auto room = (*file)->room();
  std::copy_n(std::as_bytes(std::span(bytes)).begin(), bytes.size(), room.begin());
  const Status shelved = shelf.Shelve(*std::move(file));
  EXPECT_TRUE(shelved) << shelved.error().message;
  return shelf.Find(part.Directory(), part.ranks.front().rank);
}

// Bytes of a shelved file, as Offer takes them.
inline PeerClient::Source SourceOf(const PeerShelf::FilePtr& file) {
  return [file](uint64_t at) -> Result<std::span<const std::byte>> {
    const auto rest = file->bytes().subspan(at);
    return rest.first(std::min<size_t>(rest.size(), kMaxPeerPayload));
  };
}
inline Status OfferTo(PeerClient& client, const PeerShelf::FilePtr& file) {
  return client.Offer(file->record(), SourceOf(file), {});
}

inline PeerIdentity IdentityOf(uint64_t node) {
  PeerIdentity self;
  self.key.bytes.fill(std::byte{7});
  self.node = {node, node};
  self.store = {5, 5};
  return self;
}

// A daemon's end: a shelf, and a server over TCP.
struct ServedShelf {
  explicit ServedShelf(PeerIdentity self, uint64_t budget = uint64_t{64} << 20,
                       PeerServerOptions options = {})
      : shelf(budget), identity(self) {
    auto listener = tcp.Listen("127.0.0.1");
    EXPECT_TRUE(listener) << listener.error().message;
    options.self = self;
    options.shelf = &shelf;
    server = std::make_unique<PeerServer>(*std::move(listener), std::move(options));
  }
  Result<std::unique_ptr<PeerClient>> Connect(const PeerIdentity& from,
                                              PeerTransport* by = nullptr) {
    return PeerClient::Connect(by != nullptr ? *by : tcp, server->address(), identity.node, from);
  }
  TcpTransport tcp{{.patience = std::chrono::milliseconds(2000)}};
  PeerShelf shelf;
  PeerIdentity identity;
  std::unique_ptr<PeerServer> server;
};

}  // namespace ckptfs
