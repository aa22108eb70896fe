// SPDX-License-Identifier: Apache-2.0
//
// CudaDriver is the few calls of NVIDIA's driver that copies need, found when the process
// runs: nothing is linked, and one program serves machines with and without.  The
// prototypes are those of cuda.h (CUDA 12 and 13), under the symbols that it maps them to.
//
// Thread safety: immutable; the driver's calls may be made concurrently.
// Lifetime: the library stays loaded.
// Units: bytes.

#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/result.h"

namespace ckptfs {

struct CudaDriver {
  using Code = int;                    // CUresult; 0: success
  using Device = int;                  // CUdevice
  using Handle = void*;                // CUcontext, CUstream, CUevent
  using Address = unsigned long long;  // CUdeviceptr

  static constexpr Code kNotReady = 600;             // CUDA_ERROR_NOT_READY
  static constexpr unsigned kStreamNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
  static constexpr unsigned kEventQuiet = 3;         // BLOCKING_SYNC | DISABLE_TIMING
  static constexpr unsigned kRegisterPortable = 1;   // CU_MEMHOSTREGISTER_PORTABLE
  static constexpr unsigned kAllocatePortable = 1;   // CU_MEMHOSTALLOC_PORTABLE
  static constexpr int kCaptureRelaxed = 2;          // CU_STREAM_CAPTURE_MODE_RELAXED

  Code (*init)(unsigned flags) = nullptr;
  Code (*get_device)(Device* device, int ordinal) = nullptr;
  Code (*retain_primary)(Handle* context, Device device) = nullptr;
  Code (*release_primary)(Device device) = nullptr;
  Code (*push_context)(Handle context) = nullptr;
  Code (*pop_context)(Handle* context) = nullptr;
  Code (*priorities)(int* least, int* greatest) = nullptr;
  Code (*create_stream)(Handle* stream, unsigned flags, int priority) = nullptr;
  Code (*destroy_stream)(Handle stream) = nullptr;
  Code (*synchronize_stream)(Handle stream) = nullptr;
  Code (*wait_event)(Handle stream, Handle event, unsigned flags) = nullptr;
  Code (*create_event)(Handle* event, unsigned flags) = nullptr;
  Code (*destroy_event)(Handle event) = nullptr;
  Code (*record_event)(Handle event, Handle stream) = nullptr;
  Code (*synchronize_event)(Handle event) = nullptr;
  Code (*copy_to_host)(void* to, Address from, size_t bytes, Handle stream) = nullptr;
  Code (*register_host)(void* memory, size_t bytes, unsigned flags) = nullptr;
  Code (*unregister_host)(void* memory) = nullptr;
  Code (*query_event)(Handle event) = nullptr;  // kNotReady: it is not over
  Code (*allocate)(Address* memory, size_t bytes) = nullptr;
  Code (*free)(Address memory) = nullptr;
  Code (*allocate_host)(void** memory, size_t bytes, unsigned flags) = nullptr;
  Code (*free_host)(void* memory) = nullptr;
  // Swaps this thread's mode: in the relaxed one no call of ours breaks a graph that another
  // thread captures.
  Code (*exchange_capture_mode)(int* mode) = nullptr;
  Code (*is_capturing)(Handle stream, int* status) = nullptr;  // 0: it is not
  Code (*load_module)(Handle* module, const void* image) = nullptr;
  Code (*unload_module)(Handle module) = nullptr;
  Code (*get_function)(Handle* function, Handle module, const char* name) = nullptr;
  Code (*launch)(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                 unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                 Handle stream, void** arguments, void** extra) = nullptr;
  Code (*error_name)(Code code, const char** name) = nullptr;

  // kUnsupported if there is no such library, or it lacks a call.
  static Result<std::shared_ptr<const CudaDriver>> Load(const std::string& library);
  // kIo with the call's and the error's name, unless it succeeded.
  Status Check(Code code, std::string_view call) const;
};

}  // namespace ckptfs
