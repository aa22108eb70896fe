// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/write_watch.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/mutex.h"

namespace ckptfs {
namespace {

// Constants of Linux 6.7's headers (linux/userfaultfd.h, linux/fs.h), which a build may lack.
constexpr uint64_t kWpUnpopulated = uint64_t{1} << 13;  // UFFD_FEATURE_WP_UNPOPULATED
constexpr uint64_t kWpAsync = uint64_t{1} << 15;        // UFFD_FEATURE_WP_ASYNC
constexpr int kUserModeOnly = 1;                        // UFFD_USER_MODE_ONLY
struct ScanArgument {                                   // struct pm_scan_arg
  uint64_t size = sizeof(ScanArgument);
  uint64_t flags = 0;
  uint64_t start = 0;
  uint64_t end = 0;
  uint64_t walk_end = 0;
  uint64_t vec = 0;
  uint64_t vec_len = 0;
  uint64_t max_pages = 0;
  uint64_t category_inverted = 0;
  uint64_t category_mask = 0;
  uint64_t category_anyof_mask = 0;
  uint64_t return_mask = 0;
};
struct ScanRegion {  // struct page_region
  uint64_t start = 0;
  uint64_t end = 0;
  uint64_t categories = 0;
};
constexpr unsigned long kScan = _IOWR('f', 16, ScanArgument);  // PAGEMAP_SCAN
constexpr uint64_t kScanProtect = 1;    // PM_SCAN_WP_MATCHING: what it finds is protected anew
constexpr uint64_t kScanCheck = 2;      // PM_SCAN_CHECK_WPASYNC: EPERM for what is not registered
constexpr size_t kMostRefused = 65536;  // that are remembered
constexpr uint64_t kIsWritten = 2;      // PAGE_IS_WRITTEN: its protection is lifted

// Finds up to `room` runs of written pages from `begin` on; returns where it went on to.
std::optional<std::vector<ScanRegion>> Scan(int pagemap, uintptr_t& begin, uintptr_t end,
                                            size_t room, uint64_t most) {
  std::vector<ScanRegion> regions(room);
  ScanArgument scan;
  scan.flags = kScanCheck;
  scan.start = begin;
  scan.end = end;
  scan.vec = reinterpret_cast<uintptr_t>(regions.data());
  scan.vec_len = room;
  scan.max_pages = most;
  scan.category_mask = kIsWritten;
  scan.return_mask = kIsWritten;
  const int count = ioctl(pagemap, kScan, &scan);
  if (count < 0) return std::nullopt;
  begin = scan.walk_end;
  regions.resize(static_cast<size_t>(count));
  return regions;
}

}  // namespace

// The process's one userfaultfd: a mapping can be registered with one alone.
class WriteWatch::Kernel {
 public:
  // Null where it has none.
  static Kernel* Get();

  Mutex& mutex() { return mutex_; }
  // Begins to watch one of the extents; false if it cannot be.  `places`: where all of them may be
  // registered, which is read from the kernel when the first has to be.
  bool Protect(const Extent& extent, std::span<const Extent> all,
               std::optional<std::vector<Extent>>& places) EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the first page that was written.
  std::optional<uintptr_t> FindWritten(const Extent& extent) const;
  std::vector<Extent> AllWritten(const Extent& extent) const;
  void Lift(const Extent& extent) const;
  std::set<WriteWatch*>& active() EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return active_; }
  uintptr_t page() const { return page_; }

 private:
  Kernel();
  bool Register(const Extent& extent, const std::vector<Extent>& places)
      EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Ask(const Extent& extent) const;
  static std::vector<Extent> OwnMemory();
  static std::vector<Extent> PlacesOf(std::span<const Extent> all);

  const pid_t process_ = getpid();
  const uintptr_t page_ = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  Descriptor fault_;
  Descriptor pagemap_;
  bool works_ = false;
  Mutex mutex_;
  std::set<WriteWatch*> active_ GUARDED_BY(mutex_);
  std::set<std::pair<uintptr_t, uintptr_t>> refused_ GUARDED_BY(mutex_);
};

WriteWatch::Kernel::Kernel()
    : fault_(static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | kUserModeOnly))),
      pagemap_(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC)) {
  if (!fault_.valid() || !pagemap_.valid()) return;
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = kWpAsync | kWpUnpopulated | UFFD_FEATURE_PAGEFAULT_FLAG_WP;
  works_ = ioctl(fault_.get(), UFFDIO_API, &api) == 0;
}

WriteWatch::Kernel* WriteWatch::Kernel::Get() {
  static std::atomic<Kernel*> shared{nullptr};
  Kernel* kernel = shared.load();
  // A child that was forked has its own memory, and whatever its parent's lock was doing then.
  if (kernel == nullptr || kernel->process_ != getpid()) {
    auto* const made = new Kernel;
    if (shared.compare_exchange_strong(kernel, made)) {
      kernel = made;
    } else {
      delete made;
    }
  }
  return kernel->works_ ? kernel : nullptr;
}

bool WriteWatch::Kernel::Protect(const Extent& extent, std::span<const Extent> all,
                                 std::optional<std::vector<Extent>>& places) {
  ScanArgument scan;
  scan.flags = kScanProtect | kScanCheck;
  scan.start = extent.begin;
  scan.end = extent.end;
  scan.category_mask = kIsWritten;
  if (ioctl(pagemap_.get(), kScan, &scan) >= 0) return true;
  if (errno != EPERM || refused_.contains({extent.begin, extent.end})) return false;
  if (!places) places = PlacesOf(all);
  return Register(extent, *places) && ioctl(pagemap_.get(), kScan, &scan) >= 0;
}

bool WriteWatch::Kernel::Ask(const Extent& extent) const {
  uffdio_register asked{};
  asked.range = {extent.begin, extent.end - extent.begin};
  asked.mode = UFFDIO_REGISTER_MODE_WP;
  return ioctl(fault_.get(), UFFDIO_REGISTER, &asked) == 0;
}

bool WriteWatch::Kernel::Register(const Extent& extent, const std::vector<Extent>& places) {
  const auto place = std::ranges::upper_bound(places, extent.begin, {}, &Extent::end);
  const bool own =
      place != places.end() && place->begin <= extent.begin && extent.end <= place->end;
  if (!own) return false;  // it may be another mapping at the next save
  if (Ask(*place) || Ask(extent)) return true;
  if (refused_.size() >= kMostRefused) refused_.clear();
  refused_.emplace(extent.begin, extent.end);
  return false;
}

// Returns the memory whose pages change by writes of this process alone: not shared mappings, nor
// private ones of files, of which a page that was not written yet is the file's.  Rising; mappings
// that touch are one.  Reads /proc/self/maps, whose lines are "BEGIN-END rwxs OFFSET DEVICE INODE
// PATH"; the inode of memory without a file is 0.
std::vector<WriteWatch::Extent> WriteWatch::Kernel::OwnMemory() {
  std::vector<Extent> found;
  const std::unique_ptr<FILE, int (*)(FILE*)> maps(std::fopen("/proc/self/maps", "re"),
                                                   &std::fclose);
  char* line = nullptr;
  size_t room = 0;
  while (maps && getline(&line, &room, maps.get()) > 0) {
    unsigned long begin = 0, end = 0, inode = 0;
    char write = 0, kind = 0;
    const bool told = std::sscanf(line, "%lx-%lx %*c%c%*c%c %*x %*s %lu", &begin, &end, &write,
                                  &kind, &inode) == 5;
    if (!told || write != 'w' || kind != 'p' || inode != 0) continue;
    if (!found.empty() && found.back().end == begin) {
      found.back().end = end;
    } else {
      found.push_back({begin, end});
    }
  }
  std::free(line);
  return found;
}

// The kernel splits a mapping at the ends of what is registered, and a process may have 65,530: so
// from the first to the last extent in a mapping all is registered at once.  What lies between is
// not protected.
std::vector<WriteWatch::Extent> WriteWatch::Kernel::PlacesOf(std::span<const Extent> all) {
  std::vector<Extent> places;
  for (const Extent& mapping : OwnMemory()) {
    std::optional<Extent> place;
    auto at = std::ranges::lower_bound(all, mapping.begin, {}, &Extent::begin);
    for (; at != all.end() && at->begin < mapping.end; ++at) {
      if (at->end > mapping.end) continue;
      if (!place) place = *at;
      place->end = std::max(place->end, at->end);
    }
    if (place) places.push_back(*place);
  }
  return places;
}

std::optional<uintptr_t> WriteWatch::Kernel::FindWritten(const Extent& extent) const {
  uintptr_t begin = extent.begin;
  const auto regions = Scan(pagemap_.get(), begin, extent.end, 1, 1);
  if (!regions) return extent.begin;  // unmapped, or mapped anew
  return regions->empty() ? std::nullopt : std::optional<uintptr_t>(regions->front().start);
}

std::vector<WriteWatch::Extent> WriteWatch::Kernel::AllWritten(const Extent& extent) const {
  std::vector<Extent> found;
  for (uintptr_t begin = extent.begin; begin < extent.end;) {
    const uintptr_t before = begin;
    const auto regions = Scan(pagemap_.get(), begin, extent.end, 512, 0);
    if (!regions || begin <= before) return {extent};
    for (const ScanRegion& region : *regions) found.push_back({region.start, region.end});
  }
  return found;
}

void WriteWatch::Kernel::Lift(const Extent& extent) const {
  uffdio_writeprotect asked{};
  asked.range = {extent.begin, extent.end - extent.begin};
  ioctl(fault_.get(), UFFDIO_WRITEPROTECT, &asked);
}

// ---- one watch -----------------------------------------------------------------

bool WriteWatch::Overlaps(const Extent& extent) const {
  const auto at = std::ranges::upper_bound(extents_, extent.begin, {}, &Extent::end);
  return at != extents_.end() && at->begin < extent.end;
}

std::unique_ptr<WriteWatch> WriteWatch::Begin(std::span<const HostBytes> memory) {
  Kernel* const kernel = Kernel::Get();
  if (kernel == nullptr) return nullptr;
  std::unique_ptr<WriteWatch> watch(new WriteWatch(kernel));
  std::vector<Extent> given;
  for (const HostBytes& bytes : memory) {
    const auto begin = reinterpret_cast<uintptr_t>(bytes.data()), page = kernel->page();
    const Extent extent{(begin + page - 1) / page * page, (begin + bytes.size()) / page * page};
    if (extent.begin < extent.end) given.push_back(extent);
  }
  std::ranges::sort(given, {}, &Extent::begin);
  std::optional<std::vector<Extent>> places;
  MutexLock lock(kernel->mutex());
  for (const Extent& extent : given) {
    for (WriteWatch* other : kernel->active()) {
      if (!other->Overlaps(extent)) continue;
      const auto seen = kernel->AllWritten(extent);
      other->written_.insert(other->written_.end(), seen.begin(), seen.end());
    }
    if (!kernel->Protect(extent, given, places)) continue;
    if (!watch->extents_.empty() && extent.begin < watch->extents_.back().end) {
      watch->extents_.back().end = std::max(watch->extents_.back().end, extent.end);
      watch->lifts_late_ = true;
    } else {
      watch->extents_.push_back(extent);
    }
  }
  kernel->active().insert(watch.get());
  return watch;
}

WriteWatch::~WriteWatch() {
  MutexLock lock(kernel_->mutex());
  kernel_->active().erase(this);
  for (const Extent& extent : extents_) {
    if (std::ranges::none_of(kernel_->active(),
                             [&](auto* other) { return other->Overlaps(extent); })) {
      kernel_->Lift(extent);
    }
  }
}

void WriteWatch::Leave() {
  MutexLock lock(kernel_->mutex());
  kernel_->active().erase(this);
}

HostBytes WriteWatch::Covered(HostBytes bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data()), page = kernel_->page();
  const uintptr_t first = (begin + page - 1) / page * page;
  const uintptr_t last = (begin + bytes.size()) / page * page;
  MutexLock lock(kernel_->mutex());
  const auto at = std::ranges::upper_bound(extents_, first, {}, &Extent::end);
  if (first >= last || at == extents_.end() || at->begin > first || at->end < last) return {};
  return bytes.subspan(first - begin, last - first);
}

std::optional<const std::byte*> WriteWatch::FindWritten(HostBytes bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data()), page = kernel_->page();
  const uintptr_t end = (begin + bytes.size() + page - 1) / page * page;
  std::optional<uintptr_t> first;
  MutexLock lock(kernel_->mutex());
  for (auto at = std::ranges::upper_bound(extents_, begin, {}, &Extent::end);
       at != extents_.end() && at->begin < end && !first; ++at) {
    // Its pages that `bytes` has a part of.
    const Extent asked{std::max(at->begin, begin / page * page), std::min(at->end, end)};
    first = kernel_->FindWritten(asked);
    for (const Extent& seen : written_) {
      if (seen.begin < asked.end && asked.begin < seen.end) first = seen.begin;
    }
  }
  if (!first) return std::nullopt;
  return reinterpret_cast<const std::byte*>(std::max(*first, begin));
}

void WriteWatch::Release(HostBytes bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data()), page = kernel_->page();
  MutexLock lock(kernel_->mutex());
  if (lifts_late_) return;
  for (auto at = std::ranges::upper_bound(extents_, begin, {}, &Extent::end);
       at != extents_.end() && at->begin < begin + bytes.size(); ++at) {
    // The page that they end in is also another's; the one that they begin in was another's before.
    const Extent over{std::max(at->begin, begin / page * page),
                      std::min(at->end, (begin + bytes.size()) / page * page)};
    const bool shared = std::ranges::any_of(
        kernel_->active(), [&](auto* other) { return other != this && other->Overlaps(over); });
    if (over.begin >= over.end || shared) continue;
    kernel_->Lift(over);
    if (over.begin == at->begin) at->begin = over.end;
  }
}

}  // namespace ckptfs
