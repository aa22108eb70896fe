// SPDX-License-Identifier: Apache-2.0
//
// The envelope of a manifest file (docs/store-format.md): a header that says
// what follows and how to tell that it is whole, then a FlatBuffers payload of
// the schema core/store/manifest.fbs.
//
//   file    = header(48) | payload
//   header  = magic(8) = "ckptfs\r\n"
//           | version(4) = 1 | zero(4)
//           | payload length(8) | zero(8)
//           | XXH3-128 of the payload: high(8), low(8)
//
// Numbers are little-endian.  The digest is the manifest's name and identity:
// every byte of the file is either covered by it or fixed.
//
// Thread safety: pure functions.
// Lifetime: views of the caller's bytes.
// Units: bytes.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/digest.h"
#include "core/base/result.h"

namespace ckptfs {

inline constexpr size_t kManifestHeaderSize = 48;
inline constexpr uint32_t kManifestVersion = 1;
// FlatBuffers' own limit is 2^31; a step of a trillion parameters has some MiB.
inline constexpr uint64_t kManifestMaxPayload = (uint64_t{1} << 31) - 4096;

struct ManifestEnvelope {
  Digest digest;             // of the payload, verified
  std::string_view payload;  // of the bytes given
};

// kDataLoss if bytes are missing or the digest differs, kUnsupported for a
// newer version, kInvalid for what is no manifest.
Result<ManifestEnvelope> OpenManifest(std::string_view bytes);

std::string WrapManifest(std::string_view payload);

}  // namespace ckptfs
