// SPDX-License-Identifier: Apache-2.0

#include "tests/support/fake_cuda.h"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "snapshot/device/device_pieces.h"
#include "snapshot/device/piece_lanes.h"

namespace {

constexpr int kDevices = 4;
constexpr int kInvalidValue = 1;
constexpr int kInvalidImage = 200;
constexpr int kInvalidContext = 201;
constexpr int kAlreadyRegistered = 712;
constexpr int kLaunchFailed = 719;
constexpr int kNotReady = 600;
constexpr int kOutOfMemory = 2;

struct Event {
  uint64_t recorded = 0;  // how often that was asked for
  uint64_t reached = 0;   // and has happened
};

struct Stream {
  int device = 0;
  std::deque<std::function<void()>> work;
  bool busy = false;
  bool ending = false;
  std::thread thread;
};

struct Context {
  int device = 0;
  int users = 0;
};

// Never destroyed: streams that are not given back wait with them until the process ends.
std::mutex& mutex = *new std::mutex;
std::condition_variable& moved = *new std::condition_variable;
bool gate_open = true;
bool refuse_pins = false;
uint64_t calls = 0;
uint64_t fail_at = 0;
uint64_t stops = 0;  // how often all work was lost
size_t largest = 0;
Context contexts[kDevices];
std::map<void*, size_t> pinned;
std::set<void*> allocated;
bool refuse_modules = false;
bool capturing = false;
int digest_kernel = 0, gather_kernel = 0,
    pack_kernel = 0;                                 // their addresses are the kernels' handles
std::map<unsigned long long, size_t> device_memory;  // that was allocated
bool refuse_memory = false;
uint64_t waits = 0;  // how often a caller was made to wait for a device
std::map<void*, std::unique_ptr<Stream>>& streams = *new std::map<void*, std::unique_ptr<Stream>>;
std::map<void*, std::shared_ptr<Event>> events;
thread_local std::vector<Context*> current;

// Under the lock: whether this call is one that fails.
int Enter(bool needs_context = true) {
  ++calls;
  if (fail_at != 0 && calls >= fail_at) return kLaunchFailed;
  if (needs_context && (current.empty() || current.back()->users == 0)) return kInvalidContext;
  return 0;
}

Stream* Find(void* handle) {
  const auto found = streams.find(handle);
  if (found == streams.end()) return nullptr;
  return current.empty() || found->second->device == current.back()->device ? found->second.get()
                                                                            : nullptr;
}

void Run(Stream* stream) {
  std::unique_lock lock(mutex);
  while (true) {
    moved.wait(lock, [&] { return stream->ending || (gate_open && !stream->work.empty()); });
    if (stream->work.empty()) return;
    const auto next = std::move(stream->work.front());
    stream->work.pop_front();
    stream->busy = true;
    lock.unlock();
    next();
    lock.lock();
    stream->busy = false;
    moved.notify_all();
  }
}

void* MakeStream(int device) {
  auto stream = std::make_unique<Stream>();
  Stream* raw = stream.get();
  raw->device = device;
  streams[raw] = std::move(stream);
  raw->thread = std::thread([raw] { Run(raw); });
  return raw;
}

void Post(Stream* stream, std::function<void()> work) {
  stream->work.push_back(std::move(work));
  moved.notify_all();
}

// As the four threads of the kernel do.
ckptfs::DeviceDigest DigestOf(const ckptfs::DevicePiece& piece) {
  static constexpr ckptfs::PieceSecret kSecret = ckptfs::MakePieceSecret();
  std::vector<char> bytes(std::max(piece.bytes, ckptfs::kShortestPiece));
  std::memcpy(bytes.data(), reinterpret_cast<const void*>(piece.address), piece.bytes);
  uint64_t low = 0, high = 0;
  for (unsigned thread = 0; thread < ckptfs::kPieceThreads; ++thread) {
    ckptfs::PieceLanes lanes(kSecret, thread);
    AddPiece(lanes, bytes.size(), thread, [&](uint64_t at) {
      ckptfs::PieceWords words;
      std::memcpy(&words.first, &bytes[at], 8);
      std::memcpy(&words.second, &bytes[at + 8], 8);
      return words;
    });
    low += lanes.Low();
    high += lanes.High();
  }
  return {ckptfs::PieceLanes::FinishHigh(high, bytes.size()),
          ckptfs::PieceLanes::FinishLow(low, bytes.size())};
}

// A device that failed copies no more.
void StopAll() {
  ++stops;
  for (auto& [handle, stream] : streams) stream->work.clear();
  for (auto& [handle, event] : events) event->reached = event->recorded;  // nobody waits for good
  moved.notify_all();
}

}  // namespace

extern "C" {

void FakeCudaGateCall(bool open) {
  const std::lock_guard lock(mutex);
  gate_open = open;
  moved.notify_all();
}
void FakeCudaFailAtCall(uint64_t n) {
  const std::lock_guard lock(mutex);
  calls = 0;
  fail_at = n;
  largest = 0;
}
uint64_t FakeCudaCallsCall() {
  const std::lock_guard lock(mutex);
  return calls;
}
uint64_t FakeCudaContextsCall() {
  const std::lock_guard lock(mutex);
  uint64_t mask = 0;
  for (int i = 0; i < kDevices; ++i) mask |= contexts[i].users > 0 ? uint64_t{1} << i : 0;
  return mask;
}
uint64_t FakeCudaPinnedCall() {
  const std::lock_guard lock(mutex);
  uint64_t bytes = 0;
  for (const auto& [begin, size] : pinned) bytes += size;
  return bytes;
}
void FakeCudaRefusePinsCall(bool refuse) {
  const std::lock_guard lock(mutex);
  refuse_pins = refuse;
}
void FakeCudaRefuseModulesCall(bool refuse) {
  const std::lock_guard lock(mutex);
  refuse_modules = refuse;
}
void FakeCudaRefuseMemoryCall(bool refuse) {
  const std::lock_guard lock(mutex);
  refuse_memory = refuse;
}
uint64_t FakeCudaMemoryCall() {
  const std::lock_guard lock(mutex);
  uint64_t bytes = 0;
  for (const auto& [begin, size] : device_memory) bytes += size;
  return bytes;
}
uint64_t FakeCudaWaitsCall() {
  const std::lock_guard lock(mutex);
  return waits;
}
void FakeCudaCaptureCall(bool begin) {
  const std::lock_guard lock(mutex);
  capturing = begin;
}
void* FakeCudaStreamCall(int device) {
  const std::lock_guard lock(mutex);
  return MakeStream(device);
}
void FakeCudaLaunchCall(void* stream, void (*kernel)(void*), void* argument) {
  const std::lock_guard lock(mutex);
  Post(streams.at(stream).get(), [=] { kernel(argument); });
}
size_t FakeCudaLargestCall() {
  const std::lock_guard lock(mutex);
  return largest;
}

int cuInit(unsigned) { return 0; }

int cuDeviceGet(int* device, int ordinal) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter(false)) return failed;
  if (ordinal < 0 || ordinal >= kDevices) return kInvalidValue;
  *device = ordinal;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter(false)) return failed;
  contexts[device].device = device;
  ++contexts[device].users;
  *context = &contexts[device];
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  const std::lock_guard lock(mutex);
  --contexts[device].users;
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  const std::lock_guard lock(mutex);
  current.push_back(static_cast<Context*>(context));
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  const std::lock_guard lock(mutex);
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return 0;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  *least = 0;
  *greatest = -5;
  return 0;
}

int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  if (flags != 1 || priority != 0) return kInvalidValue;  // not to be in anyone's way
  *stream = MakeStream(current.back()->device);
  return 0;
}

int cuStreamDestroy_v2(void* handle) {
  std::unique_ptr<Stream> stream;
  {
    const std::lock_guard lock(mutex);
    const auto found = streams.find(handle);
    if (found == streams.end()) return kInvalidValue;
    stream = std::move(found->second);
    streams.erase(found);
    stream->ending = true;
    moved.notify_all();
  }
  stream->thread.join();
  return 0;
}

int cuStreamSynchronize(void* handle) {
  std::unique_lock lock(mutex);
  Stream* stream = Find(handle);
  if (stream == nullptr) return kInvalidValue;
  if (const int failed = Enter()) {
    StopAll();
    moved.wait(lock, [&] { return !stream->busy; });
    return failed;
  }
  moved.wait(lock, [&] { return stream->work.empty() && !stream->busy; });
  return 0;
}

int cuEventCreate(void** event, unsigned) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  auto made = std::make_shared<Event>();
  *event = made.get();
  events[made.get()] = std::move(made);
  return 0;
}

int cuEventDestroy_v2(void* event) {
  const std::lock_guard lock(mutex);
  return events.erase(event) == 1 ? 0 : kInvalidValue;
}

int cuEventRecord(void* handle, void* stream) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  Stream* on = Find(stream);
  const auto event = events.find(handle);
  if (on == nullptr || event == events.end()) return kInvalidValue;
  const uint64_t number = ++event->second->recorded;
  Post(on, [held = event->second, number] {
    const std::lock_guard inner(mutex);
    held->reached = std::max(held->reached, number);
    moved.notify_all();
  });
  return 0;
}

int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  Stream* on = Find(stream);
  const auto event = events.find(handle);
  if (on == nullptr || event == events.end()) return kInvalidValue;
  Post(on, [held = event->second, number = event->second->recorded, before = stops] {
    std::unique_lock inner(mutex);
    moved.wait(inner, [&] { return held->reached >= number || stops != before; });
  });
  return 0;
}

int cuEventSynchronize(void* handle) {
  std::unique_lock lock(mutex);
  if (const int failed = Enter()) return failed;
  const auto event = events.find(handle);
  if (event == events.end()) return kInvalidValue;
  const auto held = event->second;
  const uint64_t number = held->recorded, before = stops;
  waits += held->reached < number ? 1 : 0;
  moved.wait(lock, [&] { return held->reached >= number || stops != before; });
  return stops == before ? 0 : kLaunchFailed;
}

int cuEventQuery(void* handle) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  const auto event = events.find(handle);
  if (event == events.end()) return kInvalidValue;
  return event->second->reached >= event->second->recorded ? 0 : kNotReady;
}

int cuMemAlloc_v2(unsigned long long* memory, size_t bytes) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  if (refuse_memory) return kOutOfMemory;
  *memory = reinterpret_cast<unsigned long long>(std::malloc(bytes));
  device_memory[*memory] = bytes;
  return 0;
}

int cuMemFree_v2(unsigned long long memory) {
  const std::lock_guard lock(mutex);
  if (device_memory.erase(memory) != 1) return kInvalidValue;
  std::free(reinterpret_cast<void*>(memory));
  return 0;
}

int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void* stream) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  Stream* on = Find(stream);
  if (on == nullptr) return kInvalidValue;
  largest = std::max(largest, bytes);
  Post(on, [=] { std::memcpy(to, reinterpret_cast<const void*>(from), bytes); });
  return 0;
}

int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  if (refuse_pins) return kInvalidValue;
  return pinned.emplace(memory, bytes).second ? 0 : kAlreadyRegistered;
}

int cuMemHostUnregister(void* memory) {
  const std::lock_guard lock(mutex);
  return pinned.erase(memory) == 1 ? 0 : kInvalidValue;
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  *memory = std::malloc(bytes);
  allocated.insert(*memory);
  return 0;
}

int cuMemFreeHost(void* memory) {
  const std::lock_guard lock(mutex);
  if (allocated.erase(memory) != 1) return kInvalidValue;
  std::free(memory);
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int own = 0;
  std::swap(own, *mode);
  return 0;
}

int cuStreamIsCapturing(void* stream, int* status) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  if (Find(stream) == nullptr) return kInvalidValue;
  *status = capturing ? 1 : 0;
  return 0;
}

int cuModuleLoadData(void** module, const void* image) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  if (refuse_modules) return kInvalidImage;
  *module = const_cast<void*>(image);
  return 0;
}

int cuModuleUnload(void*) { return 0; }

int cuModuleGetFunction(void** function, void*, const char* name) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  const std::map<std::string, int*> kernels{{ckptfs::kDigestKernel, &digest_kernel},
                                            {ckptfs::kGatherKernel, &gather_kernel},
                                            {ckptfs::kPackKernel, &pack_kernel}};
  const auto found = kernels.find(name);
  if (found == kernels.end()) return kInvalidValue;
  *function = found->second;
  return 0;
}

int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                   unsigned, unsigned, void* stream, void** arguments, void**) {
  const std::lock_guard lock(mutex);
  if (const int failed = Enter()) return failed;
  Stream* on = Find(stream);
  if (on != nullptr && function == &gather_kernel) {
    const auto* const moves = *static_cast<const ckptfs::DeviceMove**>(arguments[0]);
    Post(on, [=] {
      for (unsigned i = 0; i < blocks; ++i) {
        std::memcpy(reinterpret_cast<void*>(moves[i].to),
                    reinterpret_cast<const void*>(moves[i].from), moves[i].bytes);
      }
    });
    return 0;
  }
  if (on != nullptr && function == &pack_kernel) {
    Post(on, [packed = *static_cast<const ckptfs::PackedMoves*>(arguments[0]), blocks] {
      for (unsigned i = 0; i < blocks; ++i) {
        const ckptfs::PackedMove& move = packed.moves[i];
        std::memcpy(reinterpret_cast<void*>(packed.to + move.to),
                    reinterpret_cast<const void*>(move.from), move.bytes);
      }
    });
    return 0;
  }
  const auto* const pieces = *static_cast<const ckptfs::DevicePiece**>(arguments[0]);
  auto* const digests = *static_cast<ckptfs::DeviceDigest**>(arguments[1]);
  const uint64_t count = *static_cast<uint64_t*>(arguments[2]);
  const bool enough = uint64_t{blocks} * threads >= count * ckptfs::kPieceThreads;
  if (on == nullptr || function != &digest_kernel || !enough) return kInvalidValue;
  Post(on, [=] {
    for (uint64_t i = 0; i < count; ++i) digests[i] = DigestOf(pieces[i]);
  });
  return 0;
}

int cuGetErrorName(int code, const char** name) {
  *name = code == kLaunchFailed ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_INVALID";
  return 0;
}
}
