// SPDX-License-Identifier: Apache-2.0

#include "core/model/atom_source.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/model/step_model.h"

namespace ckptfs {
namespace {

Status CheckCast(const StepModel& model, const Atom& atom) {
  const auto of = static_cast<uint32_t>(atom.source.of);
  if (of >= model.atoms.size()) return Refuse("derived from atom ", of, ", which does not exist");
  if (model.atoms[of].shape == atom.shape) return {};
  return Refuse("derived from an atom of shape ", ShapeToString(model.atoms[of].shape));
}

Status CheckInline(const Atom& atom) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount(atom.shape, atom.dtype));
  if (atom.source.inline_bytes.size() == bytes) return {};
  return Refuse(atom.source.inline_bytes.size(), " inline bytes, but the shape needs ", bytes);
}

// The local tensor is one fragment, whole.
bool IsOneFragment(const Gather& gather, size_t local) {
  const auto elements = ElementCount(gather.locals[local].shape);
  const FragmentSeries& series = gather.series[local];
  return elements && series.local == local && series.count == 1 && series.flat_begin == 0 &&
         series.elements == *elements;
}

// One scale for each block of the values.
bool AreScalesOf(const Shape& scales, const Shape& values, const ScaleBlock& block) {
  if (values.size() < 2 || scales.size() != values.size()) return false;
  Shape blocks = values;
  uint64_t& rows = blocks[blocks.size() - 2];
  rows = CeilDiv(rows, block.rows);
  blocks.back() = CeilDiv(blocks.back(), block.columns);
  return scales == blocks;
}

Status CheckScaled(const AtomSource& source) {
  if (source.gathers.size() != 2) return Refuse(source.gathers.size(), " gathers of 2");
  const Gather &values = source.gathers[0], &scales = source.gathers[1];
  const size_t locals = values.locals.size();
  if (scales.locals.size() != locals || values.series.size() != locals ||
      scales.series.size() != locals || source.block.rows == 0 || source.block.columns == 0) {
    return Refuse("values and scales that do not lie side by side");
  }
  for (size_t i = 0; i < locals; ++i) {
    if (!IsOneFragment(values, i) || !IsOneFragment(scales, i) || !scales.locals[i].pieces.empty())
      return Refuse("values or scales in several pieces");
    if (!AreScalesOf(scales.locals[i].shape, values.locals[i].shape, source.block)) {
      return Refuse("scales of shape ", ShapeToString(scales.locals[i].shape), " for values of ",
                    ShapeToString(values.locals[i].shape), " in blocks of ", source.block.rows,
                    " x ", source.block.columns);
    }
  }
  return {};
}

}  // namespace

Result<SourceKind> SourceKindOf(uint8_t number) {
  for (const SourceKind kind : {SourceKind::kGather, SourceKind::kReplicas, SourceKind::kAverage,
                                SourceKind::kCast, SourceKind::kInline}) {
    if (static_cast<uint8_t>(kind) == number) return kind;
  }
  const std::string_view reserved = number == 4   ? " (values with scales per block)"
                                    : number == 5 ? " (gradients on a base)"
                                                  : "";  // the first in no manifest
  return Fail(ErrorCode::kUnsupported, StrCat("a source of kind ", static_cast<int>(number),
                                              reserved, ": this build cannot read it"));
}

AtomSource ReplicaSource(std::vector<Gather> copies) {
  AtomSource source;
  source.kind = SourceKind::kReplicas;
  source.gathers = std::move(copies);
  return source;
}

AtomSource AverageSource(std::vector<Gather> copies) {
  AtomSource source = ReplicaSource(std::move(copies));
  source.kind = SourceKind::kAverage;
  return source;
}

AtomSource InlineSource(std::string bytes, bool python_number) {
  AtomSource source;
  source.kind = SourceKind::kInline;
  source.inline_bytes = std::move(bytes);
  source.python_number = python_number;
  return source;
}

AtomSource CastSource(AtomIndex of) {
  AtomSource source;
  source.kind = SourceKind::kCast;
  source.of = of;
  return source;
}

AtomSource ScaledSource(Gather values, Gather scales, ScaleBlock block) {
  AtomSource source;
  source.kind = SourceKind::kScaled;
  source.gathers.push_back(std::move(values));
  source.gathers.push_back(std::move(scales));
  source.block = block;
  return source;
}

std::span<const Gather> GathersRead(const AtomSource& source) {
  switch (source.kind) {
    case SourceKind::kGather:
    case SourceKind::kReplicas:
      return {source.gathers.data(), std::min<size_t>(source.gathers.size(), 1)};
    case SourceKind::kAverage:
    case SourceKind::kScaled: return source.gathers;
    case SourceKind::kCast:
    case SourceKind::kInline: break;
  }
  return {};
}

const Gather* GatherCopied(const AtomSource& source) {
  const std::span<const Gather> read = GathersRead(source);
  return IsAveraged(source) || IsScaled(source) || read.empty() ? nullptr : &read.front();
}

std::span<const Gather> EqualCopies(const AtomSource& source) {
  if (source.kind != SourceKind::kReplicas) return {};
  return source.gathers;
}

bool IsAveraged(const AtomSource& source) { return source.kind == SourceKind::kAverage; }

bool IsScaled(const AtomSource& source) { return source.kind == SourceKind::kScaled; }

std::span<const Gather> AllCopies(const AtomSource& source) {
  return IsAveraged(source) ? std::span<const Gather>(source.gathers) : EqualCopies(source);
}

bool IsCopyable(const AtomSource& source) {
  return (source.kind == SourceKind::kGather && source.gathers.size() == 1) ||
         (source.kind == SourceKind::kReplicas && source.gathers.size() > 1);
}

void PutCopyFirst(AtomSource& source, Gather copy) {
  CKPT_CHECK(source.kind == SourceKind::kGather || source.gathers.size() > 1);
  source.kind = SourceKind::kReplicas;
  source.gathers.insert(source.gathers.begin(), std::move(copy));
}

void TakeFirstCopy(AtomSource& source) {
  CKPT_CHECK(source.kind == SourceKind::kReplicas && source.gathers.size() > 1);
  source.gathers.erase(source.gathers.begin());
  if (source.gathers.size() == 1) source.kind = SourceKind::kGather;
}

std::optional<AtomIndex> DerivedFrom(const AtomSource& source) {
  if (source.kind != SourceKind::kCast) return std::nullopt;
  return source.of;
}

bool IsStoredInFiles(const AtomSource& source) {
  return source.kind != SourceKind::kInline && source.kind != SourceKind::kCast;
}

bool IsPythonNumber(const AtomSource& source) {
  return source.kind == SourceKind::kInline && source.python_number;
}

Status CheckSource(const StepModel& model, const Atom& atom) {
  const size_t gathers = atom.source.gathers.size();
  switch (atom.source.kind) {
    case SourceKind::kGather:
      if (gathers != 1) return Refuse(gathers, " gathers where one is expected");
      return {};
    case SourceKind::kReplicas:
    case SourceKind::kAverage:
      if (gathers == 0) return Refuse("no copies");
      return {};
    case SourceKind::kScaled: return CheckScaled(atom.source);
    case SourceKind::kCast: return CheckCast(model, atom);
    case SourceKind::kInline: return CheckInline(atom);
  }
  return Fail(ErrorCode::kUnsupported, "a source kind this build cannot read");
}

}  // namespace ckptfs
