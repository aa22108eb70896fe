// SPDX-License-Identifier: Apache-2.0

#include "fs/permissions.h"

#include <sys/stat.h>
#include <sys/xattr.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr std::chrono::seconds kDirectoryInterval{2};
constexpr std::chrono::seconds kGroupsInterval{1};
constexpr size_t kMaxKeptProcesses = 4096;

bool HasAcl(const std::string& path) {
  return getxattr(path.c_str(), "system.posix_acl_access", nullptr, 0) > 0;
}

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

StepAccess::StepAccess(const Step& step, const BlobReader& blobs) {
  CollectDirectories(step, blobs);
  SummariseModes();
}

void StepAccess::CollectDirectories(const Step& step, const BlobReader& blobs) {
  std::set<std::string> directories;
  std::set<std::string> parents;
  bool adopted_from_known = !step.record.source.empty();
  if (adopted_from_known) AddDirectory(step.record.source, directories);
  struct stat info;
  if (adopted_from_known && stat(step.record.source.c_str(), &info) != 0) {
    adopted_from_known = false;
    directories.clear();
  }
  for (size_t i = 0; i < step.model.blobs.size(); ++i) {
    const Blob& blob = step.model.blobs[i];
    File file{AccessGate{blob.mode & 0777, blob.uid, blob.gid, false},
              blobs.PathOf(BlobIndex{static_cast<uint32_t>(i)})};
    if (blob.store_owned) {
      // The store's own directories say nothing; those it was copied from do.
      if (!adopted_from_known) file.gate = OwnerOnly(file.gate);
    } else {
      parents.insert(ParentOf(file.path));
    }
    files_.push_back(std::move(file));
  }
  for (const std::string& parent : parents) AddDirectory(parent, directories);
  directories_.assign(directories.begin(), directories.end());
}

void StepAccess::SummariseModes() {
  if (files_.empty()) return;
  uid_ = files_.front().gate.uid;
  gid_ = files_.front().gate.gid;
  bool one_group = true;
  read_bits_ = 0444;
  uint32_t others_or_group = 0444;
  for (const File& file : files_) {
    if (file.gate.uid != uid_) uid_ = 0;
    if (file.gate.gid != gid_) one_group = false;
    read_bits_ &= file.gate.mode;
    others_or_group &= file.gate.mode & (file.gate.mode << 3 | 0707);
  }
  for (const AccessGate& gate : DirectoryGates()) {
    // Search of every directory is needed, so x here is r of the files.
    read_bits_ &= gate.mode << 2;
  }
  if (!one_group) read_bits_ &= others_or_group;
  if (!one_group) gid_ = 0;
  read_bits_ &= 0444;
}

StepAccess::Gates StepAccess::DirectoryGates() const {
  Gates gates;
  for (const std::string& directory : directories_) {
    struct stat info;
    if (stat(directory.c_str(), &info) != 0) {
      gates.push_back(Closed());
      continue;
    }
    // What was adopted may itself be a file.
    AccessGate gate{info.st_mode & 0777, info.st_uid, info.st_gid, S_ISDIR(info.st_mode) != 0};
    gates.push_back(HasAcl(directory) ? OwnerOnly(gate) : gate);
  }
  SortUnique(gates);
  return gates;
}

std::shared_ptr<const StepAccess::Gates> StepAccess::CurrentGates() const {
  const auto now = std::chrono::steady_clock::now();
  std::shared_ptr<const Gates> files;
  {
    MutexLock lock(mutex_);
    if (gates_ && now < check_after_) return gates_;
    files = file_gates_;
  }
  if (!files) {
    Gates fresh;
    for (const File& file : files_) {
      fresh.push_back(HasAcl(file.path) ? OwnerOnly(file.gate) : file.gate);
    }
    SortUnique(fresh);
    files = std::make_shared<const Gates>(std::move(fresh));
  }
  auto all = std::make_shared<Gates>(DirectoryGates());
  all->insert(all->end(), files->begin(), files->end());
  MutexLock lock(mutex_);
  file_gates_ = files;
  gates_ = all;
  check_after_ = now + kDirectoryInterval;
  return gates_;
}

bool StepAccess::Allows(const Caller& caller, GroupCache& groups) const {
  if (caller.uid == 0) return true;
  if (files_.empty()) return false;
  const auto gates = CurrentGates();
  const std::vector<uint32_t> member_of = groups.Of(caller);
  return std::all_of(gates->begin(), gates->end(), [&](const AccessGate& gate) {
    return PassesGate(gate, caller.uid, member_of);
  });
}

}  // namespace ckptfs
