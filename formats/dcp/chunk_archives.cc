// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/chunk_archives.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_map>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/torch/stored_tensor.h"
#include "formats/torch/zip_format.h"

namespace ckptfs::dcp {
namespace {

using zip::Load;

constexpr uint64_t kMaxFrame = uint64_t{64} << 10;  // around the elements; larger ones are parsed
constexpr size_t kBatch = 512;                      // archives compared at a time

// Names the thing that an archive holds in place of a plain tensor; "" if it holds one.
std::string OtherValue(PickleRef root) {
  if (root.Tensor() != nullptr) return "";
  const PickleRef arguments = root.Arguments();
  // _rebuild_from_type_v2(function, class, ...)
  const bool subclass = arguments && arguments.IsSequence() && arguments.size() > 1;
  std::string name = subclass ? arguments.at(1).ClassName() : "";
  if (name.empty()) name = root.ClassName();
  return name.empty() ? "another value" : StrCat("a ", name);
}

// Archives of the same length, dtype and shape.
std::string KindOf(const ChunkAsked& chunk) {
  std::string kind;
  zip::Store(kind, chunk.length);
  zip::Store(kind, static_cast<uint64_t>(chunk.dtype));
  for (const uint64_t size : chunk.sizes) zip::Store(kind, size);
  return kind;
}

// Bytes [begin, end) of an archive's tail that say nothing.
using Idle = std::vector<std::pair<size_t, size_t>>;

// Finds them in the tail of a sound archive: the checksum of the elements, and the
// serialization id and its checksum.  Nothing if the tail is not as torch writes it.
class IdleFinder {
 public:
  // `at`: where the tail begins in the archive, behind the elements.
  IdleFinder(std::string_view tail, uint64_t at) : tail_(tail), at_(at) {}

  std::optional<Idle> Find() && {
    if (tail_.size() < zip::kEndBytes) return std::nullopt;
    const size_t end = tail_.size() - zip::kEndBytes;
    if (Load<uint32_t>(tail_, end) != zip::kEndSignature || Load<uint16_t>(tail_, end + 20) != 0) {
      return std::nullopt;
    }
    const uint64_t length = Load<uint32_t>(tail_, end + 12);
    const uint64_t offset = Load<uint32_t>(tail_, end + 16);
    if (offset < at_ || !RangeInside(offset - at_, length, end)) return std::nullopt;
    size_t now = offset - at_;
    const size_t stop = now + length;
    while (now < stop) {
      const size_t next = Entry(now, stop);
      if (next == 0) return std::nullopt;
      now = next;
    }
    std::sort(idle_.begin(), idle_.end());
    return std::move(idle_);
  }

 private:
  // The entry after the one at `now` of the directory; 0 if it is not understood.
  size_t Entry(size_t now, size_t stop) {
    if (stop - now < zip::kCentralBytes) return 0;
    const size_t name_length = Load<uint16_t>(tail_, now + 28);
    const size_t next = now + zip::kCentralBytes + name_length + Load<uint16_t>(tail_, now + 30) +
                        Load<uint16_t>(tail_, now + 32);
    if (next > stop) return 0;
    const std::string_view name = tail_.substr(now + zip::kCentralBytes, name_length);
    const bool descriptor = (Load<uint16_t>(tail_, now + 8) & zip::kFlagDescriptor) != 0;
    if (name.ends_with("/data/0")) {
      idle_.emplace_back(now + 16, now + 20);
      if (descriptor && !Descriptor(0)) return 0;
    } else if (name.ends_with("/.data/serialization_id")) {
      idle_.emplace_back(now + 16, now + 20);
      if (!Identity(Load<uint32_t>(tail_, now + 42), Load<uint32_t>(tail_, now + 24), descriptor)) {
        return 0;
      }
    }
    return next;
  }

  bool Identity(uint64_t header, uint64_t length, bool descriptor) {
    if (header < at_ || !RangeInside(header - at_, zip::kLocalBytes, tail_.size())) return false;
    const size_t local = header - at_;
    const uint64_t begin = local + zip::kLocalBytes + Load<uint16_t>(tail_, local + 26) +
                           Load<uint16_t>(tail_, local + 28);
    if (!RangeInside(begin, length, tail_.size())) return false;
    idle_.emplace_back(begin, begin + length);
    return !descriptor || Descriptor(begin + length);
  }

  // The checksum in the descriptor at `at` of the tail.
  bool Descriptor(uint64_t at) {
    if (!RangeInside(at, 8, tail_.size())) return false;
    idle_.emplace_back(at + 4, at + 8);
    return Load<uint32_t>(tail_, at) == 0x08074b50;
  }

  std::string_view tail_;
  uint64_t at_;
  Idle idle_;
};

// An archive that was parsed, to compare others with.
struct Model {
  std::string head;  // up to the elements
  std::string tail;  // behind them
  uint64_t payload = 0;
  Idle idle;

  bool Matches(const char* other_head, const char* other_tail) const {
    if (std::memcmp(head.data(), other_head, head.size()) != 0) return false;
    size_t now = 0;
    for (const auto& [begin, end] : idle) {
      if (begin > now && std::memcmp(tail.data() + now, other_tail + now, begin - now) != 0) {
        return false;
      }
      now = std::max(now, end);
    }
    return std::memcmp(tail.data() + now, other_tail + now, tail.size() - now) == 0;
  }
};

// Nothing of an archive that others cannot be compared with.
Result<std::optional<Model>> Learn(const File& file, const ChunkAsked& chunk,
                                   const FileTensor& tensor) {
  const std::optional<Model> none;
  const auto bytes = tensor.Bytes();
  const bool all = tensor.storage_offset() == 0 && tensor.storage_elements() == tensor.elements();
  if (!bytes || !all || bytes->length == 0) return none;
  const uint64_t payload = bytes->offset - chunk.offset;
  const uint64_t behind = payload + bytes->length;
  if (payload > kMaxFrame || chunk.length - behind > kMaxFrame) return none;
  CKPT_ASSIGN_OR_RETURN(std::string head, file.Read(chunk.offset, payload, "an archive"));
  CKPT_ASSIGN_OR_RETURN(std::string tail,
                        file.Read(chunk.offset + behind, chunk.length - behind, "an archive"));
  auto idle = IdleFinder(tail, behind).Find();
  if (!idle) return none;
  return std::optional(Model{std::move(head), std::move(tail), payload, *std::move(idle)});
}

class Locator {
 public:
  Locator(const std::shared_ptr<const File>& file, BlobIndex blob,
          std::span<const ChunkAsked> asked)
      : file_(file), blob_(blob), asked_(asked) {}

  Result<ChunksFound> Run() {
    found_.dense.assign(asked_.size(), 0);
    for (size_t begin = 0; begin < asked_.size(); begin += kBatch) {
      CKPT_RETURN_IF_ERROR(Batch(begin, std::min(begin + kBatch, asked_.size())));
    }
    std::sort(found_.strided.begin(), found_.strided.end(),
              [](const auto& a, const auto& b) { return a.first < b.first; });
    std::ranges::sort(found_.others);
    return std::move(found_);
  }

 private:
  struct Comparison {
    size_t chunk;
    const Model* model;
    size_t at;  // of its head in the buffer, its tail behind it
  };

  Status Batch(size_t begin, size_t end) {
    std::vector<Comparison> comparisons;
    size_t bytes = 0;
    for (size_t i = begin; i < end; ++i) {
      CKPT_RETURN_IF_ERROR(CheckExtent(asked_[i]));
      const auto known = models_.find(KindOf(asked_[i]));
      if (known == models_.end()) {
        CKPT_RETURN_IF_ERROR(Parse(i));
      } else {
        comparisons.push_back({i, &known->second, bytes});
        bytes += known->second.head.size() + known->second.tail.size();
      }
    }
    CKPT_RETURN_IF_ERROR(ReadFrames(comparisons, bytes));
    for (const Comparison& one : comparisons) {
      const char* head = buffer_.data() + one.at;
      if (one.model->Matches(head, head + one.model->head.size())) {
        found_.dense[one.chunk] = asked_[one.chunk].offset + one.model->payload;
      } else {
        CKPT_RETURN_IF_ERROR(Parse(one.chunk));
      }
    }
    return {};
  }

  // Frames that lie behind each other are one request.
  Status ReadFrames(const std::vector<Comparison>& comparisons, size_t bytes) {
    buffer_.resize(std::max(buffer_.size(), bytes));
    std::vector<ReadRequest> requests;
    const auto add = [&](uint64_t offset, size_t at, size_t length) {
      const std::span out(reinterpret_cast<std::byte*>(buffer_.data()) + at, length);
      if (!requests.empty()) {
        ReadRequest& last = requests.back();
        if (last.offset + last.out.size() == offset) {
          last.out = {last.out.data(), last.out.size() + length};
          return;
        }
      }
      requests.push_back({offset, out});
    };
    for (const Comparison& one : comparisons) {
      const ChunkAsked& chunk = asked_[one.chunk];
      const Model& model = *one.model;
      add(chunk.offset, one.at, model.head.size());
      add(chunk.offset + chunk.length - model.tail.size(), one.at + model.head.size(),
          model.tail.size());
    }
    return file_->ReadAt(requests);
  }

  Status CheckExtent(const ChunkAsked& chunk) const {
    if (RangeInside(chunk.offset, chunk.length, file_->size())) return {};
    return Refuse(file_->name(), ": a chunk of ", chunk.length, " bytes at ", chunk.offset,
                  " lies beyond the end of the file of ", file_->size());
  }

  Status Parse(size_t i) {
    const ChunkAsked& chunk = asked_[i];
    const auto at = [&](Error error) {
      return Fail(std::move(error).WithContext(
          StrCat(file_->name(), ": the chunk at byte ", chunk.offset)));
    };
    ++found_.parsed;
    auto archive = TorchFile::Open(file_, Extent{chunk.offset, chunk.offset + chunk.length});
    if (!archive) return at(std::move(archive).error());
    if (const std::string other = OtherValue(archive->root()); !other.empty()) {
      found_.others.emplace_back(i, other);
      return {};
    }
    auto tensor = FileTensorOf(archive->root(), *archive, blob_, "the chunk");
    if (!tensor) return at(std::move(tensor).error());
    if (tensor->dtype() != chunk.dtype || !std::ranges::equal(tensor->shape(), chunk.sizes)) {
      return at(
          Error{ErrorCode::kInvalid,
                StrCat("it is ", DTypeName(tensor->dtype()), " ", ShapeToString(tensor->shape()),
                       ", but .metadata says ", DTypeName(chunk.dtype), " ",
                       ShapeToString({chunk.sizes.begin(), chunk.sizes.end()}))});
    }
    if (const auto bytes = tensor->Bytes()) {
      found_.dense[i] = bytes->offset;
    } else {
      found_.strided.emplace_back(i, *tensor);
    }
    CKPT_ASSIGN_OR_RETURN(auto model, Learn(*file_, chunk, *tensor));
    if (model) models_.try_emplace(KindOf(chunk), *std::move(model));
    return {};
  }

  const std::shared_ptr<const File>& file_;
  const BlobIndex blob_;
  const std::span<const ChunkAsked> asked_;
  ChunksFound found_;
  // References stay valid: elements are never taken out.
  std::unordered_map<std::string, Model> models_;
  std::string buffer_;
};

}  // namespace

Result<ChunksFound> LocateChunks(const std::shared_ptr<const File>& file, BlobIndex blob,
                                 std::span<const ChunkAsked> asked) {
  return Locator(file, blob, asked).Run();
}

Result<TorchFile> OpenArchive(const std::shared_ptr<const File>& file, uint64_t offset,
                              uint64_t length) {
  if (!RangeInside(offset, length, file->size())) {
    return Refuse(file->name(), ": an object of ", length, " bytes at ", offset,
                  " lies beyond the end of the file of ", file->size());
  }
  auto opened = TorchFile::Open(file, Extent{offset, offset + length});
  if (!opened) {
    return Fail(std::move(opened).error().WithContext(StrCat("the object at byte ", offset)));
  }
  return opened;
}

}  // namespace ckptfs::dcp
