// SPDX-License-Identifier: Apache-2.0
#include "core/manifest/manifest_format.h"

#include <bit>
#include <cstring>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

static_assert(std::endian::native == std::endian::little);
constexpr std::string_view kMagic("ckptfs\r\n", 8);

template <class T>
T Load(std::string_view bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

template <class T>
void Append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(T));
}

}  // namespace

Result<ManifestEnvelope> OpenManifest(std::string_view bytes) {
  if (bytes.size() < kManifestHeaderSize || bytes.substr(0, 8) != kMagic) {
    return Fail(ErrorCode::kInvalid, "manifest: not a ckptfs manifest");
  }
  const auto version = Load<uint32_t>(bytes, 8);
  if (version == 0) return Fail(ErrorCode::kInvalid, "manifest: version 0");
  if (version > kManifestVersion) {
    return Fail(ErrorCode::kUnsupported, StrCat("manifest: version ", version,
                                                ", but this build reads up to ", kManifestVersion));
  }
  if (Load<uint32_t>(bytes, 12) != 0 || Load<uint64_t>(bytes, 24) != 0) {
    return Fail(ErrorCode::kInvalid, "manifest: reserved header bytes are not zero");
  }
  const auto length = Load<uint64_t>(bytes, 16);
  if (length != bytes.size() - kManifestHeaderSize) {
    return Fail(ErrorCode::kDataLoss, StrCat("manifest: ", bytes.size() - kManifestHeaderSize,
                                             " bytes of payload, but the header says ", length));
  }
  if (length > kManifestMaxPayload) {
    return Fail(ErrorCode::kInvalid, "manifest: payload above 2 GiB");
  }
  ManifestEnvelope envelope;
  envelope.digest = ManifestDigest(bytes);
  envelope.payload = bytes.substr(kManifestHeaderSize);
  if (DigestOf(envelope.payload) != envelope.digest) {
    return Fail(ErrorCode::kDataLoss, "manifest: its bytes fail their digest");
  }
  return envelope;
}

Digest ManifestDigest(std::string_view bytes) {
  return Digest{Load<uint64_t>(bytes, 32), Load<uint64_t>(bytes, 40)};
}

std::string WrapManifest(std::string_view payload) {
  const Digest digest = DigestOf(payload);
  std::string out;
  out.reserve(kManifestHeaderSize + payload.size());
  out += kMagic;
  Append<uint32_t>(out, kManifestVersion);
  Append<uint32_t>(out, 0);
  Append<uint64_t>(out, payload.size());
  Append<uint64_t>(out, 0);
  Append<uint64_t>(out, digest.high);
  Append<uint64_t>(out, digest.low);
  out += payload;
  return out;
}

}  // namespace ckptfs
