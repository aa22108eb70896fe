// SPDX-License-Identifier: Apache-2.0
//
// FileRange is a range of a File as a parser sees it: with a size of its own and
// offsets from its own begin, so that an archive may lie anywhere inside a file.
//
// Thread safety: immutable; Read may be called concurrently.
// Lifetime: the file must outlive it.
// Units: bytes.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/io/blob.h"
#include "core/io/file.h"
#include "core/io/near_reads.h"

namespace ckptfs {

class FileRange {
 public:
  explicit FileRange(const File& file) : FileRange(file, 0, file.size()) {}
  // kInvalid unless the extent lies inside the file.
  static Result<FileRange> Of(const File& file, const Extent& extent) {
    if (extent.begin <= extent.end && extent.end <= file.size()) {
      return FileRange(file, extent.begin, extent.end - extent.begin);
    }
    return Fail(ErrorCode::kInvalid, StrCat("bytes ", extent.begin, " to ", extent.end,
                                            " are not in the file of ", file.size()));
  }

  uint64_t begin() const { return begin_; }  // in the file
  uint64_t size() const { return size_; }

  // Exactly `length` bytes at `offset` of the range; kInvalid, naming `what`, if it
  // does not have them.  BLOCKS: on the device.
  Result<std::string> Read(uint64_t offset, uint64_t length, std::string_view what) const {
    if (RangeInside(offset, length, size_)) return file_.Read(begin_ + offset, length, what);
    return Beyond(offset, length, what);
  }

  // All requests, whose offsets are of the range, neighbours together (near_reads.h);
  // errors as of Read.  BLOCKS: on the device.
  Status ReadNear(std::vector<ReadRequest> requests, std::string_view what) const {
    for (ReadRequest& request : requests) {
      if (!RangeInside(request.offset, request.out.size(), size_)) {
        return Beyond(request.offset, request.out.size(), what);
      }
      request.offset += begin_;
    }
    auto read = ckptfs::ReadNear(file_, requests);
    return read ? Status{} : Fail(std::move(read).error().WithContext(what));
  }

 private:
  tl::unexpected<Error> Beyond(uint64_t offset, uint64_t length, std::string_view what) const {
    return Fail(ErrorCode::kInvalid,
                StrCat(what, " (bytes ", offset, " and ", length,
                       " on) lies beyond the end of the ", size_, "-byte file"));
  }
  FileRange(const File& file, uint64_t begin, uint64_t size)
      : file_(file), begin_(begin), size_(size) {}

  const File& file_;
  uint64_t begin_;
  uint64_t size_;
};

}  // namespace ckptfs
