// SPDX-License-Identifier: Apache-2.0

#include "snapshot/arena.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;
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

// A shared mapping that begins at a multiple of the huge page's size.
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

Status CheckArenaShape(const ArenaShape& shape) {
  if (shape.chunk_bytes % kArenaPage != 0 || shape.chunk_bytes < 2 * kArenaPage ||
      shape.chunk_bytes > (uint64_t{1} << 30)) {
    return Fail(ErrorCode::kInvalid, StrCat("arena: chunks of ", shape.chunk_bytes, " bytes"));
  }
  if (shape.chunks == 0 || shape.bytes() > (uint64_t{1} << 46)) {
    return Fail(ErrorCode::kInvalid, StrCat("arena: ", shape.chunks, " chunks"));
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
    return Fail(ErrorCode::kInvalid, StrCat("chunk: version ", header.version));
  }
  if (header.check != CheckOf(header)) {
    return Fail(ErrorCode::kInvalid, "chunk: the header is damaged");
  }
  if (header.length == 0 || header.length > shape.payload_bytes()) {
    return Fail(ErrorCode::kInvalid, StrCat("chunk: a length of ", header.length, " bytes"));
  }
  return {};
}

Result<ArenaMemory> MakeArena(const ArenaShape& shape) {
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
  for (uint64_t at = 0; at + kHugePage <= bytes; at += kHugePage) {
    // Where one is refused the next would be, too: small pages then, at once.
    if (madvise(mapping->data() + at, kHugePage, MADV_COLLAPSE) != 0) break;
    memory.huge_bytes += kHugePage;
  }
  const uint64_t rest = bytes - memory.huge_bytes;
  if (rest != 0 &&
      fallocate(fd, 0, static_cast<off_t>(memory.huge_bytes), static_cast<off_t>(rest)) != 0) {
    return Fail(ArenaError("allocating", bytes));
  }
  return memory;
}

Status CheckArenaMemory(int descriptor, const ArenaShape& shape) {
  CKPT_RETURN_IF_ERROR(CheckArenaShape(shape));
  const int seals = fcntl(descriptor, F_GET_SEALS);
  struct stat info;
  struct statfs where;
  // Of hugetlbfs a page may be missing when it is read, which ends the reader.
  if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW) ||
      fstat(descriptor, &info) != 0 || static_cast<uint64_t>(info.st_size) != shape.bytes() ||
      fstatfs(descriptor, &where) != 0 || where.f_type != TMPFS_MAGIC) {
    return Fail(ErrorCode::kInvalid, "arena: not a sealed memory file of the size that was said");
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
  // Read once: what is checked is what was copied.
  const volatile std::byte* from = mapping_->data() + chunk * shape_.chunk_bytes;
  auto* to = reinterpret_cast<std::byte*>(&header);
  for (size_t i = 0; i < sizeof header; ++i) to[i] = from[i];
  return header;
}

std::span<const std::byte> ArenaReader::Payload(uint32_t chunk) const {
  return {mapping_->data() + chunk * shape_.chunk_bytes + kArenaPage, shape_.payload_bytes()};
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
  header.payload = DigestOf(Payload(chunk).first(header.length));
  header = SealedHeader(header);
  std::memcpy(mapping_->data() + chunk * shape_.chunk_bytes, &header, sizeof header);
}

}  // namespace ckptfs
