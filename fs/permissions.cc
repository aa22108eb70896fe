// SPDX-License-Identifier: Apache-2.0

#include "fs/permissions.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "core/base/strings.h"
#include "core/blob/file_stamp.h"

namespace ckptfs {
namespace {

constexpr std::chrono::seconds kDirectoryInterval{2};
constexpr std::chrono::seconds kGroupsInterval{1};
constexpr size_t kMaxKeptProcesses = 4096;

AccessGate OwnerOnly(AccessGate gate) {
  gate.mode &= 0700;
  return gate;
}

// Nobody but root passes.
AccessGate Closed() { return AccessGate{0, 0, 0, true}; }

// `path` and all directories above it.
void AddAncestors(std::string_view path, std::set<std::string>& out) {
  while (!path.empty()) {
    if (!out.emplace(path).second) return;
    const size_t slash = path.rfind('/');
    if (slash == std::string_view::npos) return;
    path = path.substr(0, slash);
  }
  out.emplace("/");
}

// The directory as it is spelled, and as symbolic links resolve it.
void AddDirectory(const std::string& directory, std::set<std::string>& out) {
  AddAncestors(directory, out);
  char* real = realpath(directory.c_str(), nullptr);
  if (real == nullptr) return;
  AddAncestors(std::string_view(real) == "/" ? std::string_view() : std::string_view(real), out);
  std::free(real);
}

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash);
}

// The directories between a blob's root and the blob.
void AddBelowRoot(const std::string& path, const Blob& blob, std::set<std::string>& out) {
  const size_t root = path.size() - blob.path.size() - 1;
  for (std::string parent = ParentOf(path); parent.size() > root; parent = ParentOf(parent)) {
    out.insert(parent);
  }
}

template <class Gates>
void SortUnique(Gates& gates) {
  std::sort(gates.begin(), gates.end());
  gates.erase(std::unique(gates.begin(), gates.end()), gates.end());
}

}  // namespace

std::vector<uint32_t> GroupCache::Of(const Caller& caller) {
  const auto now = std::chrono::steady_clock::now();
  {
    MutexLock lock(mutex_);
    const auto found = kept_.find(caller.pid);
    if (found != kept_.end() && found->second.uid == caller.uid &&
        found->second.gid == caller.gid && now < found->second.until) {
      return found->second.groups;
    }
  }
  std::vector<uint32_t> groups{caller.gid};
  std::ifstream status(StrCat("/proc/", caller.pid, "/status"));
  for (std::string line; caller.pid != 0 && std::getline(status, line);) {
    if (!line.starts_with("Groups:")) continue;
    std::istringstream numbers(line.substr(7));
    for (uint32_t group; numbers >> group;) groups.push_back(group);
    break;
  }
  MutexLock lock(mutex_);
  if (kept_.size() >= kMaxKeptProcesses) kept_.clear();
  kept_[caller.pid] = Kept{groups, caller.uid, caller.gid, now + kGroupsInterval};
  return groups;
}

bool PassesGate(const AccessGate& gate, uint32_t uid, const std::vector<uint32_t>& groups) {
  if (uid == 0) return true;
  const uint32_t bit = gate.directory ? 1 : 4;
  if (uid == gate.uid) return (gate.mode >> 6 & bit) != 0;
  if (std::find(groups.begin(), groups.end(), gate.gid) != groups.end()) {
    return (gate.mode >> 3 & bit) != 0;
  }
  return (gate.mode & bit) != 0;
}

AccessRule MakeAccessRule(std::vector<AccessGate> files, std::vector<AccessGate> directories) {
  AccessRule rule;
  if (files.empty()) {
    rule.gates = {Closed()};
    return rule;
  }
  rule.uid = files.front().uid;
  rule.gid = files.front().gid;
  rule.exact = true;
  uint32_t all = 0777;          // bits that every file has
  uint32_t groups_others = 04;  // 04 if every file's group and others may read
  for (const AccessGate& file : files) {
    if (file.uid != files.front().uid) rule.uid = 0;
    if (file.gid != files.front().gid) rule.gid = 0;
    if (file.uid != files.front().uid || file.gid != files.front().gid) rule.exact = false;
    all &= file.mode;
    groups_others &= file.mode & file.mode >> 3;
  }
  // A group that is not everybody's is shown only if the others may read, too.
  if (!rule.exact) all = (all & 0707) | groups_others << 3;
  for (const AccessGate& directory : directories) {
    // Search of every directory is needed, so x here is r of the files.
    all &= directory.mode << 2 | 0333;
    const bool everybody = (directory.mode & 0111) == 0111;
    const bool same = directory.uid == rule.uid && directory.gid == rule.gid;
    if (!everybody && !same) rule.exact = false;
  }
  rule.read_bits = all & 0444;
  rule.gates = std::move(directories);
  rule.gates.insert(rule.gates.end(), files.begin(), files.end());
  return rule;
}

StepAccess::StepAccess(const Step& step, const BlobReader& blobs)
    : files_(CollectFiles(step, blobs)),
      rule_(std::make_shared<const AccessRule>(MakeAccessRule(files_, LookAtDirectories()))),
      check_after_(std::chrono::steady_clock::now() + kDirectoryInterval) {}

std::vector<AccessGate> StepAccess::CollectFiles(const Step& step, const BlobReader& blobs) {
  std::set<std::string> directories;
  std::set<std::string> parents;
  std::vector<AccessGate> gates;
  struct stat info;
  const std::string& adopted_from = step.record.source;
  const bool known = !adopted_from.empty() && stat(adopted_from.c_str(), &info) == 0;
  if (known) AddDirectory(adopted_from, directories);
  for (size_t i = 0; i < step.model.blobs.size(); ++i) {
    const Blob& blob = step.model.blobs[i];
    if (blob.side) continue;  // whoever may see the pieces may see their copies
    const std::string path = blobs.PathOf(BlobIndex{static_cast<uint32_t>(i)});
    AccessGate gate{blob.mode & 0777, blob.uid, blob.gid, false};
    if (HasAcl(path)) gate = OwnerOnly(gate);
    if (blob.store_owned) {
      // The store's own directories say nothing; those it was copied from do,
      // and those that were copied with it.
      if (!known) gate = OwnerOnly(gate);
      AddBelowRoot(path, blob, directories);
    } else {
      parents.insert(ParentOf(path));
    }
    gates.push_back(gate);
  }
  for (const std::string& parent : parents) AddDirectory(parent, directories);
  directories_.assign(directories.begin(), directories.end());
  SortUnique(gates);
  return gates;
}

std::vector<AccessGate> StepAccess::LookAtDirectories() const {
  std::vector<AccessGate> gates;
  for (const std::string& directory : directories_) {
    struct stat info;
    if (stat(directory.c_str(), &info) != 0) {
      gates.push_back(Closed());
      continue;
    }
    if (!S_ISDIR(info.st_mode)) continue;  // what was adopted was a file
    const AccessGate gate{info.st_mode & 0777, info.st_uid, info.st_gid, true};
    gates.push_back(HasAcl(directory) ? OwnerOnly(gate) : gate);
  }
  SortUnique(gates);
  return gates;
}

std::shared_ptr<const AccessRule> StepAccess::rule() const {
  const auto now = std::chrono::steady_clock::now();
  {
    MutexLock lock(mutex_);
    if (now < check_after_) return rule_;
    check_after_ = now + kDirectoryInterval;  // one thread looks, the others go on
  }
  auto fresh = std::make_shared<const AccessRule>(MakeAccessRule(files_, LookAtDirectories()));
  MutexLock lock(mutex_);
  if (fresh->read_bits != rule_->read_bits || fresh->exact != rule_->exact) changed_ = true;
  rule_ = fresh;
  return fresh;
}

bool StepAccess::Allows(const Caller& caller, GroupCache& groups) const {
  if (caller.uid == 0) return true;
  const auto current = rule();
  const std::vector<uint32_t> member_of = groups.Of(caller);
  return std::all_of(current->gates.begin(), current->gates.end(), [&](const AccessGate& gate) {
    return PassesGate(gate, caller.uid, member_of);
  });
}

}  // namespace ckptfs
