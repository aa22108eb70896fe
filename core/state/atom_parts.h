// SPDX-License-Identifier: Apache-2.0
//
// AtomParts puts what the ranks of a source hold under one atom, as its Spread says: in this one
// place is said which tensors are parts of one copy, which are replicas, and which are to be
// averaged.
//
// Thread safety: none; one thread builds one step.
// Lifetime: assembler, spread and locals must outlive it.
// Units: flat ranges are elements of a rank's tensor, row-major.

#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"

namespace ckptfs {

// How the tensors of a source's tensor-parallel ranks make up an atom.
struct Spread {
  enum class How {
    kWhole,     // one rank has all of it
    kReplicas,  // every rank has all of it, declared equal
    kAverage,   // every rank has all of it, to be averaged
    kCut,       // the ranks' locals cover it
  };
  How how = How::kWhole;
  std::vector<LocalTensor> locals;  // one per tensor-parallel rank
  bool on_several_stages = false;   // declared equal over the pipeline stages that hold it
};

// The holder of a tensor: a tensor-parallel rank of one of the places (pipeline
// stages) that hold the parameter, counted from 0.
struct Holder {
  uint32_t place = 0;
  uint32_t tp = 0;
};

class AtomParts {
 public:
  // The local tensors so far, of all atoms: by atom, copy and tensor-parallel rank.
  using Locals = std::map<std::tuple<AtomIndex, uint32_t, uint32_t>, uint32_t>;

  AtomParts(Assembler& assembler, AtomIndex atom, const Spread& spread, Locals& locals)
      : assembler_(assembler), atom_(atom), spread_(spread), locals_(locals) {}

  // Whoever has the whole of it needs the atom alone.
  operator AtomIndex() const { return atom_; }
  const LocalTensor& LocalOf(uint32_t tp) const { return spread_.locals[tp]; }

  // The tensor of one rank under the atom.
  struct Local {
    uint32_t copy = 0;
    uint32_t index = 0;
  };
  // kUnsupported for a parameter that is averaged and in several places.
  Result<Local> Add(Holder holder);
  // The same, where the rank's tensor lies in memory otherwise than row-major.
  Result<Local> Add(Holder holder, LocalTensor local);
  void AddFragment(const Local& local, const Fragment& fragment);

 private:
  Assembler& assembler_;
  AtomIndex atom_;
  const Spread& spread_;
  Locals& locals_;
};

}  // namespace ckptfs
