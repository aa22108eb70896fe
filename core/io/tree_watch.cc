// SPDX-License-Identifier: Apache-2.0

#include "core/io/tree_watch.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>
#include <string_view>
#include <vector>

#include "core/base/strings.h"
#include "core/io/local_filesystem.h"

namespace ckptfs {
namespace {

constexpr int kDepth = 3;             // output / checkpoint-N / global_stepN / zero
constexpr size_t kMaxWatches = 1000;  // of the user's 8,192 and more
constexpr uint32_t kEvents =
    IN_CREATE | IN_MOVED_TO | IN_CLOSE_WRITE | IN_DELETE | IN_MOVE_SELF | IN_ONLYDIR;
// After which there may be directories that are not watched.
constexpr uint32_t kStale = IN_ISDIR | IN_Q_OVERFLOW | IN_IGNORED | IN_MOVE_SELF;

// Identifies what lies at the path now: it may be another directory than before, or
// something mounted over it.
std::pair<uint64_t, uint64_t> IdentityOf(const std::string& directory) {
  struct stat info {};
  if (::stat(directory.c_str(), &info) != 0) return {};
  return {info.st_dev, info.st_ino};
}

// Directories in a directory; links are not followed.
std::vector<std::string> FoldersIn(const std::string& directory) {
  std::vector<std::string> out;
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::opendir(directory.c_str()), ::closedir);
  while (const dirent* const entry = listing ? ::readdir(listing.get()) : nullptr) {
    const std::string_view name = entry->d_name;
    if (name == "." || name == ".." || entry->d_type != DT_DIR) continue;
    out.push_back(StrCat(directory, "/", name));
  }
  return out;
}

}  // namespace

Result<TreeWatch> TreeWatch::Create(std::string directory) {
  TreeWatch watch(std::move(directory));
  watch.wake_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!watch.wake_.valid()) return Fail(ErrnoError(errno, "eventfd"));
  // Without one (a container may have none left) it polls.
  watch.inotify_ = Descriptor(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  watch.AddAll();
  return watch;
}

void TreeWatch::AddAll() {
  watched_ = IdentityOf(directory_);  // before it is watched: one that comes meanwhile is another
  hears_ = inotify_.valid() && IsLocalFilesystem(directory_);
  if (!hears_) return;
  std::vector<std::string> level = {directory_};
  size_t count = 0;
  for (int depth = 0; depth <= kDepth && !level.empty(); ++depth) {
    std::vector<std::string> below;
    for (const std::string& folder : level) {
      // With so many only some events would be heard, and each would make us look for more.
      if (++count > kMaxWatches) {
        hears_ = false;
        return;
      }
      if (::inotify_add_watch(inotify_.get(), folder.c_str(), kEvents) < 0) {
        if (errno != ENOSPC) continue;  // it went
        hears_ = false;
        return;
      }
      if (depth == kDepth) continue;
      for (std::string& inner : FoldersIn(folder)) below.push_back(std::move(inner));
    }
    level = std::move(below);
  }
  stale_ = false;
}

void TreeWatch::Drain() {
  alignas(inotify_event) std::array<char, 16384> buffer;
  while (true) {
    const ssize_t got = ::read(inotify_.get(), buffer.data(), buffer.size());
    if (got <= 0) return;
    for (ssize_t at = 0; at < got;) {
      const auto* const event = reinterpret_cast<const inotify_event*>(buffer.data() + at);
      at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
      stale_ = stale_ || (event->mask & kStale) != 0;
    }
  }
}

void TreeWatch::Wait(std::chrono::milliseconds most) {
  std::array<pollfd, 2> events = {pollfd{wake_.get(), POLLIN, 0},
                                  pollfd{inotify_.get(), POLLIN, 0}};
  const auto time = std::clamp<int64_t>(most.count(), 0, 60'000);
  (void)::poll(events.data(), hears_ ? 2 : 1, static_cast<int>(time));
  if (inotify_.valid()) Drain();
  uint64_t woken = 0;
  (void)!::read(wake_.get(), &woken, sizeof woken);
  // Before the caller looks: what a new directory holds by then is seen, what comes later heard.
  if (stale_ || !hears_ || IdentityOf(directory_) != watched_) AddAll();
}

void TreeWatch::Wake() const {
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

}  // namespace ckptfs
