// SPDX-License-Identifier: Apache-2.0
//
// ZipArchive is the directory of a zip whose members are stored, not
// compressed: which records there are and where their bytes lie.  Payload
// offsets come from the local headers.  Only end records, the central
// directory and local headers are read.
//
// Refused: compressed or encrypted members, absolute names, "..", duplicated
// names, records that overlap each other or the directory, anything that lies
// outside the file, local headers that contradict the directory.
//
// Thread safety: immutable once opened.
// Units: bytes.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/file_range.h"

namespace ckptfs {

struct ZipRecord {
  std::string name;
  uint64_t header_offset = 0;  // in the file, not in the range
  uint64_t offset = 0;         // of the payload, as well
  uint64_t length = 0;
  uint32_t crc = 0;  // of the payload; 0 where the writer computed none
};

class ZipArchive {
 public:
  // kInvalid names the rule.  BLOCKS: on reading the headers.
  static Result<ZipArchive> Open(const FileRange& file);

  // In the order of the central directory.
  const std::vector<ZipRecord>& records() const { return records_; }
  const ZipRecord* Find(std::string_view name) const;

 private:
  std::vector<ZipRecord> records_;
  std::vector<uint32_t> by_name_;  // indexes into records_, sorted by name
};

}  // namespace ckptfs
