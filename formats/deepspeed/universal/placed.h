// SPDX-License-Identifier: Apache-2.0
//
// The stages of reading a universal directory after its files are parsed: how each
// parameter may be cut (Shard), and everything under its atoms (Place).
//
// Thread safety: Sharded is immutable; one call of Place builds one step.
// Lifetime: Sharded refers to Parsed.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "formats/deepspeed/universal/parsed.h"
#include "formats/sharding/sharding.h"

namespace ckptfs::deepspeed::universal {

// A buffer or frozen parameter: whole or in parts in the copied model states.
struct Other {
  std::string name;
  Role role = Role::kFrozen;
  Sharding sharding;
  std::vector<const FileTensor*> tensors;  // of each tensor-parallel rank
};

struct Sharded {
  ShardingRules rules;
  std::vector<Sharding> folders;  // as Parsed has them
  std::vector<Other> others;
};

// Errors: kUnsupported a frozen parameter that nothing covers, or experts of several
// ranks in one tensor; kInvalid shapes that contradict their rule.
Result<Sharded> Shard(const Listed& listed, const Parsed& parsed);

// `assembler`: which the files were registered with.  kInvalid names file and
// parameter where param_shapes or the optimizer's state speak of one that has no
// folder; then whatever the proof of coverage finds.
Result<StepModel> Place(const Listed& listed, const Parsed& parsed, const Sharded& sharded,
                        Assembler assembler);

}  // namespace ckptfs::deepspeed::universal
