// SPDX-License-Identifier: Apache-2.0

#include "core/io/file.h"

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs {

Status File::ReadAt(uint64_t offset, std::span<std::byte> out) const {
  const ReadRequest request{offset, out};
  return ReadAt({&request, 1});
}

Result<std::string> File::Read(uint64_t offset, uint64_t length, std::string_view what) const {
  if (!RangeInside(offset, length, size_)) {
    return Fail(ErrorCode::kInvalid,
                StrCat(what, " (bytes ", offset, " and ", length,
                       " on) lies beyond the end of the ", size_, "-byte file"));
  }
  std::string bytes(length, '\0');
  Status read = ReadAt(offset, std::as_writable_bytes(std::span(bytes)));
  if (!read) return Fail(std::move(read).error().WithContext(what));
  return bytes;
}

Status File::CheckRanges(std::span<const ReadRequest> requests) const {
  for (const ReadRequest& request : requests) {
    if (RangeInside(request.offset, request.out.size(), size_)) continue;
    return Fail(ErrorCode::kDataLoss,
                StrCat(name_, " has ", size_, " bytes; bytes ", request.offset, " + ",
                       request.out.size(), " are not there"));
  }
  return {};
}

}  // namespace ckptfs
