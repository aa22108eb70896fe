// SPDX-License-Identifier: Apache-2.0
//
// SlowRoot shows another Root as if it lay far away: no file can be mapped, every
// request takes a while, all together share one line, and what was asked for is
// counted.  Neighbouring requests of one call are one request.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: files must not outlive it.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/io/root.h"

namespace ckptfs {

class SlowRoot final : public Root {
 public:
  struct Line {
    std::chrono::microseconds latency{20'000};
    double bytes_per_second = 200e6;
    // Nothing arrives before so many were in flight at once (or ten seconds are
    // over), so that a test of that does not depend on how busy the machine is.
    uint64_t together = 0;
  };
  struct Counts {
    uint64_t requests = 0;
    uint64_t bytes = 0;
    uint64_t most_in_flight = 0;
    uint64_t most_reads_of_a_byte = 0;  // at 4 KiB steps
  };

  SlowRoot(std::shared_ptr<const Root> root, Line line)
      : Root(root->name(), false), root_(std::move(root)), line_(line) {}

  Result<std::vector<RootEntry>> List(std::string_view path) const override {
    return root_->List(path);
  }
  Result<EntryStat> Stat(std::string_view path) const override { return root_->Stat(path); }
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override {
    CKPT_ASSIGN_OR_RETURN(auto file, root_->Open(path));
    return std::make_shared<const SlowFile>(*this, std::move(file));
  }

  Counts counts() const {
    MutexLock lock(mutex_);
    return counts_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  class SlowFile final : public File {
   public:
    SlowFile(const SlowRoot& root, std::shared_ptr<const File> file)
        : File(file->name(), file->size()), root_(root), file_(std::move(file)) {}
    Result<FileIdentity> Identity() const override { return file_->Identity(); }
    Status ReadAt(std::span<const ReadRequest> requests) const override {
      CKPT_RETURN_IF_ERROR(CheckRanges(requests));
      root_.Travel(name(), requests);
      return file_->ReadAt(requests);
    }
    Result<std::shared_ptr<const Mapping>> Map() const override { return nullptr; }
    int descriptor() const override { return -1; }

   private:
    const SlowRoot& root_;
    const std::shared_ptr<const File> file_;
  };

  // Sleeps until the last byte would have come: a latency from now on, and behind
  // what is on the line.
  void Travel(const std::string& file, std::span<const ReadRequest> requests) const {
    uint64_t bytes = 0, count = 0, end = ~uint64_t{0};
    for (const ReadRequest& request : requests) {
      if (request.offset != end) ++count;
      end = request.offset + request.out.size();
      bytes += request.out.size();
    }
    Clock::time_point arrival;
    {
      MutexLock lock(mutex_);
      const auto now = Clock::now();
      const auto takes = std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(static_cast<double>(bytes) / line_.bytes_per_second));
      busy_until_ = std::max(busy_until_, now + line_.latency) + takes;
      arrival = busy_until_;
      counts_.requests += count;
      counts_.bytes += bytes;
      in_flight_ += count;
      counts_.most_in_flight = std::max(counts_.most_in_flight, in_flight_);
      for (const ReadRequest& request : requests) Note(file, request);
    }
    std::this_thread::sleep_until(arrival);
    const auto patience = arrival + std::chrono::seconds(10);
    while (counts().most_in_flight < line_.together && Clock::now() < patience) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    MutexLock lock(mutex_);
    in_flight_ -= count;
  }

  void Note(const std::string& file, const ReadRequest& request) const
      EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::vector<uint32_t>& reads = reads_[file];
    const uint64_t end = request.offset + request.out.size();
    reads.resize(std::max<size_t>(reads.size(), end / 4096 + 1));
    for (uint64_t page = (request.offset + 4095) / 4096; page * 4096 < end; ++page) {
      counts_.most_reads_of_a_byte =
          std::max<uint64_t>(counts_.most_reads_of_a_byte, ++reads[page]);
    }
  }

  const std::shared_ptr<const Root> root_;
  const Line line_;
  mutable Mutex mutex_;
  mutable Clock::time_point busy_until_ GUARDED_BY(mutex_);
  mutable uint64_t in_flight_ GUARDED_BY(mutex_) = 0;
  mutable Counts counts_ GUARDED_BY(mutex_);
  mutable std::map<std::string, std::vector<uint32_t>> reads_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
