// SPDX-License-Identifier: Apache-2.0

#include "mount/fuse/mount_users.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/strings.h"
#include "core/io/mount_info.h"

namespace ckptfs {
namespace {

namespace stdfs = std::filesystem;

constexpr size_t kUsersTold = 8;
constexpr size_t kFilesTold = 2;

std::string LinkTarget(const std::string& link) {
  std::array<char, 4097> text;
  const ssize_t bytes = ::readlink(link.c_str(), text.data(), text.size() - 1);
  return bytes > 0 ? std::string(text.data(), static_cast<size_t>(bytes)) : "";
}

std::string ProcOf(int pid) { return StrCat("/proc/", pid); }

std::string NameOf(const std::string& proc) {
  std::ifstream comm(proc + "/comm");
  std::string name;
  std::getline(comm, name);
  return name;
}

class Process {
 public:
  Process(std::string proc, const std::string& directory)
      : proc_(std::move(proc)), directory_(directory) {}

  std::vector<std::string> Files() {
    Add(LinkTarget(proc_ + "/cwd"));
    Add(LinkTarget(proc_ + "/root"));
    std::error_code error;
    for (stdfs::directory_iterator fd(proc_ + "/fd", error), end; !error && fd != end;
         fd.increment(error)) {
      Add(LinkTarget(fd->path()));
    }
    std::ifstream maps(proc_ + "/maps");
    for (std::string line; std::getline(maps, line);) {
      const size_t path = line.find('/');
      if (path != std::string::npos) Add(std::string_view(line).substr(path));
    }
    return {files_.begin(), files_.end()};
  }

 private:
  void Add(std::string_view path) {
    if (!path.starts_with(directory_)) return;
    path.remove_prefix(directory_.size());
    if (path.empty()) files_.insert(".");
    if (path.starts_with('/')) files_.insert(std::string(path.substr(1)));
  }

  const std::string proc_;
  const std::string& directory_;
  std::set<std::string> files_;
};

// The pids of all processes but this one, in order.
std::vector<int> OtherProcesses() {
  std::vector<int> pids;
  std::error_code error;
  for (stdfs::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    int pid = 0;
    const auto parsed = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (parsed.ptr == name.data() + name.size() && pid != ::getpid()) pids.push_back(pid);
  }
  std::sort(pids.begin(), pids.end());
  return pids;
}

// True if the file system is among the mounts that the process sees.
bool SeesDevice(const std::string& proc, const std::string& device) {
  const auto mounts = ReadMounts(proc + "/mountinfo");
  return mounts && std::any_of(mounts->begin(), mounts->end(), [&](const MountEntry& mount) {
           return mount.device == device && mount.type == "fuse.ckptfs";
         });
}

}  // namespace

std::vector<MountUser> FindMountUsers(const std::string& directory) {
  std::vector<MountUser> users;
  for (const int pid : OtherProcesses()) {
    Process process(ProcOf(pid), directory);
    std::vector<std::string> files = process.Files();
    if (!files.empty()) users.push_back(MountUser{pid, NameOf(ProcOf(pid)), std::move(files)});
  }
  return users;
}

std::vector<MountUser> FindMountHolders(const std::string& device) {
  std::vector<MountUser> holders;
  std::map<std::string, bool> sees;  // by namespace: many processes share one
  sees[LinkTarget("/proc/self/ns/mnt")] = false;
  for (const int pid : OtherProcesses()) {
    const std::string space = LinkTarget(ProcOf(pid) + "/ns/mnt");
    if (space.empty()) continue;
    const auto [known, fresh] = sees.try_emplace(space, false);
    if (fresh) known->second = SeesDevice(ProcOf(pid), device);
    if (known->second) holders.push_back(MountUser{pid, NameOf(ProcOf(pid)), {}});
  }
  return holders;
}

std::string DescribeUsers(const std::vector<MountUser>& users) {
  std::string text;
  for (size_t i = 0; i < users.size() && i < kUsersTold; ++i) {
    const MountUser& user = users[i];
    text +=
        StrCat(i == 0 ? "" : ", ", user.name, " (pid ", user.pid, user.files.empty() ? "" : ":");
    for (size_t f = 0; f < user.files.size() && f < kFilesTold; ++f) {
      text += StrCat(f == 0 ? " " : ", ", user.files[f]);
    }
    if (user.files.size() > kFilesTold)
      text += StrCat(" and ", user.files.size() - kFilesTold, " more");
    text += ")";
  }
  if (users.size() > kUsersTold)
    text += StrCat(" and ", users.size() - kUsersTold, " processes more");
  return text;
}

nlohmann::json UsersJson(const std::vector<MountUser>& users) {
  nlohmann::json all = nlohmann::json::array();
  for (const MountUser& user : users) {
    all.push_back({{"pid", user.pid}, {"name", user.name}, {"files", user.files}});
  }
  return all;
}

}  // namespace ckptfs
