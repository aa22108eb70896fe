// SPDX-License-Identifier: Apache-2.0
//
// The manual (docs/reference/ckptfs.1.md) as a man page: the Markdown that it uses and no more, so
// that an install needs no program for it.
//
//   page    = "# name(section)" title, then blocks apart by empty lines
//   block   = heading ("##", "###") | list ("- item", its lines indented by 2) | table ("|" rows)
//           | example (indented by 4) | paragraph
//   inline  = `code`, **bold**, [text](target)
//
// Thread safety: pure function.

#pragma once

#include <string>
#include <string_view>

namespace ckptfs {

// Text for man(7).  `description` stands behind the name.
std::string ManPageOf(std::string_view markdown, std::string_view description);

}  // namespace ckptfs
