// SPDX-License-Identifier: Apache-2.0
//
// Kept gates say who could reach a step's files when the store took them (--copy, --link):
// the directories above them at that time, kept with the copy, since the paths may be
// anybody's later.
//
//   <store>/blobs/<digest>/gates = one line per directory: mode (octal) " " uid
//                                  " " gid " " acl (0 or 1) "\n"
//
// Thread safety: pure functions over the filesystem.
// Units: modes are st_mode permission bits.

#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/io/open_beneath.h"

namespace ckptfs {

inline constexpr std::string_view kKeptGatesName = "gates";

std::string RenderKeptGates(const std::vector<OwnerAndMode>& gates);

// Those of the copy that `root` is or lies in.  Nothing if they are not there,
// are not what was rendered, or may have been written by somebody else.
std::optional<std::vector<OwnerAndMode>> ReadKeptGates(const std::string& root);

}  // namespace ckptfs
