// SPDX-License-Identifier: Apache-2.0
//
// A side blob holds copies of atoms whose bytes lie in many small pieces (a
// norm over 1,024 ZeRO-3 ranks is 32 bytes in each of 1,024 files).  It belongs
// to the store and is a convenience only: an atom in it has the side blob as
// the first of its declared copies and keeps the pieces as the next, so that a
// step without its side blob reads the same bytes, more slowly.
//
// Thread safety: pure functions; a model that is finished is never edited, what
// is said with or without a side blob is another model.
// Units: offsets are bytes.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/model/step_model.h"

namespace ckptfs {

// One atom in a side blob: whole, dense, row-major, in its own dtype.
struct SideAtom {
  AtomIndex atom{};
  uint64_t offset = 0;  // of the blob
};

// The side blob of a step, if it has one.
std::optional<BlobIndex> FindSideBlob(const StepModel& model);

// The atom is read from the side blob.
bool IsPacked(const StepModel& model, const Atom& atom);

// The model with `blob`, in the new root `root`, as the first source of the
// atoms: a gather becomes replicas of it and of what it was.
// REQUIRES: no side blob yet; every atom is a gather or has two replicas or more.
StepModel WithSideBlob(StepModel model, Blob blob, std::string root,
                       std::span<const SideAtom> atoms);

// The model that WithSideBlob was given; as it is if it has no side blob.
// REQUIRES: CheckSideBlob(model).
StepModel WithoutSideBlob(StepModel model);

// Checks the form that WithSideBlob makes: at most one side blob, the last blob in a last
// root of its own, and it is only the first of several copies.  kInvalid names the rule
// that a manifest breaks.
Status CheckSideBlob(const StepModel& model);

}  // namespace ckptfs
