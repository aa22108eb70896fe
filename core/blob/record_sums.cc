// SPDX-License-Identifier: Apache-2.0

#include "core/blob/record_sums.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/crc32.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

std::string Hex(uint32_t sum) { return fmt::format("{:08x}", sum); }

}  // namespace

RecordSums::RecordSums(std::vector<FileRecord> records)
    : records_(std::move(records)), sums_(records_.size(), 0) {
  std::sort(records_.begin(), records_.end(),
            [](const FileRecord& a, const FileRecord& b) { return a.offset < b.offset; });
}

void RecordSums::Add(uint64_t at, std::span<const std::byte> bytes) {
  const uint64_t end = at + bytes.size();
  for (; next_ < records_.size() && records_[next_].offset < end; ++next_) {
    const FileRecord& record = records_[next_];
    const uint64_t from = std::max(record.offset, at);
    const uint64_t to = std::min(record.offset + record.length, end);
    if (record.crc && from < to) {
      sums_[next_] = Crc32(sums_[next_], bytes.subspan(from - at, to - from));
    }
    if (record.offset + record.length > end) return;  // goes on in the next bytes
  }
}

std::vector<std::string> RecordSums::Wrong() const {
  std::vector<std::string> out;
  for (size_t i = 0; i < records_.size(); ++i) {
    const FileRecord& record = records_[i];
    if (!record.crc || *record.crc == sums_[i]) continue;
    out.push_back(StrCat("record '", record.name, "' is damaged: the checksum of its ",
                         record.length, " bytes is ", Hex(sums_[i]), ", recorded ",
                         Hex(*record.crc)));
  }
  return out;
}

uint64_t RecordSums::bytes_with_sum() const {
  uint64_t sum = 0;
  for (const FileRecord& record : records_) sum += record.crc ? record.length : 0;
  return sum;
}

uint64_t RecordSums::bytes_without_sum() const {
  uint64_t sum = 0;
  for (const FileRecord& record : records_) sum += record.crc ? 0 : record.length;
  return sum;
}

}  // namespace ckptfs
