// SPDX-License-Identifier: Apache-2.0

#include "snapshot/device/cuda_copier.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "snapshot/device/piece_lanes.h"

namespace ckptfs {
namespace {

// Large enough for the bus, small enough that a collective's copies wait for no long one.
constexpr uint64_t kPieceBytes = uint64_t{8} << 20;

}  // namespace

// One device's primary context, with our stream in it.
class CudaCopier::Device : public std::enable_shared_from_this<Device> {
 public:
  static Result<std::shared_ptr<Device>> Open(std::shared_ptr<const CudaDriver> driver,
                                              std::span<const std::byte> image, int ordinal) {
    CudaDriver::Device number = 0;
    CKPT_RETURN_IF_ERROR(driver->Check(driver->get_device(&number, ordinal), "cuDeviceGet"));
    CudaDriver::Handle context = nullptr;
    CKPT_RETURN_IF_ERROR(
        driver->Check(driver->retain_primary(&context, number), "cuDevicePrimaryCtxRetain"));
    std::shared_ptr<Device> device(new Device(std::move(driver), image, number, context));
    CKPT_RETURN_IF_ERROR(device->Inside([&] { return device->MakeStream(); }));
    return device;
  }
  ~Device() {
    (void)Inside([this]() -> Status {
      if (stream_ != nullptr) {
        driver_->synchronize_stream(stream_);
        driver_->destroy_stream(stream_);
      }
      if (done_ != nullptr) driver_->destroy_event(done_);
      for (const Block& block : free_) {
        driver_->synchronize_event(block.launched);
        driver_->destroy_event(block.launched);
        driver_->free_host(block.memory);
      }
      if (module_ != nullptr) driver_->unload_module(module_);
      return {};
    });
    driver_->release_primary(number_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Runs call() with the context; afterwards the caller's own context is the current
  // one again.  It does not disturb a thread that captures a graph meanwhile.
  template <class Call>
  Status Inside(const Call& call) const {
    CKPT_RETURN_IF_ERROR(driver_->Check(driver_->push_context(context_), "cuCtxPushCurrent"));
    int mode = CudaDriver::kCaptureRelaxed;
    driver_->exchange_capture_mode(&mode);
    Status done = call();
    driver_->exchange_capture_mode(&mode);
    CudaDriver::Handle popped = nullptr;
    driver_->pop_context(&popped);
    return done;
  }

  Status Follow(uint64_t handle) const {
    return Inside([&] { return Order(reinterpret_cast<CudaDriver::Handle>(handle), stream_); });
  }

  // Runs the kernel on the first of the streams.  The kernel comes
  // after what the others did so far, and before what they will do.
  Result<std::shared_ptr<void>> Digest(std::span<const DevicePiece> pieces,
                                       std::span<const CudaDriver::Handle> streams) {
    std::shared_ptr<Block> block;
    CKPT_RETURN_IF_ERROR(Inside([&] { return Digest(pieces, streams, block); }));
    return std::shared_ptr<void>(block, block->memory);
  }
  // Returns where the digests are in what Digest returned.
  static const DeviceDigest* DigestsIn(const void* memory, size_t pieces) {
    return reinterpret_cast<const DeviceDigest*>(static_cast<const DevicePiece*>(memory) + pieces);
  }

  // Nothing is waited for between them.
  Status Copy(std::span<const MemoryCopy> copies) {
    busy_ = true;
    return Inside([&]() -> Status {
      for (const MemoryCopy& copy : copies) CKPT_RETURN_IF_ERROR(Copy(copy));
      return {};
    });
  }

  // Sleeps until all copies are done: the stream's own wait would keep a processor
  // busy.  If nothing was begun, it does not wait for what the stream follows.
  Status Wait() {
    if (!busy_) return {};
    Status waited = Inside([&]() -> Status {
      CKPT_RETURN_IF_ERROR(driver_->Check(driver_->record_event(done_, stream_), "cuEventRecord"));
      return driver_->Check(driver_->synchronize_event(done_), "cuEventSynchronize");
    });
    busy_ = !waited;
    return waited;
  }
  // Waits for all copies that can be waited for, whatever fails.
  void Quiet() const {
    (void)Inside([&]() -> Status {
      driver_->synchronize_stream(stream_);
      return {};
    });
  }

  const CudaDriver& driver() const { return *driver_; }

 private:
  Device(std::shared_ptr<const CudaDriver> driver, std::span<const std::byte> image,
         CudaDriver::Device number, CudaDriver::Handle context)
      : driver_(std::move(driver)), image_(image), number_(number), context_(context) {}

  Status Copy(const MemoryCopy& copy) const {
    for (uint64_t at = 0; at < copy.bytes; at += kPieceBytes) {
      const uint64_t bytes = std::min(kPieceBytes, copy.bytes - at);
      const auto from =
          static_cast<CudaDriver::Address>(reinterpret_cast<uintptr_t>(copy.from + at));
      CKPT_RETURN_IF_ERROR(driver_->Check(driver_->copy_to_host(copy.to + at, from, bytes, stream_),
                                          "cuMemcpyDtoHAsync"));
    }
    return {};
  }

  // Page-locked memory of pieces and their digests.
  struct Block {
    void* memory = nullptr;
    uint64_t pieces = 0;                    // it has room for so many
    CudaDriver::Handle launched = nullptr;  // an event: what was launched with it is over
  };

  Status Digest(std::span<const DevicePiece> pieces, std::span<const CudaDriver::Handle> streams,
                std::shared_ptr<Block>& block) {
    for (CudaDriver::Handle stream : streams) {
      int capturing = 0;
      CKPT_RETURN_IF_ERROR(
          driver_->Check(driver_->is_capturing(stream, &capturing), "cuStreamIsCapturing"));
      if (capturing != 0) return Fail(ErrorCode::kUnsupported, "a graph is being captured");
    }
    CKPT_RETURN_IF_ERROR(LoadKernel());
    CKPT_ASSIGN_OR_RETURN(block, Room(pieces.size()));
    std::ranges::copy(pieces, static_cast<DevicePiece*>(block->memory));
    CKPT_RETURN_IF_ERROR(Order(streams.subspan(1), streams.first(1)));
    CKPT_RETURN_IF_ERROR(Launch(*block, pieces.size(), streams.front()));
    return Order(streams.first(1), streams.subspan(1));
  }

  // Makes work that `later` are given from now on wait for what `earlier` were given so far.
  Status Order(std::span<const CudaDriver::Handle> earlier,
               std::span<const CudaDriver::Handle> later) const {
    for (CudaDriver::Handle before : earlier) {
      for (CudaDriver::Handle after : later) CKPT_RETURN_IF_ERROR(Order(before, after));
    }
    return {};
  }
  Status Order(CudaDriver::Handle before, CudaDriver::Handle after) const {
    CudaDriver::Handle event = nullptr;
    CKPT_RETURN_IF_ERROR(
        driver_->Check(driver_->create_event(&event, CudaDriver::kEventQuiet), "cuEventCreate"));
    Status done = driver_->Check(driver_->record_event(event, before), "cuEventRecord");
    if (done) done = driver_->Check(driver_->wait_event(after, event, 0), "cuStreamWaitEvent");
    driver_->destroy_event(event);  // it lives until it was waited for
    return done;
  }

  // kUnsupported if it has none for this device: what is copied is then unproved, and no more.
  Status LoadKernel() {
    MutexLock lock(kernel_mutex_);
    if (kernel_ != nullptr) return {};
    if (image_.empty()) no_kernel_ = "built without CUDA's compiler";
    if (no_kernel_.empty()) {
      Status found =
          driver_->Check(driver_->load_module(&module_, image_.data()), "cuModuleLoadData");
      if (found) {
        found = driver_->Check(driver_->get_function(&kernel_, module_, kDigestKernel),
                               "cuModuleGetFunction");
      }
      if (found) return {};
      no_kernel_ = found.error().message;
    }
    return Fail(ErrorCode::kUnsupported, no_kernel_);
  }

  // Returns one that was used before, or a new one.  The driver stops a
  // device to take memory back, so none is given back before the end.
  Result<std::shared_ptr<Block>> Room(uint64_t pieces) {
    Block block;
    {
      MutexLock lock(kernel_mutex_);
      const auto found =
          std::ranges::find_if(free_, [&](auto& one) { return one.pieces >= pieces; });
      if (found != free_.end()) {
        block = *found;
        free_.erase(found);
      }
    }
    if (block.memory != nullptr) {
      driver_->synchronize_event(block.launched);
    } else {
      CKPT_RETURN_IF_ERROR(Allocate(pieces, block));
    }
    return std::shared_ptr<Block>(new Block(block), [device = shared_from_this()](Block* used) {
      MutexLock lock(device->kernel_mutex_);
      device->free_.push_back(*used);
      delete used;
    });
  }
  Status Allocate(uint64_t pieces, Block& block) const {
    block.pieces = pieces;
    CKPT_RETURN_IF_ERROR(driver_->Check(
        driver_->allocate_host(&block.memory, pieces * (sizeof(DevicePiece) + sizeof(DeviceDigest)),
                               CudaDriver::kAllocatePortable),
        "cuMemHostAlloc"));
    Status made = driver_->Check(driver_->create_event(&block.launched, CudaDriver::kEventQuiet),
                                 "cuEventCreate");
    if (!made) driver_->free_host(block.memory);
    return made;
  }

  Status Launch(const Block& block, uint64_t count, CudaDriver::Handle stream) const {
    const void* pieces = block.memory;
    const void* digests = DigestsIn(block.memory, count);
    void* arguments[] = {&pieces, &digests, &count};
    constexpr uint64_t kPiecesABlock = kDigestBlock / kPieceThreads;
    const auto blocks = static_cast<unsigned>((count + kPiecesABlock - 1) / kPiecesABlock);
    CKPT_RETURN_IF_ERROR(driver_->Check(
        driver_->launch(kernel_, blocks, 1, 1, kDigestBlock, 1, 1, 0, stream, arguments, nullptr),
        "cuLaunchKernel"));
    return driver_->Check(driver_->record_event(block.launched, stream), "cuEventRecord");
  }

  Status MakeStream() {
    int least = 0, greatest = 0;
    CKPT_RETURN_IF_ERROR(
        driver_->Check(driver_->priorities(&least, &greatest), "cuCtxGetStreamPriorityRange"));
    CKPT_RETURN_IF_ERROR(
        driver_->Check(driver_->create_stream(&stream_, CudaDriver::kStreamNonBlocking, least),
                       "cuStreamCreateWithPriority"));
    return driver_->Check(driver_->create_event(&done_, CudaDriver::kEventQuiet), "cuEventCreate");
  }

  const std::shared_ptr<const CudaDriver> driver_;
  const std::span<const std::byte> image_;
  const CudaDriver::Device number_;
  const CudaDriver::Handle context_;
  CudaDriver::Handle stream_ = nullptr;
  CudaDriver::Handle done_ = nullptr;  // the one thread's that copies
  bool busy_ = false;                  // copies were begun since the last Wait; theirs who calls it
  Mutex kernel_mutex_;
  CudaDriver::Handle module_ GUARDED_BY(kernel_mutex_) = nullptr;
  CudaDriver::Handle kernel_ = nullptr;              // once loaded it stays
  std::string no_kernel_ GUARDED_BY(kernel_mutex_);  // why there is none
  std::vector<Block> free_ GUARDED_BY(kernel_mutex_);
};

CudaCopier::CudaCopier(std::shared_ptr<const CudaDriver> driver, std::span<const std::byte> image)
    : driver_(std::move(driver)), image_(image) {}
CudaCopier::~CudaCopier() = default;

Result<std::unique_ptr<CudaCopier>> CudaCopier::Open(const std::string& library,
                                                     std::span<const std::byte> image) {
  CKPT_ASSIGN_OR_RETURN(auto driver, CudaDriver::Load(library));
  return std::unique_ptr<CudaCopier>(new CudaCopier(std::move(driver), image));
}

Result<std::shared_ptr<CudaCopier::Device>> CudaCopier::DeviceOf(int ordinal) {
  {
    MutexLock lock(mutex_);
    const auto found = devices_.find(ordinal);
    if (found != devices_.end()) return found->second;
  }
  CKPT_ASSIGN_OR_RETURN(auto made, Device::Open(driver_, image_, ordinal));
  MutexLock lock(mutex_);
  return devices_.try_emplace(ordinal, std::move(made)).first->second;
}

std::map<int, std::shared_ptr<CudaCopier::Device>> CudaCopier::Devices() {
  MutexLock lock(mutex_);
  return devices_;
}

Result<PieceDigests> CudaCopier::Digest(std::span<const MemoryPiece> pieces,
                                        std::span<const DeviceStream> streams) {
  std::map<int, std::vector<size_t>> by_device;
  for (size_t i = 0; i < pieces.size(); ++i) by_device[pieces[i].device].push_back(i);
  PieceDigests digests;
  digests.of.resize(pieces.size());
  for (const auto& [ordinal, its] : by_device) {
    std::vector<CudaDriver::Handle> on;
    for (const DeviceStream& stream : streams) {
      if (stream.device == ordinal)
        on.push_back(reinterpret_cast<CudaDriver::Handle>(stream.handle));
    }
    if (on.empty()) return Fail(ErrorCode::kUnsupported, "no stream of a device is known");
    std::vector<DevicePiece> given;
    for (const size_t i : its) {
      given.push_back({reinterpret_cast<uintptr_t>(pieces[i].from), pieces[i].bytes});
    }
    CKPT_ASSIGN_OR_RETURN(const auto device, DeviceOf(ordinal));
    CKPT_ASSIGN_OR_RETURN(auto memory, device->Digest(given, on));
    const DeviceDigest* const made = Device::DigestsIn(memory.get(), its.size());
    for (size_t i = 0; i < its.size(); ++i) digests.of[its[i]] = made + i;
    digests.memory.push_back(std::move(memory));
  }
  return digests;
}

Status CudaCopier::Follow(std::span<const DeviceStream> streams) {
  for (const DeviceStream& stream : streams) {
    CKPT_ASSIGN_OR_RETURN(const auto device, DeviceOf(stream.device));
    CKPT_RETURN_IF_ERROR(device->Follow(stream.handle));
  }
  return {};
}

Status CudaCopier::Begin(std::span<const MemoryCopy> copies, Trainer trainer) {
  std::map<int, std::vector<MemoryCopy>> by_device;
  for (const MemoryCopy& copy : copies) by_device[copy.device].push_back(copy);
  // A device copies while this thread makes the host's copies.
  for (const auto& [ordinal, its] : by_device) {
    if (ordinal == kHost) continue;
    CKPT_ASSIGN_OR_RETURN(const auto device, DeviceOf(ordinal));
    CKPT_RETURN_IF_ERROR(device->Copy(its));
  }
  return CopyHostMemory(by_device[kHost], trainer);
}

Status CudaCopier::Enqueue(std::span<const MemoryCopy> copies, Trainer trainer) {
  Status begun = Begin(copies, trainer);
  if (!begun) {
    for (const auto& [ordinal, device] : Devices()) device->Quiet();
  }
  return begun;
}

Status CudaCopier::Wait() {
  Status done;
  for (const auto& [ordinal, device] : Devices()) {
    const Status waited = device->Wait();
    if (waited) continue;
    device->Quiet();
    if (done) done = waited;
  }
  return done;
}

std::shared_ptr<const void> CudaCopier::Pin(std::span<std::byte> memory) {
  const auto devices = Devices();
  if (devices.empty()) return nullptr;
  const std::shared_ptr<Device> device = devices.begin()->second;
  const Status pinned = device->Inside([&] {
    return driver_->Check(
        driver_->register_host(memory.data(), memory.size(), CudaDriver::kRegisterPortable),
        "cuMemHostRegister");
  });
  if (!pinned) return nullptr;  // copies go through the driver's own buffers, then
  return {memory.data(), [device](const void* begin) {
            (void)device->Inside([&]() -> Status {
              device->driver().unregister_host(const_cast<void*>(begin));
              return {};
            });
          }};
}

std::function<std::unique_ptr<Copier>()> CudaCopierMaker(const std::string& library) {
  if (!CudaCopier::Open(library)) return {};
  return [library]() -> std::unique_ptr<Copier> {
    auto copier = CudaCopier::Open(library);
    if (!copier) return std::make_unique<HostCopier>();
    return *std::move(copier);
  };
}

}  // namespace ckptfs
