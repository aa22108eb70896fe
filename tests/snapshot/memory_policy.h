// SPDX-License-Identifier: Apache-2.0
//
// On which NUMA node a memory file's next pages will be.

#pragma once

#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <utility>

namespace ckptfs::testing_support {

// The file's own policy, and the first 64 nodes of it.
inline std::pair<int, unsigned long> MemoryPolicyOf(int descriptor) {
  void* const page = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, descriptor, 0);
  int policy = -1;
  std::array<unsigned long, 16> nodes{};
  EXPECT_EQ(syscall(SYS_get_mempolicy, &policy, nodes.data(), 1024, page, MPOL_F_ADDR), 0);
  munmap(page, 4096);
  return {policy, nodes[0]};
}

}  // namespace ckptfs::testing_support
