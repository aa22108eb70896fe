// SPDX-License-Identifier: Apache-2.0
//
// How two daemons of one store prove to each other that they are: both can read the store's
// key.  The key is 32 random bytes in keys/peers, published if it is absent; only the store's
// owner may read it.  A greeting proves both sides by HMAC-SHA256 over fresh random numbers of
// both, their nodes, and which of them connected:
//
//   hello      digest = the node that connects; text = its 32 random bytes | store (16)
//   challenge  digest = the node that answers;  text = its 32 random bytes | its proof (32)
//   proof                                       text = the proof of who connected (32)
//   welcome | refused(text)
//   proof = HMAC-SHA256(key, "ckptfs peer 1 " | role | both random texts | both nodes | store)
//
// The greeting says who is there.  It does not hide or sign what is sent afterwards: tensors
// are checked by digests, and a network that strangers can write to needs a tunnel of the site's.
//
// Thread safety: pure functions, but for the store's key.

#pragma once

#include <array>
#include <chrono>
#include <cstddef>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/io/root.h"
#include "core/peer/peer_transport.h"

namespace ckptfs {

inline constexpr std::string_view kPeerKeyName = "keys/peers";

struct PeerKey {
  std::array<std::byte, 32> bytes{};
};

// The store's key, which is made if there is none.  kPermission if others than its owner may read
// it; kDataLoss if it is damaged.  BLOCKS: on the store.
Result<PeerKey> StorePeerKey(Storage& storage);

// A whole greeting is over in that time, however its bytes come.
inline constexpr std::chrono::seconds kGreetingTime{10};

// One side of a greeting.
struct PeerIdentity {
  PeerKey key;
  Digest node;   // the random digest of this daemon's life
  Digest store;  // of its `format` record: which store it is
};

// The greeting of who connected; returns the node that answered.  kPermission if that does not
// have the key, or refuses us.  BLOCKS: on the network.
Result<Digest> GreetPeer(PeerLink& link, const PeerIdentity& self);
// The greeting of who answers; returns the node that connected.  A stranger is told nothing
// but that it is refused.  BLOCKS: on the network.
Result<Digest> AnswerPeer(PeerLink& link, const PeerIdentity& self,
                          std::chrono::milliseconds time = kGreetingTime);

}  // namespace ckptfs
