// SPDX-License-Identifier: Apache-2.0
//
// Pickles: what parses must print, and what was printed must parse again to a
// tree that prints the same.

#include <string_view>

#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle_writer.h"
#include "tests/fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto parsed = ckptfs::ParsePickle(bytes);
  if (!parsed) return 0;
  FUZZ_CHECK(parsed->length <= size);
  const auto printed = ckptfs::PrintPickle(parsed->tree);
  if (!printed) return 0;  // not everything can be said in protocol 2
  const auto again = ckptfs::ParsePickle(*printed);
  FUZZ_CHECK(again.has_value());
  const auto twice = ckptfs::PrintPickle(again->tree);
  FUZZ_CHECK(twice.has_value() && *twice == *printed);
  return 0;
}
