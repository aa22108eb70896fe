// SPDX-License-Identifier: Apache-2.0
//
// Makes zips for tests, honest or not: every field that a reader might trust
// can be told to lie.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/crc32.h"
#include "formats/torch/zip_format.h"

namespace ckptfs {

struct MadeRecord {
  std::string name = {};
  std::string payload = {};
  uint16_t flags = zip::kFlagUtf8;
  uint16_t method = 0;
  // Values of the headers, where they are not the truth.
  std::optional<std::string> local_name = {};
  std::optional<uint32_t> local_size = {};
  std::optional<uint64_t> central_size = {};      // both stored and original
  std::optional<uint64_t> central_original = {};  // original only
  std::optional<uint64_t> header_offset = {};
  bool summed = false;  // with its checksum
  bool zip64 = false;   // sizes and offset in a zip64 extra field
};

struct MadeZip {
  std::vector<MadeRecord> records = {};
  // Values of the end records.
  std::optional<uint64_t> count = {};
  std::optional<uint64_t> directory_offset = {};
  std::optional<uint64_t> directory_bytes = {};
  bool end64 = false;
  std::optional<uint64_t> end64_offset = {};
  std::string comment = {};
};

inline uint32_t SumOf(const MadeRecord& record) {
  return record.summed ? Crc32(0, std::as_bytes(std::span(record.payload))) : 0;
}

inline void AppendMadeLocal(std::string& out, const MadeRecord& record) {
  using zip::Store;
  uint32_t size = record.local_size.value_or(static_cast<uint32_t>(record.payload.size()));
  std::string name = record.local_name.value_or(record.name);
  Store<uint32_t>(out, zip::kLocalSignature);
  Store<uint16_t>(out, 0);
  Store<uint16_t>(out, record.flags);
  Store<uint16_t>(out, record.method);
  Store<uint32_t>(out, 0);
  Store<uint32_t>(out, SumOf(record));
  Store<uint32_t>(out, size);
  Store<uint32_t>(out, size);
  Store<uint16_t>(out, static_cast<uint16_t>(name.size()));
  Store<uint16_t>(out, 0);
  out += name + record.payload;
}

inline void AppendMadeCentral(std::string& out, const MadeRecord& record, uint64_t at) {
  using zip::Store;
  uint64_t stored = record.central_size.value_or(record.payload.size());
  uint64_t original = record.central_original.value_or(stored);
  bool big = record.zip64;
  Store<uint32_t>(out, zip::kCentralSignature);
  Store<uint32_t>(out, 0);
  Store<uint16_t>(out, record.flags);
  Store<uint16_t>(out, record.method);
  Store<uint32_t>(out, 0);
  Store<uint32_t>(out, SumOf(record));
  Store<uint32_t>(out, big ? zip::kBig32 : static_cast<uint32_t>(stored));
  Store<uint32_t>(out, big ? zip::kBig32 : static_cast<uint32_t>(original));
  Store<uint16_t>(out, static_cast<uint16_t>(record.name.size()));
  Store<uint16_t>(out, big ? 28 : 0);
  Store<uint64_t>(out, 0);
  Store<uint16_t>(out, 0);
  Store<uint32_t>(out, big ? zip::kBig32 : static_cast<uint32_t>(at));
  out += record.name;
  if (!big) return;
  Store<uint16_t>(out, zip::kZip64Extra);
  Store<uint16_t>(out, 24);
  Store<uint64_t>(out, original);
  Store<uint64_t>(out, stored);
  Store<uint64_t>(out, at);
}

inline std::string MakeZip(const MadeZip& made) {
  using zip::Store;
  std::string out;
  std::string central;
  for (const MadeRecord& record : made.records) {
    AppendMadeCentral(central, record, record.header_offset.value_or(out.size()));
    AppendMadeLocal(out, record);
  }
  uint64_t offset = made.directory_offset.value_or(out.size());
  uint64_t bytes = made.directory_bytes.value_or(central.size());
  uint64_t count = made.count.value_or(made.records.size());
  out += central;
  if (made.end64) {
    uint64_t at = made.end64_offset.value_or(out.size());
    Store<uint32_t>(out, zip::kEnd64Signature);
    Store<uint64_t>(out, zip::kEnd64Bytes - 12);
    Store<uint32_t>(out, 0);
    Store<uint64_t>(out, 0);
    Store<uint64_t>(out, count);
    Store<uint64_t>(out, count);
    Store<uint64_t>(out, bytes);
    Store<uint64_t>(out, offset);
    Store<uint32_t>(out, zip::kLocatorSignature);
    Store<uint32_t>(out, 0);
    Store<uint64_t>(out, at);
    Store<uint32_t>(out, 1);
  }
  Store<uint32_t>(out, zip::kEndSignature);
  Store<uint32_t>(out, 0);
  Store<uint16_t>(out, static_cast<uint16_t>(count));
  Store<uint16_t>(out, static_cast<uint16_t>(count));
  Store<uint32_t>(out, static_cast<uint32_t>(bytes));
  Store<uint32_t>(out, static_cast<uint32_t>(offset));
  Store<uint16_t>(out, static_cast<uint16_t>(made.comment.size()));
  return out + made.comment;
}

// {"t": a float tensor of `elements` over storage "0"} as torch pickles it.
inline std::string OneTensorPickle(uint8_t elements = 4, uint8_t offset = 0, uint8_t stride = 1,
                                   uint8_t storage = 4) {
  auto text = [](const std::string& s) {
    return std::string("X") + static_cast<char>(s.size()) + std::string(3, '\0') + s;
  };
  auto number = [](uint8_t value) { return std::string("K") + static_cast<char>(value); };
  return "\x80\x02}" + text("t") + "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") +
         "ctorch\nFloatStorage\n" + text("0") + text("cpu") + number(storage) + "tQ" +
         number(offset) + number(elements) + "\x85" + number(stride) + "\x85\x89" +
         "ccollections\nOrderedDict\n)RtRs.";
}

inline MadeZip OneTensorZip() {
  return {.records = {{.name = "x/data.pkl", .payload = OneTensorPickle()},
                      {.name = "x/byteorder", .payload = "little"},
                      {.name = "x/data/0", .payload = std::string(16, '\7')},
                      {.name = "x/version", .payload = "3\n"}}};
}

}  // namespace ckptfs
