// SPDX-License-Identifier: Apache-2.0

#include "snapshot/device/cuda_device.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "snapshot/device/piece_lanes.h"

namespace ckptfs {
namespace {

// Large enough for the bus, small enough that a collective's copies wait for no long one.
constexpr uint64_t kPieceBytes = uint64_t{16} << 20;
// Copies of at most so many bytes are packed, where there are so many.
constexpr uint64_t kSmallCopy = uint64_t{2} << 20;
constexpr size_t kLeastPacked = 4;
constexpr uint64_t kPackBytes = uint64_t{16} << 20;
constexpr uint64_t kPackRooms = 4;
constexpr uint64_t kLeastTaken = uint64_t{1} << 20;  // a device's memory is allocated so

uint64_t BytesOf(std::span<const DevicePiece> pieces) {
  uint64_t bytes = 0;
  for (const DevicePiece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

// The moves that bring pieces one behind the other, to `to`.
std::vector<DeviceMove> MovesOf(std::span<const DevicePiece> pieces, uint64_t to) {
  std::vector<DeviceMove> moves;
  for (const DevicePiece& piece : pieces) {
    for (uint64_t at = 0; at < piece.bytes; at += kLargestMove) {
      moves.push_back({piece.address + at, to + at, std::min(kLargestMove, piece.bytes - at)});
    }
    to += piece.bytes;
  }
  return moves;
}

// Returns how many of the first copies may be packed together.
size_t PackedOf(std::span<const MemoryCopy> copies) {
  uint64_t bytes = 0;
  size_t count = 0;
  for (; count < copies.size(); ++count) {
    const MemoryCopy& one = copies[count];
    const bool beside = count == 0 || copies[count - 1].to + copies[count - 1].bytes == one.to;
    if (!beside || one.bytes > kSmallCopy || bytes + one.bytes > kPackBytes) break;
    bytes += one.bytes;
  }
  return count;
}

}  // namespace

Result<std::shared_ptr<CudaDevice>> CudaDevice::Open(std::shared_ptr<const CudaDriver> driver,
                                                     std::span<const std::byte> image,
                                                     int ordinal) {
  CudaDriver::Device number = 0;
  CKPT_RETURN_IF_ERROR(driver->Check(driver->get_device(&number, ordinal), "cuDeviceGet"));
  Handle context = nullptr;
  CKPT_RETURN_IF_ERROR(
      driver->Check(driver->retain_primary(&context, number), "cuDevicePrimaryCtxRetain"));
  std::shared_ptr<CudaDevice> device(new CudaDevice(std::move(driver), image, number, context));
  CKPT_RETURN_IF_ERROR(device->Inside([&] { return device->MakeStreams(); }));
  return device;
}

CudaDevice::~CudaDevice() {
  (void)Inside([this]() -> Status {
    for (Handle stream : {stream_, pack_stream_}) {
      if (stream == nullptr) continue;
      driver_->synchronize_stream(stream);
      driver_->destroy_stream(stream);
    }
    for (const PackRoom& room : rooms_) Free(room);
    for (const Block& block : free_) {
      driver_->synchronize_event(block.launched);
      Free(block);
    }
    for (Handle event : free_events_) driver_->destroy_event(event);
    if (module_ != nullptr) driver_->unload_module(module_);
    return {};
  });
  driver_->release_primary(number_);
}

Status CudaDevice::MakeStreams() {
  CKPT_RETURN_IF_ERROR(MakeStream(stream_));
  return MakeStream(pack_stream_);
}

Status CudaDevice::MakeStream(Handle& stream) const {
  int least = 0, greatest = 0;
  CKPT_RETURN_IF_ERROR(
      driver_->Check(driver_->priorities(&least, &greatest), "cuCtxGetStreamPriorityRange"));
  return driver_->Check(driver_->create_stream(&stream, CudaDriver::kStreamNonBlocking, least),
                        "cuStreamCreateWithPriority");
}

Status CudaDevice::Follow(Handle stream) const {
  return Inside([&]() -> Status {
    CKPT_RETURN_IF_ERROR(Order(stream, stream_));
    return Order(stream, pack_stream_);
  });
}

// Makes work that `after` is given from now on wait for what `before` was given so far.
Status CudaDevice::Order(Handle before, Handle after) const {
  Handle event = nullptr;
  CKPT_RETURN_IF_ERROR(
      driver_->Check(driver_->create_event(&event, CudaDriver::kEventQuiet), "cuEventCreate"));
  Status done = driver_->Check(driver_->record_event(event, before), "cuEventRecord");
  if (done) done = driver_->Check(driver_->wait_event(after, event, 0), "cuStreamWaitEvent");
  driver_->destroy_event(event);  // it lives until it was waited for
  return done;
}

Result<CudaDevice::Moment> CudaDevice::TakeMoment(std::span<const DevicePiece> digested,
                                                  std::span<const DevicePiece> taken,
                                                  std::span<const Handle> streams) {
  Moment moment;
  CKPT_RETURN_IF_ERROR(Inside([&] { return TakeMoment(digested, taken, streams, moment); }));
  return moment;
}

Status CudaDevice::TakeMoment(std::span<const DevicePiece> digested,
                              std::span<const DevicePiece> taken, std::span<const Handle> streams,
                              Moment& moment) {
  for (Handle stream : streams) CKPT_RETURN_IF_ERROR(CheckNotCaptured(stream));
  CKPT_RETURN_IF_ERROR(LoadKernels());
  std::vector<DeviceMove> moves = MovesOf(taken, 0);
  const uint64_t digest_bytes = digested.size() * (sizeof(DevicePiece) + sizeof(DeviceDigest));
  CKPT_ASSIGN_OR_RETURN(const auto block,
                        Room(digest_bytes + moves.size() * sizeof(DeviceMove), BytesOf(taken)));
  if (block->taken == 0) moves.clear();
  for (DeviceMove& move : moves) move.to += block->taken;
  auto* const pieces = static_cast<DevicePiece*>(block->memory);
  auto* const digests = reinterpret_cast<DeviceDigest*>(pieces + digested.size());
  auto* const listed = reinterpret_cast<DeviceMove*>(digests + digested.size());
  std::ranges::copy(digested, pieces);
  std::ranges::copy(moves, listed);
  Handle first = streams.front();
  for (Handle other : streams.subspan(1)) CKPT_RETURN_IF_ERROR(Order(other, first));
  if (!digested.empty()) {
    uint64_t count = digested.size();
    const void *from = pieces, *to = digests;
    void* arguments[] = {&from, &to, &count};
    constexpr uint64_t kPiecesABlock = kDigestBlock / kPieceThreads;
    CKPT_RETURN_IF_ERROR(Launch(digest_, (count + kPiecesABlock - 1) / kPiecesABlock, kDigestBlock,
                                first, arguments));
  }
  if (!moves.empty()) {
    const void* from = listed;
    void* arguments[] = {&from};
    CKPT_RETURN_IF_ERROR(Launch(gather_, moves.size(), kGatherBlock, first, arguments));
  }
  CKPT_RETURN_IF_ERROR(
      driver_->Check(driver_->record_event(block->launched, first), "cuEventRecord"));
  for (Handle other : streams.subspan(1)) CKPT_RETURN_IF_ERROR(Order(first, other));
  moment.digests = digests;
  moment.taken = reinterpret_cast<const std::byte*>(block->taken);
  moment.memory = std::shared_ptr<void>(block, block->memory);
  return {};
}

Status CudaDevice::Launch(Handle kernel, uint64_t blocks, unsigned threads, Handle stream,
                          void** arguments) const {
  return driver_->Check(driver_->launch(kernel, static_cast<unsigned>(blocks), 1, 1, threads, 1, 1,
                                        0, stream, arguments, nullptr),
                        "cuLaunchKernel");
}

// kUnsupported if it has none for this device: what is copied is then unproved, and no more.
Status CudaDevice::LoadKernels() {
  MutexLock lock(mutex_);
  if (pack_ != nullptr) return {};
  if (image_.empty()) no_kernel_ = "built without CUDA's compiler";
  if (no_kernel_.empty()) {
    Status found =
        driver_->Check(driver_->load_module(&module_, image_.data()), "cuModuleLoadData");
    if (found) {
      found = driver_->Check(driver_->get_function(&digest_, module_, kDigestKernel),
                             "cuModuleGetFunction");
    }
    if (found) {
      found = driver_->Check(driver_->get_function(&gather_, module_, kGatherKernel),
                             "cuModuleGetFunction");
    }
    if (found) {
      found = driver_->Check(driver_->get_function(&pack_, module_, kPackKernel),
                             "cuModuleGetFunction");
    }
    if (found) return {};
    no_kernel_ = found.error().message;
  }
  return Fail(ErrorCode::kUnsupported, no_kernel_);
}

// Returns one that was used before, or a new one.  A save that was dropped may have given one back
// that its device has not come to yet.  The driver stops a device to take memory back, so none is
// given back before the end.
Result<std::shared_ptr<CudaDevice::Block>> CudaDevice::Room(uint64_t bytes, uint64_t taken_bytes) {
  Block block;
  {
    MutexLock lock(mutex_);
    const auto found = std::ranges::find_if(free_, [&](const Block& one) {
      return one.bytes >= bytes && one.taken_bytes >= taken_bytes &&
             driver_->query_event(one.launched) == 0;
    });
    if (found != free_.end()) {
      block = *found;
      free_.erase(found);
    }
  }
  if (block.memory == nullptr) CKPT_RETURN_IF_ERROR(Allocate(bytes, taken_bytes, block));
  return std::shared_ptr<Block>(new Block(block), [device = shared_from_this()](Block* used) {
    MutexLock lock(device->mutex_);
    device->free_.push_back(*used);
    delete used;
  });
}

// Memory of a device is the trainer's: where it has none left, nothing is taken there.
Status CudaDevice::Allocate(uint64_t bytes, uint64_t taken_bytes, Block& block) const {
  block.bytes = std::max<uint64_t>(bytes, 1);
  CKPT_RETURN_IF_ERROR(driver_->Check(
      driver_->allocate_host(&block.memory, block.bytes, CudaDriver::kAllocatePortable),
      "cuMemHostAlloc"));
  Status made = driver_->Check(driver_->create_event(&block.launched, CudaDriver::kEventQuiet),
                               "cuEventCreate");
  if (!made) {
    driver_->free_host(block.memory);
    return made;
  }
  if (taken_bytes == 0) return {};
  const uint64_t room = std::bit_ceil(std::max(taken_bytes, kLeastTaken));
  if (driver_->allocate(&block.taken, room) == 0) block.taken_bytes = room;
  return {};
}

void CudaDevice::Free(const Block& block) const {
  driver_->destroy_event(block.launched);
  driver_->free_host(block.memory);
  if (block.taken_bytes != 0) driver_->free(block.taken);
}

Status CudaDevice::Copy(std::span<const MemoryCopy> copies) {
  busy_ = true;
  return Inside([&]() -> Status {
    for (size_t i = 0; i < copies.size();) {
      const size_t count = packs_ ? PackedOf(copies.subspan(i)) : 0;
      if (count >= kLeastPacked) {
        CKPT_RETURN_IF_ERROR(Pack(copies.subspan(i, count)));
        i += count;
      } else {
        CKPT_RETURN_IF_ERROR(CopyPieces(copies[i++]));
      }
    }
    return {};
  });
}

// Copies that lie side by side in host memory.  Where they cannot be packed they are copied one by
// one.
Status CudaDevice::Pack(std::span<const MemoryCopy> copies) {
  packs_ = packs_ && LoadKernels() && MakeRooms();
  if (packs_) return PackInto(rooms_[packed_++ % rooms_.size()], copies);
  for (const MemoryCopy& copy : copies) CKPT_RETURN_IF_ERROR(CopyPieces(copy));
  return {};
}

Status CudaDevice::MakeRooms() {
  while (rooms_.size() < kPackRooms) {
    PackRoom room;
    Status made = driver_->Check(driver_->allocate(&room.memory, kPackBytes + 16), "cuMemAlloc");
    if (!made) return made;
    for (Handle* event : {&room.packed, &room.copied}) {
      if (made) {
        made =
            driver_->Check(driver_->create_event(event, CudaDriver::kEventQuiet), "cuEventCreate");
      }
    }
    rooms_.push_back(room);
    CKPT_RETURN_IF_ERROR(made);
  }
  return {};
}

void CudaDevice::Free(const PackRoom& room) const {
  for (Handle event : {room.packed, room.copied}) {
    if (event != nullptr) driver_->destroy_event(event);
  }
  driver_->free(room.memory);
}

// A room is filled again when it was copied; only devices wait for that.
Status CudaDevice::PackInto(const PackRoom& room, std::span<const MemoryCopy> copies) {
  CKPT_RETURN_IF_ERROR(
      driver_->Check(driver_->wait_event(pack_stream_, room.copied, 0), "cuStreamWaitEvent"));
  // So that the words of the first one, and mostly of all, need not be cut.
  const uint64_t begin = room.memory + reinterpret_cast<uintptr_t>(copies.front().from) % 16;
  PackedMoves packed;
  packed.to = begin;
  size_t count = 0;
  uint32_t at = 0;
  void* arguments[] = {&packed};
  for (const MemoryCopy& copy : copies) {
    for (uint64_t done = 0; done < copy.bytes;) {
      const auto bytes = static_cast<uint32_t>(std::min(kLargestMove, copy.bytes - done));
      packed.moves[count++] = {reinterpret_cast<uintptr_t>(copy.from) + done, at, bytes};
      at += bytes;
      done += bytes;
      if (count < PackedMoves::kMost) continue;
      CKPT_RETURN_IF_ERROR(Launch(pack_, count, kGatherBlock, pack_stream_, arguments));
      count = 0;
    }
  }
  if (count > 0) {
    CKPT_RETURN_IF_ERROR(Launch(pack_, count, kGatherBlock, pack_stream_, arguments));
  }
  CKPT_RETURN_IF_ERROR(
      driver_->Check(driver_->record_event(room.packed, pack_stream_), "cuEventRecord"));
  CKPT_RETURN_IF_ERROR(
      driver_->Check(driver_->wait_event(stream_, room.packed, 0), "cuStreamWaitEvent"));
  CKPT_RETURN_IF_ERROR(driver_->Check(driver_->copy_to_host(copies.front().to, begin, at, stream_),
                                      "cuMemcpyDtoHAsync"));
  return driver_->Check(driver_->record_event(room.copied, stream_), "cuEventRecord");
}

Status CudaDevice::CopyPieces(const MemoryCopy& copy) const {
  for (uint64_t at = 0; at < copy.bytes; at += kPieceBytes) {
    const uint64_t bytes = std::min(kPieceBytes, copy.bytes - at);
    const auto from = static_cast<CudaDriver::Address>(reinterpret_cast<uintptr_t>(copy.from + at));
    CKPT_RETURN_IF_ERROR(driver_->Check(driver_->copy_to_host(copy.to + at, from, bytes, stream_),
                                        "cuMemcpyDtoHAsync"));
  }
  return {};
}

// Returns one that nobody waits for any more, or a new one.
Result<CudaDevice::Handle> CudaDevice::FreeEvent() {
  {
    MutexLock lock(mutex_);
    if (!free_events_.empty()) {
      Handle event = free_events_.back();
      free_events_.pop_back();
      return event;
    }
  }
  Handle event = nullptr;
  CKPT_RETURN_IF_ERROR(
      driver_->Check(driver_->create_event(&event, CudaDriver::kEventQuiet), "cuEventCreate"));
  return event;
}

Result<std::shared_ptr<void>> CudaDevice::Record() {
  Handle event = nullptr;
  CKPT_RETURN_IF_ERROR(Inside([&]() -> Status {
    CKPT_ASSIGN_OR_RETURN(event, FreeEvent());
    Status noted = driver_->Check(driver_->record_event(event, stream_), "cuEventRecord");
    if (!noted) driver_->destroy_event(event);
    return noted;
  }));
  return std::shared_ptr<void>(event, [device = shared_from_this()](Handle used) {
    MutexLock lock(device->mutex_);
    device->free_events_.push_back(used);
  });
}

Status CudaDevice::CheckNotCaptured(Handle stream) const {
  return Inside([&]() -> Status {
    int capturing = 0;
    CKPT_RETURN_IF_ERROR(
        driver_->Check(driver_->is_capturing(stream, &capturing), "cuStreamIsCapturing"));
    if (capturing != 0) return Fail(ErrorCode::kUnsupported, "a graph is being captured");
    return {};
  });
}

Status CudaDevice::Hold(Handle stream, Handle event) const {
  return Inside(
      [&] { return driver_->Check(driver_->wait_event(stream, event, 0), "cuStreamWaitEvent"); });
}

Result<bool> CudaDevice::IsOver(Handle event) const {
  bool over = false;
  CKPT_RETURN_IF_ERROR(Inside([&]() -> Status {
    const CudaDriver::Code code = driver_->query_event(event);
    over = code == 0;
    return code == CudaDriver::kNotReady ? Status() : driver_->Check(code, "cuEventQuery");
  }));
  return over;
}

Status CudaDevice::Wait(Handle event) const {
  return Inside(
      [&] { return driver_->Check(driver_->synchronize_event(event), "cuEventSynchronize"); });
}

Status CudaDevice::Wait() {
  if (!busy_.exchange(false)) return {};
  const auto event = Record();
  Status waited = event ? Wait(event->get()) : Fail(Error(event.error()));
  if (!waited) busy_ = true;
  return waited;
}

void CudaDevice::Quiet() const {
  (void)Inside([&]() -> Status {
    driver_->synchronize_stream(pack_stream_);
    driver_->synchronize_stream(stream_);
    return {};
  });
}

}  // namespace ckptfs
