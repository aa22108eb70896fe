// SPDX-License-Identifier: Apache-2.0
//
// Manifests: the input is taken as a file as it is, and as a payload under a
// header whose digest is right, since an attacker may compute it.  A manifest that
// is accepted renders and parses again to the same bytes.
#include <string_view>

#include "core/manifest/manifest.h"
#include "core/manifest/manifest_format.h"
#include "core/store/store.h"
#include "tests/fuzz/target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  (void)ckptfs::ParseManifest(bytes).has_value();
  std::string_view payload = bytes;
  if (payload.size() > ckptfs::kManifestHeaderSize && payload.starts_with("ckptfs\r\n")) {
    payload.remove_prefix(ckptfs::kManifestHeaderSize);
  }
  const auto model = ckptfs::ParseManifest(ckptfs::WrapManifest(payload));
  if (!model) return 0;
  const auto rendered = ckptfs::RenderManifest(*model);
  FUZZ_CHECK(rendered);
  const auto again = ckptfs::ParseManifest(*rendered);
  FUZZ_CHECK(again);
  const auto rendered_again = ckptfs::RenderManifest(*again);
  FUZZ_CHECK(rendered_again && *rendered_again == *rendered);
  return 0;
}
