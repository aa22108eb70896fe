// SPDX-License-Identifier: Apache-2.0
//
// Nodes and schemes for tests of placements.
//
// Thread safety: pure functions.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/peer/placement.h"

namespace ckptfs {

inline ProtectScheme SchemeOf(std::string_view text) { return ProtectScheme::Parse(text).value(); }

// `per_domain` nodes in each failure domain; 0: nodes do not say theirs.
inline std::vector<PeerNode> NodesOf(size_t count, size_t per_domain = 0) {
  std::vector<PeerNode> nodes;
  for (size_t i = 0; i < count; ++i)
    nodes.push_back(
        {"n" + std::to_string(i), per_domain == 0 ? "" : "rack" + std::to_string(i / per_domain)});
  return nodes;
}

}  // namespace ckptfs
