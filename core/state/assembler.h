// SPDX-License-Identifier: Apache-2.0
//
// Assembler collects what a Source finds (blobs, parameters, atoms, local
// tensors, fragments) and proves for every atom that its fragments cover it
// exactly once.  A gap, an overlap or a contradiction is a refusal that names
// the atom and the files.  Replication and averaging are declared by whoever
// adds fragments under several copies, never inferred from equal bytes.
//
// Thread safety: none; one thread builds one step.
// Lifetime: consumed by Finish.
// Units: flat ranges are elements of local tensors; offsets are bytes.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"
#include "core/model/step_model.h"

namespace ckptfs {

class Assembler {
 public:
  Assembler();
  ~Assembler();
  Assembler(Assembler&&) noexcept;

  // Everything of the step that is not an atom, parameter, alias, group or blob:
  // framework, id, iteration, layout, documents, notes ... filled by the source.
  StepModel& header();

  // Files are told apart by their root's name and their path below it.
  uint32_t AddRoot(std::shared_ptr<const Root> root);
  // Open, fingerprint and register a file; the same path again gives the same
  // index.  kInvalid for ".." or an absolute path, and for links that leave the
  // root.  BLOCKS: on reading.
  Result<BlobIndex> AddFile(uint32_t root, std::string_view relative_path);
  bool HasFile(uint32_t root, std::string_view relative_path) const;
  // Sets the digest of a file's frame (core/blob/frame.h).  May be called for several files at
  // the same time, once all are added.
  void SetFrame(BlobIndex index, const Digest& frame);
  // A blob whose stamp the caller knows (tests, other storages).
  BlobIndex AddBlob(Blob blob);
  const Blob& blob(BlobIndex index) const;

  // The same name again with the same shape and role gives the same index;
  // with others it is kInvalid.
  Result<ParameterIndex> AddParameter(Parameter parameter);
  ParameterIndex parameter_count() const;
  Parameter& parameter(ParameterIndex index);

  // One atom per (parameter, optimizer, kind); the same again must agree.
  Result<AtomIndex> AddAtom(ParameterIndex parameter, std::string_view optimizer,
                            std::string_view kind, DType dtype, Shape shape,
                            Relation relation = Relation::kSame);
  Status SetInline(AtomIndex atom, std::string bytes, bool python_number);
  Status SetCast(AtomIndex atom, AtomIndex of);
  // All copies of the atom are to be averaged / are declared replicas.  More
  // than one copy without either is a refusal.
  void DeclareAverage(AtomIndex atom);
  void DeclareReplicas(AtomIndex atom);

  // Adds the local tensor of one source rank; `copy` counts replicas or slices from 0.
  uint32_t AddLocal(AtomIndex atom, uint32_t copy, LocalTensor local);
  // Replace a local tensor that was added.
  void SetLocal(AtomIndex atom, uint32_t copy, uint32_t local, LocalTensor tensor);
  void AddFragment(AtomIndex atom, uint32_t copy, uint32_t local, const Fragment& fragment);

  void AddAlias(std::string name, ParameterIndex parameter);
  void AddGroup(Group group);

  // Proof and result.  Errors: kInvalid, the first few defects in one message.
  Result<StepModel> Finish() &&;

 private:
  struct State;
  uint32_t AddDirectory(uint32_t root, const std::string& directory);
  std::unique_ptr<State> state_;
};

// The proof for one gather, for tests and for loaded manifests: every element
// of an atom of this shape is covered exactly once and every fragment the
// pieces need is there.
Status ProveCoverage(const Gather& gather, const Shape& atom);

}  // namespace ckptfs
