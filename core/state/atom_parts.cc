// SPDX-License-Identifier: Apache-2.0

#include "core/state/atom_parts.h"

#include <utility>

namespace ckptfs {

Result<AtomParts::Local> AtomParts::Add(Holder holder) {
  const bool average = spread_.how == Spread::How::kAverage;
  const bool replicas = spread_.how == Spread::How::kReplicas;
  if (average && holder.place > 0) {
    const StepModel& step = assembler_.header();
    return Fail(Error{ErrorCode::kUnsupported,
                      "it is to be averaged, but lies on several "
                      "pipeline stages"}
                    .OfParameter(step.parameter(step.atom(atom_).parameter).name));
  }
  if (average) assembler_.DeclareAverage(atom_);
  if (replicas || (holder.place > 0 && spread_.on_several_stages)) {
    assembler_.DeclareReplicas(atom_);
  }
  // Ranks that each hold all of it are copies; the parts of a cut are one.
  const auto ranks = static_cast<uint32_t>(spread_.locals.size());
  Local local{average || replicas ? holder.place * ranks + holder.tp : holder.place, 0};
  const auto [at, added] = locals_.try_emplace({atom_, local.copy, holder.tp}, 0);
  if (added) at->second = assembler_.AddLocal(atom_, local.copy, spread_.locals[holder.tp]);
  local.index = at->second;
  return local;
}

Result<AtomParts::Local> AtomParts::Add(Holder holder, LocalTensor tensor) {
  CKPT_ASSIGN_OR_RETURN(const Local local, Add(holder));
  assembler_.SetLocal(atom_, local.copy, local.index, std::move(tensor));
  return local;
}

void AtomParts::AddFragment(const Local& local, const Fragment& fragment) {
  assembler_.AddFragment(atom_, local.copy, local.index, fragment);
}

}  // namespace ckptfs
