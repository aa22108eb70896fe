// SPDX-License-Identifier: Apache-2.0
//
// Memory that begins at a page: what is written from it can go past the page cache.
//
// Thread safety: as that of what holds it.

#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace ckptfs {

inline constexpr std::align_val_t kPageAlignment{4096};

struct FreePages {
  void operator()(std::byte* pages) const { ::operator delete(pages, kPageAlignment); }
};
using Pages = std::unique_ptr<std::byte[], FreePages>;

// Not initialised.  std::bad_alloc if there is no memory.
inline Pages MakePages(size_t bytes) {
  return Pages(static_cast<std::byte*>(::operator new(bytes, kPageAlignment)));
}

}  // namespace ckptfs
