// SPDX-License-Identifier: Apache-2.0

#include "snapshot/cuda_copier.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

// Large enough for the bus, small enough that a collective's copies wait for no long one.
constexpr uint64_t kPieceBytes = uint64_t{8} << 20;

}  // namespace

// One device's primary context, with our stream in it.
class CudaCopier::Device {
 public:
  static Result<std::shared_ptr<Device>> Open(std::shared_ptr<const CudaDriver> driver,
                                              int ordinal) {
    CudaDriver::Device number = 0;
    CKPT_RETURN_IF_ERROR(driver->Check(driver->get_device(&number, ordinal), "cuDeviceGet"));
    CudaDriver::Handle context = nullptr;
    CKPT_RETURN_IF_ERROR(
        driver->Check(driver->retain_primary(&context, number), "cuDevicePrimaryCtxRetain"));
    std::shared_ptr<Device> device(new Device(std::move(driver), number, context));
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
      return {};
    });
    driver_->release_primary(number_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // call() with the context; the caller's own is the current one again afterwards.
  template <class Call>
  Status Inside(const Call& call) const {
    CKPT_RETURN_IF_ERROR(driver_->Check(driver_->push_context(context_), "cuCtxPushCurrent"));
    Status done = call();
    CudaDriver::Handle popped = nullptr;
    driver_->pop_context(&popped);
    return done;
  }

  Status Follow(uint64_t handle) const {
    return Inside([&]() -> Status {
      CudaDriver::Handle event = nullptr;
      CKPT_RETURN_IF_ERROR(driver_->Check(
          driver_->create_event(&event, CudaDriver::kEventQuiet), "cuEventCreate"));
      auto* stream = reinterpret_cast<CudaDriver::Handle>(handle);
      Status done = driver_->Check(driver_->record_event(event, stream), "cuEventRecord");
      if (done) {
        done = driver_->Check(driver_->wait_event(stream_, event, 0), "cuStreamWaitEvent");
      }
      driver_->destroy_event(event);  // it lives until it was waited for
      return done;
    });
  }

  // Nothing is waited for between them.
  Status Copy(std::span<const MemoryCopy> copies) const {
    return Inside([&]() -> Status {
      for (const MemoryCopy& copy : copies) CKPT_RETURN_IF_ERROR(Copy(copy));
      return {};
    });
  }

  // Sleeps until all copies are done: the stream's own wait would keep a processor busy.
  Status Wait() const {
    return Inside([&]() -> Status {
      CKPT_RETURN_IF_ERROR(driver_->Check(driver_->record_event(done_, stream_), "cuEventRecord"));
      return driver_->Check(driver_->synchronize_event(done_), "cuEventSynchronize");
    });
  }
  // Whatever fails, nothing is being copied afterwards that can be waited for.
  void Quiet() const {
    (void)Inside([&]() -> Status {
      driver_->synchronize_stream(stream_);
      return {};
    });
  }

  const CudaDriver& driver() const { return *driver_; }

 private:
  Device(std::shared_ptr<const CudaDriver> driver, CudaDriver::Device number,
         CudaDriver::Handle context)
      : driver_(std::move(driver)), number_(number), context_(context) {}

  Status Copy(const MemoryCopy& copy) const {
    for (uint64_t at = 0; at < copy.bytes; at += kPieceBytes) {
      const uint64_t bytes = std::min(kPieceBytes, copy.bytes - at);
      const auto from = static_cast<CudaDriver::Address>(
          reinterpret_cast<uintptr_t>(copy.from + at));
      CKPT_RETURN_IF_ERROR(driver_->Check(
          driver_->copy_to_host(copy.to + at, from, bytes, stream_), "cuMemcpyDtoHAsync"));
    }
    return {};
  }

  Status MakeStream() {
    int least = 0, greatest = 0;
    CKPT_RETURN_IF_ERROR(
        driver_->Check(driver_->priorities(&least, &greatest), "cuCtxGetStreamPriorityRange"));
    CKPT_RETURN_IF_ERROR(driver_->Check(
        driver_->create_stream(&stream_, CudaDriver::kStreamNonBlocking, least),
        "cuStreamCreateWithPriority"));
    return driver_->Check(driver_->create_event(&done_, CudaDriver::kEventQuiet), "cuEventCreate");
  }

  const std::shared_ptr<const CudaDriver> driver_;
  const CudaDriver::Device number_;
  const CudaDriver::Handle context_;
  CudaDriver::Handle stream_ = nullptr;
  CudaDriver::Handle done_ = nullptr;  // the one thread's that copies
};

CudaCopier::CudaCopier(std::shared_ptr<const CudaDriver> driver) : driver_(std::move(driver)) {}
CudaCopier::~CudaCopier() = default;

Result<std::unique_ptr<CudaCopier>> CudaCopier::Open(const std::string& library) {
  CKPT_ASSIGN_OR_RETURN(auto driver, CudaDriver::Load(library));
  return std::unique_ptr<CudaCopier>(new CudaCopier(std::move(driver)));
}

Result<std::shared_ptr<CudaCopier::Device>> CudaCopier::DeviceOf(int ordinal) {
  {
    MutexLock lock(mutex_);
    const auto found = devices_.find(ordinal);
    if (found != devices_.end()) return found->second;
  }
  CKPT_ASSIGN_OR_RETURN(auto made, Device::Open(driver_, ordinal));
  MutexLock lock(mutex_);
  return devices_.try_emplace(ordinal, std::move(made)).first->second;
}

std::map<int, std::shared_ptr<CudaCopier::Device>> CudaCopier::Devices() {
  MutexLock lock(mutex_);
  return devices_;
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
  // A device copies while this thread copies what is the host's.
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
    return driver_->Check(driver_->register_host(memory.data(), memory.size(),
                                                 CudaDriver::kRegisterPortable),
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
