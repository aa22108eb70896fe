// SPDX-License-Identifier: Apache-2.0

#include "fs/permissions.h"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "core/access/kept_gates.h"
#include "core/access/searched_directories.h"
#include "core/base/strings.h"
#include "core/io/open_beneath.h"
#include "core/model/read_blobs.h"

namespace ckptfs {
namespace {

constexpr std::chrono::seconds kDirectoryInterval{2};
constexpr std::chrono::seconds kGroupsInterval{1};
constexpr size_t kMaxKeptProcesses = 4096;

OwnerAndMode OwnerOnly(OwnerAndMode gate) {
  gate.mode &= 0700;
  return gate;
}

OwnerAndMode RecordedAccess(const Blob& blob) {
  return OwnerAndMode{blob.mode & 0777, blob.uid, blob.gid, false};
}

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash);
}

// A missing file that nothing of the step is read of closes nothing: none of its bytes can
// be shown any more.  Such directories, and roots of links, are marked.
std::string MarkedBeside(const std::string& path) { return path + "/"; }
bool IsBeside(std::string_view path) { return path.ends_with('/'); }
std::string Unmarked(std::string path) {
  if (IsBeside(path)) path.pop_back();
  return path;
}

bool IsGone(const Error& error) { return error.code == ErrorCode::kNotFound; }

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

StepAccess::StepAccess(const Step& step, const BlobReader& blobs, const StepAccess* before) {
  LookAtFiles(step, blobs);
  MutexLock lock(mutex_);
  rule_ = MakeRule();
  check_after_ = std::chrono::steady_clock::now() + kDirectoryInterval;
  if (before == nullptr) return;
  const auto old = before->rule();
  changed_ = old->read_bits != rule_->read_bits || old->exact != rule_->exact ||
             old->uid != rule_->uid || old->gid != rule_->gid;
}

void StepAccess::LookAtFiles(const Step& step, const BlobReader& blobs) {
  std::set<std::string> tops;
  std::set<std::string> below;
  std::set<std::string> beside;
  const std::vector<uint8_t> read = FindReadBlobs(step.model);
  std::map<std::string, Result<RootDirectory>> roots;
  std::map<std::string, bool> kept;  // root of the store's copies -> whether its gates are known
  for (size_t i = 0; i < step.model.blobs.size(); ++i) {
    const Blob& blob = step.model.blobs[i];
    if (blob.side) continue;  // a user who may see the pieces may see their copies
    const BlobIndex index{static_cast<uint32_t>(i)};
    if (!blobs.RootOf(index).local()) {
      const auto found = blobs.RootOf(index).Stat(blob.path);
      files_.push_back(found ? found->access : kClosedGate);  // closed if it cannot be looked at
      continue;
    }
    const std::string& path = blobs.RootOf(index).name();
    if (step.roots.contains(path)) {  // in memory: there is nothing to look at
      files_.push_back(OwnerOnly(RecordedAccess(blob)));
      kept[path] = true;
      continue;
    }
    auto root = roots.find(path);
    if (root == roots.end()) root = roots.emplace(path, RootDirectory::Open(path)).first;
    const auto found = root->second ? root->second->Look(blob.path) : Fail(root->second.error());
    OwnerAndMode gate = RecordedAccess(blob);
    if (found) {
      gate = found->access;
      if (found->linked) linked_.push_back({read[i] != 0 ? path : MarkedBeside(path), blob.path});
    } else if (found.error().code != ErrorCode::kNotFound) {
      gate = kClosedGate;
    }
    AddBelowRoot(blobs.PathOf(index), blob, read[i] != 0 ? below : beside);
    if (!blob.store_owned) {
      tops.insert(path);
    } else {
      const auto [known, first] = kept.try_emplace(path, false);
      if (const auto gates = first ? ReadKeptGates(path) : std::nullopt) {
        known->second = true;
        kept_.insert(kept_.end(), gates->begin(), gates->end());
      }
      if (!known->second) gate = OwnerOnly(gate);
    }
    if (!found || !found->linked) files_.push_back(gate);
  }
  struct stat info;
  const std::string& source = step.record.source;
  if (kept.empty() && !source.empty() && stat(source.c_str(), &info) == 0) tops.insert(source);
  tops_.assign(tops.begin(), tops.end());
  below_.assign(below.begin(), below.end());
  for (const std::string& directory : beside) {
    if (!below.contains(directory)) below_.push_back(MarkedBeside(directory));
  }
  SortUnique(files_);
  SortUnique(kept_);
}

// The directories on the way to the files, and files behind links, as they are now.
std::shared_ptr<const AccessRule> StepAccess::MakeRule() const {
  std::vector<OwnerAndMode> files = files_;
  std::vector<OwnerAndMode> gates = kept_;
  std::set<std::string> searched;
  for (const std::string& top : tops_) AddSearched(top, searched);
  for (const std::string& marked : below_) {
    const std::string directory = Unmarked(marked);
    struct stat info;
    const bool there = lstat(directory.c_str(), &info) == 0;
    if (!there && IsBeside(marked) && IsGone(ErrnoError(errno, directory))) continue;
    there&& S_ISLNK(info.st_mode) ? AddSearched(directory, searched)
                                  : void(searched.insert(directory));
  }
  for (const std::string& directory : searched) {
    const auto access = AccessOfDirectory(directory);
    if (!access) gates.push_back(kClosedGate);
    if (access && *access) gates.push_back(**access);  // else a file was adopted
  }
  for (const LinkedFile& file : linked_) {
    const auto root = RootDirectory::Open(Unmarked(file.root));
    const auto found = root ? root->Look(file.path) : Fail(root.error());
    if (!found) {
      if (!IsBeside(file.root) || !IsGone(found.error())) gates.push_back(kClosedGate);
      continue;
    }
    files.push_back(found->access);
    gates.insert(gates.end(), found->searched.begin(), found->searched.end());
  }
  SortUnique(files);
  SortUnique(gates);
  return std::make_shared<const AccessRule>(MakeAccessRule(std::move(files), std::move(gates)));
}

std::shared_ptr<const AccessRule> StepAccess::rule() const {
  const auto now = std::chrono::steady_clock::now();
  {
    MutexLock lock(mutex_);
    if (now < check_after_) return rule_;
    check_after_ = now + kDirectoryInterval;  // one thread looks, the others go on
  }
  auto fresh = MakeRule();
  MutexLock lock(mutex_);
  if (fresh->read_bits != rule_->read_bits || fresh->exact != rule_->exact) changed_ = true;
  rule_ = fresh;
  return fresh;
}

bool StepAccess::Allows(const Caller& caller, GroupCache& groups) const {
  if (caller.uid == 0) return true;
  const auto current = rule();
  return current->Lets(caller.uid, groups.Of(caller));
}

}  // namespace ckptfs
