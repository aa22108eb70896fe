// SPDX-License-Identifier: Apache-2.0
//
// AtomSource is where an atom's bytes come from.  All that depends on its kind
// is asked here: which gathers a read takes, which are copies of each other,
// what it is computed from, whether it is sound.  Only the reader of bytes
// (core/view/atom_reader.cc) knows the kinds beside it.
//
// Thread safety: pure functions of immutable values.
// Lifetime: spans refer to the source.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/fragment.h"

namespace ckptfs {

struct Atom;
struct StepModel;

enum class AtomIndex : uint32_t {};  // into StepModel::atoms

// The numbers are stored in manifests.
enum class SourceKind : uint8_t {
  kGather = 0,    // gathers[0] covers it exactly once
  kReplicas = 1,  // any of gathers; declared equal, compared by verify
  kAverage = 2,   // fp32 sum over gathers in order, divided by their number
  kCast = 3,      // cast of atom `of`; marked derived
  kScaled = 4,    // gathers[0] times gathers[1], a scale for each block; in no manifest
  // 5: reserved: gradients on a base
  kInline = 6,  // the bytes themselves (scalars)
};

// The size of the blocks of values that share a scale, in elements of the last two dimensions of
// a local tensor; those at the ends may be smaller.
struct ScaleBlock {
  uint64_t rows = 1;
  uint64_t columns = 1;
  bool operator==(const ScaleBlock&) const = default;
};

// kScaled: the values are fp8 (e4m3) or fp4 (e2m1, two in a byte, the lower half first).  The k-th
// local tensor of gathers[1] has the scales of the k-th of gathers[0], one for each block: its last
// two dimensions count blocks, the others are the same.  No piece maps scales.  Each local tensor
// is one fragment.  The product is made in fp32.
struct AtomSource {
  SourceKind kind = SourceKind::kGather;
  std::vector<Gather> gathers;
  AtomIndex of{};
  std::string inline_bytes;    // kInline: little-endian element bytes
  bool python_number = false;  // kInline: was a Python int or float, not a tensor
  ScaleBlock block = {};       // kScaled
};

// The kind of a number; kUnsupported for one that this build does not know.
Result<SourceKind> SourceKindOf(uint8_t number);

AtomSource ReplicaSource(std::vector<Gather> copies);
AtomSource AverageSource(std::vector<Gather> copies);
AtomSource InlineSource(std::string bytes, bool python_number);
AtomSource CastSource(AtomIndex of);
AtomSource ScaledSource(Gather values, Gather scales, ScaleBlock block);

// Those a read takes elements from: the first of replicas, all of an average, values and scales,
// none where the source is of another kind.
std::span<const Gather> GathersRead(const AtomSource& source);
// The one whose elements are the atom's as they are; null where a read computes them,
// or nothing is gathered.
const Gather* GatherCopied(const AtomSource& source);

// Copies that are declared equal, and so are compared; none where there is one.
std::span<const Gather> EqualCopies(const AtomSource& source);
// These, or those that are averaged: each is all of the atom.
std::span<const Gather> AllCopies(const AtomSource& source);
bool IsAveraged(const AtomSource& source);
bool IsScaled(const AtomSource& source);

// One gather, or the first of several copies, is all of it as it is stored: a
// copy of these bytes can stand before it.
bool IsCopyable(const AtomSource& source);
// A copy that is read from now on, before all that were there, and back.
// REQUIRES: IsCopyable(source); to take one away, an equal one behind it.
void PutCopyFirst(AtomSource& source, Gather copy);
void TakeFirstCopy(AtomSource& source);

// The atom it is computed from.
std::optional<AtomIndex> DerivedFrom(const AtomSource& source);

// Its elements are in files: they do not stand in the source itself, nor are
// they computed from another atom's.
bool IsStoredInFiles(const AtomSource& source);
// It was a Python int or float.
bool IsPythonNumber(const AtomSource& source);

// It has what its kind needs.  kInvalid says what is wrong.
Status CheckSource(const StepModel& model, const Atom& atom);

// visit(uint32_t blob) for the blobs that any of the gathers lies in, as often
// as they are mentioned, until it returns true; true if it did.
template <class Visit>
bool AnyBlobOf(std::span<const Gather> gathers, const Visit& visit) {
  for (const Gather& gather : gathers) {
    for (const FragmentSeries& series : gather.series) {
      const uint32_t fragments = series.blob_step == 0 ? 1 : series.count;
      for (uint32_t k = 0; k < fragments; ++k) {
        const int64_t blob = series.blob + static_cast<int64_t>(k) * series.blob_step;
        if (visit(static_cast<uint32_t>(blob))) return true;
      }
    }
  }
  return false;
}
template <class Visit>
bool AnyBlobOf(const AtomSource& source, const Visit& visit) {
  return AnyBlobOf(std::span<const Gather>(source.gathers), visit);
}

}  // namespace ckptfs
