// SPDX-License-Identifier: Apache-2.0

#include "snapshot/wire/arena.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/mempolicy.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;
// If huge pages come slower than this (a second per GiB: memory is in pieces, or a
// host has taken it back), they hold up the first save more than small ones would.
constexpr uint64_t kHugeBatch = uint64_t{64} << 20;
constexpr std::chrono::milliseconds kHugeBatchTime{64};
constexpr uint64_t kSmallBatch = uint64_t{32} << 20;
constexpr uint64_t kMagic = 0x6b6e756863746b63;  // "ckchunk"
constexpr uint32_t kVersion = 1;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static_assert(std::is_trivially_copyable_v<ChunkHeader>);
static_assert(std::has_unique_object_representations_v<ChunkHeader>);
static_assert(sizeof(ChunkHeader) <= kArenaPage);

Digest CheckOf(const ChunkHeader& header) {
  const auto bytes = std::as_bytes(std::span(&header, 1));
  return DigestOf(bytes.first(offsetof(ChunkHeader, check)));
}

Error ArenaError(std::string_view call, uint64_t bytes) {
  Error error = ErrnoError(errno, StrCat(call, " of ", bytes, " bytes for snapshots"));
  if (errno == ENOMEM || errno == ENOSPC) error.code = ErrorCode::kExhausted;
  return error;
}

}  // namespace

// Maps shared memory at an address that is a multiple of the huge page's size.
class ArenaMapping {
 public:
  static Result<std::unique_ptr<ArenaMapping>> Map(int descriptor, uint64_t bytes, int protection) {
    const uint64_t room = bytes + kHugePage;
    void* reserved =
        mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return Fail(ArenaError("reserving", bytes));
    const auto start = reinterpret_cast<uintptr_t>(reserved);
    const uintptr_t begin = (start + kHugePage - 1) / kHugePage * kHugePage;
    void* mapped = mmap(reinterpret_cast<void*>(begin), bytes, protection, MAP_SHARED | MAP_FIXED,
                        descriptor, 0);
    if (mapped == MAP_FAILED) {
      const Error error = ArenaError("mapping", bytes);
      munmap(reserved, room);
      return Fail(error);
    }
    return std::unique_ptr<ArenaMapping>(
        new ArenaMapping(reserved, room, static_cast<std::byte*>(mapped)));
  }
  ~ArenaMapping() { munmap(reserved_, room_); }
  ArenaMapping(const ArenaMapping&) = delete;
  ArenaMapping& operator=(const ArenaMapping&) = delete;

  std::byte* data() const { return data_; }

 private:
  ArenaMapping(void* reserved, uint64_t room, std::byte* data)
      : reserved_(reserved), room_(room), data_(data) {}
  void* const reserved_;
  const uint64_t room_;
  std::byte* const data_;
};

namespace {

// Maps the pages of some payloads, which begin and end at pages, once more, side by side.
class PayloadMapping final : public Mapping {
 public:
  PayloadMapping(void* begin, uint64_t room, uint64_t bytes)
      : Mapping({static_cast<const std::byte*>(begin), bytes}), begin_(begin), room_(room) {}
  ~PayloadMapping() override { munmap(begin_, room_); }

 private:
  void* const begin_;
  const uint64_t room_;
};

}  // namespace

Status CheckArenaShape(const ArenaShape& shape) {
  if (shape.chunk_bytes % kArenaPage != 0 || shape.chunk_bytes < 2 * kArenaPage ||
      shape.chunk_bytes > (uint64_t{1} << 30)) {
    return Fail(ErrorCode::kInvalid, StrCat("arena: chunks cannot "
                                            "have ",
                                            shape.chunk_bytes, " bytes"));
  }
  if (shape.chunks == 0 || shape.bytes() > (uint64_t{1} << 46)) {
    return Fail(ErrorCode::kInvalid, StrCat("arena: it cannot have ", shape.chunks, " chunks"));
  }
  return {};
}

ChunkHeader SealedHeader(ChunkHeader header) {
  header.magic = kMagic;
  header.version = kVersion;
  header.check = CheckOf(header);
  return header;
}

Status CheckChunkHeader(const ChunkHeader& header, const ArenaShape& shape) {
  if (header.magic != kMagic) return Fail(ErrorCode::kInvalid, "chunk: not a header");
  if (header.version != kVersion) {
    return Fail(ErrorCode::kInvalid, StrCat("chunk: unknown version ", header.version));
  }
  if (header.check != CheckOf(header)) {
    return Fail(ErrorCode::kInvalid, "chunk: the header is damaged");
  }
  if (header.length == 0 || header.length > shape.payload_bytes()) {
    return Fail(ErrorCode::kInvalid, StrCat("chunk: it cannot hold ", header.length, " bytes"));
  }
  return {};
}

namespace {

// Sets the file's own policy from now on, whoever touches its pages first.
void PreferNode(std::byte* memory, uint64_t bytes, uint64_t node) {
  std::array<unsigned long, 16> nodes{};
  constexpr uint64_t kBits = 8 * sizeof nodes[0];
  constexpr uint64_t kNodes = kBits * nodes.size();
  if (node >= kNodes - 1) return;  // the kernel looks at one less than it is told
  nodes[node / kBits] = 1UL << (node % kBits);
  // If the policy cannot be set, the kernel takes memory from anywhere.
  (void)syscall(SYS_mbind, memory, bytes, MPOL_PREFERRED, nodes.data(), kNodes, 0);
}

}  // namespace

namespace {

// Allocates small pages from `at` to the end, in steps between which `ends` is asked.
Status AllocateRest(int fd, uint64_t at, uint64_t bytes, const std::atomic<bool>* ends) {
  while (at < bytes) {
    if (ends != nullptr && *ends) return Fail(ErrorCode::kIo, "the arena is not wanted any more");
    const uint64_t step = std::min(bytes - at, kSmallBatch);
    if (fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(step)) != 0) {
      return Fail(ArenaError("allocating", bytes));
    }
    at += step;
  }
  return {};
}

}  // namespace

Result<ArenaMemory> MakeArena(const ArenaShape& shape, std::optional<uint64_t> node,
                              const std::atomic<bool>* ends) {
  CKPT_RETURN_IF_ERROR(CheckArenaShape(shape));
  const uint64_t bytes = shape.bytes();
  ArenaMemory memory;
  memory.descriptor = Descriptor(memfd_create("ckptfs-snapshots", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const int fd = memory.descriptor.get();
  if (fd < 0 || fchmod(fd, 0600) != 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    return Fail(ArenaError("making memory", bytes));
  }
  CKPT_ASSIGN_OR_RETURN(const auto mapping, ArenaMapping::Map(fd, bytes, PROT_READ | PROT_WRITE));
  if (node) PreferNode(mapping->data(), bytes, *node);
  auto start = std::chrono::steady_clock::now();
  for (uint64_t at = 0; at + kHugePage <= bytes && !(ends != nullptr && *ends); at += kHugePage) {
    // The kernel makes a huge page only where a page exists, and places it on that page's node.
    // If it refuses one, it would refuse the next, too; then all others stay small pages.
    if (fallocate(fd, 0, static_cast<off_t>(at), kArenaPage) != 0 ||
        madvise(mapping->data() + at, kHugePage, MADV_COLLAPSE) != 0) {
      break;
    }
    memory.huge_bytes += kHugePage;
    if (memory.huge_bytes % kHugeBatch != 0) continue;
    const auto now = std::chrono::steady_clock::now();
    if (now - std::exchange(start, now) > kHugeBatchTime) break;
  }
  CKPT_RETURN_IF_ERROR(AllocateRest(fd, memory.huge_bytes, bytes, ends));
  return memory;
}

Status CheckArenaMemory(int descriptor, const ArenaShape& shape) {
  CKPT_RETURN_IF_ERROR(CheckArenaShape(shape));
  const int seals = fcntl(descriptor, F_GET_SEALS);
  struct stat info;
  struct statfs where;
  // A page of hugetlbfs may be missing when it is read; that ends the reader.
  if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW) ||
      fstat(descriptor, &info) != 0 || static_cast<uint64_t>(info.st_size) != shape.bytes() ||
      fstatfs(descriptor, &where) != 0 || where.f_type != TMPFS_MAGIC) {
    return Fail(ErrorCode::kInvalid, "arena: not a sealed memory file of the announced size");
  }
  return {};
}

std::unique_ptr<const FileLock> ClaimArena(int descriptor) {
  // A lock belongs to an open file, and the trainer has the one of `descriptor`.
  const std::string path = StrCat("/proc/self/fd/", descriptor);
  Descriptor own(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!own.valid() || flock(own.get(), LOCK_EX | LOCK_NB) != 0) return nullptr;
  return std::make_unique<const FileLock>(std::move(own));
}

ArenaReader::ArenaReader(std::unique_ptr<ArenaMapping> mapping, const ArenaShape& shape)
    : mapping_(std::move(mapping)), shape_(shape) {}
ArenaReader::~ArenaReader() = default;

Result<std::unique_ptr<ArenaReader>> ArenaReader::Open(int descriptor, const ArenaShape& shape) {
  CKPT_ASSIGN_OR_RETURN(auto mapping, ArenaMapping::Map(descriptor, shape.bytes(), PROT_READ));
  return std::unique_ptr<ArenaReader>(new ArenaReader(std::move(mapping), shape));
}

ChunkHeader ArenaReader::CopyHeader(uint32_t chunk) const {
  ChunkHeader header;
  // Reads the header once: it checks what it copied.
  const volatile std::byte* from = mapping_->data() + chunk * shape_.chunk_bytes;
  auto* to = reinterpret_cast<std::byte*>(&header);
  for (size_t i = 0; i < sizeof header; ++i) to[i] = from[i];
  return header;
}

std::span<const std::byte> ArenaReader::Payload(uint32_t chunk) const {
  return {mapping_->data() + chunk * shape_.chunk_bytes + kArenaPage, shape_.payload_bytes()};
}

std::shared_ptr<const Mapping> ArenaReader::MapPayloads(std::span<const uint32_t> chunks,
                                                        uint64_t bytes) const {
  const uint64_t payload = shape_.payload_bytes();
  const uint64_t room = chunks.size() * payload;
  void* const begin =
      mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  auto mapping = std::make_shared<const PayloadMapping>(begin, room, bytes);
  auto* to = static_cast<std::byte*>(begin);
  for (const uint32_t chunk : chunks) {
    // An old length of 0 makes mremap map shared memory once more.
    void* const from = const_cast<std::byte*>(Payload(chunk).data());
    if (mremap(from, 0, payload, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) return nullptr;
    to += payload;
  }
  return mapping;
}

ArenaWriter::ArenaWriter(std::unique_ptr<ArenaMapping> mapping, const ArenaShape& shape)
    : mapping_(std::move(mapping)), shape_(shape) {}
ArenaWriter::~ArenaWriter() = default;

Result<std::unique_ptr<ArenaWriter>> ArenaWriter::Open(int descriptor, const ArenaShape& shape) {
  CKPT_RETURN_IF_ERROR(CheckArenaMemory(descriptor, shape));
  CKPT_ASSIGN_OR_RETURN(auto mapping,
                        ArenaMapping::Map(descriptor, shape.bytes(), PROT_READ | PROT_WRITE));
  if (madvise(mapping->data(), shape.bytes(), MADV_DONTFORK) != 0) {
    return Fail(ArenaError("MADV_DONTFORK", shape.bytes()));
  }
  return std::unique_ptr<ArenaWriter>(new ArenaWriter(std::move(mapping), shape));
}

std::span<std::byte> ArenaWriter::All() const { return {mapping_->data(), shape_.bytes()}; }

std::span<std::byte> ArenaWriter::Payload(uint32_t chunk) const {
  return {mapping_->data() + chunk * shape_.chunk_bytes + kArenaPage, shape_.payload_bytes()};
}

void ArenaWriter::WriteHeader(uint32_t chunk, ChunkHeader header) const {
  if (header.payload == Digest{}) header.payload = DigestOf(Payload(chunk).first(header.length));
  header = SealedHeader(header);
  std::memcpy(mapping_->data() + chunk * shape_.chunk_bytes, &header, sizeof header);
}

}  // namespace ckptfs
