// SPDX-License-Identifier: Apache-2.0

#include "core/redundancy/document_copies.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/base/checked_math.h"
#include "core/base/digest.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr uint64_t kReadAtOnce = uint64_t{1} << 20;

struct DigestedDocument {
  Digest digest;
  uint64_t bytes = 0;
};

// From a tensor's first element to its last.
Result<uint64_t> ExtentOfTensor(const StoredTensor& tensor) {
  uint64_t reach = 0;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    if (tensor.shape[d] == 0) return uint64_t{0};
    CKPT_ASSIGN_OR_RETURN(const uint64_t step,
                          CheckedMul(tensor.shape[d] - 1, tensor.strides[d], "a tensor's extent"));
    CKPT_ASSIGN_OR_RETURN(reach, CheckedAdd(reach, step, "a tensor's extent"));
  }
  CKPT_ASSIGN_OR_RETURN(reach, CheckedAdd(reach, 1, "a tensor's extent"));
  return ByteCount({reach}, tensor.dtype);
}

void AddText(DigestStream& hash, const std::string& text) {
  hash.Add(std::as_bytes(std::span(text.data(), text.size())));
}

Status AddBytes(DigestStream& hash, BlobReader& blobs, const StoredTensor& tensor, uint64_t bytes) {
  std::vector<std::byte> buffer(std::min(bytes, kReadAtOnce));
  for (uint64_t at = 0; at < bytes;) {
    const std::span<std::byte> piece(buffer.data(), std::min<uint64_t>(buffer.size(), bytes - at));
    CKPT_RETURN_IF_ERROR(blobs.Read(tensor.blob, tensor.offset + at, piece));
    hash.Add(piece);
    at += piece.size();
  }
  return {};
}

Result<DigestedDocument> DigestDocument(const Document& document, BlobReader& blobs) {
  DigestStream hash;
  uint64_t bytes = document.pickle.size();
  AddText(hash, document.pickle);
  for (const StoredTensor& tensor : document.tensors) {
    AddText(hash, StrCat(DTypeName(tensor.dtype), ShapeToString(tensor.shape)));
    for (const uint64_t stride : tensor.strides) AddText(hash, StrCat(stride, ","));
    if (tensor.atom) {  // a tensor of its own class; another one is another document
      AddText(hash, StrCat("atom ", static_cast<uint32_t>(*tensor.atom)));
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(const uint64_t extent, ExtentOfTensor(tensor));
    CKPT_RETURN_IF_ERROR(AddBytes(hash, blobs, tensor, extent));
    bytes += extent;
  }
  return DigestedDocument{hash.Finish(), bytes};
}

}  // namespace

Result<ClassRedundancy> CompareDocuments(const StepModel& step, BlobReader& blobs) {
  ClassRedundancy documents;
  documents.name = kDocumentClass;
  std::set<std::string> scopes;
  std::map<std::string, std::map<Digest, std::vector<uint64_t>>> by_key;  // the bytes of each
  for (const Document& document : step.documents) {
    CKPT_ASSIGN_OR_RETURN(const DigestedDocument digested, DigestDocument(document, blobs));
    by_key[document.key][digested.digest].push_back(digested.bytes);
    scopes.insert(document.scope);
  }
  documents.files = scopes.size();
  for (const auto& [key, contents] : by_key) {
    size_t all = 0;
    for (const auto& [digest, sizes] : contents) all += sizes.size();
    Sharing of_key = Sharing::kNone;
    for (const auto& [digest, sizes] : contents) {
      const Sharing sharing = sizes.size() == 1     ? Sharing::kNone
                              : sizes.size() == all ? Sharing::kFull
                                                    : Sharing::kPartial;
      of_key = std::max(of_key, sharing);
      documents.unique += sizes[0];
      documents.stored += sizes[0] * sizes.size();
      documents.bytes[static_cast<size_t>(sharing)] += sizes[0];
    }
    ++documents.tensors[static_cast<size_t>(of_key)];
  }
  return documents;
}

}  // namespace ckptfs
