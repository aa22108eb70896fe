// SPDX-License-Identifier: Apache-2.0
//
// Counters counts what happened since the mount: requests by kind, bytes, errors, and the
// last opens with the reason for their mode.
//
// Thread safety: all methods may be called concurrently; counting takes no lock.
// Units: bytes.

#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "fs/types.h"

namespace ckptfs {

enum class Request : uint8_t {
  kLookup,
  kForget,
  kAttributes,
  kReadLink,
  kReadDirectory,
  kOpen,
  kRead,
  kRelease
};
inline constexpr size_t kRequestKinds = 8;
std::string_view RequestName(Request request);

struct RecentOpen {
  std::string path;
  ServingMode mode = ServingMode::kStream;
  std::string reason;
  uint64_t size = 0;  // of the file
};

class Counters {
 public:
  void Count(Request request) {
    requests_[static_cast<size_t>(request)].value.fetch_add(1, std::memory_order_relaxed);
  }
  // `mode`: how the handle that was read is served.
  void CountServed(ServingMode mode, uint64_t bytes) {
    served_[static_cast<size_t>(mode)].value.fetch_add(bytes, std::memory_order_relaxed);
  }
  void CountOpen(RecentOpen open);
  // An open that may have to fill begins.
  void CountFill() { begun_.value.fetch_add(1, std::memory_order_relaxed); }
  // Names that are not there are no errors.
  void CountError(const Error& error);
  // An answer to a caller who asked for what is not for them: counted, and not among the last
  // errors, which they could fill.
  void CountRefusal(ErrorCode code);

  uint64_t requests(Request request) const {
    return requests_[static_cast<size_t>(request)].value.load(std::memory_order_relaxed);
  }
  // A number that grows while files are opened and read (reading the status does not count).
  uint64_t activity() const {
    return served() + begun_.value.load(std::memory_order_relaxed) + opens(ServingMode::kStream) +
           opens(ServingMode::kMaterialise) + opens(ServingMode::kDirect);
  }
  uint64_t served(ServingMode mode) const {
    return served_[static_cast<size_t>(mode)].value.load(std::memory_order_relaxed);
  }
  uint64_t served() const {
    return served(ServingMode::kStream) + served(ServingMode::kMaterialise) +
           served(ServingMode::kDirect);
  }
  uint64_t opens(ServingMode mode) const {
    return opens_[static_cast<size_t>(mode)].value.load(std::memory_order_relaxed);
  }
  // Bytes of the files that were opened.
  uint64_t opened_bytes(ServingMode mode) const {
    return opened_bytes_[static_cast<size_t>(mode)].value.load(std::memory_order_relaxed);
  }
  // By ErrorCodeName, those that never happened, too.
  std::map<std::string, uint64_t> Errors() const;
  std::vector<std::string> RecentErrors() const;  // oldest first
  std::vector<RecentOpen> RecentOpens() const;    // oldest first

  static constexpr size_t kRecent = 64;

 private:
  struct alignas(64) Counter {
    std::atomic<uint64_t> value{0};
  };
  std::array<Counter, kRequestKinds> requests_;
  std::array<Counter, kServingModes> opens_;
  std::array<Counter, kServingModes> opened_bytes_;
  std::array<Counter, kServingModes> served_;
  Counter begun_;  // opens that may have to fill
  mutable Mutex mutex_;
  std::map<std::string, uint64_t> errors_ GUARDED_BY(mutex_);
  std::deque<std::string> recent_errors_ GUARDED_BY(mutex_);
  std::deque<RecentOpen> recent_opens_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
