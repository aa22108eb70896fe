// SPDX-License-Identifier: Apache-2.0

#include "core/base/work_list.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/single_flight.h"

namespace ckptfs {
namespace {

constexpr std::chrono::milliseconds kReportInterval{200};

class Crew {
 public:
  Crew(size_t items, const std::function<Result<uint64_t>(size_t)>& work)
      : items_(items), work_(work) {}

  void Run(unsigned threads) {
    {
      MutexLock lock(mutex_);
      running_ = threads;
    }
    for (unsigned i = 0; i < threads; ++i) crew_.emplace_back([this] { Labour(); });
  }

  // Waits a moment; true when every thread has ended.
  bool WaitFor(std::chrono::milliseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    MutexLock lock(mutex_);
    while (running_ != 0 && ended_.WaitUntil(mutex_, end)) {
    }
    return running_ == 0;
  }

  void Join() {
    for (std::thread& one : crew_) one.join();
  }

  uint64_t bytes() const { return bytes_.load(); }
  uint64_t done() const { return done_.load(); }
  std::optional<Error>& error() { return error_; }

 private:
  void Labour() {
    for (size_t i = next_++; i < items_ && !stop_; i = next_++) {
      auto result = Caught([&] { return work_(i); });
      if (!result) {
        stop_ = true;
        MutexLock lock(mutex_);
        if (!error_) error_ = std::move(result).error();
        break;
      }
      bytes_ += *result;
      ++done_;
    }
    MutexLock lock(mutex_);
    if (--running_ == 0) ended_.NotifyAll();
  }

  const size_t items_;
  const std::function<Result<uint64_t>(size_t)>& work_;
  std::atomic<size_t> next_{0};
  std::atomic<uint64_t> bytes_{0};
  std::atomic<uint64_t> done_{0};
  std::atomic<bool> stop_{false};
  Mutex mutex_;
  CondVar ended_;
  unsigned running_ GUARDED_BY(mutex_) = 0;
  std::optional<Error> error_;  // guarded until Join
  std::vector<std::thread> crew_;
};

}  // namespace

Status RunWorkList(size_t items, uint64_t bytes_total, const JobOptions& options,
                   const std::function<Result<uint64_t>(size_t)>& work) {
  unsigned threads = options.threads;
  if (threads == 0) threads = std::max(2u, std::thread::hardware_concurrency());
  threads = static_cast<unsigned>(std::min<size_t>(threads, std::max<size_t>(items, 1)));
  Crew crew(items, work);
  crew.Run(threads);
  const auto report = [&] {
    if (!options.progress) return;
    options.progress(JobProgress{crew.bytes(), bytes_total, crew.done(), items});
  };
  while (!crew.WaitFor(kReportInterval)) report();
  crew.Join();
  if (crew.error()) return Fail(*std::move(crew.error()));
  report();
  return {};
}

}  // namespace ckptfs
