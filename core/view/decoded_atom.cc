// SPDX-License-Identifier: Apache-2.0

#include "core/view/decoded_atom.h"

#include <algorithm>
#include <vector>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/tensor/box_runs.h"
#include "core/tensor/small_float.h"
#include "core/view/atom_reader.h"

namespace ckptfs {
namespace {

constexpr uint64_t kBlock = 16384;                  // elements decoded at a time
constexpr uint64_t kMaxScales = uint64_t{1} << 26;  // scales one block may span

// Elements of a target that share a scale.
struct Span {
  uint64_t target;
  uint64_t stride;
  uint64_t count;
  uint64_t scale;  // flat index into the scales
};

// Finds the spans of one block of a target.
class SpanFinder {
 public:
  explicit SpanFinder(const Atom& atom)
      : shape_(atom.shape),
        block_(atom.source.block),
        strides_(RowMajorStrides(shape_)),
        whole_(WholeTensor(shape_)) {
    Shape grid = shape_;
    for (size_t d = 0; d < grid.size(); ++d) grid[d] = CeilDiv(shape_[d], block_[d]);
    scale_strides_ = RowMajorStrides(grid);
  }

  void Find(const LocalTensor& local, uint64_t begin, uint64_t end,
            std::vector<Span>& spans) const {
    spans.clear();
    for (const Piece& piece : local.pieces) {
      const auto runs = BoxRuns::Intersect(piece, whole_.pieces.front());
      if (!runs) continue;
      runs->ForEach(begin, end, [&](uint64_t target, uint64_t atom, uint64_t count) {
        Split(target, runs->target_stride(), atom, runs->source_stride(), count, spans);
        return true;
      });
    }
  }

 private:
  // Cuts a run where the scale changes.
  void Split(uint64_t target, uint64_t target_stride, uint64_t atom, uint64_t atom_stride,
             uint64_t count, std::vector<Span>& spans) const {
    while (count > 0) {
      uint64_t scale = 0;
      uint64_t same = 1;
      for (size_t d = 0; d < shape_.size(); ++d) {
        const uint64_t index = atom / strides_[d] % shape_[d];
        scale += index / block_[d] * scale_strides_[d];
        if (d + 1 == shape_.size() && atom_stride == 1) {
          same = std::min(block_[d] - index % block_[d], shape_[d] - index);
        }
      }
      const uint64_t n = std::min(same, count);
      spans.push_back(Span{target, target_stride, n, scale});
      target += n * target_stride;
      atom += n * atom_stride;
      count -= n;
    }
  }

  const Shape& shape_;
  const Shape& block_;
  const std::vector<uint64_t> strides_;
  const LocalTensor whole_;
  std::vector<uint64_t> scale_strides_;
};

// Elements [begin, end) of a local tensor of an atom, as fp32.
Status ReadFloats(const StepModel& model, BlobReader& blobs, AtomIndex index,
                  const LocalTensor& local, uint64_t begin, uint64_t end,
                  std::vector<float>& floats) {
  const DType dtype = model.atom(index).dtype;
  std::vector<std::byte> raw((end - begin) * ByteWidth(dtype));
  // The segment lives for this call only; it does not own the tensor.
  const std::shared_ptr<const LocalTensor> borrowed(std::shared_ptr<const void>(), &local);
  const AtomSegment segment{index, borrowed, begin, end, dtype};
  CKPT_RETURN_IF_ERROR(ReadAtom(model, blobs, segment, begin, end, raw.data()));
  floats.resize(end - begin);
  DecodeToFloat(dtype, raw.data(), floats.data(), floats.size());
  return {};
}

Status DecodeBlock(const StepModel& model, BlobReader& blobs, const Atom& atom,
                   const LocalTensor& local, uint64_t begin, uint64_t end,
                   const std::vector<Span>& spans, std::vector<float>& values) {
  CKPT_RETURN_IF_ERROR(ReadFloats(model, blobs, atom.source.of, local, begin, end, values));
  if (spans.empty()) return {};
  const auto [least, most] = std::minmax_element(
      spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.scale < b.scale; });
  const uint64_t first = least->scale;
  if (most->scale - first >= kMaxScales) {
    return Fail(ErrorCode::kUnsupported, "the scales of one read are too far apart");
  }
  std::vector<float> scales;
  CKPT_RETURN_IF_ERROR(ReadFloats(model, blobs, atom.source.scales,
                                  WholeTensor(model.atom(atom.source.scales).shape), first,
                                  most->scale + 1, scales));
  for (const Span& span : spans) {
    const float scale = scales[span.scale - first];
    float* value = values.data() + (span.target - begin);
    for (uint64_t i = 0; i < span.count; ++i) value[i * span.stride] *= scale;
  }
  return {};
}

}  // namespace

Status CheckDecoded(const StepModel& model, const Atom& atom) {
  const AtomSource& source = atom.source;
  const auto broken = [](std::string rule) { return Fail(ErrorCode::kInvalid, std::move(rule)); };
  if (static_cast<uint32_t>(source.of) >= model.atoms.size() ||
      static_cast<uint32_t>(source.scales) >= model.atoms.size()) {
    return broken("a decoded atom's values or scales do not exist");
  }
  const Atom& values = model.atom(source.of);
  const Atom& scales = model.atom(source.scales);
  if (values.source.kind == SourceKind::kDecode || scales.source.kind == SourceKind::kDecode) {
    return broken("a decoded atom's values or scales are decoded themselves");
  }
  if (!IsFloat(atom.dtype) || !CanDecode(values.dtype) || !CanDecode(scales.dtype)) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("values of type ", DTypeName(values.dtype), " with scales of type ",
                       DTypeName(scales.dtype), " cannot be decoded to ", DTypeName(atom.dtype)));
  }
  if (values.shape != atom.shape || source.block.size() != atom.shape.size() ||
      scales.shape.size() != atom.shape.size()) {
    return broken("a decoded atom's values, block and scales do not agree in rank");
  }
  for (size_t d = 0; d < atom.shape.size(); ++d) {
    if (source.block[d] == 0 || scales.shape[d] != CeilDiv(atom.shape[d], source.block[d])) {
      return broken(StrCat("the scales are not one per block in dimension ", d));
    }
  }
  return {};
}

Status ReadDecoded(const StepModel& model, BlobReader& blobs, const StoredAtom& stored,
                   const LocalTensor& local, uint64_t begin, uint64_t end, std::byte* out) {
  const Atom& atom = *stored.atom;
  CKPT_RETURN_IF_ERROR(CheckDecoded(model, atom));
  for (const Piece& piece : local.pieces) {
    if (piece.scale != 1.0) return Fail(ErrorCode::kUnsupported, "a scaled decoded atom");
  }
  CKPT_ASSIGN_OR_RETURN(const Conversion conversion, stored.MakeConversion(DType::kF32, 1.0));
  const SpanFinder finder(atom);
  std::vector<Span> spans;
  std::vector<float> values;
  for (uint64_t at = begin; at < end; at += kBlock) {
    const uint64_t stop = std::min(at + kBlock, end);
    finder.Find(local, at, stop, spans);
    CKPT_RETURN_IF_ERROR(DecodeBlock(model, blobs, atom, local, at, stop, spans, values));
    conversion.Run(reinterpret_cast<const std::byte*>(values.data()), 1,
                   out + (at - begin) * conversion.shown_width(), 1, stop - at);
  }
  return {};
}

}  // namespace ckptfs
