// SPDX-License-Identifier: Apache-2.0

#include "core/peer/placement.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr uint32_t kMostCopies = 15;
constexpr uint32_t kMostSchemeUnits = 128;  // a group of up to twice as many fits GF(256)
constexpr std::string_view kGrammar = "off, local, copy, copy:COPIES or ec:DATA+PARITY";

// A decimal number without sign or leading zeros; nothing if `text` is not one.
std::optional<uint32_t> Number(std::string_view text) {
  uint32_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || text.front() == '0') return std::nullopt;
  return value;
}

Result<StripeShape> ParseCopies(std::string_view text) {
  const std::optional<uint32_t> copies = Number(text);
  if (!copies || *copies > kMostCopies)
    return Refuse("'copy:", text, "': the copies are a number from 1 to ", kMostCopies);
  return StripeShape{1, *copies};
}

Result<StripeShape> ParseErasure(std::string_view text) {
  const size_t plus = text.find('+');
  std::optional<uint32_t> data, parity;
  if (plus != std::string_view::npos) {
    data = Number(text.substr(0, plus));
    parity = Number(text.substr(plus + 1));
  }
  if (!data || !parity) return Refuse("'ec:", text, "': write ec:DATA+PARITY, such as ec:8+2");
  if (*data < 2) return Refuse("'ec:", text, "': fewer than 2 data units; write copy:", *parity);
  if (*data > kMostSchemeUnits || *parity > kMostSchemeUnits - *data)
    return Refuse("'ec:", text, "': more than ", kMostSchemeUnits, " units together");
  return StripeShape{*data, *parity};
}

// The schemes: what one is called, and the shape of its stripes.
struct SchemeRow {
  ProtectScheme::Kind kind;
  std::string_view name;
  std::optional<StripeShape> alone;                  // by the name alone
  Result<StripeShape> (*numbers)(std::string_view);  // of what follows NAME":"; null: nothing may
};
constexpr std::array<SchemeRow, 4> kSchemes = {{
    {ProtectScheme::kOff, "off", StripeShape{1, 0}, nullptr},
    {ProtectScheme::kLocal, "local", StripeShape{1, 1}, nullptr},
    {ProtectScheme::kCopy, "copy", StripeShape{1, 1}, &ParseCopies},
    {ProtectScheme::kErasure, "ec", std::nullopt, &ParseErasure},
}};

// All that die with `node`: its domain, or itself.
std::string DomainOf(const PeerNode& node) {
  return node.failure_domain.empty() ? StrCat("node ", node.name)
                                     : StrCat("domain ", node.failure_domain);
}

Status CheckNames(const std::vector<PeerNode>& sorted) {
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i].name.empty()) return Refuse("a node without a name cannot be placed");
    if (i > 0 && sorted[i].name == sorted[i - 1].name)
      return Refuse("two nodes are named '", sorted[i].name, "'");
  }
  return {};
}

// Brings the nodes of each domain together, the largest domain first.
void SortByDomain(std::vector<PeerNode>& nodes) {
  std::map<std::string, size_t> sizes;
  for (const PeerNode& node : nodes) ++sizes[DomainOf(node)];
  std::sort(nodes.begin(), nodes.end(), [&](const PeerNode& a, const PeerNode& b) {
    const std::string domain_a = DomainOf(a), domain_b = DomainOf(b);
    const size_t size_a = sizes[domain_a], size_b = sizes[domain_b];
    if (size_a != size_b) return size_a > size_b;
    if (domain_a != domain_b) return domain_a < domain_b;
    return a.name < b.name;
  });
}

// Members of one domain stand next to each other in `members`; spreads them over the ring:
// with as many rows as the largest domain has members, the columns are read as rows.
std::vector<PeerNode> Ring(std::vector<PeerNode> members) {
  std::map<std::string, size_t> sizes;
  size_t rows = 1;
  for (const PeerNode& member : members) rows = std::max(rows, ++sizes[DomainOf(member)]);
  std::vector<PeerNode> ring;
  ring.reserve(members.size());
  for (size_t row = 0; row < rows; ++row)
    for (size_t i = row; i < members.size(); i += rows) ring.push_back(std::move(members[i]));
  return ring;
}

}  // namespace

Result<ProtectScheme> ProtectScheme::Parse(std::string_view text) {
  const size_t colon = text.find(':');
  for (const SchemeRow& row : kSchemes) {
    if (text.substr(0, colon) != row.name) continue;
    if (colon == std::string_view::npos && row.alone) return ProtectScheme{row.kind, *row.alone};
    if (colon == std::string_view::npos || row.numbers == nullptr) break;
    CKPT_ASSIGN_OR_RETURN(const StripeShape shape, row.numbers(text.substr(colon + 1)));
    return ProtectScheme{row.kind, shape};
  }
  return Refuse("'", text, "' is not a protection: write ", kGrammar);
}

std::string ProtectScheme::Text() const {
  const std::string name(kSchemes[kind].name);
  if (shape.cuts()) return StrCat(name, ":", shape.data, "+", shape.parity);
  return kSchemes[kind].alone == shape ? name : StrCat(name, ":", shape.parity);
}

Result<std::vector<PeerGroup>> PlaceNodes(std::vector<PeerNode> nodes,
                                          const ProtectScheme& scheme) {
  std::sort(nodes.begin(), nodes.end());
  CKPT_RETURN_IF_ERROR(CheckNames(nodes));
  if (nodes.size() < scheme.GroupSize() || nodes.empty()) {
    return Refuse("'", scheme.Text(), "' needs ", Counted(scheme.GroupSize(), "node"),
                  "; there are ", nodes.size());
  }
  SortByDomain(nodes);
  // Dealt like cards: a domain of no more nodes than there are groups meets no group twice.
  std::vector<std::vector<PeerNode>> dealt(nodes.size() / scheme.GroupSize());
  for (size_t i = 0; i < nodes.size(); ++i) dealt[i % dealt.size()].push_back(std::move(nodes[i]));
  std::vector<PeerGroup> groups;
  groups.reserve(dealt.size());
  for (std::vector<PeerNode>& members : dealt) {
    StripeShape shape = scheme.shape;
    if (shape.cuts()) shape.data = static_cast<uint32_t>(members.size()) - shape.parity;
    groups.push_back({Ring(std::move(members)), shape});
  }
  return groups;
}

std::vector<size_t> UnitHolders(const PeerGroup& group, size_t member) {
  const size_t size = group.members.size();
  CKPT_CHECK(member < size && size >= group.shape.units());
  std::vector<size_t> holders;
  for (size_t unit = 0; unit < group.shape.units(); ++unit)
    holders.push_back((member + unit) % size);
  return holders;
}

}  // namespace ckptfs
