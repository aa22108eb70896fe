// SPDX-License-Identifier: Apache-2.0
//
// PeerClient asks one peer, a question at a time (peer_protocol.h).
//
// Thread safety: one thread at a time; Close by any.
// Lifetime: independent of the transport.
// Units: bytes; a rate is bytes a second.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/peer/peer_keys.h"
#include "core/peer/peer_protocol.h"
#include "core/peer/peer_transport.h"

namespace ckptfs {

class PeerClient {
 public:
  // kPermission if who answers does not have the store's key, or is not `node`.
  static Result<std::unique_ptr<PeerClient>> Connect(PeerTransport& transport,
                                                     const std::string& address, const Digest& node,
                                                     const PeerIdentity& self);

  // Returns the bytes from `at` on that are sent next, at most kMaxPeerPayload of them; they are
  // used until it is called again.
  using Source = std::function<Result<std::span<const std::byte>>(uint64_t at)>;
  // Gives the peer a rank's file or a unit of one.  Success: the peer holds it, and its digest of
  // what came is that of the record.  `paced` is called after each piece with its bytes; false ends
  // it.  kExhausted if the peer has no room.
  Status Offer(const UnitRecord& record, const Source& source,
               const std::function<bool(uint64_t bytes)>& paced);
  Status Protect(std::string_view directory, uint32_t rank, uint32_t slot);
  Status LetGo(std::string_view directory, uint32_t rank, uint32_t slot);
  Result<std::vector<ShelvedPart>> List();
  // The record of what the peer holds there.
  Result<UnitRecord> Describe(std::string_view directory, uint32_t rank, uint32_t slot);
  // Fills `out`, at most kMaxPeerPayload.  The bytes are what the peer says: the caller checks
  // their digests.
  Status Get(std::string_view directory, uint32_t rank, uint32_t slot, uint64_t offset,
             std::span<std::byte> out);
  // Has the peer look what its mount can show of a run from memory.
  Result<std::vector<ShownMemoryStep>> Show(std::string_view run);
  // Files of a run that lie in its spool.
  Result<std::vector<ShelvedPart>> Spooled(std::string_view run);

  // True if the link is of no use any more; a peer that refuses something does not break it.
  bool broken() const { return broken_; }
  void Close() { link_->Close(); }
  std::string about() const { return link_->about(); }

 private:
  explicit PeerClient(std::unique_ptr<PeerLink> link) : link_(std::move(link)) {}
  Result<PeerFrame> Ask(PeerFrame question, PeerWord answer);
  Status SendBytes(const Source& source, uint64_t bytes,
                   const std::function<bool(uint64_t bytes)>& paced);
  Result<PeerFrame> Answer(PeerWord question, PeerWord expected, PeerWord other);
  Status Fails(Status status);

  const std::unique_ptr<PeerLink> link_;
  bool broken_ = false;
};

}  // namespace ckptfs
