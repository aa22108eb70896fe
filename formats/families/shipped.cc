// SPDX-License-Identifier: Apache-2.0

#include "formats/families/shipped.h"

namespace ckptfs {

Result<FamilySet> ShippedFamilies() {
  FamilySet set;
  for (const auto& [origin, text] : ShippedFamilyTexts()) {
    CKPT_ASSIGN_OR_RETURN(Family family, Family::Parse(text, origin));
    set.Add(std::move(family));
  }
  return set;
}

}  // namespace ckptfs
