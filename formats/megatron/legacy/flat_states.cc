// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/flat_states.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/megatron/buckets/bucket_layout.h"
#include "formats/megatron/buckets/stored_buckets.h"
#include "formats/megatron/legacy/cast_match.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kStoredMaster = "param";
constexpr size_t kMaxWays = 64;

// The parameters of one buffer, in the order of registration.
struct Buffer {
  uint32_t chunk = 0;
  DType dtype = DType::kF32;
  std::vector<const RankParameter*> parameters;
};

// Each virtual stage has a buffer for each type, in the order in which it registers the first of
// the type.
std::vector<Buffer> BuffersOf(const ChainedOptimizer& optimizer) {
  std::vector<Buffer> out;
  for (const RankParameter& one : optimizer.parameters) {
    const DType dtype = one.tensor->tensor.dtype();
    const auto at = std::ranges::find_if(out, [&](const Buffer& buffer) {
      return buffer.chunk == one.chunk && buffer.dtype == dtype;
    });
    Buffer& buffer = at == out.end() ? out.emplace_back(Buffer{one.chunk, dtype, {}}) : *at;
    buffer.parameters.push_back(&one);
  }
  return out;
}

// A way through a buffer so far.
struct Way {
  uint64_t end = 0;              // of the last parameter
  uint64_t bucket = 0;           // its bucket's first element
  std::vector<uint64_t> begins;  // of the parameters so far
};

class Walk {
 public:
  Walk(const RankModel& rank, const FlatFile& flat, const FileTensor& masters, const Buffer& buffer,
       bool buckets)
      : rank_(rank), flat_(flat), masters_(masters), buffer_(buffer), buckets_(buckets) {}

  // The first elements of the parameters, in the order of the buffer.
  Result<std::vector<uint64_t>> Find() && {
    std::vector<Way> ways = {Way{}};
    for (size_t i = buffer_.parameters.size(); i-- > 0;) {
      CKPT_ASSIGN_OR_RETURN(std::vector<Way> next, Next(ways, *buffer_.parameters[i]));
      if (next.empty()) {
        return Refuse("no master follows that is, cast, the weight of '",
                      buffer_.parameters[i]->tensor->name, "'");
      }
      if (next.size() > kMaxWays) return Refuse("buckets may end in more than ", kMaxWays, " ways");
      ways = std::move(next);
    }
    std::erase_if(ways, [&](const Way& way) { return way.end != masters_.elements(); });
    if (ways.size() == 1) return std::move(ways.front().begins);
    return Refuse(ways.empty() ? "the last parameter does not end where the buffer ends"
                               : "buckets may end in several ways");
  }

 private:
  Result<std::vector<Way>> Next(const std::vector<Way>& ways, const RankParameter& one) const {
    std::vector<Way> out;
    for (const Way& way : ways) {
      const uint64_t aligned = way.bucket + AlignUp(way.end - way.bucket, kParameterAlignment);
      std::vector<std::pair<uint64_t, uint64_t>> places = {{aligned, way.bucket}};
      // A bucket that ends at such a multiple changes nothing.
      if (buckets_ && aligned != way.end) places.emplace_back(way.end, way.end);
      for (const auto& [begin, bucket] : places) {
        CKPT_ASSIGN_OR_RETURN(const bool fits, MayBeCast({&flat_.file, &masters_}, begin,
                                                         {&rank_.file(), &one.tensor->tensor}));
        if (!fits) continue;
        Way next{begin + one.tensor->tensor.elements(), bucket, way.begins};
        next.begins.push_back(begin);
        out.push_back(std::move(next));
      }
    }
    return out;
  }

  const RankModel& rank_;
  const FlatFile& flat_;
  const FileTensor& masters_;
  const Buffer& buffer_;
  const bool buckets_;
};

// A torch.dtype as pickles name it.
bool IsDType(PickleRef value, DType dtype) {
  return value && value.node().kind == PickleNode::Kind::kGlobal &&
         value.ClassName() == StrCat("torch.", TorchName(dtype));
}

class FlatReader {
 public:
  FlatReader(const RankModel& rank, const FlatFile& flat, RankStates& out)
      : rank_(rank), flat_(flat), out_(out) {
    const PickleRef overlap = rank.state.ArgumentOf("overlap_grad_reduce");
    const PickleRef untied = rank.state.ArgumentOf("untie_embeddings_and_output_weights");
    buckets_ = !overlap || overlap.Bool() != false || !untied || untied.Bool() != true;
  }

  Status Read(const ChainedOptimizer& optimizer, PickleRef root) {
    const PickleRef coalesced = root["buckets_coalesced"];
    if (!root.IsDict() || !coalesced || coalesced.Bool() != true) {
      return Fail(ErrorCode::kUnsupported,
                  "its file is of before 2024, with tensors of each bucket (buckets_coalesced)");
    }
    const std::vector<Buffer> buffers = BuffersOf(optimizer);
    if (root.size() != buffers.size() + 1) {
      return Refuse("it has ", root.size() - 1, " buffers, and the rank's parameters lie in ",
                    buffers.size());
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
      Status read = ReadBuffer(root.AtInt(static_cast<int64_t>(i)), buffers[i]);
      if (!read) return Fail(std::move(read).error().WithContext(StrCat("buffer ", i)));
    }
    return {};
  }

 private:
  Status ReadBuffer(PickleRef by_types, const Buffer& buffer) {
    if (!by_types || !by_types.IsDict() || by_types.size() != 1) {
      return Refuse("it is not a dict of one pair of types");
    }
    const auto [types, dict] = by_types.Items().front();
    if (!types.IsSequence() || types.size() != 2 || !IsDType(types.at(0), buffer.dtype)) {
      return Refuse("it is not of parameters of ", DTypeName(buffer.dtype));
    }
    std::map<std::string, FileTensor> kinds;
    for (const auto& [key, value] : dict.Items()) {
      const auto kind = key.String();
      if (!kind || *kind == "numel_unpadded") continue;
      if (*kind == kMasterKind || *kind == "weight" || *kind == "step") {
        return Refuse("'", *kind, "' is a name that ckptfs uses for something else");
      }
      CKPT_ASSIGN_OR_RETURN(FileTensor tensor, FileTensorOf(value, flat_.file, flat_.blob, *kind));
      if (tensor.shape().size() != 1 || !tensor.dense()) {
        return Refuse("'", *kind, "' is not one row of elements");
      }
      kinds.emplace(*kind == kStoredMaster ? kMasterKind : *kind, std::move(tensor));
    }
    const auto masters = kinds.find(std::string(kMasterKind));
    if (masters == kinds.end()) return Refuse("it does not have masters ('param')");
    for (const auto& [kind, tensor] : kinds) {
      if (tensor.elements() == masters->second.elements()) continue;
      return Refuse("'", kind, "' has ", tensor.elements(), " elements, the masters ",
                    masters->second.elements());
    }
    CKPT_ASSIGN_OR_RETURN(const std::vector<uint64_t> begins,
                          Walk(rank_, flat_, masters->second, buffer, buckets_).Find());
    for (size_t i = 0; i < begins.size(); ++i) {
      const RankParameter& one = *buffer.parameters[buffer.parameters.size() - 1 - i];
      auto& states = out_.states[{one.chunk, one.entry}];
      for (const auto& [kind, tensor] : kinds) {
        states.insert_or_assign(kind, PartBytes{tensor, begins[i]});
      }
    }
    return {};
  }

  const RankModel& rank_;
  const FlatFile& flat_;
  RankStates& out_;
  bool buckets_ = true;  // they may end anywhere
};

}  // namespace

Status ReadFlatStates(const RankModel& rank, std::span<const ChainedOptimizer> optimizers,
                      const FlatFile& flat, RankStates& out) {
  const PickleRef root = flat.file.root();
  const bool list = root.IsSequence();
  if (list ? root.size() != optimizers.size() : optimizers.size() != 1) {
    return Refuse("its file of buffers is of ", list ? root.size() : 1, " optimizers, and ",
                  kRankFile, " has ", optimizers.size());
  }
  FlatReader reader(rank, flat, out);
  for (size_t i = 0; i < optimizers.size(); ++i) {
    const PickleRef one = list ? root.at(i) : root;
    if (one.IsNone()) continue;  // another rank has gathered it
    CKPT_RETURN_IF_ERROR(reader.Read(optimizers[i], one));
  }
  return {};
}

}  // namespace ckptfs::megatron
