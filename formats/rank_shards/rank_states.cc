// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_shards/rank_states.h"

#include <optional>

#include "core/base/strings.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs::rank_shards {

Result<RankModel> ReadRankModel(const TorchFile& file, BlobIndex blob, uint64_t rank) {
  if (!file.root().IsDict()) return Refuse(file.name(), ": it does not hold a state dict");
  RankModel out;
  ShardReader reader(file, blob, rank);
  for (const auto& [key, value] : file.root().Items()) {
    const auto name = key.String();
    if (!name) return Refuse(file.name(), ": a tensor's name is not text");
    auto read = reader.Read(value);
    if (!read) {
      return Fail(std::move(read).error().WithContext(StrCat(file.name(), ": '", *name, "'")));
    }
    if (*read) {
      out.tensors.emplace_back(*name, **std::move(read));
    } else {
      out.others.emplace_back(*name);
    }
  }
  return out;
}

Result<RankOptimizer> ReadRankOptimizer(const TorchFile& file, BlobIndex blob, uint64_t rank) {
  RankOptimizer out;
  CKPT_ASSIGN_OR_RETURN(out.torch, deepspeed::ReadTorchOptimizer(file.root(), file, blob));
  ShardReader reader(file, blob, rank);
  for (const auto& [number, states] : out.torch.values) {
    for (const auto& [key, value] : states.Items()) {
      const auto kind = key.String();
      if (!kind) continue;
      const std::pair<int64_t, std::string> at(number, *kind);
      auto read = reader.Read(value);
      const bool disk = !read && read.error().code != ErrorCode::kInvalid &&
                        read.error().code != ErrorCode::kUnsupported;
      if (disk) return Fail(std::move(read).error());
      if (!read) {
        out.strangers.emplace(at, read.error().message);
      } else if (*read && !(*read)->whole.empty()) {
        out.shards.emplace(at, **std::move(read));
      } else if (*read && (*read)->form != ShardValue::Form::kPlain) {
        out.strangers.emplace(at, "is one element that the ranks share");
      }
    }
  }
  out.torch.values.clear();
  return out;
}

}  // namespace ckptfs::rank_shards
