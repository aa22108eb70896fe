// SPDX-License-Identifier: Apache-2.0
//
// Safetensors headers: every tensor of what parses lies inside the file, and a
// header that is rendered again says the same.

#include <string_view>

#include "core/blob/safetensors_header.h"
#include "tests/fuzz/target.h"

namespace {

void CheckRoundTrip(const ckptfs::SafetensorsHeader& header, uint64_t file_size) {
  for (const auto& entry : header.entries) {
    FUZZ_CHECK(entry.begin <= entry.end);
    FUZZ_CHECK(entry.end <= file_size - header.data_offset);
  }
  std::vector<ckptfs::SafetensorsEntry> entries = header.entries;
  const auto text = ckptfs::RenderSafetensorsHeader(header.metadata, entries);
  if (!text) return;
  const auto size = ckptfs::SafetensorsHeaderSize(header.metadata, header.entries);
  FUZZ_CHECK(size && *size == text->size());
  const uint64_t end = text->size() + (entries.empty() ? 0 : entries.back().end);
  const auto again = ckptfs::ParseSafetensorsHeader(*text, end);
  FUZZ_CHECK(again.has_value());
  FUZZ_CHECK(again->entries.size() == header.entries.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (size < 8) return 0;
  // The input is a head; the file may be longer than it by its last byte's worth.
  const uint64_t file_size = size + static_cast<uint64_t>(data[size - 1]);
  const auto length = ckptfs::SafetensorsHeaderLength(bytes.substr(0, 8), file_size);
  if (!length || *length > size - 8) return 0;
  const auto header = ckptfs::ParseSafetensorsHeader(bytes, file_size);
  if (header) CheckRoundTrip(*header, file_size);
  return 0;
}
