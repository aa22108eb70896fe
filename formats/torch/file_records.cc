// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/file_records.h"

#include "core/io/file_range.h"
#include "formats/torch/torch_file.h"
#include "formats/torch/zip_archive.h"

namespace ckptfs {

Result<std::vector<FileRecord>> RecordsOfFile(const std::shared_ptr<const File>& file) {
  const auto archive = ZipArchive::Open(FileRange(*file));
  std::vector<FileRecord> out;
  if (archive) {
    for (const ZipRecord& record : archive->records()) {
      const bool summed = record.crc != 0 || record.length == 0;
      out.push_back(FileRecord{record.name, record.offset, record.length,
                               summed ? std::optional(record.crc) : std::nullopt});
    }
  } else if (file->name().ends_with(".pt")) {
    CKPT_RETURN_IF_ERROR(TorchFile::Open(file));  // a legacy one, or why not
  }
  return out;
}

}  // namespace ckptfs
