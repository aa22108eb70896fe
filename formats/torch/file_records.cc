// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/file_records.h"

#include "formats/torch/input_file.h"
#include "formats/torch/torch_file.h"
#include "formats/torch/zip_archive.h"

namespace ckptfs {

Result<std::vector<FileRecord>> RecordsOfFile(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const InputFile file, InputFile::Open(path));
  const auto archive = ZipArchive::Open(file);
  std::vector<FileRecord> out;
  if (archive) {
    for (const ZipRecord& record : archive->records()) {
      const bool summed = record.crc != 0 || record.length == 0;
      out.push_back(FileRecord{record.name, record.offset, record.length,
                               summed ? std::optional(record.crc) : std::nullopt});
    }
  } else if (path.ends_with(".pt")) {
    CKPT_RETURN_IF_ERROR(TorchFile::Open(path));  // a legacy one, or why not
  }
  return out;
}

}  // namespace ckptfs
