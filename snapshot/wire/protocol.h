// SPDX-License-Identifier: Apache-2.0
//
// How a trainer's rank hands a snapshot to the daemon of a store: messages on a Unix
// seqpacket socket, bytes in an arena (arena.h).
//
//   rank   -> daemon  hello(rank, world, length = bytes of a snapshot,
//                           sequence = for how many there shall be room,
//                           attempt = a random number of this rank's life, text = run LF job,
//                           chunk = 1 + the NUMA node that it runs on; 0: not known,
//                           step = the attempt that it wants to save; 0: not known)
//                   | return(rank, world, length = bytes of a chunk, sequence = chunks,
//                            attempt, text = as above,
//                            step = 1: for a rank, which may come itself later)
//                     + descriptor                              of an arena of before
//   daemon -> rank    welcome(length = bytes of a chunk, sequence = chunks) + descriptor
//                   | refused(text, sequence = 1: for now)     and the end
//   rank   -> daemon  begin(step, attempt, length = bytes of the rank's file,
//                           sequence = 1: the rank had to wait for free chunks,
//                           chunk = 1: said before, to another daemon)
//                     chunk(attempt, sequence, chunk) *        in order, without gaps
//                     end(attempt,                             none of it has changed, but for
//                         length = bytes)                      these, of which it is not known
//                     drop(step, attempt, text = why,          instead, at any time
//                          sequence = 1: there were too few free chunks)
//                     ask(step, attempt, text = where)         what became of it?  Asked if
//                                                              an earlier daemon has it on a disk
//   daemon -> rank    free(chunk,                              the rank's again
//                          sequence = 1: what it holds is on a disk of this node,
//                          text = where)
//                     durable(step, attempt,                   its files lie in `text`,
//                             text = where)                    below the store's blobs;
//                                                              empty: nobody knows
//                   | dropped(step, attempt, text = why,
//                             sequence = 1: the ranks are in different turns, go on in this one)
//
// All chunks are the rank's at first; one is the daemon's from `chunk` until
// `free`.  A rank that returns to a daemon that came after another repeats what
// is not durable, from `begin` on; the welcome then has no descriptor.  It does
// not repeat what is on a disk, but asks.  The bytes of a rank's file
// (core/state/rank_file.h) fill the payloads one after the other, all but the
// last to the end.  A rank that goes away after `end` has done its part.  The
// job is a text that all ranks of one life of a training job share.  A text that
// begins with kOwnJob was made for one life alone.  The daemon believes that of
// any other text only if nothing that it sees speaks against it (job_lives.h).
//
// Thread safety: sends of different threads do not mix.
// Units: bytes.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/digest.h"
#include "core/base/result.h"

namespace ckptfs {

inline constexpr uint32_t kSnapshotProtocol = 1;
inline constexpr size_t kMaxSnapshotText = 1024;
inline constexpr uint32_t kMaxSnapshotWorld = 1u << 20;
inline constexpr std::string_view kOwnJob = "own:";

// The numbers are spoken between processes: append only.
enum class SnapshotWord : uint32_t {
  kHello = 1,
  kWelcome = 2,
  kRefused = 3,
  kBegin = 4,
  kChunk = 5,
  kEnd = 6,
  kDrop = 7,
  kFree = 8,
  kDurable = 9,
  kDropped = 10,
  kReturn = 11,
  kAsk = 12,
};

struct SnapshotMessage {
  SnapshotWord word = SnapshotWord::kHello;
  uint32_t rank = 0;
  uint32_t world = 0;
  uint64_t step = 0;
  uint64_t attempt = 0;
  uint64_t sequence = 0;
  uint64_t chunk = 0;
  uint64_t length = 0;
  std::string text = {};  // cut to kMaxSnapshotText when it is sent
};

// The number of a rank's save after `last` (0: none).  It is made of the step, which all ranks
// have, not of how many saves there were: a rank that misses one, or saves a step again alone, is
// with the others at its next.  A step before the last one begins another turn, and so does one
// that is saved for the 65th time; a rank that did so alone is in a turn of its own until the
// daemon says so.
uint64_t NextAttempt(uint64_t last, uint64_t step);
// Returns the step that the number was made of; for steps near 2^64 another one.
uint64_t StepOf(uint64_t attempt);
// Returns how often a rank went back before this number.
uint64_t TurnOf(uint64_t attempt);
// Returns the numbers that a step's saves have in a turn, rising.
std::vector<uint64_t> AttemptsOf(uint64_t turn, uint64_t step);
// Returns `last` as a rank in the turn of `attempt` has it, unless its own turn is later.
uint64_t InTurnOf(uint64_t attempt, uint64_t last);

// Returns the digest by which a chunk's header must name its owner.
Digest StreamOf(std::string_view run, std::string_view job);

// Returns the whole message as it is sent.
std::string EncodeSnapshotMessage(const SnapshotMessage& message);
// kInvalid for what is not a message of this protocol.
Result<SnapshotMessage> DecodeSnapshotMessage(std::string_view bytes);

// `passed`: a descriptor that goes along; -1: none.  kExhausted if it would block and it or
// the socket does not, or the socket's time is over.
enum class Full { kWait, kFail };
Status SendSnapshotMessage(int socket, const SnapshotMessage& message, int passed = -1,
                           Full full = Full::kWait);

struct Incoming {
  enum class Kind { kMessage, kNothing, kClosed };
  Kind kind = Kind::kNothing;  // kNothing: the socket does not block, or its time is over
  SnapshotMessage message;
  Descriptor passed;  // only if it was asked for
};

// kInvalid for what is not a message of this protocol.  Descriptors that come along
// unasked are closed; two that come where one is asked for are kInvalid, and closed, too.
Result<Incoming> ReceiveSnapshotMessage(int socket, bool descriptor = false);

// The socket of the daemon that receives snapshots for `store` (absolute).
Result<std::string> SnapshotSocketPath(std::string_view store, bool create);
// Identifies the socket of the store's daemon; another daemon has another one.  0: none.
uint64_t SnapshotDoorOf(const std::string& store);
// kNotFound if there is no daemon.
Result<Descriptor> ConnectForSnapshots(std::string_view store);

}  // namespace ckptfs
