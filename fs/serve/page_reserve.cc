// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/page_reserve.h"

#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <chrono>

namespace ckptfs {
namespace {

constexpr std::chrono::seconds kQuiet{2};  // without a request, before it works
constexpr size_t kMostIdle = 64;           // each holds a descriptor

// The memory that can be had without taking it from the page cache, with some left over.
uint64_t FreeMemory() {
  struct sysinfo now;
  if (sysinfo(&now) != 0) return 0;
  const uint64_t left_over = uint64_t{now.totalram} / 32;
  const uint64_t free = now.freeram < left_over ? 0 : now.freeram - left_over;
  return free * now.mem_unit / kHugePage * kHugePage;
}

}  // namespace

uint64_t DefaultReserve(uint64_t budget) { return std::min(budget / 3, uint64_t{8} << 30); }

uint64_t NextToPrepare(uint64_t reserve, const PagePool::Idle& idle) {
  reserve = reserve / kHugePage * kHugePage;
  if (idle.files >= kMostIdle || idle.bytes >= reserve) return 0;
  uint64_t wanted = 0;
  for (const uint64_t charge : idle.expected) {
    wanted += charge;
    if (wanted > idle.bytes) return std::min(wanted, reserve) - idle.bytes;
  }
  if (idle.last_taken == 0) return 0;
  if (idle.last_taken > reserve) return reserve - idle.bytes;
  return idle.bytes + idle.last_taken <= reserve ? idle.last_taken : 0;
}

PageReserve::PageReserve(PagePool& pool, uint64_t bytes, std::function<uint64_t()> activity)
    : pool_(pool), bytes_(std::min(bytes, pool.budget())), activity_(std::move(activity)) {
  if (bytes_ < kHugePage) return;
  before_ = activity_();
  worker_.Start(Worker::Clock::now() + kQuiet, [this] { return Turn(); });
}

PageReserve::~PageReserve() { worker_.Stop(); }

bool PageReserve::settled() const { return no_room_ || NextToPrepare(bytes_, pool_.idle()) == 0; }

void PageReserve::PrepareAll() {
  const uint64_t before = activity_();
  const auto stop = [&] { return worker_.stopping() || activity_() != before; };
  while (!stop()) {
    const uint64_t wanted = NextToPrepare(bytes_, pool_.idle());
    const uint64_t size = std::min(wanted, FreeMemory());
    const uint64_t got = size == 0 ? 0 : pool_.Prepare(size, stop);
    no_room_ = wanted != 0 && got == 0 && !stop();
    if (got == 0) return;
  }
}

Worker::Time PageReserve::Turn() {
  setpriority(PRIO_PROCESS, 0, 19);  // of this thread only
  if (activity_() == before_) PrepareAll();
  before_ = activity_();
  return Worker::Clock::now() + kQuiet;
}

}  // namespace ckptfs
