// SPDX-License-Identifier: Apache-2.0
//
// Third stage: how the ranks' parts make up each parameter.
//
// Thread safety: immutable; Shard is pure but for reading the model's config.
// Lifetime: refers to Parsed (the rules).

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "formats/deepspeed/native/named.h"
#include "formats/sharding/sharding.h"

namespace ckptfs::deepspeed::native {

struct Sharded {
  ShardingRules rules;
  std::vector<Sharding> shardings;  // by ParameterIndex
  uint32_t layers = 0;              // as a pipeline's names count them; 0 where they do not
  std::vector<std::string> notes;   // beside those of the rules
};

// Errors: kUnsupported names the parameters that nothing covers, and the remedies;
// kInvalid a parameter that some ranks lack, or whose shapes contradict its rule.
Result<Sharded> Shard(const TagFiles& files, const Parsed& parsed, const Named& named);

}  // namespace ckptfs::deepspeed::native
