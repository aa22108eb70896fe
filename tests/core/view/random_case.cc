// SPDX-License-Identifier: Apache-2.0

#include "tests/core/view/random_case.h"

#include <stdlib.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/base/strings.h"
#include "tests/support/stamp_of_file.h"

namespace ckptfs {
namespace {

constexpr uint64_t kBlobs = 4;

// Small integers, halves and quarters: exact in every floating type here, so
// that the oracle needs no rounding of its own.
void AppendElement(std::string& out, DType dtype, double value) {
  const auto append = [&out](auto typed) {
    out.append(reinterpret_cast<const char*>(&typed), sizeof(typed));
  };
  const float single = static_cast<float>(value);
  switch (dtype) {
    case DType::kF64: return append(value);
    case DType::kF32: return append(single);
    case DType::kBF16: return append(static_cast<uint16_t>(std::bit_cast<uint32_t>(single) >> 16));
    case DType::kF16: {
      const uint32_t bits = std::bit_cast<uint32_t>(single);
      const uint32_t exponent = (bits >> 23) & 0xff;
      const uint32_t half = exponent == 0 ? 0 : ((exponent - 112) << 10) | ((bits >> 13) & 0x3ff);
      return append(static_cast<uint16_t>(((bits >> 16) & 0x8000) | half));
    }
    case DType::kI32: return append(static_cast<int32_t>(value));
    default: return append(static_cast<uint8_t>(value));
  }
}

bool NextIndex(std::vector<uint64_t>& index, const Shape& shape) {
  for (size_t d = shape.size(); d-- > 0;) {
    if (++index[d] < shape[d]) return true;
    index[d] = 0;
  }
  return false;
}

uint64_t Elements(const Shape& shape) {
  uint64_t n = 1;
  for (uint64_t dim : shape) n *= dim;
  return n;
}

// Calls f(atom flat, local flat) for every element of a piece.
template <class F>
void ForEachElement(const Piece& piece, const Shape& atom, F&& f) {
  if (Elements(piece.shape) == 0) return;
  std::vector<uint64_t> index(piece.shape.size(), 0);
  do {
    uint64_t flat = 0;
    uint64_t local = piece.local_offset;
    for (size_t d = 0; d < atom.size(); ++d) {
      flat = flat * atom[d] + piece.atom_begin[d] + index[d];
      local += index[d] * piece.local_strides[d];
    }
    f(flat, local);
  } while (NextIndex(index, piece.shape));
}

}  // namespace

RandomCase::RandomCase(uint64_t seed) : random_(seed) {
  char name[] = "/tmp/ckptfs_case_XXXXXX";
  directory_ = mkdtemp(name);
  model_.roots = {directory_};
  model_.parameters.resize(1);
  model_.parameters[0].name = std::string("w");
  blob_bytes_.resize(kBlobs);
  Atom atom;
  atom.kind = std::string("weight");
  atom.shape = RandomShape();
  constexpr DType kTypes[] = {DType::kF32, DType::kF32, DType::kBF16, DType::kF16,
                              DType::kF64, DType::kI32, DType::kU8};
  atom.dtype = kTypes[Pick(std::size(kTypes))];
  model_.atoms.push_back(atom);
  AtomSource& source = model_.atoms[0].source;
  const bool floating = IsFloat(atom.dtype);
  source.kind = floating && Chance(20) ? SourceKind::kAverage
                : Chance(20)           ? SourceKind::kReplicas
                                       : SourceKind::kGather;
  const uint64_t slices = source.kind == SourceKind::kAverage ? 2 : 1;
  for (uint64_t slice = 0; slice < slices; ++slice) source.gathers.push_back(MakeGather(slice));
  if (floating && Chance(25)) {  // shown through a derived cast
    Atom derived = atom;
    derived.dtype = Chance(50) ? DType::kBF16 : DType::kF32;
    derived.source.kind = SourceKind::kCast;
    derived.source.of = AtomIndex{0};
    model_.atoms.push_back(derived);
  }
  WriteBlobs();
  MakeFile();
}

RandomCase::~RandomCase() { std::filesystem::remove_all(directory_); }

std::string RandomCase::Describe() const {
  const Atom& atom = model_.atoms[0];
  return StrCat(DTypeName(atom.dtype), " ", ShapeToString(atom.shape), " source kind ",
                static_cast<int>(atom.source.kind), ", ", atom.source.gathers[0].locals.size(),
                " locals, ", atom.source.gathers[0].series.size(), " series");
}

// Slices of an average differ by an even number, so that means stay exact.
double RandomCase::ValueOf(uint64_t flat, uint64_t slice) const {
  const uint64_t modulus = model_.atoms[0].source.kind == SourceKind::kAverage ? 61 : 113;
  return static_cast<double>(flat % modulus + 1 + 2 * slice);
}

Shape RandomCase::RandomShape() {
  Shape shape(Pick(5));
  for (uint64_t& dim : shape) dim = Chance(3) ? 0 : 1 + Pick(9);
  if (!shape.empty() && Chance(20)) shape.back() = 1 + Pick(3000);
  return shape;
}

// Cuts the shape into boxes that cover it exactly once.
std::vector<Piece> RandomCase::RandomBoxes(const Shape& shape) {
  std::vector<Piece> boxes(1);
  boxes[0].shape = shape;
  boxes[0].atom_begin.assign(shape.size(), 0);
  for (uint64_t cuts = Pick(6); cuts > 0 && !shape.empty(); --cuts) {
    const size_t which = Pick(boxes.size());
    const size_t dim = Pick(shape.size());
    if (boxes[which].shape[dim] < 2) continue;
    const uint64_t at = 1 + Pick(boxes[which].shape[dim] - 1);
    Piece rest = boxes[which];
    rest.shape[dim] -= at;
    rest.atom_begin[dim] += at;
    boxes[which].shape[dim] = at;
    boxes.push_back(rest);
  }
  std::shuffle(boxes.begin(), boxes.end(), random_);
  return boxes;
}

// Lays boxes into one local tensor: dense, transposed or with gaps.
LocalTensor RandomCase::Pack(const Shape& atom, std::vector<Piece> boxes, bool scaled) {
  LocalTensor local;
  uint64_t now = Chance(20) ? Pick(5) : 0;
  for (Piece& box : boxes) {
    std::vector<size_t> order(atom.size());
    for (size_t d = 0; d < order.size(); ++d) order[d] = d;
    if (Chance(25)) std::shuffle(order.begin(), order.end(), random_);
    box.local_strides.assign(atom.size(), 0);
    uint64_t stride = Chance(10) ? 2 : 1;
    for (size_t i = order.size(); i-- > 0;) {
      box.local_strides[order[i]] = stride;
      stride = stride * std::max<uint64_t>(box.shape[order[i]], 1) + (Chance(15) ? Pick(4) : 0);
    }
    box.local_offset = now;
    if (scaled) box.scale = Chance(50) ? 0.5 : 2.0;
    now += stride + (Chance(15) ? Pick(7) : 0);
    local.pieces.push_back(box);
  }
  local.shape = {now};
  return local;
}

// One or more fragments of elements [0, n), as series where sizes are equal.
void RandomCase::AddSeries(Gather& gather, uint32_t local, const std::string& bytes) {
  const DType dtype = model_.atoms[0].dtype;
  const uint64_t width = ByteWidth(dtype);
  const uint64_t n = bytes.size() / width;
  uint64_t now = 0;
  while (now < n) {
    const uint64_t elements = 1 + Pick(n - now);
    const auto count = static_cast<uint32_t>(Chance(40) ? 1 + Pick((n - now) / elements) : 1);
    const uint64_t gap = Pick(9);  // bytes between the fragments in the blob
    std::string& blob = blob_bytes_[Pick(kBlobs)];
    blob.append(Pick(40), '\xee');
    FragmentSeries series;
    series.local = local;
    series.count = count;
    series.flat_begin = now;
    series.flat_step = count > 1 ? elements : 0;
    series.elements = elements;
    series.blob = static_cast<uint32_t>(&blob - blob_bytes_.data());
    series.offset = blob.size();
    series.offset_step = static_cast<int64_t>(elements * width + gap);
    series.dtype = dtype;
    for (uint32_t k = 0; k < count; ++k) {
      blob.append(bytes, now * width, elements * width);
      blob.append(gap, '\xee');
      now += elements;
    }
    gather.series.push_back(series);
  }
}

void RandomCase::StoreLocal(Gather& gather, uint32_t local, uint64_t slice) {
  const Atom& atom = model_.atoms[0];
  const LocalTensor& tensor = gather.locals[local];
  std::vector<double> values(tensor.shape[0], 99);  // padding: anything
  for (const Piece& piece : tensor.pieces) {
    ForEachElement(piece, atom.shape, [&](uint64_t flat, uint64_t at) {
      values[at] = ValueOf(flat, slice) * piece.scale;
    });
  }
  std::string bytes;
  for (double value : values) AppendElement(bytes, atom.dtype, value);
  AddSeries(gather, local, bytes);
}

Gather RandomCase::MakeGather(uint64_t slice) {
  const Atom& atom = model_.atoms[0];
  std::vector<Piece> boxes = RandomBoxes(atom.shape);
  const bool scaled = IsFloat(atom.dtype) && Chance(15);
  Gather gather;
  while (!boxes.empty()) {
    const size_t n = 1 + Pick(boxes.size());
    gather.locals.push_back(
        Pack(atom.shape, {boxes.begin(), boxes.begin() + static_cast<ptrdiff_t>(n)}, scaled));
    boxes.erase(boxes.begin(), boxes.begin() + static_cast<ptrdiff_t>(n));
  }
  for (uint32_t i = 0; i < gather.locals.size(); ++i) StoreLocal(gather, i, slice);
  return gather;
}

void RandomCase::WriteBlobs() {
  for (uint64_t i = 0; i < kBlobs; ++i) {
    Blob blob;
    blob.path = StrCat("blob", i);
    const std::string path = StrCat(directory_, "/", blob.path);
    std::ofstream(path, std::ios::binary) << blob_bytes_[i];
    blob.stamp = *StampOfFile(path);
    model_.blobs.push_back(blob);
  }
}

// A literal, the target's range, some zeros, a range of a blob.
void RandomCase::MakeFile() {
  const Atom& atom = model_.atoms.back();
  std::vector<Piece> boxes = RandomBoxes(atom.shape);
  if (Chance(50)) boxes.resize(1 + Pick(boxes.size()));
  const bool floating = IsFloat(atom.dtype);
  auto local = std::make_shared<LocalTensor>(Pack(atom.shape, boxes, floating && Chance(15)));
  constexpr DType kShown[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  const DType shown = floating ? kShown[Pick(4)] : atom.dtype;
  const uint64_t n = local->shape[0];
  const uint64_t begin = Chance(50) ? 0 : Pick(n + 1);
  const uint64_t end = begin + Pick(2 * n + 2);
  std::vector<double> values(std::max(n, end), 0);
  const double shift = model_.atoms[0].source.kind == SourceKind::kAverage ? 1 : 0;
  for (const Piece& piece : local->pieces) {
    ForEachElement(piece, atom.shape, [&](uint64_t flat, uint64_t at) {
      values[at] = (ValueOf(flat, 0) + shift) * piece.scale;
    });
  }
  PlanBuilder builder;
  expected_ = std::string(Pick(130), 'L');
  builder.Literal(expected_);
  builder.Atom(AtomIndex{static_cast<uint32_t>(model_.atoms.size() - 1)}, local, begin, end, shown);
  for (uint64_t i = begin; i < end; ++i) AppendElement(expected_, shown, values[i]);
  const uint64_t zeros = Pick(20);
  builder.Zeros(zeros);
  expected_.append(zeros, '\0');
  const std::string& blob = blob_bytes_[0];
  const uint64_t from = Pick(blob.size() + 1);
  builder.BlobRange(BlobIndex{0}, from, blob.size() - from);
  expected_.append(blob, from);
  plan_ = std::move(builder).Finish();
}

}  // namespace ckptfs
