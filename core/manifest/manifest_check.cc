// SPDX-License-Identifier: Apache-2.0
#include "core/manifest/manifest_check.h"

#include <algorithm>
#include <limits>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"

namespace ckptfs {
namespace {

using Wide = __int128;

Status CheckFragment(const FragmentSeries& series, uint64_t k, uint64_t bytes,
                     std::span<const Blob> blobs) {
  const Wide blob = Wide{series.blob} + Wide{series.blob_step} * static_cast<Wide>(k);
  const Wide offset = Wide{series.offset} + Wide{series.offset_step} * static_cast<Wide>(k);
  if (blob < 0 || blob >= static_cast<Wide>(blobs.size())) {
    return Refuse("fragment ", k, " of a series lies in no blob");
  }
  const Blob& there = blobs[static_cast<size_t>(blob)];
  if (offset < 0 || offset + static_cast<Wide>(bytes) > static_cast<Wide>(there.stamp.size)) {
    return Refuse("fragment ", k, " of a series lies outside '", there.path, "' of ",
                  there.stamp.size, " bytes");
  }
  return {};
}

// Success if following `of` from every atom ends at one that is not derived.
Status CheckChains(const StepModel& model) {
  constexpr int kMaxChain = 8;
  for (size_t i = 0; i < model.atoms.size(); ++i) {
    size_t at = i;
    for (int depth = 0;; ++depth) {
      const auto of = DerivedFrom(model.atoms[at].source);
      if (!of) break;
      if (depth == kMaxChain) return Refuse("atom ", i, " is derived in a circle");
      at = static_cast<size_t>(*of);
    }
  }
  return {};
}

}  // namespace

Status CheckBlobPath(std::string_view path) {
  if (path.empty() || path.front() == '/' || path.find('\0') != std::string_view::npos) {
    return Refuse("a blob's path must be relative and not empty");
  }
  while (true) {
    const size_t slash = path.find('/');
    const std::string_view component = path.substr(0, slash);
    if (component.empty() || component == "." || component == "..") {
      return Refuse("a blob's path must not have an empty, '.' or '..' component");
    }
    if (slash == std::string_view::npos) return {};
    path.remove_prefix(slash + 1);
  }
}

Status CheckIdentity(const Blob& blob, bool root_is_store) {
  constexpr uint64_t kLeastChunk = 4096;
  const bool listed = blob.chunk_list != Digest{};
  if (blob.chunk_bytes == 0 && (listed || !blob.chunks.empty()))
    return Refuse("digests of chunks of 0 bytes");
  if (listed && !blob.chunks.empty()) return Refuse("digests of chunks here and in a file");
  if (listed && (!blob.store_owned || !root_is_store))
    return Refuse("digests of chunks beside '", blob.path, "', which is not the store's own");
  if (blob.chunk_bytes != 0 && blob.chunk_bytes < kLeastChunk) {
    return Refuse("chunks of ", blob.chunk_bytes, " bytes");
  }
  if (blob.chunk_bytes != 0 && !listed &&
      blob.chunks.size() != ChunkCount(blob.stamp.size, blob.chunk_bytes)) {
    return Refuse(blob.chunks.size(), " digests of chunks of ", blob.chunk_bytes, " bytes for ",
                  blob.stamp.size, " bytes");
  }
  if (!blob.stamp.size_only()) return {};
  if (!blob.store_owned || !root_is_store) {
    return Refuse("'", blob.path, "' has no stamp and is not the store's own");
  }
  if (blob.chunk_bytes == 0) return Refuse("'", blob.path, "' has neither a stamp nor digests");
  return {};
}

Status CheckSeries(const FragmentSeries& series, std::span<const LocalTensor> locals,
                   std::span<const Blob> blobs) {
  if (series.count == 0) return Refuse("a series does not have any fragments");
  if (series.local >= locals.size()) return Refuse("local tensor index ", series.local);
  if (series.count > 1 && series.flat_step < series.elements) {
    return Refuse("the fragments of a series overlap");
  }
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(locals[series.local].shape));
  const Wide end = Wide{series.flat_begin} + Wide{series.flat_step} * Wide{series.count - 1} +
                   Wide{series.elements};
  if (end > static_cast<Wide>(elements)) {
    return Refuse("a series ends outside its local tensor of ", elements, " elements");
  }
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount({series.elements}, series.dtype));
  CKPT_RETURN_IF_ERROR(CheckFragment(series, 0, bytes, blobs));
  CKPT_RETURN_IF_ERROR(CheckFragment(series, series.count - 1, bytes, blobs));
  if (series.blob_step == 0) return {};
  for (uint64_t k = 1; k + 1 < series.count; ++k) {  // fewer than there are blobs
    CKPT_RETURN_IF_ERROR(CheckFragment(series, k, bytes, blobs));
  }
  return {};
}

Status CheckStoredTensor(const StoredTensor& tensor, const StepModel& model) {
  if (tensor.atom) {
    const Atom& atom = model.atom(*tensor.atom);
    if (model.IsOfModel(atom)) return Refuse("it refers to an atom of the model");
    if (atom.dtype != tensor.dtype || atom.shape != tensor.shape) {
      return Refuse("it refers to an atom of another dtype or shape");
    }
    if (tensor.strides != RowMajorStrides(tensor.shape))
      return Refuse(
          "it has other strides than "
          "its atom");
    return {};
  }
  const std::span<const Blob> blobs = model.blobs;
  const auto blob = static_cast<uint32_t>(tensor.blob);
  if (blob >= blobs.size()) return Refuse("blob index ", blob);
  if (tensor.strides.size() != tensor.shape.size())
    return Refuse(
        "its strides have another rank "
        "than its shape");
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(tensor.shape));
  if (elements == 0) return {};
  uint64_t last = 0;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    CKPT_ASSIGN_OR_RETURN(const uint64_t step,
                          CheckedMul(tensor.shape[d] - 1, tensor.strides[d], "strides"));
    CKPT_ASSIGN_OR_RETURN(last, CheckedAdd(last, step, "strides"));
  }
  CKPT_ASSIGN_OR_RETURN(const uint64_t span, CheckedAdd(last, 1, "extent"));
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount({span}, tensor.dtype));
  if (!RangeInside(tensor.offset, bytes, blobs[blob].stamp.size)) {
    return Refuse("its bytes lie outside '", blobs[blob].path, "'");
  }
  return {};
}

Status CheckFacts(const StepFacts& facts, std::span<const Blob> blobs) {
  const auto inside = [&](BlobIndex blob) { return static_cast<uint32_t>(blob) < blobs.size(); };
  if (facts.tool && facts.tool->tool.empty()) return Refuse("a tool without a name");
  if (facts.tool && !facts.tool->own.empty()) {
    CKPT_RETURN_IF_ERROR(CheckBlobPath(facts.tool->own));
  }
  std::string_view last;
  for (const ModelFile& file : facts.model_files.files) {
    CKPT_RETURN_IF_ERROR(CheckBlobPath(file.name));
    if (file.name <= last) return Refuse("model files are not sorted by name");
    if (std::ranges::count(file.name, '/') > 1) return Refuse("'", file.name, "' is too deep");
    const auto* const blob = std::get_if<BlobIndex>(&file.body);
    if (blob != nullptr && !inside(*blob)) return Refuse("'", file.name, "' lies in no blob");
    last = file.name;
  }
  for (const auto& [blob, tensors] : facts.safetensors) {
    if (inside(blob) && tensors <= blobs[static_cast<uint32_t>(blob)].stamp.size) continue;
    return Refuse("tensors begin outside their file");
  }
  if (facts.modules) {
    for (const auto& [name, grid] : facts.modules->objects) {
      CKPT_ASSIGN_OR_RETURN(const uint64_t parts, ElementCount(grid));
      if (parts == 0 || parts > kMaxObjectParts)
        return Refuse("'", name, "' has ", parts, " parts");
    }
  }
  if (!facts.keys) return {};
  for (const auto& [kind, path] : facts.keys->kinds) {
    if (path.empty() || KeyOf(path) != kind) return Refuse("'", kind, "' is not where it stands");
  }
  for (const auto& [key, tensor] : facts.keys->tensors) {
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(tensor.second));
    if (elements != 1) return Refuse("'", key, "' does not have one element");
  }
  return {};
}

Status CheckAtomSources(const StepModel& model) {
  for (size_t i = 0; i < model.atoms.size(); ++i) {
    const Status status = CheckSource(model, model.atoms[i]);
    if (!status) return Fail(Error(status.error()).WithContext(StrCat("atom ", i)));
  }
  return CheckChains(model);
}

}  // namespace ckptfs
