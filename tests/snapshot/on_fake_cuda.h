// SPDX-License-Identifier: Apache-2.0
//
// A receiver beside a driver that is not one (tests/support/fake_cuda.h), and what a test does
// with that driver.
//
// Thread safety: that of the fake and of the fixture's base.

#pragma once

#include <dlfcn.h>

#include <future>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "snapshot/device/cuda_copier.h"
#include "tests/snapshot/receiving.h"
#include "tests/support/fake_cuda.h"

namespace ckptfs::testing_support {
class FakeCudaTest : public ReceiverTest {
 protected:
  template <class Call>
  static Call* Fake(const char* name) {
    static void* library = dlopen(CKPTFS_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<Call*>(dlsym(library, name));
  }
  static void Gate(bool open) { Fake<FakeCudaGate>("FakeCudaGateCall")(open); }
  static void FailAt(uint64_t n) { Fake<FakeCudaFailAt>("FakeCudaFailAtCall")(n); }
  static uint64_t Calls() { return Fake<FakeCudaCalls>("FakeCudaCallsCall")(); }
  static uint64_t Contexts() { return Fake<FakeCudaContexts>("FakeCudaContextsCall")(); }
  static uint64_t Pinned() { return Fake<FakeCudaPinned>("FakeCudaPinnedCall")(); }
  static void RefusePins(bool refuse) {
    Fake<FakeCudaRefusePins>("FakeCudaRefusePinsCall")(refuse);
  }
  static void RefuseModules(bool refuse) {
    Fake<FakeCudaRefuseModules>("FakeCudaRefuseModulesCall")(refuse);
  }
  static void RefuseMemory(bool refuse) {
    Fake<FakeCudaRefuseMemory>("FakeCudaRefuseMemoryCall")(refuse);
  }
  static uint64_t DeviceMemory() { return Fake<FakeCudaMemory>("FakeCudaMemoryCall")(); }
  static uint64_t Waits() { return Fake<FakeCudaWaits>("FakeCudaWaitsCall")(); }
  static void Capturing(bool begin) { Fake<FakeCudaCapture>("FakeCudaCaptureCall")(begin); }
  static void* Stream(int device) { return Fake<FakeCudaStream>("FakeCudaStreamCall")(device); }

  // The training job's own stream; streams are never given back.
  static DeviceStream Training(int device = 1) {
    static std::map<int, void*> streams;
    void*& stream = streams[device];
    if (stream == nullptr) stream = Stream(device);
    return {device, reinterpret_cast<uint64_t>(stream)};
  }
  // An update of all bytes, on the training job's stream.
  static void Update(std::string& memory, int device = 1) {
    Fake<FakeCudaLaunch>("FakeCudaLaunchCall")(
        reinterpret_cast<void*>(Training(device).handle),
        [](void* argument) {
          for (char& byte : *static_cast<std::string*>(argument)) ++byte;
        },
        &memory);
  }

  // Until the training job's stream has done all.
  static void Synchronize() {
    std::promise<void> done;
    Fake<FakeCudaLaunch>("FakeCudaLaunchCall")(
        reinterpret_cast<void*>(Training().handle),
        [](void* promise) { static_cast<std::promise<void>*>(promise)->set_value(); }, &done);
    done.get_future().wait();
  }

  void SetUp() override {
    FailAt(0);
    RefusePins(false);
    RefuseModules(false);
    RefuseMemory(false);
    Capturing(false);
    Gate(true);
  }
  void TearDown() override {
    SetUp();
    ReceiverTest::TearDown();
  }
  // The fake takes any image for the kernel.
  static std::unique_ptr<CudaCopier> Open(std::string_view image = "a kernel") {
    return *CudaCopier::Open(CKPTFS_FAKE_CUDA, std::as_bytes(std::span(image)));
  }
  static std::string Filled(size_t bytes, char with) { return std::string(bytes, with); }
  static MemoryCopy CopyOf(const std::string& from, std::string& to, int device) {
    return {reinterpret_cast<const std::byte*>(from.data()),
            reinterpret_cast<std::byte*>(to.data()), from.size(), device};
  }
};

}  // namespace ckptfs::testing_support
