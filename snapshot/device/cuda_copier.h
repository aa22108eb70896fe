// SPDX-License-Identifier: Apache-2.0
//
// CudaCopier copies out of CUDA devices on a stream of its own per device.  The
// stream has the lowest priority, so that computing goes first.  Copies are cut
// into pieces, so that others' copies get between.  Host memory is copied at once.
//
// It touches a device when the first copy or stream of it comes and not before.  It
// retains the device's primary context, which torch uses, and never makes another.
//
// Thread safety: as Copier.
// Lifetime: the end waits for copies that are under way.
// Units: bytes.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "core/base/mutex.h"
#include "snapshot/device/copier.h"
#include "snapshot/device/cuda_driver.h"
#include "snapshot/device/cuda_image.h"

namespace ckptfs {

inline constexpr const char* kCudaLibrary = "libcuda.so.1";

class CudaDevice;

class CudaCopier final : public Copier {
 public:
  // kUnsupported if the library cannot be used.  No device is touched.  `image`: the kernels.
  static Result<std::unique_ptr<CudaCopier>> Open(const std::string& library = kCudaLibrary,
                                                  std::span<const std::byte> image = CudaImage());
  ~CudaCopier() override;

  Result<DeviceMoment> TakeMoment(std::span<const MemoryPiece> digested,
                                  std::span<const MemoryPiece> taken,
                                  std::span<const DeviceStream> streams) override;
  Status Follow(std::span<const DeviceStream> streams) override;
  Status Enqueue(std::span<const MemoryCopy> copies, Trainer trainer) override;
  Status Wait() override;
  Result<std::shared_ptr<const CopyMark>> Mark(std::span<const DeviceStream> streams) override;
  Result<std::shared_ptr<const void>> Pin(std::span<std::byte> memory, int device) override;

 private:
  CudaCopier(std::shared_ptr<const CudaDriver> driver, std::span<const std::byte> image);
  Result<std::shared_ptr<CudaDevice>> DeviceOf(int ordinal);
  std::map<int, std::shared_ptr<CudaDevice>> Devices();
  Status Begin(std::span<const MemoryCopy> copies, Trainer trainer);

  const std::shared_ptr<const CudaDriver> driver_;
  const std::span<const std::byte> image_;
  Mutex mutex_;
  std::map<int, std::shared_ptr<CudaDevice>> devices_ GUARDED_BY(mutex_);
};

// Makes copiers of that library, the host's if it is gone by then; empty where it cannot
// be used now.
std::function<std::unique_ptr<Copier>()> CudaCopierMaker(const std::string& library = kCudaLibrary);

}  // namespace ckptfs
