// SPDX-License-Identifier: Apache-2.0
//
// The JSON that lies beside weights: `*.index.json`, config.json and modules.json.  An
// index names files below its own directory, and says the same when it is printed and
// read again; a config whose dtype was replaced says the same but for that.

#include <string>
#include <string_view>

#include "core/state/model_config.h"
#include "formats/huggingface/shard_index.h"
#include "formats/tools/config_text.h"
#include "tests/fuzz/target.h"

namespace {

void CheckIndex(std::string_view text) {
  const auto map = ckptfs::huggingface::ParseShardIndex(text);
  if (!map) return;
  for (const auto& [tensor, file] : *map) {
    FUZZ_CHECK(!file.empty() && file != "." && file != "..");
    FUZZ_CHECK(file.front() != '/' && file.find('\0') == std::string::npos);
    FUZZ_CHECK(("/" + file + "/").find("/../") == std::string::npos);
  }
  const auto printed = ckptfs::huggingface::PrintShardIndex(*map, 1, 1);
  if (!printed) return;  // names that are not UTF-8
  const auto again = ckptfs::huggingface::ParseShardIndex(*printed);
  FUZZ_CHECK(again.has_value() && *again == *map);
}

void CheckConfig(std::string_view text) {
  (void)ckptfs::ParseModelConfig(text).has_value();
  const auto facts = ckptfs::ReadConfigFacts(text);
  if (!facts) return;
  const std::string changed = ckptfs::WithDType(text, ckptfs::DType::kBF16);
  FUZZ_CHECK(ckptfs::WithDType(changed, ckptfs::DType::kBF16) == changed);
  const std::string older = ckptfs::WithOlderKeys(text);
  FUZZ_CHECK(ckptfs::ReadConfigFacts(older));
  FUZZ_CHECK(ckptfs::WithOlderKeys(older) == older);
  const auto plain = ckptfs::ReadConfigFacts(ckptfs::WithoutQuantisation(text));
  FUZZ_CHECK(plain.has_value() && plain->model_type == facts->model_type);
  const auto again = ckptfs::ReadConfigFacts(changed);
  FUZZ_CHECK(again.has_value());
  FUZZ_CHECK(again->model_type == facts->model_type && again->version == facts->version);
  FUZZ_CHECK(again->architectures == facts->architectures && again->tied == facts->tied);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  CheckIndex(text);
  CheckConfig(text);
  for (const std::string& folder : ckptfs::ReadModuleFolders(text)) FUZZ_CHECK(!folder.empty());
  return 0;
}
