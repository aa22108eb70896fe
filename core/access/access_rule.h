// SPDX-License-Identifier: Apache-2.0
//
// The one rule of who may see a step: a caller who could open every one of its source files,
// the directories above them included.  Thousands of files have few distinct owners and
// modes, so a step's rule is a short list of those, its gates.
//
// Thread safety: pure functions of values.
// Units: modes are st_mode permission bits.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/io/file.h"

namespace ckptfs {

// A gate at which nobody but root passes.
inline constexpr OwnerAndMode kClosedGate{};

// The gates that a caller has to pass, and how attributes show them.
struct AccessRule {
  std::vector<OwnerAndMode> files;        // distinct; to be read
  std::vector<OwnerAndMode> directories;  // likewise; to be searched
  uint32_t uid = 0;                       // of the sources, 0 if they differ
  uint32_t gid = 0;
  uint32_t read_bits = 0;  // subset of 0444: those that all gates have
  // The kernel's check of (uid, gid, read_bits) lets through exactly those who
  // pass all gates, so it may answer from its caches.
  bool exact = false;

  bool Lets(uint32_t user, std::span<const uint32_t> groups) const;
};

// No files: nobody but root passes.
AccessRule MakeAccessRule(std::vector<OwnerAndMode> files, std::vector<OwnerAndMode> directories);

// The access of a file made from `files`: a user (but root) who may read it may read each of
// them.  Where owners (or groups) differ, their bits go to nobody who lacks the others'.
OwnerAndMode TightestAccess(std::span<const OwnerAndMode> files);

// Two gates of one owner and group, or one that is open to all: true if each user who passes
// `known` passes `gate`.  Of other owners or groups somebody may pass the one and not the
// other.  Rights: 04 to read a file, 01 to search a directory.
bool LetsAllOf(const OwnerAndMode& known, uint32_t known_right, const OwnerAndMode& gate,
               uint32_t right);
bool LetsEverybody(const OwnerAndMode& gate, uint32_t right);

}  // namespace ckptfs
