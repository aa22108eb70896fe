// SPDX-License-Identifier: Apache-2.0

#include "core/check/stage_copies.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "core/base/strings.h"
#include "core/view/plan.h"
#include "core/view/plan_reader.h"

namespace ckptfs {
namespace {

constexpr uint64_t kSample = 4096;  // bytes
constexpr uint64_t kSamples = 8;
constexpr uint64_t kPiece = uint64_t{1} << 20;

// The copies of one parameter's atoms, each an atom that can be read by itself.
class ParameterCopies {
 public:
  ParameterCopies(const StepModel& model, ParameterIndex parameter, BlobReader& blobs)
      : blobs_(blobs) {
    alone_.roots = model.roots;
    alone_.blobs = model.blobs;
    alone_.parameters = model.parameters;
    for (uint32_t i = 0; i < model.atoms.size(); ++i) {
      const Atom& atom = model.atoms[i];
      const auto copies = EqualCopies(atom.source);
      if (atom.parameter != parameter || copies.size() < 2) continue;
      if (count_ == 0) count_ = copies.size();
      if (copies.size() != count_) continue;
      atoms_.push_back({i, static_cast<uint32_t>(alone_.atoms.size())});
      for (const Gather& gather : copies) {
        Atom copy = atom;
        copy.source = AtomSource{};
        copy.source.gathers.push_back(gather);
        alone_.atoms.push_back(std::move(copy));
      }
    }
  }

  size_t count() const { return count_; }
  bool Has(size_t atom) const {
    return std::ranges::any_of(atoms_, [&](const Held& held) { return held.atom == atom; });
  }

  // True if no sample of any atom differs.
  Result<bool> AreEqual(size_t a, size_t b) const {
    for (const Held& held : atoms_) {
      CKPT_ASSIGN_OR_RETURN(const Plan first, PlanOf(held, a));
      CKPT_ASSIGN_OR_RETURN(const Plan second, PlanOf(held, b));
      const uint64_t size = first.size();
      const uint64_t last = size < kSample ? 0 : size - kSample;
      for (uint64_t i = 0; i < kSamples; ++i) {
        const uint64_t at = last / (kSamples - 1) * i;
        CKPT_ASSIGN_OR_RETURN(const auto mine, Read(first, at, kSample));
        CKPT_ASSIGN_OR_RETURN(const auto theirs, Read(second, at, kSample));
        if (mine != theirs) return false;
        if (size <= kSample) break;
      }
    }
    return true;
  }

  // True if a moment has an element that is not zero.
  Result<bool> IsTrained(size_t copy) const {
    for (const Held& held : atoms_) {
      const std::string& kind = alone_.atoms[held.first].kind;
      if (kind == "weight" || kind == "master" || kind == "step") continue;
      CKPT_ASSIGN_OR_RETURN(const Plan plan, PlanOf(held, copy));
      for (uint64_t at = 0; at < plan.size(); at += kPiece) {
        CKPT_ASSIGN_OR_RETURN(const auto bytes, Read(plan, at, kPiece));
        if (std::ranges::any_of(bytes, [](std::byte b) { return b != std::byte{0}; })) return true;
      }
    }
    return false;
  }

 private:
  struct Held {
    uint32_t atom = 0;   // of the step
    uint32_t first = 0;  // the first of its copies, of alone_
  };

  Result<Plan> PlanOf(const Held& held, size_t copy) const {
    const AtomIndex index{held.first + static_cast<uint32_t>(copy)};
    const Atom& atom = alone_.atom(index);
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(atom.shape));
    PlanBuilder builder;
    builder.Atom(index, std::make_shared<const LocalTensor>(WholeTensor(atom.shape)), 0, elements,
                 atom.dtype);
    Plan plan = std::move(builder).Finish();
    CKPT_RETURN_IF_ERROR(plan.Validate(alone_));
    return plan;
  }

  Result<std::vector<std::byte>> Read(const Plan& plan, uint64_t at, uint64_t most) const {
    std::vector<std::byte> bytes(std::min(most, plan.size() - at));
    const PlanReader reader(plan, alone_, blobs_);
    CKPT_ASSIGN_OR_RETURN(const size_t got, reader.Read(at, bytes));
    bytes.resize(got);
    return bytes;
  }

  BlobReader& blobs_;
  StepModel alone_;
  size_t count_ = 0;
  std::vector<Held> atoms_;
};

// The copies that are the parameter; all of them where they are equal.
Result<std::vector<size_t>> ChooseCopies(const ParameterCopies& copies, const std::string& name) {
  std::vector<size_t> all;
  bool equal = true;
  for (size_t k = 0; k < copies.count(); ++k) {
    all.push_back(k);
    if (k == 0 || !equal) continue;
    CKPT_ASSIGN_OR_RETURN(equal, copies.AreEqual(0, k));
  }
  if (equal) return all;
  std::vector<size_t> trained;
  for (const size_t k : all) {
    CKPT_ASSIGN_OR_RETURN(const bool is_trained, copies.IsTrained(k));
    if (is_trained) trained.push_back(k);
  }
  bool one = !trained.empty() && trained.size() < all.size();
  for (size_t i = 1; one && i < trained.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(one, copies.AreEqual(trained[0], trained[i]));
  }
  if (one) return trained;
  return Fail(Error{ErrorCode::kInvalid,
                    "pipeline stages hold it with different values, and their moments do not tell "
                    "which one is trained"}
                  .OfParameter(name));
}

void Keep(const std::vector<size_t>& kept, AtomSource& source) {
  std::vector<Gather> gathers;
  for (const size_t k : kept) gathers.push_back(std::move(source.gathers[k]));
  source.gathers = std::move(gathers);
  if (source.gathers.size() == 1) source.kind = SourceKind::kGather;
}

}  // namespace

Result<std::vector<std::string>> KeepTrainedCopies(StepModel& model,
                                                   std::span<const ParameterIndex> on_several,
                                                   BlobReader& blobs) {
  std::vector<std::string> changed;
  for (const ParameterIndex parameter : on_several) {
    const ParameterCopies copies(model, parameter, blobs);
    const std::string& name = model.parameter(parameter).name;
    CKPT_ASSIGN_OR_RETURN(const std::vector<size_t> kept, ChooseCopies(copies, name));
    if (kept.size() == copies.count()) continue;
    std::optional<AtomIndex> master;
    for (uint32_t i = 0; i < model.atoms.size(); ++i) {
      if (!copies.Has(i)) continue;
      Keep(kept, model.atoms[i].source);
      if (model.atoms[i].kind == "master") master = AtomIndex{i};
    }
    // Nothing says which stage wrote a weight that stands alone.
    for (uint32_t i = 0; i < model.atoms.size(); ++i) {
      Atom& atom = model.atoms[i];
      const bool alone = atom.parameter == parameter && atom.kind == "weight" && !copies.Has(i) &&
                         atom.source.kind != SourceKind::kCast;
      if (alone && master) atom.source = CastSource(*master);
    }
    changed.push_back(name);
  }
  return changed;
}

}  // namespace ckptfs
