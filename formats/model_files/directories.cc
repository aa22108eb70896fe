// SPDX-License-Identifier: Apache-2.0

#include "formats/model_files/directories.h"

#include <algorithm>
#include <charconv>
#include <vector>

namespace ckptfs {

Result<int64_t> NewestEntry(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const EntryStat itself, root.Stat(path));
  int64_t newest = itself.stamp.mtime_ns;
  if (itself.kind != EntryKind::kDirectory) return newest;
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(path));
  for (const RootEntry& entry : entries) {
    CKPT_ASSIGN_OR_RETURN(const auto found, StatIfThere(root, JoinPath(path, entry.name)));
    if (found) newest = std::max(newest, found->stamp.mtime_ns);
  }
  return newest;
}

std::optional<uint64_t> TrainerIteration(std::string_view name) {
  constexpr std::string_view kPrefix = "checkpoint-";
  uint64_t iteration = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const char* end = name.data() + name.size();
  const auto parsed = std::from_chars(name.data() + kPrefix.size(), end, iteration);
  return parsed.ec == std::errc() && parsed.ptr == end ? std::optional(iteration) : std::nullopt;
}

Result<Seal> TrainerSeal(const Root& root, const std::string& directory, int64_t mtime_ns) {
  CKPT_ASSIGN_OR_RETURN(const auto state,
                        StatIfThere(root, JoinPath(directory, "trainer_state.json")));
  if (!state) return Seal::kMissing;
  // Other ranks may write their random state after it.
  return state->stamp.mtime_ns >= mtime_ns ? Seal::kThere : Seal::kUnknown;
}

}  // namespace ckptfs
