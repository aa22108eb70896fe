// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/ingest_status.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <string_view>
#include <vector>

#include "core/base/strings.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

// `path` as it is called in the mount; "" if it does not lie below the directory.
std::string BelowOf(std::string_view directory, std::string_view path) {
  if (path == directory) return ".";
  if (!path.starts_with(directory) || path.substr(directory.size(), 1) != "/") return "";
  return std::string(path.substr(directory.size() + 1));
}

class Viewer {
 public:
  Viewer(const Descriptor& root, std::string directory, const MirrorCaller& caller)
      : root_(root), directory_(std::move(directory)), caller_(caller) {
    struct stat info {};
    all_ = caller.uid == 0 || (::fstat(root.get(), &info) == 0 && info.st_uid == caller.uid);
  }

  bool MaySee(const std::string& path) const {
    if (all_) return true;
    const std::string below = BelowOf(directory_, path);
    if (below.empty()) return false;
    const ActAs as(caller_);
    if (as.error() != 0) return false;
    open_how how{};
    how.flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS;
    const Descriptor opened(
        static_cast<int>(::syscall(SYS_openat2, root_.get(), below.c_str(), &how, sizeof how)));
    return opened.valid();
  }

  // " (run1/global_step5)", where the name does not say it.
  std::string PlaceOf(const std::string& name, const std::string& path) const {
    const std::string below = BelowOf(directory_, path);
    return below.empty() || below == name ? "" : StrCat(" (", below, ")");
  }

 private:
  const Descriptor& root_;
  const std::string directory_;
  const MirrorCaller& caller_;
  bool all_ = false;
};

}  // namespace

std::string IngestStatusText(const FollowStatus& status, const Descriptor& root,
                             const MirrorCaller& caller) {
  const Viewer viewer(root, status.path, caller);
  std::vector<std::string> lines;
  for (const StepRecord& step : status.committed) {
    if (!viewer.MaySee(step.source)) continue;
    const std::string name = StrCat(step.run, "/", step.id);
    lines.push_back(StrCat(step.provisional ? "committed for now: " : "committed: ", name,
                           viewer.PlaceOf(name, step.source)));
  }
  for (const Follower::Waiting& step : status.waiting) {
    if (!viewer.MaySee(step.path)) continue;
    const std::string_view state = step.left_behind ? "not taken, its save died: "
                                   : step.refused   ? "not taken: "
                                                    : "in progress: ";
    lines.push_back(StrCat(state, step.id, viewer.PlaceOf(step.id, step.path), ": ", step.why));
  }
  if (lines.empty()) {
    lines.push_back(status.idle.empty() ? std::string("no steps that you may see") : status.idle);
  }
  std::string text;
  for (const std::string& line : lines) text += StrCat(Printable(line), "\n");
  return text;
}

}  // namespace ckptfs
