// SPDX-License-Identifier: Apache-2.0
//
// An arena is the memory through which a trainer hands its bytes to the daemon: a
// memfd that the daemon makes, sealed against shrinking and growing, cut into
// chunks.
//
//   arena = chunk * chunks
//   chunk = header page (ChunkHeader, then unused) | payload
//
// A chunk belongs to one side at a time (protocol.h says how it changes hands); only
// its owner touches it.  The trainer can write all of it at any time nevertheless:
// so the daemon copies a header before it checks it, and believes no payload
// before its digest.
//
// Thread safety: const methods may be called concurrently, others on different chunks.
// Lifetime: mappings outlive the descriptor.
// Units: bytes; numbers in headers are of this machine's order.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "core/base/descriptor.h"
#include "core/base/digest.h"
#include "core/base/file_lock.h"
#include "core/base/result.h"
#include "core/io/file.h"

namespace ckptfs {

inline constexpr uint64_t kArenaPage = 4096;
inline constexpr uint64_t kArenaChunkBytes = uint64_t{16} << 20;

struct ArenaShape {
  uint64_t chunk_bytes = kArenaChunkBytes;  // a multiple of kArenaPage, at least two of them
  uint32_t chunks = 0;

  uint64_t payload_bytes() const { return chunk_bytes - kArenaPage; }
  uint64_t bytes() const { return chunk_bytes * chunks; }
  uint64_t ChunksFor(uint64_t payload) const {
    return payload / payload_bytes() + (payload % payload_bytes() != 0 ? 1 : 0);
  }
  bool operator==(const ArenaShape&) const = default;
};

// kInvalid names the rule.
Status CheckArenaShape(const ArenaShape& shape);

// The header of a chunk describes it, so that an arena can be read without anything else.
struct ChunkHeader {
  uint64_t magic = 0;
  uint32_t version = 0;
  uint32_t rank = 0;
  Digest stream;  // StreamOf: which job's
  uint64_t step = 0;
  uint64_t attempt = 0;   // NextAttempt
  uint64_t sequence = 0;  // of the chunks of one attempt, from 0
  uint64_t length = 0;    // of the payload that is used
  Digest payload;         // of these bytes
  Digest check;           // of all the fields before
  bool operator==(const ChunkHeader&) const = default;
};

// Returns the header with magic, version and check filled in.
ChunkHeader SealedHeader(ChunkHeader header);
// kInvalid unless the header is of this version and undamaged, and its length fits.
Status CheckChunkHeader(const ChunkHeader& header, const ArenaShape& shape);

struct ArenaMemory {
  Descriptor descriptor;    // sealed; readable and writable by whoever has it
  uint64_t huge_bytes = 0;  // in huge pages; the rest is in small ones
};

// Makes new memory, all of it allocated, in huge pages where the kernel gives them.  It is on
// that NUMA node as long as the node has some.  Any number is taken: one without a node has no
// effect.  kExhausted if there is no memory, kIo soon after `ends` (may be null) became true.
// BLOCKS: on the kernel, seconds for gigabytes.
Result<ArenaMemory> MakeArena(const ArenaShape& shape, std::optional<uint64_t> node = std::nullopt,
                              const std::atomic<bool>* ends = nullptr);

// kInvalid unless the descriptor is a memory file of this shape that nobody can cut.
Status CheckArenaMemory(int descriptor, const ArenaShape& shape);

// Takes the mark of the one daemon that reads an arena; the mark ends with that
// daemon.  Returns null if another daemon has it, or if the file cannot be opened anew
// (/proc).  A process that shares the trainer's descriptor does not share the mark.
std::unique_ptr<const FileLock> ClaimArena(int descriptor);

class ArenaMapping;

// The daemon's side.
class ArenaReader {
 public:
  // REQUIRES: `descriptor` passes CheckArenaMemory with this shape.
  static Result<std::unique_ptr<ArenaReader>> Open(int descriptor, const ArenaShape& shape);
  ~ArenaReader();

  const ArenaShape& shape() const { return shape_; }
  // REQUIRES (both): chunk < shape().chunks.
  ChunkHeader CopyHeader(uint32_t chunk) const;
  std::span<const std::byte> Payload(uint32_t chunk) const;
  // Maps the first `bytes` of these chunks' payloads as one piece of memory, which outlives this.
  // Null if the kernel maps no more.  REQUIRES: each chunk < shape().chunks; they have as many.
  std::shared_ptr<const Mapping> MapPayloads(std::span<const uint32_t> chunks,
                                             uint64_t bytes) const;

 private:
  ArenaReader(std::unique_ptr<ArenaMapping> mapping, const ArenaShape& shape);
  const std::unique_ptr<ArenaMapping> mapping_;
  const ArenaShape shape_;
};

// The trainer's side.  A child that is forked does not have it.
class ArenaWriter {
 public:
  // kInvalid unless the descriptor is a sealed memory file of this shape: another
  // could be cut under the trainer.
  static Result<std::unique_ptr<ArenaWriter>> Open(int descriptor, const ArenaShape& shape);
  ~ArenaWriter();

  const ArenaShape& shape() const { return shape_; }
  std::span<std::byte> All() const;
  // REQUIRES (both): chunk < shape().chunks.
  std::span<std::byte> Payload(uint32_t chunk) const;
  // Fills in what SealedHeader does, and the payload's digest where it is not given.
  void WriteHeader(uint32_t chunk, ChunkHeader header) const;

 private:
  ArenaWriter(std::unique_ptr<ArenaMapping> mapping, const ArenaShape& shape);
  const std::unique_ptr<ArenaMapping> mapping_;
  const ArenaShape shape_;
};

}  // namespace ckptfs
