// SPDX-License-Identifier: Apache-2.0
//
// TorchFile is any torch.save file, opened by parsing its structure: the zip
// container or the legacy one, pickle protocols 2-5, the tree, and where every
// storage lies.  No tensor byte is read.
//
// Thread safety: immutable once opened.
// Lifetime: independent of the file once opened.
// Units: bytes, except storage_elements.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

struct StorageRecord {
  uint64_t offset = 0;  // in the file
  uint64_t length = 0;
};

struct TorchFile {
  PickleTree tree;
  std::map<std::string, StorageRecord, std::less<>> storages;  // by key

  PickleRef root() const { return RootOf(tree); }

  // The bytes of the tensor's whole *storage* in the file (storage_offset is
  // not added: element e of the storage lies at offset + e * width); checks
  // numel x width against the record and storage_offset + extent of (shape,
  // strides) against the storage.
  Result<StorageRecord> Locate(const TensorNode& tensor) const;

  // The bytes from the tensor's first element to the end of its last one;
  // length 0 for a tensor without elements.
  Result<StorageRecord> LocateElements(const TensorNode& tensor) const;

  // kInvalid names the file and the rule.  BLOCKS: on reading the headers.
  static Result<TorchFile> Open(const std::string& path);
};

// Tensors of a document are numbered in `tensors`; the pickle is protocol 2 and
// holds persistent ids instead (StepModel's Document).
Result<Document> MakeDocument(std::string key, std::string scope, PickleRef value,
                              const TorchFile& file, BlobIndex blob);

// The way back: a tree in which tensor i is a kTensor node with storage_key i
// (its index in document.tensors), contiguous.
Result<PickleTree> ParseDocument(const Document& document);

}  // namespace ckptfs
