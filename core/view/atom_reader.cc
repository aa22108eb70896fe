// SPDX-License-Identifier: Apache-2.0

#include "core/view/atom_reader.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "core/base/strings.h"
#include "core/view/copy_batch.h"
#include "core/view/scaled_atom.h"
#include "core/view/source_runs.h"
#include "core/view/stored_atom.h"

namespace ckptfs {
namespace {

// Elements [begin, end) of a target, and where they go.
struct Window {
  const LocalTensor& local;
  uint64_t begin;
  uint64_t end;
  std::byte* out;
};

// Copies the runs of one gather into a window.
class GatherCopier {
 public:
  GatherCopier(BlobReader& blobs, const StoredAtom& stored) : batch_(blobs), stored_(stored) {}

  Status Copy(const Gather& gather, const Window& window) {
    Status failed;
    const RunsEnd how =
        ForEachSourceRun(gather, window.local, window.begin, window.end, [&](const SourceRun& run) {
          failed = Add(run, window);
          return failed.has_value();
        });
    CKPT_RETURN_IF_ERROR(failed);
    if (how == RunsEnd::kHole) {
      return Fail(ErrorCode::kDataLoss, "the requested elements are not stored anywhere");
    }
    return batch_.Flush();
  }

 private:
  static constexpr size_t kConversions = 4;
  struct Known {
    DType stored;
    double factor;
    Conversion conversion;
  };

  Status Add(const SourceRun& run, const Window& window) {
    if (last_ == nullptr || last_->stored != run.stored || last_->factor != run.factor) {
      CKPT_RETURN_IF_ERROR(Select(run));
    }
    const Conversion& conversion = last_->conversion;
    std::byte* to = window.out + (run.target - window.begin) * conversion.shown_width();
    return batch_.Add(run.blob, run.offset, run.source_stride, to, run.target_stride, run.count,
                      conversion);
  }

  // The copies in the batch refer to the conversions: they are done before a
  // slot is used again.
  Status Select(const SourceRun& run) {
    for (size_t i = 0; i < known_count_; ++i) {
      last_ = &*known_[i];
      if (last_->stored == run.stored && last_->factor == run.factor) return {};
    }
    if (known_count_ == kConversions) {
      CKPT_RETURN_IF_ERROR(batch_.Flush());
      known_count_ = 0;
    }
    CKPT_ASSIGN_OR_RETURN(const Conversion conversion,
                          stored_.MakeConversion(run.stored, run.factor));
    last_ = &known_[known_count_++].emplace(Known{run.stored, run.factor, conversion});
    return {};
  }

  CopyBatch batch_;
  const StoredAtom& stored_;
  const Known* last_ = nullptr;
  size_t known_count_ = 0;
  std::array<std::optional<Known>, kConversions> known_;
};

// Zeroes what no dense piece covers; pieces with holes are written over it.
void ZeroUncovered(const Window& window, uint32_t width) {
  uint64_t now = window.begin;
  while (now < window.end) {
    uint64_t next = window.end;
    bool covered = false;
    for (const Piece& piece : window.local.pieces) {
      const DenseRange range = DenseRangeOf(piece);
      if (!range.dense || range.end <= now) continue;
      if (range.begin <= now) {
        now = range.end;
        covered = true;
        break;
      }
      next = std::min(next, range.begin);
    }
    if (covered) continue;
    std::memset(window.out + (now - window.begin) * width, 0, (next - now) * width);
    now = next;
  }
}

// The same stored atom, but everything cast to fp32.
StoredAtom InFloat(const StoredAtom& stored) {
  StoredAtom result = stored;
  result.chain = {stored.atom->dtype, DType::kF32};
  result.chain_length = 2;
  return result;
}

// From fp32 to what is shown, through the stored atom's own dtype.
Result<Conversion> FromFloat(const StoredAtom& stored) {
  return stored.MakeConversion(DType::kF32, 1.0);
}

void AddFloats(const std::byte* values, float* sums, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, values + i * sizeof(float), sizeof(float));
    sums[i] += value;
  }
}

constexpr uint64_t kAverageBlock = 4096;  // elements on the stack at a time

Status AverageBlock(BlobReader& blobs, const StoredAtom& stored, const StoredAtom& as_float,
                    const Window& window) {
  alignas(64) std::byte slice[kAverageBlock * sizeof(float)];
  alignas(64) float sums[kAverageBlock] = {};
  const uint64_t count = window.end - window.begin;
  const auto& gathers = stored.atom->source.gathers;
  for (const Gather& gather : gathers) {
    const Window part{window.local, window.begin, window.end, slice};
    ZeroUncovered(part, sizeof(float));
    CKPT_RETURN_IF_ERROR(GatherCopier(blobs, as_float).Copy(gather, part));
    AddFloats(slice, sums, count);
  }
  for (uint64_t i = 0; i < count; ++i) sums[i] /= static_cast<float>(gathers.size());
  CKPT_ASSIGN_OR_RETURN(const Conversion conversion, FromFloat(stored));
  conversion.Run(reinterpret_cast<const std::byte*>(sums), 1, window.out, 1, count);
  return {};
}

Status Average(BlobReader& blobs, const StoredAtom& stored, const Window& window, uint32_t width) {
  const StoredAtom as_float = InFloat(stored);
  for (uint64_t begin = window.begin; begin < window.end; begin += kAverageBlock) {
    const uint64_t end = std::min(begin + kAverageBlock, window.end);
    CKPT_RETURN_IF_ERROR(AverageBlock(
        blobs, stored, as_float,
        Window{window.local, begin, end, window.out + (begin - window.begin) * width}));
  }
  return {};
}

// The bytes are in the manifest, dense.
Status CopyInline(const StoredAtom& stored, const Window& window) {
  const std::string& bytes = stored.atom->source.inline_bytes;
  CKPT_ASSIGN_OR_RETURN(const uint64_t expected, ByteCount(stored.atom->shape, stored.atom->dtype));
  if (bytes.size() != expected) {
    return Fail(ErrorCode::kDataLoss,
                StrCat("the manifest holds ", bytes.size(), " bytes instead of ", expected));
  }
  const auto* source = reinterpret_cast<const std::byte*>(bytes.data());
  const LocalTensor whole = WholeTensor(stored.atom->shape);
  for (const Piece& piece : window.local.pieces) {
    const auto runs = BoxRuns::Intersect(piece, whole.pieces.front());
    if (!runs) continue;
    CKPT_ASSIGN_OR_RETURN(const Conversion conversion,
                          stored.MakeConversion(stored.atom->dtype, piece.scale));
    runs->ForEach(window.begin, window.end, [&](uint64_t to, uint64_t from, uint64_t count) {
      conversion.Run(source + from * conversion.stored_width(), runs->source_stride(),
                     window.out + (to - window.begin) * conversion.shown_width(),
                     runs->target_stride(), count);
      return true;
    });
  }
  return {};
}

Status ReadStored(BlobReader& blobs, const StoredAtom& stored, const Window& window,
                  uint32_t width) {
  const AtomSource& source = stored.atom->source;
  switch (source.kind) {
    case SourceKind::kGather:
    case SourceKind::kReplicas:
      if (source.gathers.empty()) break;
      return GatherCopier(blobs, stored).Copy(source.gathers.front(), window);
    case SourceKind::kAverage:
      if (source.gathers.empty()) break;
      return Average(blobs, stored, window, width);
    case SourceKind::kScaled:
      return ReadScaled(blobs, stored, window.local, window.begin, window.end, window.out, width);
    case SourceKind::kInline: return CopyInline(stored, window);
    default:
      return Fail(ErrorCode::kUnsupported, StrCat("sources of kind ", static_cast<int>(source.kind),
                                                  " cannot be read by this version"));
  }
  return Fail(ErrorCode::kInvalid, "no fragments");
}

}  // namespace

Status ReadAtom(const StepModel& model, BlobReader& blobs, const AtomSegment& segment,
                uint64_t begin, uint64_t end, std::byte* out) {
  CKPT_ASSIGN_OR_RETURN(const StoredAtom stored,
                        FindStoredAtom(model, segment.atom, segment.dtype));
  const Window window{*segment.local, begin, end, out};
  const uint32_t width = ByteWidth(segment.dtype);
  ZeroUncovered(window, width);
  if (Status read = ReadStored(blobs, stored, window, width); !read) {
    return Fail(std::move(read).error().WithContext(AtomLabel(model, segment.atom)));
  }
  return {};
}

Status ReadPackedAtom(const StepModel& model, BlobReader& blobs, const AtomSegment& segment,
                      uint64_t begin, uint64_t end, std::byte* out) {
  const Atom& atom = model.atom(segment.atom);
  const uint64_t bits = BitWidth(atom.dtype);
  const std::span<const Gather> gathers = GathersRead(atom.source);
  const bool plain = gathers.size() == 1 && gathers[0].locals.size() == 1 &&
                     gathers[0].locals[0] == WholeTensor(atom.shape) &&
                     gathers[0].series.size() == 1 && gathers[0].series[0].count == 1;
  if (!plain) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(AtomLabel(model, segment.atom), ": values of type ", DTypeName(atom.dtype),
                       " can only be shown where the source holds them in one piece"));
  }
  const Fragment fragment = gathers[0].series[0].At(0);
  if (fragment.flat_begin != 0 || (fragment.flat_end * bits + 7) / 8 < end) {
    return Fail(ErrorCode::kDataLoss,
                StrCat(AtomLabel(model, segment.atom), ": not all of it is stored"));
  }
  return blobs.Read(fragment.blob, fragment.offset + begin, {out, end - begin});
}

}  // namespace ckptfs
