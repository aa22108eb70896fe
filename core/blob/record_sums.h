// SPDX-License-Identifier: Apache-2.0
//
// RecordSums compares a file's bytes with the checksums that the file itself
// holds (the members of a zip), while it is read once from begin to end.
//
// Thread safety: one object per file and thread.
// Units: bytes of the file.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/io/file.h"

namespace ckptfs {

struct FileRecord {
  std::string name;
  uint64_t offset = 0;
  uint64_t length = 0;
  std::optional<uint32_t> crc;  // CRC-32; nothing where the writer computed none
};

// The records of a file; none of one that holds no checksums.
using RecordsOf =
    std::function<Result<std::vector<FileRecord>>(const std::shared_ptr<const File>& file)>;

class RecordSums {
 public:
  // REQUIRES: the records do not overlap.
  explicit RecordSums(std::vector<FileRecord> records);

  // The bytes from `at` on.  REQUIRES: calls follow each other without a gap.
  void Add(uint64_t at, std::span<const std::byte> bytes);

  // A line for each record whose bytes have another checksum.
  std::vector<std::string> Wrong() const;

  uint64_t bytes_with_sum() const;
  uint64_t bytes_without_sum() const;

 private:
  std::vector<FileRecord> records_;  // by offset
  std::vector<uint32_t> sums_;       // of the bytes of each so far
  size_t next_ = 0;                  // the first record that is not complete
};

}  // namespace ckptfs
