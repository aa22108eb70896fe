// SPDX-License-Identifier: Apache-2.0

#include "formats/tools/step_tree.h"

#include <algorithm>
#include <set>

#include "core/base/strings.h"
#include "formats/tools/directories.h"
#include "formats/tools/step_names.h"

namespace ckptfs {
namespace {

// The entry beside it that a link says; "" for one that leads elsewhere.
std::string_view LinkedBeside(std::string_view link) {
  if (link.starts_with("./")) link.remove_prefix(2);
  while (link.ends_with('/')) link.remove_suffix(1);
  return link.find('/') == std::string_view::npos && link != ".." ? link : std::string_view();
}

}  // namespace

bool StepEntries::HasFile(std::string_view name) const {
  return std::binary_search(files.begin(), files.end(), name);
}

bool StepEntries::HasDirectory(std::string_view name) const {
  return std::binary_search(directories.begin(), directories.end(), name);
}

Result<StepEntries> ListStepEntries(const Root& root, const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  std::set<std::string_view> names;
  for (const RootEntry& entry : entries) names.insert(entry.name);
  StepEntries out;
  for (const RootEntry& entry : entries) {
    const std::string_view beside = LinkedBeside(entry.link);
    const bool second = beside == "." || (!beside.empty() && names.contains(beside));
    if (entry.kind == EntryKind::kDirectory) {
      if (second) continue;
      out.directories.push_back(entry.name);
      if (!entry.link.empty()) out.links.insert(entry.name);
    } else if (entry.kind == EntryKind::kFile || !entry.link.empty()) {
      // One that a link was to lead to is missed, not passed over.
      if (!second || !IsLightningName(entry.name)) out.files.push_back(entry.name);
    }
  }
  if (out.directories.size() <= kMaxStepDirectories) return out;
  return Fail(
      Error{ErrorCode::kUnsupported, StrCat(root.PathOf(directory), ": ", out.directories.size(),
                                            " directories, and ckptfs searches at "
                                            "most ",
                                            kMaxStepDirectories, " for steps")}
          .Needing("name the steps themselves"));
}

std::string RunOfToolStep(const std::string& directory, std::string_view name) {
  return StepNumber(name) ? ParentPath(directory) : directory;
}

bool IsOutOfReach(const Error& error) {
  return error.code == ErrorCode::kPermission || error.code == ErrorCode::kNotFound ||
         error.code == ErrorCode::kUnsupported;
}

Result<StepCandidate> StepAt(const std::shared_ptr<const Root>& root, const std::string& directory,
                             const std::string& save) {
  StepCandidate out;
  out.root = root;
  out.directory = directory;
  out.save = save;
  out.id = LastComponent(root->PathOf(directory));
  out.iteration = StepNumber(out.id).value_or(0);
  CKPT_ASSIGN_OR_RETURN(out.mtime_ns, NewestEntry(*root, directory));
  if (const auto named = VersionOf(LastComponent(directory))) {
    const std::string first = JoinPath(ParentPath(directory), named->first);
    CKPT_ASSIGN_OR_RETURN(const auto there, StatIfThere(*root, first));
    if (there) out.version = named->version;
  }
  return out;
}

Result<StepCandidate> ToolStep(const std::shared_ptr<const Root>& root,
                               const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(StepCandidate out, StepAt(root, directory, ParentPath(directory)));
  out.own = directory;
  return out;
}

}  // namespace ckptfs
