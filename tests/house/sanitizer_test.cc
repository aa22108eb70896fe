// SPDX-License-Identifier: Apache-2.0
//
// The sanitizers of this build are on: each fault they are there for, made on
// purpose in a child process, is reported and ends it.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <limits>
#include <thread>

#include "core/base/parallel.h"

namespace {

// Hides a value from the compiler, so that a fault stays in the program.
template <typename T>
T Opaque(T value) {
  volatile T hidden = value;
  return hidden;
}

#if defined(__SANITIZE_ADDRESS__)

TEST(SanitizerDeathTest, ReadsPastTheEndAreFound) {
  EXPECT_DEATH(
      {
        char* block = static_cast<char*>(std::malloc(Opaque<size_t>(10)));
        std::exit(block[Opaque<size_t>(10)]);
      },
      "heap-buffer-overflow");
}

TEST(SanitizerDeathTest, SignedOverflowIsFound) {
  EXPECT_DEATH(std::exit(Opaque(std::numeric_limits<int>::max()) + Opaque(1)),
               "signed integer overflow");
}

#elif defined(__SANITIZE_THREAD__)

TEST(SanitizerDeathTest, RacesAreFound) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        int shared = 0;
        std::thread other([&shared] {
          for (int i = 0; i < 1000; ++i) ++shared;
        });
        for (int i = 0; i < 1000; ++i) ++shared;
        other.join();
        std::exit(0);
      },
      testing::ExitedWithCode(66), "data race");
}

TEST(SanitizerDeathTest, RacesOfParallelWorkAreFound) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        int shared = 0;
        ckptfs::ParallelFor(256, [&shared](size_t) {
          ++shared;
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        });
        std::exit(0);
      },
      testing::ExitedWithCode(66), "data race");
}

#else
#error "this test belongs to sanitizer builds"
#endif

}  // namespace
