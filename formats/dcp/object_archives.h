// SPDX-License-Identifier: Apache-2.0
//
// The zips that DCP's files consist of: one torch.save archive per box of a tensor and
// per object, at any offset of a file.  Parts that depend only on dtype and shape are
// rendered once and shared by all boxes that have them.
//
// Thread safety: none for the two caches; what they return is immutable.
// Units: bytes.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "core/base/result.h"
#include "core/tensor/shape.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs::dcp {

// The zip's top folder, as torch.save names it when it writes into a stream.
inline constexpr std::string_view kArchiveFolder = "archive";

// An archive around the bytes of a contiguous tensor.
struct TensorArchive {
  std::shared_ptr<const std::string> head;
  uint64_t payload = 0;
  std::shared_ptr<const std::string> tail;
  uint64_t size() const { return head->size() + payload + tail->size(); }
};

class TensorArchives {
 public:
  Result<std::shared_ptr<const TensorArchive>> Of(DType dtype, const Shape& shape);

 private:
  std::map<std::pair<DType, Shape>, std::shared_ptr<const TensorArchive>> made_;
};

// Archives of values without tensors; equal values have one.
class ObjectArchives {
 public:
  Result<std::shared_ptr<const std::string>> Of(const PickleTree& value);

 private:
  std::map<std::string, std::shared_ptr<const std::string>> made_;  // by pickle
};

}  // namespace ckptfs::dcp
