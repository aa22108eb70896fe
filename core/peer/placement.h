// SPDX-License-Identifier: Apache-2.0
//
// Placement decides which nodes keep each other's part of a step in memory.  PlaceNodes() cuts the
// nodes of a job into groups; StripesOf() says who helps whom inside one group.
//
// A group has at least `data + parity` members, in an order that matters: a ring.  Stripe r
// takes the `data` members from r on as data nodes and the `parity` members after them as
// parity nodes (all numbers modulo the group's size).  A member's part is cut into `data` equal
// units, one for each stripe in which it is a data node, so that it keeps `parity` units of
// others.  A copy is the case data = 1.  A stripe outlives the loss of any `parity` of its
// members.  An erasure code is as wide as its group: each stripe holds all members.
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
    kCopy,     // `copies` further nodes hold the whole part
    kErasure,  // `parity` units for every `data` units; XOR if parity is 1
  };
  Kind kind = kOff;
  uint32_t copies = 0;
  uint32_t data = 0, parity = 0;
  bool operator==(const ProtectScheme&) const = default;

  //   scheme = "off" | "local" | "copy" [":" C] | "ec:" K "+" M
  // with 1 <= C <= 15, 2 <= K, 1 <= M and K + M <= 128.  kInvalid with the rule.
  static Result<ProtectScheme> Parse(std::string_view text);
  std::string Text() const;  // canonical: "copy" for "copy:1"

  // Members of the smallest group, at least 1.
  size_t GroupSize() const { return size_t{StripeData()} + StripeParity(); }
  // Data and parity nodes of a stripe; 1 and 0 for kOff, 1 and 1 for kLocal.
  uint32_t StripeData() const { return kind == kErasure ? data : 1; }
  uint32_t StripeParity() const;
};

struct PeerGroup {
  std::vector<PeerNode> members;  // the ring; at most 255
  uint32_t data = 1, parity = 0;  // of an erasure code all members together
  bool operator==(const PeerGroup&) const = default;
};

// Indices into the members of a group.
struct PeerStripe {
  std::vector<size_t> data;    // data[i] gives its unit i
  std::vector<size_t> parity;  // parity[j] keeps parity unit j
  bool operator==(const PeerStripe&) const = default;
};

// Groups of scheme.GroupSize() members; nodes that are left over join groups, so that every
// node is protected (an erasure code of more members has more data units).  Members of one
// group are of different failure domains, or, if a domain has more nodes than there are groups,
// of as many as there can be; members of one domain stand apart in the ring.  kOff: each node
// is alone.
// kInvalid: no nodes, a name twice, an empty name, or fewer nodes than GroupSize().
Result<std::vector<PeerGroup>> PlaceNodes(std::vector<PeerNode> nodes, const ProtectScheme& scheme);

// The stripes of a group, as many as it has members; none if parity is 0.
// REQUIRES: members.size() >= data + parity.
std::vector<PeerStripe> StripesOf(const PeerGroup& group);

}  // namespace ckptfs
