// SPDX-License-Identifier: Apache-2.0
//
// CudaDevice is one device's primary context, which torch uses, with a stream of ours in it
// that copies, and the kernels that take and prove what lies on the device.
//
// Small copies that lie side by side in the host's memory are packed: a kernel on a second stream
// brings them side by side on the device, too, while the ones before are copied, and one copy takes
// all of them.  That takes kPackRooms times kPackBytes of the device's memory, from the first on.
//
// Thread safety: all methods may be called concurrently, but Copy by one thread at a time.
// Lifetime: the end waits for copies that are under way.
// Units: bytes.

#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "snapshot/device/copier.h"
#include "snapshot/device/cuda_driver.h"
#include "snapshot/device/device_pieces.h"

namespace ckptfs {

class CudaDevice : public std::enable_shared_from_this<CudaDevice> {
 public:
  using Handle = CudaDriver::Handle;

  static Result<std::shared_ptr<CudaDevice>> Open(std::shared_ptr<const CudaDriver> driver,
                                                  std::span<const std::byte> image, int ordinal);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

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

  // Makes copies wait for what the stream was given so far.
  Status Follow(Handle stream) const;
  // The notes of a device, which are there once it comes so far.
  struct Moment {
    const DeviceDigest* digests = nullptr;
    const std::byte* taken = nullptr;  // null: there is no memory for it
    std::shared_ptr<void> memory;      // of both
  };
  // Runs the kernels on the first of the streams.  They come after what the others did
  // so far, and before what they will do.
  Result<Moment> TakeMoment(std::span<const DevicePiece> digested,
                            std::span<const DevicePiece> taken, std::span<const Handle> streams);

  // Begins copies.  Nothing is waited for between them.
  Status Copy(std::span<const MemoryCopy> copies);
  // Notes an event behind all copies that were begun.
  Result<std::shared_ptr<void>> Record();
  // kUnsupported if the stream's work is being captured into a graph.
  Status CheckNotCaptured(Handle stream) const;
  // Makes the stream's later work wait for an event.
  Status Hold(Handle stream, Handle event) const;
  Result<bool> IsOver(Handle event) const;
  // Sleeps until it is: the driver's own wait would keep a processor busy.
  Status Wait(Handle event) const;

  // Sleeps until all copies are done.  If nothing was begun, it does not wait for
  // what the stream follows.
  Status Wait();
  // Waits for all copies that can be waited for, whatever fails.
  void Quiet() const;

  const CudaDriver& driver() const { return *driver_; }

 private:
  // Memory of a moment: page-locked memory of pieces, digests and moves, and the device's.
  struct Block {
    void* memory = nullptr;
    uint64_t bytes = 0;
    CudaDriver::Address taken = 0;
    uint64_t taken_bytes = 0;
    Handle launched = nullptr;  // an event: what was launched with it is over
  };

  CudaDevice(std::shared_ptr<const CudaDriver> driver, std::span<const std::byte> image,
             CudaDriver::Device number, Handle context)
      : driver_(std::move(driver)), image_(image), number_(number), context_(context) {}
  // Device memory in which copies are packed.
  struct PackRoom {
    CudaDriver::Address memory = 0;
    Handle packed = nullptr;  // events: it is full,
    Handle copied = nullptr;  // and empty again
  };

  Status MakeStreams();
  Status MakeStream(Handle& stream) const;
  Status MakeRooms();
  Status Pack(std::span<const MemoryCopy> copies);
  Status PackInto(const PackRoom& room, std::span<const MemoryCopy> copies);
  Status CopyPieces(const MemoryCopy& copy) const;
  Status TakeMoment(std::span<const DevicePiece> digested, std::span<const DevicePiece> taken,
                    std::span<const Handle> streams, Moment& moment);
  Status Order(Handle before, Handle after) const;
  Status LoadKernels();
  Result<std::shared_ptr<Block>> Room(uint64_t bytes, uint64_t taken_bytes);
  Status Allocate(uint64_t bytes, uint64_t taken_bytes, Block& block) const;
  void Free(const Block& block) const;
  void Free(const PackRoom& room) const;
  Status Launch(Handle kernel, uint64_t blocks, unsigned threads, Handle stream,
                void** arguments) const;
  Result<Handle> FreeEvent();

  const std::shared_ptr<const CudaDriver> driver_;
  const std::span<const std::byte> image_;
  const CudaDriver::Device number_;
  const Handle context_;
  Handle stream_ = nullptr;
  Handle pack_stream_ = nullptr;
  std::atomic<bool> busy_{false};  // copies were begun since the last Wait
  Mutex mutex_;
  Handle module_ GUARDED_BY(mutex_) = nullptr;
  Handle digest_ = nullptr;  // the kernels: once loaded they stay
  Handle gather_ = nullptr;
  Handle pack_ = nullptr;
  // Theirs who copy:
  std::vector<PackRoom> rooms_;
  uint64_t packed_ = 0;                       // how often one was used
  bool packs_ = true;                         // false: there is no memory for rooms, or no kernel
  std::string no_kernel_ GUARDED_BY(mutex_);  // why there is none
  std::vector<Block> free_ GUARDED_BY(mutex_);
  std::vector<Handle> free_events_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
