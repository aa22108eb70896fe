// SPDX-License-Identifier: Apache-2.0
//
// Placement decides which nodes keep each other's part of a step in memory.  PlaceNodes() cuts the
// nodes of a job into groups; UnitHolders() says who keeps what of one member's files.
//
// A group has at least as many members as a stripe has units (parity.h), in an order that
// matters: a ring.  A member's files are stripes, whose unit u is kept by the u-th member after it,
// itself being the 0th.  A copy is the case of one data unit.  A stripe outlives the loss of any
// `parity` of the nodes that keep it.  An erasure code is as wide as its group: each stripe lies on
// all members.
//
// Thread safety: pure functions of values; every node that asks gets the same answer, whatever
// the order in which it names the nodes.

#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/peer/parity.h"

namespace ckptfs {

// One node of a job.  Nodes of one failure domain (a rack, a switch) are expected to die
// together; a node without a domain is one of its own.
struct PeerNode {
  std::string name;
  std::string failure_domain;
  auto operator<=>(const PeerNode&) const = default;
};

// How the parts of a step are protected against the loss of nodes.
struct ProtectScheme {
  enum Kind : uint8_t {
    kOff,
    kLocal,    // replicas of one state: each node also keeps its neighbour's share, unsent
    kCopy,     // further nodes hold the whole part
    kErasure,  // units of the part, and their parity, lie on as many nodes
  };
  Kind kind = kOff;
  StripeShape shape;  // in the smallest group
  bool operator==(const ProtectScheme&) const = default;

  //   scheme = "off" | "local" | "copy" [":" C] | "ec:" K "+" M
  // with 1 <= C <= 15, 2 <= K, 1 <= M and K + M <= 128.  kInvalid with the rule.
  static Result<ProtectScheme> Parse(std::string_view text);
  std::string Text() const;  // canonical: "copy" for "copy:1"

  // Members of the smallest group, at least 1.
  size_t GroupSize() const { return shape.units(); }
};

struct PeerGroup {
  std::vector<PeerNode> members;  // the ring; at most kMostUnits
  StripeShape shape;              // of an erasure code as many units as there are members
  bool operator==(const PeerGroup&) const = default;
};

// Groups of scheme.GroupSize() members; nodes that are left over join groups, so that every
// node is protected (an erasure code of more members has more data units).  Members of one
// group are of different failure domains, or, if a domain has more nodes than there are groups,
// of as many as there can be; members of one domain stand apart in the ring.  kOff: each node
// is alone.
// kInvalid: no nodes, a name twice, an empty name, or fewer nodes than GroupSize().
Result<std::vector<PeerGroup>> PlaceNodes(std::vector<PeerNode> nodes, const ProtectScheme& scheme);

// The members that keep the units of a member's files, unit 0 first, which is its own.
// REQUIRES: the group has as many members as the shape has units.
std::vector<size_t> UnitHolders(const PeerGroup& group, size_t member);

}  // namespace ckptfs
