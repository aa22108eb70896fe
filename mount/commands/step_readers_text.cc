// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/step_readers_text.h"

#include <fmt/format.h>
#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <vector>

#include "core/access/access_rule.h"
#include "core/access/searched_directories.h"
#include "core/base/strings.h"
#include "fs/permissions.h"

namespace ckptfs {
namespace {

constexpr uint32_t kRead = 04;
constexpr uint32_t kSearch = 01;

std::string UserName(uint32_t uid) {
  const passwd* const known = ::getpwuid(uid);
  return known == nullptr ? StrCat("uid ", uid) : StrCat(known->pw_name, " (uid ", uid, ")");
}

std::string GroupName(uint32_t gid) {
  const group* const known = ::getgrgid(gid);
  return known == nullptr ? StrCat("group ", gid)
                          : StrCat("group ", known->gr_name, " (gid ", gid, ")");
}

std::string Barred(const std::string& path, const OwnerAndMode& access, std::string_view rest) {
  return StrCat(path, " (", UserName(access.uid), ", ",
                fmt::format("mode {:04o}", access.mode & 07777), access.acl ? ", an ACL" : "",
                ") keeps ", rest, " out");
}

// The first directory, from the top, and else the first file that not all users pass.
std::string FirstGate(const Step& step, const BlobReader& blobs) {
  std::set<std::string> directories;
  std::vector<std::pair<std::string, OwnerAndMode>> files;
  for (uint32_t i = 0; i < step.model.blobs.size(); ++i) {
    const Blob& blob = step.model.blobs[i];
    if (blob.side || !blobs.RootOf(BlobIndex{i}).local()) continue;
    const std::string path = blobs.PathOf(BlobIndex{i});
    const auto found = blobs.RootOf(BlobIndex{i}).Stat(blob.path);
    if (found) files.emplace_back(path, found->access);
    if (!blob.store_owned) AddSearched(path.substr(0, path.rfind('/')), directories);
  }
  for (const std::string& directory : directories) {  // those above come first
    const auto access = AccessOfDirectory(directory);
    if (access && *access && !LetsEverybody(**access, kSearch)) {
      return Barred(directory, **access, "other users");
    }
  }
  for (const auto& [path, access] : files) {
    if (!LetsEverybody(access, kRead)) return Barred(path, access, "other users");
  }
  return "";
}

}  // namespace

ReadersText DescribeReaders(const Step& step, const BlobReader& blobs) {
  const auto rule = StepAccess(step, blobs).rule();
  const auto open = [](const std::vector<OwnerAndMode>& gates, uint32_t right) {
    return std::ranges::all_of(
        gates, [&](const OwnerAndMode& gate) { return LetsEverybody(gate, right); });
  };
  if (!rule->files.empty() && open(rule->files, kRead) && open(rule->directories, kSearch)) {
    return {"all users", ""};
  }
  ReadersText readers;
  const bool group = (rule->read_bits & 040) != 0;
  if (rule->exact) {
    readers.who = UserName(rule->uid);
    if (group) readers.who += StrCat(" and ", GroupName(rule->gid));
  } else {
    readers.who = "those who may open every one of its files";
  }
  readers.kept_out = FirstGate(step, blobs);
  if (readers.kept_out.empty()) {
    readers.kept_out = "the directories that it lay in when the store took it keep other users out";
  }
  return readers;
}

}  // namespace ckptfs
