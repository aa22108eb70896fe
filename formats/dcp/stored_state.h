// SPDX-License-Identifier: Apache-2.0
//
// StoredState is a DCP step as it lies: its metadata, its files as blobs of a step, and
// the byte at which each chunk's elements begin.  It gives tensors as fragments of an
// atom, small values, and objects.
//
// Thread safety: none; files are looked at in parallel inside.
// Lifetime: the candidate and the assembler must outlive it.
// Units: bytes; fragments as in core/model/fragment.h.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "formats/dcp/metadata.h"
#include "formats/dcp/step_files.h"
#include "formats/torch/file_tensor.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::dcp {

class StoredState {
 public:
  // kInvalid names the file and the rule; kStale a file that changed meanwhile.
  // BLOCKS: on reading metadata and all archives' frames.
  static Result<StoredState> Read(const StepCandidate& step, const std::vector<PartFiles>& parts,
                                  Assembler& assembler);

  const DcpMetadata& metadata() const { return metadata_; }

  // Why the elements of a tensor cannot be told: a chunk of it does not hold a plain tensor.
  // "" where all do.  REQUIRES of what follows: it is "".
  std::string WhyNotPlain(size_t tensor) const;

  // All of a tensor under an atom of its dtype and shape: chunks that continue each other
  // as a series (core/state/shared_rows.h), others by their boxes.  Chunks that several ranks
  // wrote (per-rank metadata) are replicas.
  Status AddFragments(size_t tensor, AtomIndex atom) const;
  // The same of what has one index along dimension 0, under an atom without that dimension.
  // kUnsupported where a chunk does not hold its elements in row-major order.
  // REQUIRES: the tensor has such an index.
  Status AddRow(size_t tensor, uint64_t row, AtomIndex atom) const;
  // A stored tensor inside a larger one: where its first element goes.  `begin` may have more
  // dimensions than the stored tensor, which then has one index of the outer ones.
  struct Inset {
    size_t tensor = 0;
    std::vector<uint64_t> begin;
  };
  // All of several tensors under an atom of their dtype and of the shape `whole`, which they make
  // up together.  kUnsupported as of AddRow.
  // REQUIRES: each lies inside of `whole`.
  Status AddInsets(std::span<const Inset> insets, const Shape& whole, AtomIndex atom) const;

  // The bytes of a tensor of one element, the same in all copies.  BLOCKS: on reading.
  Result<std::string> ReadSmall(size_t tensor);

  // A tensor that lies in one piece, for a document, the first rank's; nothing if it does not.
  std::optional<StoredTensor> Whole(size_t tensor) const;
  bool HasCopies(size_t tensor) const { return CopiesOf(metadata_.tensors[tensor]).size() > 1; }

  // Where the elements of a chunk begin, which lie in row-major order; nothing if they lie
  // otherwise or are none.  REQUIRES: WhyNotPlain is "".
  struct DensePlace {
    uint32_t file = 0;  // of the metadata's
    BlobIndex blob{};
    uint64_t first_byte = 0;
  };
  std::optional<DensePlace> DensePlaceOf(size_t tensor, size_t chunk) const;

  // Bytes of one file and where they go.
  struct FileRange {
    uint32_t file = 0;
    uint64_t offset = 0;
    std::span<std::byte> out;
  };
  // Reads all, many files at a time.  kStale names a file that changed.  BLOCKS: on reading.
  Status ReadRanges(std::vector<FileRange> ranges) const;

  struct Object {
    TorchFile file;
    BlobIndex blob{};
  };
  // BLOCKS: on reading.
  Result<Object> OpenObject(size_t object);

 private:
  StoredState(const StepCandidate& step, Assembler& assembler)
      : step_(step), assembler_(assembler) {}

  Status ReadParts(const std::vector<PartFiles>& parts);
  Result<DcpMetadata> ReadPart(const PartFiles& part);
  Result<DcpMetadata> ReadMetadataFile(const std::string& path);
  Result<DcpMetadata> ReadShardFiles(const PartFiles& part);
  Status RegisterFiles();
  Status LocateArchives();
  Status LocatePlain();
  Result<std::shared_ptr<const File>> OpenFile(uint32_t file);
  Status CheckUnchanged(const File& file, BlobIndex blob) const;
  std::string BelowStep(const std::string& path) const { return JoinPath(step_.directory, path); }
  bool IsEmpty(const TensorEntry& tensor, size_t chunk) const;
  std::vector<std::vector<size_t>> CopiesOf(const TensorEntry& tensor) const;
  void NoteSpares(const TensorEntry& tensor, size_t taken) const;
  Status AddCopy(const TensorEntry& tensor, const std::vector<size_t>& chunks, AtomIndex atom,
                 uint32_t copy) const;
  Status AddStrided(const TensorEntry& tensor, size_t chunk, AtomIndex atom, uint32_t copy) const;

  const StepCandidate& step_;
  Assembler& assembler_;
  DcpMetadata metadata_;                  // files: below the step's directory
  bool by_rank_ = false;                  // ranks saved by themselves
  std::vector<BlobIndex> blobs_;          // by file
  std::vector<uint64_t> first_byte_;      // by chunk; of one without elements 0
  std::map<size_t, FileTensor> strided_;  // by chunk
  std::map<size_t, std::string> others_;  // by chunk: what it holds in place of a plain tensor
  std::map<uint32_t, std::shared_ptr<const File>> open_;
};

}  // namespace ckptfs::dcp
