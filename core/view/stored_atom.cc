// SPDX-License-Identifier: Apache-2.0

#include "core/view/stored_atom.h"

#include <algorithm>

#include "core/base/strings.h"

namespace ckptfs {

Result<Conversion> StoredAtom::MakeConversion(DType stored, double factor) const {
  std::array<DType, Conversion::kMaxChain> full{stored};
  std::copy_n(chain.begin(), chain_length, full.begin() + 1);
  return Conversion::Make({full.data(), chain_length + 1}, factor);
}

Result<StoredAtom> FindStoredAtom(const StepModel& model, AtomIndex atom, DType shown) {
  StoredAtom found;
  found.chain[found.chain_length++] = shown;
  for (AtomIndex now = atom;;) {
    if (static_cast<uint32_t>(now) >= model.atoms.size()) {
      return Fail(ErrorCode::kInvalid, StrCat("no atom ", static_cast<uint32_t>(now)));
    }
    const Atom& described = model.atom(now);
    if (described.shape != model.atom(atom).shape) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(AtomLabel(model, atom), " is derived from an atom of another shape"));
    }
    // One place stays free for the fragment's own dtype.
    if (found.chain_length + 1 == Conversion::kMaxChain) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat(AtomLabel(model, atom), " is derived more than twice"));
    }
    found.chain[found.chain_length++] = described.dtype;
    found.atom = &described;
    found.index = now;
    const auto of = DerivedFrom(described.source);
    if (!of) break;
    now = *of;
  }
  std::reverse(found.chain.begin(), found.chain.begin() + found.chain_length);
  return found;
}

std::string AtomLabel(const StepModel& model, AtomIndex atom) {
  const Atom& described = model.atom(atom);
  const auto parameter = static_cast<uint32_t>(described.parameter);
  return StrCat(parameter < model.parameters.size() ? model.parameters[parameter].name : "?", " (",
                described.kind, ")");
}

}  // namespace ckptfs
