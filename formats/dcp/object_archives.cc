// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/object_archives.h"

#include "core/base/checked_math.h"
#include "core/view/plan.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs::dcp {

Result<std::shared_ptr<const TensorArchive>> TensorArchives::Of(DType dtype, const Shape& shape) {
  auto& made = made_[{dtype, shape}];
  if (made != nullptr) return made;
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount(shape, dtype));
  ArchiveBuilder archive;
  // Zeros hold the place of the payload.
  CKPT_ASSIGN_OR_RETURN(const NodeId tensor,
                        archive.Tensor(dtype, shape, {{bytes, ZeroSegment{bytes}}}));
  PlanBuilder builder;
  CKPT_RETURN_IF_ERROR(std::move(archive).Finish(tensor).AppendTo(builder, kArchiveFolder));
  std::string head, tail;
  bool behind = false;
  const Plan plan = std::move(builder).Finish();
  for (const Segment& segment : plan.segments()) {
    const std::string* literal = LiteralOf(segment);
    if (literal == nullptr) behind = true;
    if (literal != nullptr) (behind ? tail : head) += *literal;
  }
  made = std::make_shared<const TensorArchive>(
      TensorArchive{std::make_shared<const std::string>(std::move(head)), bytes,
                    std::make_shared<const std::string>(std::move(tail))});
  return made;
}

Result<std::shared_ptr<const std::string>> ObjectArchives::Of(const PickleTree& value) {
  CKPT_ASSIGN_OR_RETURN(const std::string pickle, PrintPickle(value));
  auto& made = made_[pickle];
  if (made != nullptr) return made;
  PlanBuilder builder;
  CKPT_RETURN_IF_ERROR(AppendArchive(builder, kArchiveFolder, value, {}));
  std::string bytes;
  const Plan plan = std::move(builder).Finish();
  for (const Segment& segment : plan.segments()) {
    const std::string* literal = LiteralOf(segment);
    CKPT_CHECK(literal != nullptr);  // an archive without tensors
    bytes += *literal;
  }
  made = std::make_shared<const std::string>(std::move(bytes));
  return made;
}

}  // namespace ckptfs::dcp
