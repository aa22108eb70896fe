// SPDX-License-Identifier: Apache-2.0
//
// TorchFile is any torch.save file, opened by parsing its structure: the zip
// container or the legacy one, pickle protocols 2-5, the tree, and where every
// storage lies, which it keeps to itself.  No tensor byte is read.
//
// Thread safety: immutable once opened.
// Lifetime: shares the file.
// Units: bytes.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/blob/record_sums.h"
#include "core/io/file.h"
#include "core/model/step_model.h"
#include "formats/torch/file_tensor.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

class TorchFile {
 public:
  // Storages by key: record data/<key> of a zip.
  using Storages = std::map<std::string, StorageRecord, std::less<>>;

  // An empty file.
  TorchFile() = default;

  // A whole file, or what lies at an extent of it.  kInvalid names the file and the
  // rule.  BLOCKS: on reading the headers.
  static Result<TorchFile> Open(std::shared_ptr<const File> file);
  static Result<TorchFile> Open(std::shared_ptr<const File> file, const Extent& extent);

  // Opens a torch file that a container holds, with `file` if somebody is to Read.  kInvalid
  // if the pickle contradicts itself about a storage: torch gives every mention the type of
  // the first.
  static Result<TorchFile> Make(PickleTree tree, Storages storages,
                                std::shared_ptr<const File> file = nullptr);

  // The file's path, for messages; "" if the file was made in memory.
  std::string_view name() const { return file_ ? std::string_view(file_->name()) : ""; }
  const PickleTree& tree() const { return tree_; }
  PickleRef root() const { return RootOf(tree_); }
  size_t storage_count() const { return storages_.size(); }

  // The only way to a tensor's bytes (file_tensor.h says why).  `blob` is the
  // file's own.  kInvalid unless the storage is in the file, as long as the
  // pickle says, and holds all elements of (storage offset, shape, strides).
  Result<FileTensor> Locate(const TensorNode& tensor, BlobIndex blob) const;

  // The digest of what lies between the checksums that the file holds of itself
  // (core/blob/frame.h); zero if it does not hold one for every record.
  // REQUIRES: it was opened, as a whole file.  BLOCKS: on reading.
  Result<Digest> Frame() const;

  // The bytes of a small tensor; kInvalid if they lie in another file.  REQUIRES: there
  // is a file.  BLOCKS: on reading.
  Result<std::string> Read(const FileTensor& tensor) const;
  // Reads its row-major elements [begin, end).
  Result<std::string> Read(const FileTensor& tensor, uint64_t begin, uint64_t end) const;

 private:
  std::shared_ptr<const File> file_;
  PickleTree tree_;
  Storages storages_;
  std::vector<FileRecord> records_;  // of a zip
};

// Storages that are atoms of a step (StoredTensor::atom), by key.
using StorageAtoms = std::map<std::string, AtomIndex, std::less<>>;

// Tensors of a document are numbered in `tensors`; the pickle is protocol 2 and
// holds persistent ids instead (StepModel's Document).
Result<Document> MakeDocument(std::string key, std::string scope, PickleRef value,
                              const TorchFile& file, BlobIndex blob,
                              const StorageAtoms& atoms = {});

// The way back: a tree in which tensor i is a kTensor node with storage_key i
// (its index in document.tensors), contiguous.
Result<PickleTree> ParseDocument(const Document& document);

}  // namespace ckptfs
