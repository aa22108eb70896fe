// SPDX-License-Identifier: Apache-2.0

#include "core/base/parallel.h"

#include <tbb/parallel_for.h>

#if defined(CKPT_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace ckptfs {
namespace {

// The order that oneTBB makes, in words that ThreadSanitizer reads.  Two
// addresses, since one would order the calls to each other and hide their races.
struct Order {
  char begun = 0;
  char done = 0;
};

#if defined(CKPT_THREAD_SANITIZER)
void Before(char& mark) { __tsan_release(&mark); }
void After(char& mark) { __tsan_acquire(&mark); }
#else
void Before(char&) {}
void After(char&) {}
#endif

}  // namespace

void ParallelFor(size_t count, const std::function<void(size_t)>& work) {
  Order order;
  const auto call = [&work, &order](size_t i) {
    After(order.begun);
    work(i);
    Before(order.done);
  };
  Before(order.begun);
  tbb::parallel_for(size_t{0}, count, call);
  After(order.done);
}

}  // namespace ckptfs
