// SPDX-License-Identifier: Apache-2.0

#include "formats/registry.h"

namespace ckptfs {

std::vector<std::unique_ptr<Source>> MakeSources() {
  std::vector<std::unique_ptr<Source>> sources;
  return sources;
}

std::vector<std::unique_ptr<ViewFormat>> MakeViewFormats() {
  std::vector<std::unique_ptr<ViewFormat>> formats;
  return formats;
}

}  // namespace ckptfs
