// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/dist_directory.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "core/base/device_error.h"
#include "core/base/json_text.h"
#include "core/base/strings.h"
#include "formats/dcp/step_files.h"
#include "formats/megatron/common_state.h"

namespace ckptfs::megatron {
namespace {

constexpr uint64_t kMaxBackendFile = 64 << 10;
constexpr uint64_t kMaxTracker = 64;
constexpr uint64_t kKnownVersion = 1;

// Something else of the name is not the core's.
Status ReadBackend(const Root& root, const std::string& path, DistFiles& out) {
  auto text = ReadWhole(root, path, kMaxBackendFile);
  if (!text && IsOfDevice(text.error())) return Fail(std::move(text).error());
  if (!text) return {};
  const auto json = nlohmann::json::parse(StrictJson(*text), nullptr, false);
  if (!json.is_object()) return {};
  const auto backend = json.find("sharded_backend");
  const auto version = json.find("sharded_backend_version");
  if (backend == json.end() || !backend->is_string()) return {};
  out.backend = backend->get<std::string>();
  if (version != json.end() && version->is_number_unsigned()) {
    out.version = version->get<uint64_t>();
  }
  return {};
}

}  // namespace

Result<DistFiles> ListDist(const Root& root, const std::string& directory) {
  DistFiles out;
  CKPT_ASSIGN_OR_RETURN(const bool there, HasDirectory(root, directory));
  if (!there) return out;
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  std::vector<std::string> names;
  for (const RootEntry& entry : entries) {
    if (entry.kind == EntryKind::kFile) names.push_back(entry.name);
  }
  return DistOf(root, directory, names);
}

Result<DistFiles> DistOf(const Root& root, const std::string& directory,
                         std::span<const std::string> names) {
  DistFiles out;
  bool backend = false;
  for (const std::string& name : names) {
    out.common |= name == kCommonFile;
    out.metadata |= name == dcp::kMetadataFile;
    out.data |= name.ends_with(".distcp");
    backend |= name == kBackendFile;
  }
  if (backend && (out.common || out.metadata || out.data)) {
    CKPT_RETURN_IF_ERROR(ReadBackend(root, JoinPath(directory, kBackendFile), out));
  }
  return out;
}

Status CheckFiles(const Root& root, const std::string& directory, const DistFiles& files) {
  const std::string path = root.PathOf(directory);
  if (files.backend.empty()) {
    return Fail(ErrorCode::kInvalid, StrCat(path, ": no ", kBackendFile,
                                            " that names a backend, which Megatron writes last: "
                                            "the save did not finish"));
  }
  if (!files.metadata) {
    return Fail(ErrorCode::kInvalid, StrCat(path, ": no .metadata: the save did not finish"));
  }
  if (files.version != kKnownVersion) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(path, ": ", kBackendFile, ": torch_dist of version ", files.version,
                       ", of which only 1 is known"));
  }
  return {};
}

Result<std::optional<std::string>> ReadTracker(const Root& root, const std::string& save) {
  const std::optional<std::string> none;
  auto text = ReadWhole(root, JoinPath(save, kTrackerFile), kMaxTracker);
  if (!text && IsOfDevice(text.error())) return Fail(std::move(text).error());
  if (!text) return none;
  const size_t end = text->find_last_not_of(" \t\r\n");
  const std::string said = text->substr(0, end == std::string::npos ? 0 : end + 1);
  if (said == "release") return std::optional(said);
  uint64_t iteration = 0;
  const auto [last, error] = std::from_chars(said.data(), said.data() + said.size(), iteration);
  if (error != std::errc() || last != said.data() + said.size()) return none;
  std::string digits = std::to_string(iteration);
  if (digits.size() < 7) digits.insert(0, 7 - digits.size(), '0');
  return std::optional(StrCat("iter_", digits));
}

}  // namespace ckptfs::megatron
