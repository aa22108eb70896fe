// SPDX-License-Identifier: Apache-2.0

#include "core/base/fault_point.h"

#ifdef CKPTFS_FAULT_POINTS
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#endif

namespace ckptfs {

#ifdef CKPTFS_FAULT_POINTS
void FaultPoint() {
  static std::atomic<unsigned long> reached{0};
  const char* at = getenv("CKPTFS_KILL_AT");
  if (at != nullptr && ++reached == strtoul(at, nullptr, 10)) kill(getpid(), SIGKILL);
}
#else
void FaultPoint() {}
#endif

}  // namespace ckptfs
