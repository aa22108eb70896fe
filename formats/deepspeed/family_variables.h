// SPDX-License-Identifier: Apache-2.0
//
// FamilyVariablesOf turns the integers of a checkpoint's args into what family
// rules may mention, under every common spelling (heads, num_attention_heads,
// ...).  What the user gave wins.
//
// Thread safety: pure function.

#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "core/model/family.h"

namespace ckptfs::deepspeed {

FamilyVariables FamilyVariablesOf(const std::map<std::string, int64_t>& args,
                                  const FamilyVariables& given);

}  // namespace ckptfs::deepspeed
