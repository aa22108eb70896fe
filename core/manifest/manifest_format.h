// SPDX-License-Identifier: Apache-2.0
//
// The envelope of a manifest file (docs/reference/store-format.md): a header that says
// what follows and how to tell that it is whole, then a FlatBuffers payload of
// the schema core/manifest/manifest.fbs.
//
//   file    = header(48) | payload
//   header  = magic(8) = "ckptfs\r\n"
//           | version(4) | zero(4)
//           | payload length(8) | zero(8)
//           | XXH3-128 of the payload: high(8), low(8)
//
// Numbers are little-endian.  The digest is the manifest's name and identity:
// every byte of the file but the version is either covered by it or fixed.
//
// A version is a release's schema: all fields that were appended since the
// release before belong to the next one, however many they are.  A build writes
// its own version and reads all before it; a payload means the same under each,
// since a field that is absent has the value that older builds took for granted.
//
//   1   the first
//   2   owned blobs (size and chunk digests instead of a stamp), roots below the
//       store's blob directory wherever that is, family texts with their
//       variables, uneven cuts
//   3   digests of a blob's chunks in a file beside it
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
inline constexpr uint32_t kManifestVersion = 3;
// FlatBuffers' own limit is 2^31; a step of a trillion parameters has some MiB.
inline constexpr uint64_t kManifestMaxPayload = (uint64_t{1} << 31) - 4096;

struct ManifestEnvelope {
  Digest digest;             // of the payload, verified
  std::string_view payload;  // of the bytes given
};

// kDataLoss if bytes are missing or the digest differs, kUnsupported for a
// newer version, kInvalid for what is not a manifest.
Result<ManifestEnvelope> OpenManifest(std::string_view bytes);

std::string WrapManifest(std::string_view payload);

// The digest that the header says.  REQUIRES: `bytes` are of WrapManifest.
Digest ManifestDigest(std::string_view bytes);

}  // namespace ckptfs
