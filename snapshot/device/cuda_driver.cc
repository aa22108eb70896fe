// SPDX-License-Identifier: Apache-2.0

#include "snapshot/device/cuda_driver.h"

#include <dlfcn.h>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

template <class Call>
bool Find(void* library, const char* symbol, Call& call) {
  call = reinterpret_cast<Call>(dlsym(library, symbol));
  return call != nullptr;
}

bool FindAll(void* library, CudaDriver& driver) {
  return Find(library, "cuInit", driver.init) && Find(library, "cuDeviceGet", driver.get_device) &&
         Find(library, "cuDevicePrimaryCtxRetain", driver.retain_primary) &&
         Find(library, "cuDevicePrimaryCtxRelease_v2", driver.release_primary) &&
         Find(library, "cuCtxPushCurrent_v2", driver.push_context) &&
         Find(library, "cuCtxPopCurrent_v2", driver.pop_context) &&
         Find(library, "cuCtxGetStreamPriorityRange", driver.priorities) &&
         Find(library, "cuStreamCreateWithPriority", driver.create_stream) &&
         Find(library, "cuStreamDestroy_v2", driver.destroy_stream) &&
         Find(library, "cuStreamSynchronize", driver.synchronize_stream) &&
         Find(library, "cuStreamWaitEvent", driver.wait_event) &&
         Find(library, "cuEventCreate", driver.create_event) &&
         Find(library, "cuEventDestroy_v2", driver.destroy_event) &&
         Find(library, "cuEventRecord", driver.record_event) &&
         Find(library, "cuEventSynchronize", driver.synchronize_event) &&
         Find(library, "cuEventQuery", driver.query_event) &&
         Find(library, "cuMemAlloc_v2", driver.allocate) &&
         Find(library, "cuMemFree_v2", driver.free) &&
         Find(library, "cuMemcpyDtoHAsync_v2", driver.copy_to_host) &&
         Find(library, "cuMemHostRegister_v2", driver.register_host) &&
         Find(library, "cuMemHostUnregister", driver.unregister_host) &&
         Find(library, "cuMemHostAlloc", driver.allocate_host) &&
         Find(library, "cuMemFreeHost", driver.free_host) &&
         Find(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode) &&
         Find(library, "cuStreamIsCapturing", driver.is_capturing) &&
         Find(library, "cuModuleLoadData", driver.load_module) &&
         Find(library, "cuModuleUnload", driver.unload_module) &&
         Find(library, "cuModuleGetFunction", driver.get_function) &&
         Find(library, "cuLaunchKernel", driver.launch) &&
         Find(library, "cuGetErrorName", driver.error_name);
}

}  // namespace

Result<std::shared_ptr<const CudaDriver>> CudaDriver::Load(const std::string& library) {
  // Never unloaded: the driver has threads and exit handlers of its own.
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return Fail(ErrorCode::kUnsupported, StrCat(library, " cannot be loaded"));
  auto driver = std::make_shared<CudaDriver>();
  if (!FindAll(handle, *driver)) {
    return Fail(ErrorCode::kUnsupported, StrCat(library, " lacks a call that is needed"));
  }
  CKPT_RETURN_IF_ERROR(driver->Check(driver->init(0), "cuInit"));
  return driver;
}

Status CudaDriver::Check(Code code, std::string_view call) const {
  if (code == 0) return {};
  const char* name = nullptr;
  if (error_name(code, &name) != 0 || name == nullptr) name = "unknown error";
  return Fail(ErrorCode::kIo, StrCat(call, ": ", name, " (", code, ")"));
}

}  // namespace ckptfs
