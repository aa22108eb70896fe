// SPDX-License-Identifier: Apache-2.0

#include "core/check/stage_copies.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/check/split_copies.h"
#include "core/view/plan_reader.h"
#include "core/view/whole_atom.h"

namespace ckptfs {
namespace {

constexpr uint64_t kSample = 4096;  // bytes
constexpr uint64_t kSamples = 8;
constexpr uint64_t kPiece = uint64_t{1} << 20;

// An atom of the step, and the first of its copies among those that can be read by themselves.
struct Held {
  uint32_t atom = 0;
  uint32_t first = 0;
};

// The copies of one parameter's atoms: of each as many.
class ParameterCopies {
 public:
  ParameterCopies(std::vector<Held> atoms, size_t count, const StepModel& alone, BlobReader& blobs)
      : alone_(alone), blobs_(blobs), count_(count), atoms_(std::move(atoms)) {}

  size_t count() const { return count_; }
  const std::vector<Held>& atoms() const { return atoms_; }

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
  Result<Plan> PlanOf(const Held& held, size_t copy) const {
    const AtomIndex index{held.first + static_cast<uint32_t>(copy)};
    return PlanOfWholeAtom(alone_, index, alone_.atom(index).dtype);
  }

  Result<std::vector<std::byte>> Read(const Plan& plan, uint64_t at, uint64_t most) const {
    std::vector<std::byte> bytes(std::min(most, plan.size() - at));
    const PlanReader reader(plan, alone_, blobs_);
    CKPT_ASSIGN_OR_RETURN(const size_t got, reader.Read(at, bytes));
    bytes.resize(got);
    return bytes;
  }

  const StepModel& alone_;
  BlobReader& blobs_;
  const size_t count_;
  const std::vector<Held> atoms_;
};

// The atoms of each parameter, by its number.
std::map<ParameterIndex, std::vector<uint32_t>> AtomsOf(const StepModel& model,
                                                        std::span<const ParameterIndex> wanted) {
  std::map<ParameterIndex, std::vector<uint32_t>> out;
  for (const ParameterIndex parameter : wanted) out[parameter];
  for (uint32_t i = 0; i < model.atoms.size(); ++i) {
    const auto found = out.find(model.atoms[i].parameter);
    if (found != out.end()) found->second.push_back(i);
  }
  return out;
}

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

// Nothing says which stage wrote a weight that stands alone: it is its master, cast.
void TakeMaster(const std::vector<uint32_t>& atoms, const ParameterCopies& copies,
                StepModel& model) {
  const auto master = std::ranges::find_if(
      copies.atoms(), [&](const Held& one) { return model.atoms[one.atom].kind == "master"; });
  if (master == copies.atoms().end()) return;
  for (const uint32_t i : atoms) {
    Atom& atom = model.atoms[i];
    const bool has_copies =
        std::ranges::find(copies.atoms(), i, &Held::atom) != copies.atoms().end();
    if (atom.kind != "weight" || has_copies || atom.source.kind == SourceKind::kCast) continue;
    atom.source = CastSource(AtomIndex{master->atom});
  }
}

}  // namespace

Result<std::vector<std::string>> KeepTrainedCopies(StepModel& model,
                                                   std::span<const ParameterIndex> on_several,
                                                   BlobReader& blobs) {
  std::vector<std::string> changed;
  StepModel alone = WithoutAtoms(model);
  for (const auto& [parameter, atoms] : AtomsOf(model, on_several)) {
    std::vector<Held> held;
    size_t count = 0;
    for (const uint32_t i : atoms) {
      const size_t copies = EqualCopies(model.atoms[i].source).size();
      if (count == 0 && copies > 1) count = copies;
      if (copies > 1 && copies == count) {
        held.push_back({i, AddCopies(model.atoms[i], alone).first});
      }
    }
    const ParameterCopies copies(std::move(held), count, alone, blobs);
    const std::string& name = model.parameter(parameter).name;
    CKPT_ASSIGN_OR_RETURN(const std::vector<size_t> kept, ChooseCopies(copies, name));
    if (kept.size() == count) continue;
    for (const Held& one : copies.atoms()) Keep(kept, model.atoms[one.atom].source);
    TakeMaster(atoms, copies, model);
    changed.push_back(name);
  }
  return changed;
}

}  // namespace ckptfs
