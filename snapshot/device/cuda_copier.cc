// SPDX-License-Identifier: Apache-2.0

#include "snapshot/device/cuda_copier.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "snapshot/device/cuda_device.h"

namespace ckptfs {
namespace {

CudaDevice::Handle HandleOf(const DeviceStream& stream) {
  return reinterpret_cast<CudaDevice::Handle>(stream.handle);
}

// The pieces that each device notes at a moment.  A save has tens of thousands, mostly of one
// device.
struct ByDevice {
  struct Its {
    std::vector<DevicePiece> digested, taken;
    std::vector<CudaDevice::Handle> streams;
    CudaDevice::Moment moment;
    void Digest(const MemoryPiece& one) { digested.push_back(PieceOf(one)); }
    void Take(const MemoryPiece& one) { taken.push_back(PieceOf(one)); }
    static DevicePiece PieceOf(const MemoryPiece& one) {
      return {reinterpret_cast<uintptr_t>(one.from), one.bytes};
    }
  };
  Its& Of(int device, size_t most) {
    if (last != nullptr && last_device == device) return *last;
    last = &all[last_device = device];
    last->digested.reserve(most);
    return *last;
  }
  // Streams of devices that note nothing are left out.
  void Add(const DeviceStream& stream) {
    const auto its = all.find(stream.device);
    if (its != all.end()) its->second.streams.push_back(HandleOf(stream));
  }

  std::map<int, Its> all;  // by ordinal
  Its* last = nullptr;
  int last_device = kHost;
};

// Events behind the copies of several devices.
class EventMark final : public CopyMark {
 public:
  struct One {
    std::shared_ptr<CudaDevice> device;
    std::shared_ptr<void> event;
  };
  void Add(One one) { events_.push_back(std::move(one)); }
  const std::vector<One>& events() const { return events_; }

  Result<bool> IsOver() const override {
    for (const One& one : events_) {
      CKPT_ASSIGN_OR_RETURN(const bool over, one.device->IsOver(one.event.get()));
      if (!over) return false;
    }
    return true;
  }
  Status Wait() const override {
    Status done;
    for (const One& one : events_) {
      const Status waited = one.device->Wait(one.event.get());
      if (waited) continue;
      one.device->Quiet();
      if (done) done = waited;
    }
    return done;
  }

 private:
  std::vector<One> events_;
};

}  // namespace

CudaCopier::CudaCopier(std::shared_ptr<const CudaDriver> driver, std::span<const std::byte> image)
    : driver_(std::move(driver)), image_(image) {}
CudaCopier::~CudaCopier() = default;

Result<std::unique_ptr<CudaCopier>> CudaCopier::Open(const std::string& library,
                                                     std::span<const std::byte> image) {
  CKPT_ASSIGN_OR_RETURN(auto driver, CudaDriver::Load(library));
  return std::unique_ptr<CudaCopier>(new CudaCopier(std::move(driver), image));
}

Result<std::shared_ptr<CudaDevice>> CudaCopier::DeviceOf(int ordinal) {
  {
    MutexLock lock(mutex_);
    const auto found = devices_.find(ordinal);
    if (found != devices_.end()) return found->second;
  }
  CKPT_ASSIGN_OR_RETURN(auto made, CudaDevice::Open(driver_, image_, ordinal));
  MutexLock lock(mutex_);
  return devices_.try_emplace(ordinal, std::move(made)).first->second;
}

std::map<int, std::shared_ptr<CudaDevice>> CudaCopier::Devices() {
  MutexLock lock(mutex_);
  return devices_;
}

Result<DeviceMoment> CudaCopier::TakeMoment(std::span<const MemoryPiece> digested,
                                            std::span<const MemoryPiece> taken,
                                            std::span<const DeviceStream> streams) {
  ByDevice by_device;
  for (const MemoryPiece& one : digested) by_device.Of(one.device, digested.size()).Digest(one);
  for (const MemoryPiece& one : taken) by_device.Of(one.device, digested.size()).Take(one);
  for (const DeviceStream& one : streams) by_device.Add(one);
  DeviceMoment all;
  bool room = true;
  for (auto& [ordinal, its] : by_device.all) {
    if (its.streams.empty()) return Fail(ErrorCode::kUnsupported, "no stream of a device is known");
    CKPT_ASSIGN_OR_RETURN(const auto device, DeviceOf(ordinal));
    CKPT_ASSIGN_OR_RETURN(its.moment, device->TakeMoment(its.digested, its.taken, its.streams));
    room = room && (its.taken.empty() || its.moment.taken != nullptr);
    all.memory.push_back(its.moment.memory);
  }
  all.digests.reserve(digested.size());
  for (const MemoryPiece& one : digested) {
    all.digests.push_back(by_device.Of(one.device, 0).moment.digests++);
  }
  for (const MemoryPiece& one : taken) {
    if (!room) break;
    const std::byte*& next = by_device.Of(one.device, 0).moment.taken;
    all.taken.push_back(std::exchange(next, next + one.bytes));
  }
  return all;
}

Status CudaCopier::Follow(std::span<const DeviceStream> streams) {
  for (const DeviceStream& stream : streams) {
    CKPT_ASSIGN_OR_RETURN(const auto device, DeviceOf(stream.device));
    CKPT_RETURN_IF_ERROR(device->Follow(HandleOf(stream)));
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

Result<std::shared_ptr<const CopyMark>> CudaCopier::Mark(std::span<const DeviceStream> streams) {
  const auto devices = Devices();
  for (const DeviceStream& stream : streams) {
    const auto device = devices.find(stream.device);
    if (device == devices.end()) continue;  // nothing of it was copied
    CKPT_RETURN_IF_ERROR(device->second->CheckNotCaptured(HandleOf(stream)));
  }
  auto mark = std::make_shared<EventMark>();
  for (const auto& [ordinal, device] : devices) {
    const bool held = std::ranges::any_of(
        streams, [&](const DeviceStream& stream) { return stream.device == ordinal; });
    if (!streams.empty() && !held) {
      return Fail(ErrorCode::kUnsupported, "no stream of a device is known");
    }
    CKPT_ASSIGN_OR_RETURN(auto event, device->Record());
    for (const DeviceStream& stream : streams) {
      if (stream.device != ordinal) continue;
      CKPT_RETURN_IF_ERROR(device->Hold(HandleOf(stream), event.get()));
    }
    mark->Add({device, std::move(event)});
  }
  return std::shared_ptr<const CopyMark>(std::move(mark));
}

Result<std::shared_ptr<const void>> CudaCopier::Pin(std::span<std::byte> memory, int ordinal) {
  CKPT_ASSIGN_OR_RETURN(const auto device, DeviceOf(ordinal));
  CKPT_RETURN_IF_ERROR(device->Inside([&] {
    return driver_->Check(
        driver_->register_host(memory.data(), memory.size(), CudaDriver::kRegisterPortable),
        "cuMemHostRegister");
  }));
  return std::shared_ptr<const void>(memory.data(), [device](const void* begin) {
    (void)device->Inside([&]() -> Status {
      device->driver().unregister_host(const_cast<void*>(begin));
      return {};
    });
  });
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
