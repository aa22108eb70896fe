// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/buckets/stored_buckets.h"

#include <algorithm>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "core/base/strings.h"
#include "formats/megatron/buckets/bucket_keys.h"
#include "formats/megatron/dist_keys.h"

namespace ckptfs::megatron {
namespace {

// Numbers tell these; they must run from 0 on.
template <class T>
Result<std::vector<T>> InOrder(std::map<uint32_t, T> numbered, std::string_view what) {
  std::vector<T> out;
  for (auto& [number, value] : numbered) {
    if (number != out.size())
      return Refuse("there is ", what, " ", number, ", but no ", out.size());
    out.push_back(std::move(value));
  }
  return out;
}

Result<BucketTensor> TensorOf(const dcp::StoredState& state, size_t tensor) {
  const dcp::TensorEntry& entry = state.metadata().tensors[tensor];
  if (entry.shape.size() != 1) return Refuse("'", entry.name, "' does not have one dimension");
  if (const std::string why = state.WhyNotPlain(tensor); !why.empty()) {
    return Refuse("'", entry.name, "': ", why);
  }
  if (ByteWidth(entry.dtype) == 0) {
    return Refuse("'", entry.name, "' has elements of less than a byte");
  }
  BucketTensor out;
  out.dtype = entry.dtype;
  for (size_t i = 0; i < entry.chunk_count; ++i) {
    const uint64_t elements = state.metadata().SizesOf(entry, i)[0];
    if (elements == 0) continue;
    const auto place = state.DensePlaceOf(tensor, i);
    if (!place) return Refuse("'", entry.name, "': a chunk's elements are not in their order");
    out.chunks.push_back({state.metadata().OffsetsOf(entry, i)[0], elements, *place});
  }
  std::ranges::sort(out.chunks, {}, &BucketTensor::Chunk::begin);
  uint64_t next = 0;
  for (const BucketTensor::Chunk& chunk : out.chunks) {
    if (chunk.begin != next) {
      return Refuse("'", entry.name, "': its chunks have a gap or overlap at element ",
                    std::min(next, chunk.begin));
    }
    next += chunk.elements;
  }
  if (next != entry.shape[0] || next == 0) {
    return Refuse("'", entry.name, "': its chunks end at element ", next, " of ", entry.shape[0]);
  }
  return out;
}

Status AddTensor(const dcp::StoredState& state, size_t tensor, const BucketKey& key,
                 StoredBucket& bucket) {
  const std::string& name = state.metadata().tensors[tensor].name;
  const bool master = key.kind == "param";
  const std::string kind(master ? kMasterKind : key.kind);
  if (!master && (kind == kMasterKind || kind == "weight" || kind == "step")) {
    return Refuse("'", name, "': its kind has a name that ckptfs uses for something else");
  }
  CKPT_ASSIGN_OR_RETURN(BucketTensor added, TensorOf(state, tensor));
  const uint64_t elements = added.chunks.back().begin + added.chunks.back().elements;
  if (bucket.shape.elements != 0 && bucket.shape.elements != elements) {
    return Refuse("'", name, "' has ", elements, " elements, other states of the bucket ",
                  bucket.shape.elements);
  }
  bucket.shape.elements = elements;
  if (master) {
    bucket.key = name;
    for (const BucketTensor::Chunk& chunk : added.chunks) {
      bucket.shape.borders.push_back(chunk.begin);
    }
    bucket.shape.borders.push_back(elements);
  }
  bucket.kinds.emplace(kind, std::move(added));
  return {};
}

// All that tensors are of one optimizer.
Result<std::vector<RankGroup>> GroupsOfRanks(const dcp::StoredState& state,
                                             const std::string& chain) {
  struct Buffer {
    DType parameters = DType::kF32;
    std::map<uint32_t, StoredBucket> buckets;
  };
  std::map<uint32_t, std::map<uint32_t, Buffer>> found;
  const auto& tensors = state.metadata().tensors;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const auto any = OptimizerKeyOf(tensors[t].name);
    if (!any || !any->kind.empty() || any->chain != chain) continue;
    const auto key = BucketKeyOf(tensors[t].name);
    if (!key) return Refuse("'", tensors[t].name, "' is not the key of a bucket");
    auto& buffers = found[key->group];
    Buffer& buffer = buffers.try_emplace(key->buffer, Buffer{key->parameters, {}}).first->second;
    if (buffer.parameters != key->parameters) {
      return Refuse("'", tensors[t].name, "': its buffer has buckets of two types");
    }
    CKPT_RETURN_IF_ERROR(AddTensor(state, t, *key, buffer.buckets[key->bucket]));
  }
  std::map<uint32_t, RankGroup> groups;
  for (auto& [group, buffers] : found) {
    std::map<uint32_t, StoredBuffer> ordered;
    for (auto& [number, buffer] : buffers) {
      StoredBuffer& one = ordered[number];
      one.parameters = buffer.parameters;
      CKPT_ASSIGN_OR_RETURN(one.buckets, InOrder(std::move(buffer.buckets), "a bucket"));
    }
    CKPT_ASSIGN_OR_RETURN(groups[group].buffers, InOrder(std::move(ordered), "a buffer"));
  }
  return InOrder(std::move(groups), "a group of ranks");
}

Status CheckKinds(const std::vector<RankGroup>& groups) {
  const StoredBucket* first = nullptr;
  for (const RankGroup& group : groups) {
    for (const StoredBuffer& buffer : group.buffers) {
      for (const StoredBucket& bucket : buffer.buckets) {
        if (!bucket.kinds.contains(std::string(kMasterKind))) {
          return Refuse("the masters of the parameters ('...param') are not stored");
        }
        if (first == nullptr) first = &bucket;
        const bool same =
            std::ranges::equal(bucket.kinds, first->kinds, [](const auto& one, const auto& other) {
              return one.first == other.first && one.second.dtype == other.second.dtype;
            });
        if (!same) {
          return Refuse("'", bucket.key, "' has states of other kinds or types than '", first->key,
                        "'");
        }
      }
    }
  }
  return {};
}

// The objects of an optimizer's groups of ranks.
class GroupObjects {
 public:
  GroupObjects(dcp::StoredState& state, const std::string& chain) : state_(state) {
    const auto& objects = state.metadata().objects;
    for (size_t i = 0; i < objects.size(); ++i) {
      const auto key = GroupObjectKeyOf(ObjectName(objects[i].name));
      if (key && key->chain == chain) found_[{key->group, key->what}].push_back(i);
    }
  }

  // The one object that a group has of a name; nothing if it does not have it.
  Result<std::optional<TorchFile>> Open(uint32_t group, std::string_view what) const {
    const auto found = found_.find({group, what});
    if (found == found_.end()) return std::optional<TorchFile>();
    const std::string& name = state_.metadata().objects[found->second.front()].name;
    if (found->second.size() > 1) return Refuse("'", name, "' is there in several parts");
    CKPT_ASSIGN_OR_RETURN(auto object, state_.OpenObject(found->second.front()));
    if (!object.file.root().IsSequence() || object.file.root().size() != 1) {
      return Refuse("'", name, "' is not a list of one value");
    }
    return std::optional<TorchFile>(std::move(object.file));
  }

 private:
  dcp::StoredState& state_;
  std::map<std::pair<uint32_t, std::string_view>, std::vector<size_t>> found_;
};

// [{dtypes: [elements of each bucket]} of each buffer], as an object of the group says it.
Result<std::vector<std::vector<uint64_t>>> SizesOf(const GroupObjects& objects, uint32_t group,
                                                   std::string_view what, const RankGroup& of) {
  const auto refuse = [&] {
    return Refuse(what, " of group ", group, " of ranks does not say the size of every bucket");
  };
  CKPT_ASSIGN_OR_RETURN(const auto file, objects.Open(group, what));
  if (!file) return refuse();
  const PickleRef buffers = file->root().at(0);
  if (!buffers.IsSequence() || buffers.size() != of.buffers.size()) return refuse();
  std::vector<std::vector<uint64_t>> out(of.buffers.size());
  for (size_t b = 0; b < out.size(); ++b) {
    if (!buffers.at(b).IsDict() || buffers.at(b).size() != 1) return refuse();
    const PickleRef sizes = buffers.at(b).Items().front().second;
    if (!sizes.IsSequence() || sizes.size() != of.buffers[b].buckets.size()) return refuse();
    for (size_t i = 0; i < sizes.size(); ++i) {
      const auto size = sizes.at(i).Int();
      if (!size || *size < 0) return refuse();
      out[b].push_back(static_cast<uint64_t>(*size));
    }
  }
  return out;
}

Status ReadPadding(const GroupObjects& objects, uint32_t number, RankGroup& group) {
  CKPT_ASSIGN_OR_RETURN(const auto padded, SizesOf(objects, number, "per_bucket_numel", group));
  CKPT_ASSIGN_OR_RETURN(const auto stored,
                        SizesOf(objects, number, "per_bucket_numel_unpadded", group));
  for (size_t b = 0; b < group.buffers.size(); ++b) {
    for (size_t i = 0; i < group.buffers[b].buckets.size(); ++i) {
      StoredBucket& bucket = group.buffers[b].buckets[i];
      if (stored[b][i] != bucket.shape.elements || padded[b][i] < stored[b][i]) {
        return Refuse("'", bucket.key, "' has ", bucket.shape.elements,
                      " elements, but its group of ranks says ", stored[b][i], " of ",
                      padded[b][i]);
      }
      bucket.shape.padded = padded[b][i];
    }
  }
  return {};
}

// Every group of ranks says the hyper-parameters of what it has, in an order of its own (cores up
// to 0.15) or in one.  Those that are equal are one.
Status ReadHyperParameters(const GroupObjects& objects, BucketOptimizer& optimizer) {
  std::set<std::string> texts;
  for (uint32_t g = 0; g < optimizer.groups.size(); ++g) {
    CKPT_ASSIGN_OR_RETURN(auto file, objects.Open(g, "optimizer"));
    if (!file) return Refuse("the hyper-parameters of group ", g, " of ranks are not stored");
    const auto kept = std::make_shared<const TorchFile>(*std::move(file));
    const std::vector<CommonGroup> groups = GroupsOf(kept->root().at(0));
    if (groups.empty()) return Refuse("group ", g, " of ranks does not say hyper-parameters");
    for (const CommonGroup& group : groups) {
      CKPT_ASSIGN_OR_RETURN(std::string text, HyperParametersOf(group.dict));
      if (!texts.insert(std::move(text)).second) continue;
      optimizer.hyper_parameters.push_back(group);
      if (optimizer.files.empty() || optimizer.files.back() != kept)
        optimizer.files.push_back(kept);
    }
  }
  optimizer.experts = optimizer.hyper_parameters.front().experts;
  for (const CommonGroup& group : optimizer.hyper_parameters) {
    if (group.experts != optimizer.experts) {
      return Refuse("an optimizer has experts of expert parallelism and others");
    }
  }
  return {};
}

}  // namespace

size_t BucketTensor::ChunkOf(uint64_t element) const {
  const auto after = std::ranges::upper_bound(chunks, element, {}, &Chunk::begin);
  return static_cast<size_t>(after - chunks.begin()) - 1;
}

FlatTensor BucketTensor::Part(const BucketPlace& place) const {
  FlatTensor out;
  out.dtype = dtype;
  const uint64_t end = place.begin + place.elements;
  uint64_t at = place.begin;
  for (size_t i = ChunkOf(at); at < end; ++i) {
    const Chunk& chunk = chunks[i];
    const uint64_t until = std::min(end, chunk.begin + chunk.elements);
    out.runs.push_back({chunk.place.file,
                        chunk.place.first_byte + (at - chunk.begin) * ByteWidth(dtype),
                        until - at});
    at = until;
  }
  return out;
}

std::vector<std::string> BucketOptimizersOf(const dcp::DcpMetadata& metadata) {
  std::set<std::string> out;
  for (const dcp::TensorEntry& tensor : metadata.tensors) {
    const auto key = BucketKeyOf(tensor.name);
    if (key) out.emplace(key->chain);
  }
  return {out.begin(), out.end()};
}

Result<BucketOptimizer> ReadBuckets(dcp::StoredState& state, const std::string& chain) {
  BucketOptimizer out;
  CKPT_ASSIGN_OR_RETURN(out.groups, GroupsOfRanks(state, chain));
  CKPT_RETURN_IF_ERROR(CheckKinds(out.groups));
  const GroupObjects objects(state, chain);
  for (uint32_t g = 0; g < out.groups.size(); ++g) {
    CKPT_RETURN_IF_ERROR(ReadPadding(objects, g, out.groups[g]));
  }
  CKPT_RETURN_IF_ERROR(ReadHyperParameters(objects, out));
  return out;
}

}  // namespace ckptfs::megatron
