// SPDX-License-Identifier: Apache-2.0

#include "core/check/split_copies.h"

namespace ckptfs {

StepModel WithoutAtoms(const StepModel& step) {
  StepModel split;
  split.roots = step.roots;
  split.blobs = step.blobs;
  split.parameters = step.parameters;
  return split;
}

std::pair<uint32_t, uint32_t> AddCopies(const Atom& atom, StepModel& split) {
  const auto first = static_cast<uint32_t>(split.atoms.size());
  for (const Gather& gather : AllCopies(atom.source)) {
    Atom copy = atom;
    copy.source = AtomSource{};
    copy.source.gathers.push_back(gather);
    split.atoms.push_back(std::move(copy));
  }
  return {first, static_cast<uint32_t>(split.atoms.size())};
}

}  // namespace ckptfs
