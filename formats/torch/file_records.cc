// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/file_records.h"

#include "core/base/device_error.h"
#include "core/io/file_range.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {

std::vector<FileRecord> RecordsOfArchive(const ZipArchive& archive) {
  std::vector<FileRecord> out;
  out.reserve(archive.records().size());
  for (const ZipRecord& record : archive.records()) {
    const bool summed = record.crc != 0 || record.length == 0;
    out.push_back(FileRecord{record.name, record.offset, record.length,
                             summed ? std::optional(record.crc) : std::nullopt});
  }
  return out;
}

Result<std::vector<FileRecord>> RecordsOfFile(const std::shared_ptr<const File>& file) {
  const auto archive = ZipArchive::Open(FileRange(*file));
  if (archive) return RecordsOfArchive(*archive);
  if (IsOfDevice(archive.error())) return Fail(Error(archive.error()));
  if (file->name().ends_with(".pt")) {
    CKPT_RETURN_IF_ERROR(TorchFile::Open(file));  // a legacy one, or why not
  }
  return std::vector<FileRecord>();
}

}  // namespace ckptfs
