// SPDX-License-Identifier: Apache-2.0
//
// The handles of fake_cuda.cc: a library that has the symbols of NVIDIA's driver, whose
// devices are memory of this process and whose streams are threads.  Streams run
// beside each other in any order, as late as a test likes; only events order them.
//
// Thread safety: all may be called concurrently.

#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Streams do nothing while the gate is shut.
using FakeCudaGate = void(bool open);
// The n-th call of the driver from now on (1 is the next) and all after it fail; 0: none.
using FakeCudaFailAt = void(uint64_t n);
// Calls of the driver since the last FakeCudaFailAt.
using FakeCudaCalls = uint64_t();
// Returns the devices that have a primary context: bit k is device k.
using FakeCudaContexts = uint64_t();
// Bytes that are page-locked.
using FakeCudaPinned = uint64_t();
// Page-locking fails, or not.
using FakeCudaRefusePins = void(bool refuse);
// No kernel can be loaded, or it can.
using FakeCudaRefuseModules = void(bool refuse);
// Devices have no memory to allocate, or they have; how much of it is allocated.
using FakeCudaRefuseMemory = void(bool refuse);
using FakeCudaMemory = uint64_t();
// How often a caller had to wait for an event.
using FakeCudaWaits = uint64_t();
// All streams are being captured into a graph, or not.
using FakeCudaCapture = void(bool begin);
// A stream of the test's own, on a device, and work for it.
using FakeCudaStream = void*(int device);
using FakeCudaLaunch = void(void* stream, void (*kernel)(void*), void* argument);
// Returns the largest piece that was copied on other streams than the test's.
using FakeCudaLargest = size_t();
}
