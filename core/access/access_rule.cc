// SPDX-License-Identifier: Apache-2.0

#include "core/access/access_rule.h"

#include <algorithm>
#include <utility>

namespace ckptfs {

bool AccessRule::Lets(uint32_t user, std::span<const uint32_t> groups) const {
  const auto passes = [&](const std::vector<OwnerAndMode>& gates, uint32_t right) {
    return std::ranges::all_of(
        gates, [&](const OwnerAndMode& gate) { return gate.Lets(right, user, groups); });
  };
  return passes(files, 04) && passes(directories, 01);
}

AccessRule MakeAccessRule(std::vector<OwnerAndMode> files, std::vector<OwnerAndMode> directories) {
  AccessRule rule;
  rule.files = std::move(files);
  rule.directories = std::move(directories);
  if (rule.files.empty()) {
    rule.files = {kClosedGate};
    return rule;
  }
  const OwnerAndMode& first = rule.files.front();
  rule.uid = first.uid;
  rule.gid = first.gid;
  rule.exact = true;
  uint32_t all = 0777;          // bits that every file has
  uint32_t groups_others = 04;  // 04 if every file's group and others may read
  for (const OwnerAndMode& file : rule.files) {
    if (file.uid != first.uid) rule.uid = 0;
    if (file.gid != first.gid) rule.gid = 0;
    if (file.uid != first.uid || file.gid != first.gid) rule.exact = false;
    all &= file.CertainMode();
    groups_others &= file.CertainMode() & file.CertainMode() >> 3;
  }
  // A group that is not everybody's is shown only if the others may read, too.
  if (!rule.exact) all = (all & 0707) | groups_others << 3;
  for (const OwnerAndMode& directory : rule.directories) {
    // Search of every directory is needed, so x here is r of the files.
    all &= directory.CertainMode() << 2 | 0333;
    const bool everybody = LetsEverybody(directory, 01);
    const bool same = directory.uid == rule.uid && directory.gid == rule.gid;
    if (!everybody && !same) rule.exact = false;
  }
  rule.read_bits = all & 0444;
  return rule;
}

bool LetsEverybody(const OwnerAndMode& gate, uint32_t right) {
  return (gate.CertainMode() & 0111 * right) == 0111 * right;
}

bool LetsAllOf(const OwnerAndMode& known, uint32_t known_right, const OwnerAndMode& gate,
               uint32_t right) {
  if (LetsEverybody(gate, right)) return true;
  const uint32_t passing = (known.CertainMode() & 0111 * known_right) / known_right;
  const uint32_t let = (gate.CertainMode() & 0111 * right) / right;
  return known.uid == gate.uid && known.gid == gate.gid && (passing & ~let) == 0;
}

OwnerAndMode TightestAccess(std::span<const OwnerAndMode> files) {
  if (files.empty()) return {};
  const bool one_owner = std::all_of(files.begin(), files.end(), [&](const OwnerAndMode& file) {
    return file.uid == files.front().uid;
  });
  const bool one_group = std::all_of(files.begin(), files.end(), [&](const OwnerAndMode& file) {
    return file.gid == files.front().gid;
  });
  uint32_t bits = 0777;
  for (const OwnerAndMode& file : files) bits &= file.CertainMode();
  uint32_t owner = bits >> 6 & 7;
  uint32_t group = bits >> 3 & 7;
  uint32_t others = bits & 7;
  // A user who is neither owner nor group of this file may be in the group of one of those,
  // and a user who does not own it may own one.
  if (!one_group) group = others = group & others;
  if (!one_owner) {
    owner &= group & others;
    group &= bits >> 6;
    others &= bits >> 6;
  }
  return OwnerAndMode{owner << 6 | group << 3 | others, one_owner ? files.front().uid : 0,
                      one_group ? files.front().gid : 0};
}

}  // namespace ckptfs
