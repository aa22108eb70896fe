// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/other_weights.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/device_error.h"
#include "core/base/strings.h"
#include "core/tensor/cast.h"
#include "formats/huggingface/names.h"
#include "formats/huggingface/shard_index.h"

namespace ckptfs::huggingface {
namespace {

constexpr size_t kSampledTensors = 64;
constexpr uint64_t kSampled = 256;  // elements of each, from its middle

// A tensor and the file that it is in.
struct Stored {
  const StoredWeight* weight = nullptr;
  std::string path;  // below the root
};
using StoredByName = std::map<std::string_view, Stored>;

void AddStored(const WeightsFile& content, const std::string& path, StoredByName& out) {
  for (const StoredWeight& weight : content.weights)
    out.emplace(weight.name, Stored{&weight, path});
}

// A part of the tensor's bytes; "" where they do not lie in its own order.
Result<std::string> SampleOf(const Root& root, const Stored& stored) {
  const StoredWeight& weight = *stored.weight;
  const Fragment& part = weight.held.fragment;
  if (!(weight.held.local == WholeTensor(weight.shape)) || part.flat_begin != 0)
    return std::string();
  const uint64_t width = ByteWidth(weight.dtype);
  const uint64_t count = std::min<uint64_t>(part.flat_end, kSampled);
  const uint64_t skipped = (part.flat_end - count) / 2 * width;
  CKPT_ASSIGN_OR_RETURN(const auto file, root.Open(stored.path));
  return file->Read(part.offset + skipped, count * width, weight.name);
}

// Elements as another type has them; "" where there is no cast.
std::string Cast(const std::string& elements, DType from, DType to) {
  const CastFunction cast = FindCast(from, to);
  if (cast == nullptr) return "";
  const size_t count = elements.size() / ByteWidth(from);
  std::string out(count * ByteWidth(to), '\0');
  cast(std::as_bytes(std::span(elements)).data(), std::as_writable_bytes(std::span(out)).data(),
       count);
  return out;
}

// True if samples of both hold the same, or one is the other in a narrower type.
Result<bool> AreAlike(const Root& root, const Stored& mine, const Stored& theirs) {
  CKPT_ASSIGN_OR_RETURN(std::string one, SampleOf(root, mine));
  CKPT_ASSIGN_OR_RETURN(std::string other, SampleOf(root, theirs));
  if (one.empty() || other.empty()) return true;
  const DType a = mine.weight->dtype, b = theirs.weight->dtype;
  if (a == b) return one == other;
  const bool narrows = ByteWidth(a) < ByteWidth(b);
  const std::string cast = narrows ? Cast(other, b, a) : Cast(one, a, b);
  return !cast.empty() && cast == (narrows ? one : other);
}

// True if the others hold what mine are: a form may have more of it, tied heads and masks.
Result<bool> AreEqual(const Root& root, const StoredByName& mine, const StoredByName& theirs) {
  const size_t step = mine.size() / kSampledTensors + 1;
  size_t at = 0;
  for (const auto& [name, stored] : mine) {
    const auto other = theirs.find(name);
    if (other == theirs.end() || other->second.weight->shape != stored.weight->shape) return false;
    if (at++ % step != 0) continue;
    CKPT_ASSIGN_OR_RETURN(const bool alike, AreAlike(root, stored, other->second));
    if (!alike) return false;
  }
  return true;
}

// The files of weights that a name, of a file or of an index, stands for.
Result<std::set<std::string>> FilesNamedBy(const Root& root, const StepFiles& files,
                                           const WeightsName& weights) {
  if (!weights.index) return std::set{weights.file};
  CKPT_ASSIGN_OR_RETURN(const WeightMap map,
                        ReadShardIndex(root, JoinPath(files.directory, weights.file)));
  std::set<std::string> out;
  for (const auto& [tensor, file] : map) out.insert(file);
  return out;
}

// True if the other weights are those that are taken, in another form.
Result<bool> HoldsTheSame(const Root& root, const StepFiles& files,
                          std::span<const WeightsFile> taken, const WeightsName& other) {
  StoredByName mine, theirs;
  for (size_t i = 0; i < taken.size(); ++i)
    AddStored(taken[i], JoinPath(files.directory, files.weights[i]), mine);
  CKPT_ASSIGN_OR_RETURN(const std::set<std::string> names, FilesNamedBy(root, files, other));
  std::vector<WeightsFile> contents;
  contents.reserve(names.size());  // `theirs` points into them
  for (const std::string& name : names) {
    const std::string path = JoinPath(files.directory, name);
    CKPT_ASSIGN_OR_RETURN(WeightsFile content, ReadWeightsFile(root, path, BlobIndex{}, ""));
    contents.push_back(std::move(content));
    AddStored(contents.back(), path, theirs);
  }
  return AreEqual(root, mine, theirs);
}

// True if both are there, and the first is older than the second, or no newer.
Result<bool> IsOlder(const Root& root, const StepFiles& files, const std::string& first,
                     const std::string& second, bool or_equal) {
  CKPT_ASSIGN_OR_RETURN(const auto a, StatIfThere(root, JoinPath(files.directory, first)));
  CKPT_ASSIGN_OR_RETURN(const auto b, StatIfThere(root, JoinPath(files.directory, second)));
  if (!a || !b) return false;
  const int64_t older = a->stamp.mtime_ns, newer = b->stamp.mtime_ns;
  return or_equal ? older <= newer : older < newer;
}

}  // namespace

Result<std::string> NewerWeights(const Root& root, const StepFiles& files,
                                 std::span<const WeightsFile> taken) {
  std::vector<std::string> names = files.others;
  std::erase(names, files.Taken());
  const auto other = ChooseWeights(names);
  if (!other || !*other || (*other)->adapter || !(*other)->variant.empty()) return std::string();
  const std::string& name = (*other)->file;
  CKPT_ASSIGN_OR_RETURN(const bool newer, IsOlder(root, files, files.Taken(), name, false));
  if (!newer) return std::string();
  const auto same = HoldsTheSame(root, files, taken, **other);
  if (!same && IsOfDevice(same.error())) return Fail(Error(same.error()));
  return same && *same ? std::string() : name;
}

Result<bool> TrainsOther(const Root& root, const StepFiles& files, const std::string& newer) {
  if (files.optimizer.empty() || newer.empty()) return false;
  return IsOlder(root, files, newer, files.optimizer, true);
}

namespace {

// The type of all tensors of a file; nothing of one that holds several types, or none.
std::optional<DType> OneTypeOf(const WeightsFile& content) {
  std::optional<DType> out;
  for (const StoredWeight& weight : content.weights) {
    if (out && *out != weight.dtype) return std::nullopt;
    out = weight.dtype;
  }
  return out;
}

}  // namespace

Status CheckOneType(const Root& root, const StepFiles& files, std::span<const WeightsFile> taken) {
  // Shards that somebody added have names of their own, and the size is that of the others.
  const auto added = [&](const std::string& name) { return !ShardNumberOf(name); };
  if (files.index.empty() || taken.size() < 2 || std::ranges::any_of(files.weights, added))
    return {};
  uint64_t bytes = 0;
  size_t other = 0;  // one whose type the first does not have
  for (size_t i = 0; i < taken.size(); ++i) {
    const auto type = OneTypeOf(taken[i]);
    if (!type) return {};
    if (other == 0 && *type != *OneTypeOf(taken[0])) other = i;
    for (const StoredWeight& weight : taken[i].weights) {
      CKPT_ASSIGN_OR_RETURN(const uint64_t size, ByteCount(weight.shape, weight.dtype));
      bytes += size;
    }
  }
  if (other == 0) return {};
  const std::string index = JoinPath(files.directory, files.index);
  CKPT_ASSIGN_OR_RETURN(const auto total, ReadTotalSize(root, index));
  if (!total || *total == bytes) return {};
  const auto describe = [&](size_t i) {
    return StrCat(files.weights[i], " has ", DTypeName(*OneTypeOf(taken[i])));
  };
  return Fail(Error{ErrorCode::kInvalid,
                    StrCat(root.PathOf(index), ": its total_size is ", *total,
                           ", but the shards hold ", bytes, " bytes, and ", describe(0), " where ",
                           describe(other), ": parts of two saves are in one directory")}
                  .Needing("remove the parts of the earlier save"));
}

}  // namespace ckptfs::huggingface
