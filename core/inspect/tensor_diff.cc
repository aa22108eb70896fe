// SPDX-License-Identifier: Apache-2.0

#include "core/inspect/tensor_diff.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <unordered_map>

#include "core/base/strings.h"
#include "core/inspect/atom_blocks.h"

namespace ckptfs {
namespace {

constexpr size_t kDecoded = 4096;

template <class V>
void DiffNumbers(std::span<const V> a, std::span<const V> b, const Tolerance& tolerance,
                 uint64_t first_element, ValueDiff& diff) {
  for (size_t i = 0; i < a.size(); ++i) {
    const bool both_nan = std::isnan(a[i]) && std::isnan(b[i]);
    if (a[i] == b[i] || both_nan) continue;
    ++diff.values;
    if (!diff.first) diff.first = first_element + i;
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) {
      ++diff.beyond;
      continue;
    }
    const WideNumber away =
        std::fabs(static_cast<WideNumber>(a[i]) - static_cast<WideNumber>(b[i]));
    const WideNumber size = std::fabs(static_cast<WideNumber>(b[i]));
    diff.max_abs = std::max(diff.max_abs, away);
    if (size > 0) diff.max_rel = std::max(diff.max_rel, away / size);
    if (away > tolerance.absolute + tolerance.relative * size) ++diff.beyond;
  }
}

// Elements of equal width whose bits differ, and the first.
void DiffBits(std::span<const std::byte> a, std::span<const std::byte> b, uint32_t width,
              uint64_t first_element, ValueDiff& diff) {
  for (size_t at = 0; at < a.size(); at += width) {
    if (std::memcmp(a.data() + at, b.data() + at, width) == 0) continue;
    ++diff.bits;
    if (!diff.first) diff.first = first_element + at / width;
  }
}

template <class V>
void DiffValues(DType a_dtype, std::span<const std::byte> a, DType b_dtype,
                std::span<const std::byte> b, const Tolerance& tolerance, uint64_t first_element,
                ValueDiff& diff) {
  const uint32_t a_width = ByteWidth(a_dtype), b_width = ByteWidth(b_dtype);
  const size_t elements = a.size() / a_width;
  std::vector<V> mine(std::min(kDecoded, elements)), theirs(mine.size());
  for (size_t at = 0; at < elements;) {
    const size_t count = std::min(mine.size(), elements - at);
    const std::span<V> m = std::span(mine).first(count), t = std::span(theirs).first(count);
    DecodeNumbers(a_dtype, a.subspan(at * a_width, count * a_width), m);
    DecodeNumbers(b_dtype, b.subspan(at * b_width, count * b_width), t);
    DiffNumbers<V>(m, t, tolerance, first_element + at, diff);
    at += count;
  }
}

void Append(ValueDiff& diff, const ValueDiff& part) {
  diff.elements += part.elements;
  diff.bits += part.bits;
  diff.values += part.values;
  diff.beyond += part.beyond;
  if (!diff.first) diff.first = part.first;
  diff.max_abs = std::max(diff.max_abs, part.max_abs);
  diff.max_rel = std::max(diff.max_rel, part.max_rel);
}

// Bits where types are equal and one of them has no numbers.
bool Comparable(DType a, DType b) {
  if (ByteWidth(a) == 0 || ByteWidth(b) == 0) return false;
  return a == b || (HasNumbers(a) && HasNumbers(b));
}

// Atoms by parameter, optimizer and kind.
class AtomNames {
 public:
  explicit AtomNames(const StepModel& model) : model_(model) {
    for (size_t i = 0; i < model.atoms.size(); ++i) {
      const Atom& atom = model.atoms[i];
      atoms_.emplace(KeyOf(atom.parameter, atom), AtomIndex{static_cast<uint32_t>(i)});
    }
  }
  // Finds the atom with the name, or an alias, of `atom` in `from`; `aliases` are those of
  // its parameter.
  std::optional<AtomIndex> Find(const std::string& name, const std::vector<std::string>& aliases,
                                const Atom& atom) const {
    auto parameter = model_.FindParameter(name);
    for (size_t i = 0; !parameter && i < aliases.size(); ++i) {
      parameter = model_.FindParameter(aliases[i]);
    }
    if (!parameter) return std::nullopt;
    const auto found = atoms_.find(KeyOf(*parameter, atom));
    return found == atoms_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  static std::string KeyOf(ParameterIndex parameter, const Atom& atom) {
    return StrCat(static_cast<uint32_t>(parameter), "/", atom.optimizer, "/", atom.kind);
  }
  const StepModel& model_;
  std::unordered_map<std::string, AtomIndex> atoms_;
};

std::map<ParameterIndex, std::vector<std::string>> AliasesOf(const StepModel& model) {
  std::map<ParameterIndex, std::vector<std::string>> aliases;
  for (const Alias& alias : model.aliases) aliases[alias.parameter].push_back(alias.name);
  return aliases;
}

class Comparison {
 public:
  Comparison(const StepRef& a, const StepRef& b, const Tolerance& tolerance)
      : a_(a), b_(b), tolerance_(tolerance) {}

  template <class Wanted>
  Status List(const Wanted& wanted);
  Result<std::vector<AtomDiff>> Run(const JobOptions& options);

 private:
  struct Block {
    size_t diff = 0;
    uint64_t first = 0;
    uint64_t elements = 0;
  };
  Status AddPair(AtomDiff diff);
  Result<uint64_t> Compare(size_t block);

  const StepRef a_, b_;
  const Tolerance tolerance_;
  std::vector<AtomDiff> diffs_;
  std::vector<Block> blocks_;
  std::vector<ValueDiff> parts_;
  uint64_t bytes_ = 0;
};

Status Comparison::AddPair(AtomDiff diff) {
  const Atom& mine = a_.model->atom(*diff.a);
  const Atom& theirs = b_.model->atom(*diff.b);
  if (mine.shape != theirs.shape) {
    diff.kind = AtomDiff::Kind::kReshaped;
  } else {
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(mine.shape));
    if (mine.dtype != theirs.dtype) diff.kind = AtomDiff::Kind::kRetyped;
    if (!Comparable(mine.dtype, theirs.dtype)) {
      if (mine.dtype == theirs.dtype) diff.kind = AtomDiff::Kind::kChanged;  // nobody knows
    } else {
      const uint32_t width = std::max(ByteWidth(mine.dtype), ByteWidth(theirs.dtype));
      const uint64_t each = AtomBlocks::kBlockBytes / width;
      for (uint64_t first = 0; first < elements; first += each) {
        blocks_.push_back({diffs_.size(), first, std::min(each, elements - first)});
      }
      bytes_ += elements * (uint64_t{ByteWidth(mine.dtype)} + ByteWidth(theirs.dtype));
    }
  }
  diffs_.push_back(std::move(diff));
  return {};
}

template <class Wanted>
Status Comparison::List(const Wanted& wanted) {
  const auto name_of = [](const StepModel& model, const Atom& atom) {
    return model.parameter(atom.parameter).name;
  };
  const AtomNames theirs(*b_.model);
  const auto aliases = AliasesOf(*a_.model);
  std::vector<uint8_t> met(b_.model->atoms.size(), 0);
  for (size_t i = 0; i < a_.model->atoms.size(); ++i) {
    const Atom& atom = a_.model->atoms[i];
    const std::string name = name_of(*a_.model, atom);
    const auto also = aliases.find(atom.parameter);
    const auto other =
        theirs.Find(name, also == aliases.end() ? std::vector<std::string>() : also->second, atom);
    if (other) met[static_cast<uint32_t>(*other)] = 1;
    if (wanted && !wanted(name, atom.kind)) continue;
    AtomDiff diff{AtomDiff::Kind::kSame,
                  name,
                  atom.optimizer,
                  atom.kind,
                  AtomIndex{static_cast<uint32_t>(i)},
                  other,
                  {}};
    if (other) {
      CKPT_RETURN_IF_ERROR(AddPair(std::move(diff)));
      continue;
    }
    diff.kind = AtomDiff::Kind::kRemoved;
    diffs_.push_back(std::move(diff));
  }
  for (size_t i = 0; i < b_.model->atoms.size(); ++i) {
    const Atom& atom = b_.model->atoms[i];
    const std::string name = name_of(*b_.model, atom);
    if (met[i] != 0 || (wanted && !wanted(name, atom.kind))) continue;
    diffs_.push_back({AtomDiff::Kind::kAdded,
                      name,
                      atom.optimizer,
                      atom.kind,
                      std::nullopt,
                      AtomIndex{static_cast<uint32_t>(i)},
                      {}});
  }
  return {};
}

Result<uint64_t> Comparison::Compare(size_t number) {
  const Block& block = blocks_[number];
  const AtomDiff& diff = diffs_[block.diff];
  const auto read = [&](const StepRef& step, AtomIndex atom) -> Result<std::vector<std::byte>> {
    CKPT_ASSIGN_OR_RETURN(const AtomBlocks blocks,
                          AtomBlocks::Open(*step.model, *step.blobs, atom));
    std::vector<std::byte> bytes(block.elements * blocks.width());
    const Status done = blocks.Read(block.first, bytes);
    if (!done) return Fail(Error(done.error()).WithContext(diff.name));
    return bytes;
  };
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::byte> mine, read(a_, *diff.a));
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::byte> theirs, read(b_, *diff.b));
  parts_[number] = DiffOf(a_.model->atom(*diff.a).dtype, mine, b_.model->atom(*diff.b).dtype,
                          theirs, tolerance_, block.first);
  return mine.size() + theirs.size();
}

Result<std::vector<AtomDiff>> Comparison::Run(const JobOptions& options) {
  parts_.resize(blocks_.size());
  CKPT_RETURN_IF_ERROR(
      RunWorkList(blocks_.size(), bytes_, options, [this](size_t i) { return Compare(i); }));
  CKPT_RETURN_IF_ERROR(a_.blobs->CheckOpen());
  CKPT_RETURN_IF_ERROR(b_.blobs->CheckOpen());
  for (size_t i = 0; i < blocks_.size(); ++i) Append(diffs_[blocks_[i].diff].values, parts_[i]);
  for (AtomDiff& diff : diffs_) {
    if (diff.kind == AtomDiff::Kind::kSame && diff.values.bits > 0)
      diff.kind = AtomDiff::Kind::kChanged;
  }
  return std::move(diffs_);
}

}  // namespace

ValueDiff DiffOf(DType a_dtype, std::span<const std::byte> a, DType b_dtype,
                 std::span<const std::byte> b, const Tolerance& tolerance, uint64_t first_element) {
  ValueDiff diff;
  diff.elements = a.size() / ByteWidth(a_dtype);
  const bool same_type = a_dtype == b_dtype;
  if (same_type && std::equal(a.begin(), a.end(), b.begin(), b.end())) return diff;
  if (same_type) DiffBits(a, b, ByteWidth(a_dtype), first_element, diff);
  if (!HasNumbers(a_dtype) || !HasNumbers(b_dtype)) {
    diff.values = diff.beyond = diff.bits;
    return diff;
  }
  const auto first = diff.first;
  if (NeedsWide(a_dtype) || NeedsWide(b_dtype)) {
    DiffValues<WideNumber>(a_dtype, a, b_dtype, b, tolerance, first_element, diff);
  } else {
    DiffValues<double>(a_dtype, a, b_dtype, b, tolerance, first_element, diff);
  }
  if (first) diff.first = first;
  if (!same_type) diff.bits = diff.values;
  return diff;
}

std::string_view AtomDiffName(AtomDiff::Kind kind) {
  switch (kind) {
    case AtomDiff::Kind::kSame: return "same";
    case AtomDiff::Kind::kChanged: return "changed";
    case AtomDiff::Kind::kAdded: return "added";
    case AtomDiff::Kind::kRemoved: return "removed";
    case AtomDiff::Kind::kReshaped: return "reshaped";
    case AtomDiff::Kind::kRetyped: return "retyped";
  }
  return "same";
}

Result<std::vector<AtomDiff>> DiffSteps(
    const StepRef& a, const StepRef& b, const Tolerance& tolerance, const JobOptions& options,
    const std::function<bool(const std::string& name, const std::string& kind)>& wanted) {
  Comparison comparison(a, b, tolerance);
  CKPT_RETURN_IF_ERROR(comparison.List(wanted));
  return comparison.Run(options);
}

}  // namespace ckptfs
