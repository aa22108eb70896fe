// SPDX-License-Identifier: Apache-2.0

#include "core/base/xxh3.h"

namespace ckptfs::internal {

const Xxh3* Xxh3OfAvx2() {
#if defined(__AVX2__)
  return &kXxh3Here;
#else
  return nullptr;
#endif
}

}  // namespace ckptfs::internal
