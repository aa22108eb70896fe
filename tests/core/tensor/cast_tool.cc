// SPDX-License-Identifier: Apache-2.0
//
// cast_tool FROM TO LEVEL: casts the elements on standard input to standard
// output.  LEVEL is 0 (scalar), 1 (AVX2) or 2 (AVX-512); exits 77 if this
// processor does not have it, so that the test can say so.

#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "core/tensor/cast.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const auto from = ckptfs::DTypeFromName(argv[1]);
  const auto to = ckptfs::DTypeFromName(argv[2]);
  const auto level = static_cast<ckptfs::CastLevel>(atoi(argv[3]));
  if (!from || !to) return 2;
  if (level > ckptfs::BestCastLevel()) return 77;
  const ckptfs::CastFunction cast = ckptfs::FindCast(*from, *to, level);
  if (cast == nullptr) return 2;
  std::vector<std::byte> in;
  std::vector<std::byte> block(1 << 20);
  while (const size_t n = fread(block.data(), 1, block.size(), stdin)) {
    in.insert(in.end(), block.begin(), block.begin() + static_cast<ptrdiff_t>(n));
  }
  const size_t elements = in.size() / ckptfs::ByteWidth(*from);
  std::vector<std::byte> out(elements * ckptfs::ByteWidth(*to));
  cast(in.data(), out.data(), elements);
  return fwrite(out.data(), 1, out.size(), stdout) == out.size() ? 0 : 1;
}
