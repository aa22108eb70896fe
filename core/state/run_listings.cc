// SPDX-License-Identifier: Apache-2.0

#include "core/state/run_listings.h"

#include <vector>

namespace ckptfs {
namespace {

Result<std::map<std::string, RunListings::Steps, std::less<>>> RunsIn(
    const Root& root, const std::string& directory, RunListings::NumberedAs numbered) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  std::map<std::string, RunListings::Steps, std::less<>> out;
  for (const RootEntry& entry : entries) {
    if (entry.kind != EntryKind::kDirectory || !entry.link.empty()) continue;
    if (const auto step = numbered(entry.name)) {
      out[std::string(step->run)].emplace(step->number, entry.name);
    }
  }
  return out;
}

}  // namespace

Result<RunListings::Steps*> RunListings::StepsOf(const Root& root, const std::string& directory,
                                                 std::string_view run, NumberedAs numbered) {
  auto known = listed_.find({&root, directory});
  if (known == listed_.end()) {
    known = listed_.emplace(std::pair(&root, directory), RunsIn(root, directory, numbered)).first;
  }
  if (!known->second) return Fail(Error(known->second.error()));
  return &(*known->second)[std::string(run)];
}

}  // namespace ckptfs
