// SPDX-License-Identifier: Apache-2.0
//
// The frames that daemons of several machines send each other, and the texts in them.
//
//   frame = magic (4) | word (4) | rank (4) | slot (4) | offset (8) | length (8) | digest (16)
//           | text bytes (4) | payload bytes (4) | check (8)
//           | text | payload
//
// Numbers are little-endian; check is XXH3-64 of the 56 bytes before it and the text.  A
// link begins with a greeting (peer_keys.h).  From then on who connected asks and the other
// one answers, a question at a time:
//
//   offer(text: RenderUnit)                        held | wanted | refused(text)
//     after `wanted`: chunk(offset) + payload ...  held(digest) | refused(text)
//   protect(rank, slot; text: directory)           done: its owner says that it is protected
//   let_go(rank, slot; text: directory)            done: its owner needs it no more
//   list                                           parts(text: RenderShelved)
//   describe(rank, slot; text: directory)          part(text: RenderUnit) | refused
//   get(rank, slot, offset, length; text: directory)   bytes + payload | refused
//   spooled(text: run)                             parts: what lies in the daemon's spool
//   show(text: run)                                shown(text: RenderShown: each step with the
//                                                  run, job, attempt and life of its save)
//
// A slot is what of a rank's file is meant: StripeShape::SlotOf (parity.h).
//
// Thread safety: pure functions.
// Inputs are hostile: every number is checked before it is used.
// Units: bytes.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/peer/parity.h"
#include "core/records/commit_records.h"

namespace ckptfs {

inline constexpr size_t kPeerFrameBytes = 64;
inline constexpr uint64_t kMaxPeerPayload = uint64_t{1} << 20;
inline constexpr uint64_t kMaxPeerText = uint64_t{16} << 20;  // from a peer that has the key
inline constexpr uint64_t kMaxGreetingText = 256;             // from anybody

// The numbers are spoken between machines: append only.
enum class PeerWord : uint32_t {
  kHello = 1,
  kChallenge = 2,
  kProof = 3,
  kWelcome = 4,
  kRefused = 5,
  kOffer = 6,
  kWanted = 7,
  kChunk = 8,
  kHeld = 9,
  kProtect = 10,
  kLetGo = 11,
  kDone = 12,
  kList = 13,
  kParts = 14,
  kDescribe = 15,
  kPart = 16,
  kGet = 17,
  kBytes = 18,
  kShow = 19,
  kShown = 20,
  kSpooled = 21,
};

struct PeerFrame {
  PeerWord word = PeerWord::kRefused;
  uint32_t rank = 0;
  uint32_t slot = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  Digest digest = {};
  std::string text = {};
  uint64_t payload_bytes = 0;
};

// Returns the frame's first kPeerFrameBytes; its text and payload follow.
// REQUIRES: the text and the payload are within their bounds.
std::array<std::byte, kPeerFrameBytes> EncodePeerFrame(const PeerFrame& frame);
// Returns the frame without its text, and how long that is.  kInvalid for what is not one, or is
// longer than `max_text`.
struct PeerHeader {
  PeerFrame frame;
  uint64_t text_bytes = 0;
  uint64_t check = 0;
};
Result<PeerHeader> DecodePeerHeader(std::span<const std::byte, kPeerFrameBytes> bytes,
                                    uint64_t max_text);
// kDataLoss if the frame with its text is not what was sent.
Status CheckPeerFrame(const PeerHeader& header, std::span<const std::byte, kPeerFrameBytes> bytes,
                      std::string_view text);

// A rank's file, or one unit of it, as its owner describes it to those who hold it.
struct UnitRecord {
  PreparedPart part;  // with one rank: the whole file's
  // The shape's data is 1 for a whole file; then the others are as they are here.
  StripeShape shape;
  uint32_t unit = 0;
  std::vector<Digest> parity_chunks = {};  // of each row of parity unit 0, then of unit 1 ...

  // True if it describes the same bytes.  REQUIRES: they are of one save.
  bool IsOf(const UnitRecord& other) const {
    return rank() == other.rank() && shape == other.shape && unit == other.unit &&
           parity_chunks == other.parity_chunks;
  }

  const PreparedRank& rank() const { return part.ranks.front(); }
  uint32_t slot() const { return shape.SlotOf(unit); }
  // These two are of the unit.
  uint64_t bytes() const { return shape.UnitBytes(unit, rank().bytes); }
  std::vector<Digest> chunks() const;
  Digest ChunkOf(uint32_t of_unit, uint64_t row) const;
};
std::string RenderUnit(const UnitRecord& record);
// The same rules as for a part's record of the store.
Result<UnitRecord> ParseUnit(std::string_view text);

// The states of a rank's file on a shelf.
enum class ShelvedState : uint32_t {
  kHeld = 1,       // whole; its digests were checked
  kProtected = 2,  // its owner knows that as many nodes hold it as the scheme says
};

// A rank's file, or a unit of one, that a daemon holds in memory, as it tells others.
struct ShelvedPart {
  AttemptName name;
  uint64_t step = 0;
  uint32_t world = 0;
  int64_t mtime_ns = 0;  // of the save; rank 0's is the step's
  uint32_t rank = 0;
  uint64_t bytes = 0;  // of the whole file
  Digest chunks = {};  // DigestOfChunks of the whole file's
  ShelvedState state = ShelvedState::kHeld;
  StripeShape shape;  // UnitRecord's
  uint32_t unit = 0;
  Digest parity_chunks = {};  // DigestOfChunks; zero for a whole file
  bool operator==(const ShelvedPart&) const = default;

  uint32_t slot() const { return shape.SlotOf(unit); }
  // PreparedPart::Directory of the save.
  std::string Directory() const;
};
ShelvedPart ShelvedOf(const UnitRecord& record, ShelvedState state);

std::string RenderShelved(const std::vector<ShelvedPart>& parts);
Result<std::vector<ShelvedPart>> ParseShelved(std::string_view text);

// A step that a daemon's mount shows from memory.
struct ShownMemoryStep {
  AttemptName name;
  std::string id;  // /run/<run>/memory/<id>
  Digest manifest;
  std::string directory;  // PreparedPart::Directory of its save
  int64_t mtime_ns = 0;
  uint64_t step = 0;
  bool operator==(const ShownMemoryStep&) const = default;
};
std::string RenderShown(const std::vector<ShownMemoryStep>& steps);
Result<std::vector<ShownMemoryStep>> ParseShown(std::string_view text);

}  // namespace ckptfs
