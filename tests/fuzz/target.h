// SPDX-License-Identifier: Apache-2.0
//
// A fuzz target takes any bytes as one of our formats.  It must return, without
// a crash, a leak or unbounded work; what it accepts must hold the rules that
// the target itself asserts.  The same objects link with libFuzzer
// (-DCKPTFS_FUZZ=ON, clang) and with replay_main.cc, which ctest runs.
//
// Thread safety: none needed.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Always on: a broken promise of the code under test.
#define FUZZ_CHECK(condition)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)
