// SPDX-License-Identifier: Apache-2.0

#include "core/redundancy/unchanged.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <optional>

#include "core/base/strings.h"
#include "core/redundancy/file_checks.h"
#include "core/redundancy/tensor_copies.h"

namespace ckptfs {
namespace {

constexpr uint64_t kPairBlock = uint64_t{4} << 20;
static_assert(kPairBlock % kCompareUnit == 0);

// A step, and its tensors by what they are called.
struct NamedTensors {
  StepRef step;
  TensorCopies copies;
  std::map<std::string, size_t> by_name;  // into copies.tensors()

  explicit NamedTensors(const StepRef& of) : step(of), copies(*of.model) {
    std::map<ParameterIndex, std::vector<std::string>> names;
    for (const Alias& alias : step.model->aliases) names[alias.parameter].push_back(alias.name);
    for (size_t i = 0; i < copies.tensors().size(); ++i) {
      const Atom& atom = AtomOf(i);
      by_name[KeyOf(step.model->parameter(atom.parameter).name, atom)] = i;
      for (const std::string& alias : names[atom.parameter])
        by_name.try_emplace(KeyOf(alias, atom), i);
    }
  }
  const Atom& AtomOf(size_t tensor) const {
    return step.model->atom(copies.tensors()[tensor].atom);
  }
  static std::string KeyOf(std::string_view name, const Atom& atom) {
    return StrCat(atom.kind, '\0', atom.optimizer, '\0', name);
  }
  // The tensor of this step that `atom` of another one is; nothing if it is another.
  std::optional<size_t> Find(const NamedTensors& other, size_t tensor) const {
    const Atom& atom = other.AtomOf(tensor);
    const auto found = by_name.find(KeyOf(other.step.model->parameter(atom.parameter).name, atom));
    if (found == by_name.end()) return std::nullopt;
    const Atom& mine = AtomOf(found->second);
    const CopiedTensor& my_copies = copies.tensors()[found->second];
    const CopiedTensor& their_copies = other.copies.tensors()[tensor];
    const bool alike =
        mine.shape == atom.shape && mine.dtype == atom.dtype &&
        my_copies.averaged == their_copies.averaged && !my_copies.copies.empty() &&
        (!my_copies.averaged || my_copies.copies.size() == their_copies.copies.size());
    return alike ? std::optional(found->second) : std::nullopt;
  }
};

size_t CopiesCounted(const CopiedTensor& tensor) {
  return tensor.averaged ? tensor.copies.size() : std::min<size_t>(tensor.copies.size(), 1);
}

// Both read the same bytes of files that only the store writes.
bool IsOnePlace(const StepModel& a, const Gather& x, const StepModel& b, const Gather& y) {
  if (x.locals != y.locals || x.series.size() != y.series.size()) return false;
  for (size_t i = 0; i < x.series.size(); ++i) {
    for (uint32_t k = 0; k < std::max(x.series[i].count, y.series[i].count); ++k) {
      if (k >= x.series[i].count || k >= y.series[i].count) return false;
      const Fragment p = x.series[i].At(k), q = y.series[i].At(k);
      const Blob &of_a = a.blob(p.blob), &of_b = b.blob(q.blob);
      if (x.series[i].local != y.series[i].local || p.flat_begin != q.flat_begin ||
          p.flat_end != q.flat_end || p.offset != q.offset || !of_a.owned() || !of_b.owned() ||
          a.PathOf(of_a) != b.PathOf(of_b))
        return false;
    }
  }
  return true;
}

class PairComparison {
 public:
  PairComparison(const NamedTensors& before, const NamedTensors& after)
      : before_(before),
        after_(after),
        equal_(after.copies.tensors().size()),
        paired_(after.copies.tensors().size()) {}
  Result<StepSince> Run(const RedundancyOptions& options);

 private:
  // A run of bytes of one copy of a tensor in both steps.
  struct Item {
    size_t tensor = 0, other = 0;  // of the later, of the earlier step
    size_t copy = 0;
    uint64_t offset = 0, bytes = 0;
  };
  uint64_t List();
  Result<uint64_t> Compare(const Item& item);
  void Reduce(StepSince& since) const;

  const NamedTensors &before_, &after_;
  std::vector<Item> items_;
  std::vector<std::atomic<uint64_t>> equal_;  // bytes of each tensor
  std::map<size_t, uint64_t> shared_;         // bytes of tensors that need not be read
  std::vector<uint8_t> paired_;               // by tensor: the step before has it
};

// Returns the bytes that are read.
uint64_t PairComparison::List() {
  uint64_t total = 0;
  for (size_t i = 0; i < after_.copies.tensors().size(); ++i) {
    const CopiedTensor& tensor = after_.copies.tensors()[i];
    const auto other = before_.Find(after_, i);
    if (!other || tensor.copies.empty()) continue;
    paired_[i] = 1;
    for (size_t c = 0; c < CopiesCounted(tensor); ++c) {
      const CopiedTensor& old = before_.copies.tensors()[*other];
      const Gather& mine = after_.copies.model().atom(tensor.copies[c]).source.gathers[0];
      const Gather& theirs = before_.copies.model().atom(old.copies[c]).source.gathers[0];
      if (IsOnePlace(after_.copies.model(), mine, before_.copies.model(), theirs)) {
        shared_[i] += tensor.bytes();
        continue;
      }
      for (uint64_t at = 0; at < tensor.bytes(); at += kPairBlock)
        items_.push_back({i, *other, c, at, std::min(kPairBlock, tensor.bytes() - at)});
      total += 2 * tensor.bytes();
    }
  }
  return total;
}

Result<uint64_t> PairComparison::Compare(const Item& item) {
  const auto read = [&](const NamedTensors& step, size_t tensor) -> Result<std::vector<std::byte>> {
    CKPT_ASSIGN_OR_RETURN(
        const CopyReader reader,
        CopyReader::Open(step.copies, *step.step.blobs, step.copies.tensors()[tensor], item.copy));
    std::vector<std::byte> bytes(item.bytes);
    CKPT_RETURN_IF_ERROR(reader.Read(item.offset, bytes));
    return bytes;
  };
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::byte> mine, read(after_, item.tensor));
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::byte> theirs, read(before_, item.other));
  uint64_t equal = 0;
  for (uint64_t at = 0; at < item.bytes; at += kCompareUnit) {
    const uint64_t unit = std::min(kCompareUnit, item.bytes - at);
    if (std::memcmp(mine.data() + at, theirs.data() + at, unit) == 0) equal += unit;
  }
  equal_[item.tensor] += equal;
  return 2 * item.bytes;
}

void PairComparison::Reduce(StepSince& since) const {
  std::map<std::string, size_t> class_of;
  for (size_t i = 0; i < after_.copies.tensors().size(); ++i) {
    const CopiedTensor& tensor = after_.copies.tensors()[i];
    if (tensor.copies.empty()) continue;  // told with the tensor that has its bytes
    const std::string& kind = after_.AtomOf(i).kind;
    TensorSince told;
    told.atom = tensor.atom;
    told.bytes = tensor.bytes() * CopiesCounted(tensor);
    const auto shared = shared_.find(i);
    told.shared = shared == shared_.end() ? 0 : shared->second;
    told.unchanged = equal_[i] + told.shared;
    told.since = paired_[i] == 0                ? SinceBefore::kFresh
                 : told.unchanged == told.bytes ? SinceBefore::kUnchanged
                 : told.unchanged > 0           ? SinceBefore::kPartly
                                                : SinceBefore::kChanged;
    const auto [place, fresh] = class_of.try_emplace(kind, since.classes.size());
    if (fresh) since.classes.emplace_back().name = kind;
    ClassSince& of = since.classes[place->second];
    ++of.tensors[static_cast<size_t>(told.since)];
    of.bytes += told.bytes;
    of.unchanged += told.unchanged;
    of.shared += told.shared;
    since.tensors.push_back(told);
  }
}

Result<StepSince> PairComparison::Run(const RedundancyOptions& options) {
  StepSince since;
  since.bytes_read = List();
  JobOptions job;
  job.threads = options.threads;
  if (options.progress && since.bytes_read > 0)
    job.progress = options.progress(after_.step.model->id);
  CKPT_RETURN_IF_ERROR(RunWorkList(items_.size(), since.bytes_read, job,
                                   [this](size_t i) { return Compare(items_[i]); }));
  Reduce(since);
  return since;
}

}  // namespace

std::string_view SinceBeforeName(SinceBefore since) {
  switch (since) {
    case SinceBefore::kUnchanged: return "unchanged";
    case SinceBefore::kPartly: return "partly";
    case SinceBefore::kChanged: return "changed";
    case SinceBefore::kFresh: return "fresh";
  }
  return "fresh";
}

Result<std::vector<StepSince>> FindUnchanged(std::span<const StepRef> steps,
                                             const RedundancyOptions& options) {
  for (const StepRef& step : steps)
    CKPT_RETURN_IF_ERROR(CheckFilesBefore(*step.model, *step.blobs));
  std::vector<StepSince> since;
  std::unique_ptr<NamedTensors> before;
  for (const StepRef& step : steps) {
    auto after = std::make_unique<NamedTensors>(step);
    if (before) {
      CKPT_ASSIGN_OR_RETURN(StepSince pair, PairComparison(*before, *after).Run(options));
      since.push_back(std::move(pair));
    }
    before = std::move(after);
  }
  for (const StepRef& step : steps) CKPT_RETURN_IF_ERROR(CheckFilesAfter(*step.model, *step.blobs));
  return since;
}

}  // namespace ckptfs
