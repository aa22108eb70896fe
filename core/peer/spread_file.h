// SPDX-License-Identifier: Apache-2.0
//
// SpreadFile is one rank's file whose owner gives it to other nodes:
//
//   whole ---Cut---> cut ---sent to all---> complete ---KeepUnit---> its own unit alone
//
// A file that is not cut (StripeShape::cuts) stays whole on the own shelf.  One that is cut goes
// from there once others hold its units; what is sent later is calculated from these.
//
// Thread safety: one thread at a time.
// Lifetime: the shelf must outlive it; what is shelved stays there until LetGo.
// Units: bytes.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "core/base/result.h"
#include "core/peer/held_file.h"
#include "core/peer/peer_client.h"
#include "core/peer/peer_shelf.h"

namespace ckptfs {

class SpreadFile {
 public:
  SpreadFile(PeerShelf& shelf, PeerShelf::FilePtr whole);

  uint32_t rank() const { return record_.rank().rank; }
  const std::optional<StripeShape>& shape() const { return shape_; }
  // The units that other nodes hold, one each.
  const std::map<Digest, uint32_t>& holders() const { return holders_; }

  // True while the whole file is here, so that it may be cut, or cut anew.
  bool MayBeCut() const { return whole_ != nullptr; }
  // Decides the shape, and digests the parity.  What others hold by another shape is none of it.
  // REQUIRES: MayBeCut().  BLOCKS: on reading it.
  void Cut(const StripeShape& shape);
  // Units that none of these other nodes holds.  REQUIRES: it has a shape; so do all below.
  std::set<uint32_t> Missing(const std::set<Digest>& nodes) const;
  // Gives a node a unit.  `ask`: PeerPool::Ask.  BLOCKS: on the network.
  Status Send(uint32_t unit, const Digest& node, const HeldFile::AskNode& ask,
              const std::function<bool(uint64_t bytes)>& paced);
  // The node has lost its unit.
  void Forget(const Digest& node) { holders_.erase(node); }
  // Leaves the own unit alone on the shelf, or the whole file while there is no room for both.
  // REQUIRES: others hold the other units.
  Status KeepUnit();
  // All nodes know that it is protected; so does the own shelf.
  void Protect();
  // The own shelf has no need of it any more.
  void LetGo();

 private:
  UnitRecord RecordOf(uint32_t unit) const;
  // Fills `out` with a unit's chunk from the whole file.
  void ChunkOf(uint32_t unit, uint64_t row, std::span<std::byte> out) const;
  std::span<const std::byte> FileChunk(uint32_t unit, uint64_t row) const;
  // Where a unit's bytes come from.  `room` holds a chunk.
  PeerClient::Source SourceOf(uint32_t unit, const HeldFile::AskNode& ask,
                              std::vector<std::byte>& room) const;

  PeerShelf& shelf_;
  PeerShelf::FilePtr whole_;  // null: units alone are left
  UnitRecord record_;
  std::optional<StripeShape> shape_;
  std::optional<StripeCode> code_;  // of one that is cut
  std::map<Digest, uint32_t> holders_;
};

}  // namespace ckptfs
