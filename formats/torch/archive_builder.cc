// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/archive_builder.h"

#include <bit>
#include <cstring>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/tensor/piece.h"
#include "formats/torch/tail_run.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

// Runs of a strided tensor beyond which a document's tensor is refused.
constexpr uint64_t kMaxRuns = 1'000'000;

// The bytes of a stored tensor in row-major order, one segment per contiguous
// run of the blob.
Result<std::vector<std::pair<uint64_t, SegmentBody>>> RunsOf(const StoredTensor& tensor) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount(tensor.shape, tensor.dtype));
  std::vector<std::pair<uint64_t, SegmentBody>> runs;
  if (bytes == 0) return runs;
  if (tensor.atom) {
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(tensor.shape));
    auto local = std::make_shared<const LocalTensor>(WholeTensor(tensor.shape));
    runs.emplace_back(bytes,
                      AtomSegment{*tensor.atom, std::move(local), 0, elements, tensor.dtype});
    return runs;
  }
  const uint64_t width = ByteWidth(tensor.dtype);
  const auto [run, outer] = TailRunOf(tensor.shape, tensor.strides);
  if (width == 0 || bytes / (run * width) > kMaxRuns) {
    return Fail(ErrorCode::kUnsupported, "a document's tensor is too scattered to be shown");
  }
  std::vector<uint64_t> index(outer, 0);
  for (uint64_t done = 0; done < bytes; done += run * width) {
    uint64_t element = 0;
    for (size_t d = 0; d < outer; ++d) element += index[d] * tensor.strides[d];
    runs.emplace_back(run * width,
                      BlobSegment{tensor.blob, tensor.offset + element * width, run * width});
    for (size_t d = outer; d-- > 0;) {
      if (++index[d] < tensor.shape[d]) break;
      index[d] = 0;
    }
  }
  return runs;
}

template <class T>
T LittleEndian(const std::string& bytes) {
  T value{};
  std::memcpy(&value, bytes.data(), sizeof(T));  // little-endian hosts only, as the file
  return value;
}
static_assert(std::endian::native == std::endian::little);

// A Python number out of the bytes of a scalar; nothing if the type has none.
std::optional<NodeId> NumberNode(const Atom& atom, PickleBuilder& pickle) {
  const std::string& bytes = atom.source.inline_bytes;
  if (bytes.size() != ByteWidth(atom.dtype)) return std::nullopt;
  switch (atom.dtype) {
    case DType::kI64: return pickle.Int(LittleEndian<int64_t>(bytes));
    case DType::kI32: return pickle.Int(LittleEndian<int32_t>(bytes));
    case DType::kF64: return pickle.Float(LittleEndian<double>(bytes));
    case DType::kF32: return pickle.Float(static_cast<double>(LittleEndian<float>(bytes)));
    case DType::kBool: return pickle.Bool(bytes[0] != 0);
    default: return std::nullopt;
  }
}

}  // namespace

Result<uint64_t> ArchiveContent::Size(std::string_view folder) const {
  CKPT_ASSIGN_OR_RETURN(const std::string pickle, PrintPickle(tree));
  std::vector<uint64_t> lengths;
  lengths.reserve(storages.size());
  for (const ArchiveStorage& storage : storages) lengths.push_back(storage.length);
  return ArchiveSize(folder, pickle.size(), lengths);
}

Result<Plan> ArchiveContent::MakePlan(std::string_view folder) && {
  return ArchivePlan(folder, tree, std::move(storages));
}

Status ArchiveContent::AppendTo(PlanBuilder& plan, std::string_view folder) && {
  return AppendArchive(plan, folder, tree, std::move(storages));
}

Result<NodeId> ArchiveBuilder::Tensor(DType dtype, const Shape& shape,
                                      std::vector<std::pair<uint64_t, SegmentBody>> parts) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(shape));
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount(shape, dtype));
  if (TorchName(dtype).empty()) {
    return Fail(ErrorCode::kUnsupported, StrCat("torch has no dtype ", DTypeName(dtype)));
  }
  ArchiveStorage storage;
  for (const auto& part : parts) storage.length += part.first;
  CKPT_CHECK(storage.length == bytes);
  storage.parts = std::move(parts);
  TensorNode node;
  node.dtype = dtype;
  node.storage_key = std::to_string(storages_.size());
  node.storage_elements = elements;
  node.shape = shape;
  node.strides = RowMajorStrides(shape);
  storages_.push_back(std::move(storage));
  return pickle_.Tensor(std::move(node));
}

Result<NodeId> ArchiveBuilder::WholeAtom(const StepModel& step, AtomIndex index, DType dtype) {
  const Atom& atom = step.atom(index);
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(atom.shape));
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount(atom.shape, dtype));
  auto local = std::make_shared<const LocalTensor>(WholeTensor(atom.shape));
  return Tensor(dtype, atom.shape,
                {{bytes, AtomSegment{index, std::move(local), 0, elements, dtype}}});
}

Result<NodeId> ArchiveBuilder::Scalar(const StepModel& step, AtomIndex index) {
  const Atom& atom = step.atom(index);
  if (IsPythonNumber(atom.source)) {
    if (auto number = NumberNode(atom, pickle_)) return *number;
  }
  return WholeAtom(step, index, atom.dtype);
}

Result<NodeId> ArchiveBuilder::Value(const Document& document) {
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(document));
  const size_t base = storages_.size();
  for (const StoredTensor& tensor : document.tensors) {
    ArchiveStorage storage;
    CKPT_ASSIGN_OR_RETURN(storage.parts, RunsOf(tensor));
    for (const auto& part : storage.parts) storage.length += part.first;
    storages_.push_back(std::move(storage));
  }
  return pickle_.Copy(RootOf(tree), [base](const TensorNode& tensor) {
    return std::to_string(base + std::stoul(tensor.storage_key));
  });
}

Result<NodeId> ArchiveBuilder::PartOf(const Document& document, PickleRef value) {
  std::vector<size_t> used;  // of the document's tensors, in the order of their storages
  const size_t base = storages_.size();
  const NodeId copy = pickle_.Copy(value, [&](const TensorNode& tensor) {
    used.push_back(std::stoul(tensor.storage_key));
    return std::to_string(base + used.size() - 1);
  });
  for (size_t i : used) {
    ArchiveStorage storage;
    CKPT_ASSIGN_OR_RETURN(storage.parts, RunsOf(document.tensors.at(i)));
    for (const auto& part : storage.parts) storage.length += part.first;
    storages_.push_back(std::move(storage));
  }
  return copy;
}

ArchiveContent ArchiveBuilder::Finish(NodeId root) && {
  return ArchiveContent{std::move(pickle_).Finish(root), std::move(storages_)};
}

}  // namespace ckptfs
