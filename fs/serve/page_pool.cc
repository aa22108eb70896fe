// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/page_pool.h"

#include <fcntl.h>
#include <linux/mount.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "fs/serve/memory_limit.h"

namespace ckptfs {
namespace {

// glibc before 2.36 has no wrappers for these.
int FsOpen(const char* type) { return static_cast<int>(syscall(SYS_fsopen, type, FSOPEN_CLOEXEC)); }
int FsSet(int fd, const char* key, const std::string& value) {
  return static_cast<int>(syscall(SYS_fsconfig, fd, FSCONFIG_SET_STRING, key, value.c_str(), 0));
}
int FsCreate(int fd) {
  return static_cast<int>(syscall(SYS_fsconfig, fd, FSCONFIG_CMD_CREATE, nullptr, nullptr, 0));
}
int FsMount(int fd) { return static_cast<int>(syscall(SYS_fsmount, fd, FSMOUNT_CLOEXEC, 0)); }

constexpr uint64_t kWorthShrinking = 4 * kHugePage;

uint64_t ChargeOf(uint64_t size) { return AlignUp(std::max<uint64_t>(size, 1), kHugePage); }

}  // namespace

uint64_t MemoryToUse() {
  const uint64_t machine =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return std::min(machine, GroupMemoryLimit());
}

uint64_t MaterialiseBudget(uint64_t asked, uint64_t memory) {
  return asked == 0 ? memory / 4 : std::min(asked, memory / 4 * 3);
}

Result<std::unique_ptr<PagePool>> PagePool::Create(uint64_t budget) {
  const Descriptor context(FsOpen("tmpfs"));
  if (!context.valid()) return Fail(ErrnoError(errno, "fsopen tmpfs"));
  // Our accounts bound it.  A file that shrinks or goes still has its pages for
  // a while, and more of them when its last page is split.
  const std::string size = StrCat(2 * budget + 64 * kHugePage);
  Descriptor mount;
  if (FsSet(context.get(), "huge", "always") == 0 && FsSet(context.get(), "size", size) == 0 &&
      FsSet(context.get(), "mode", "0700") == 0 && FsCreate(context.get()) == 0) {
    mount = Descriptor(FsMount(context.get()));
  }
  if (!mount.valid()) {
    if (errno == EINVAL) {
      return Fail(ErrorCode::kUnsupported, "this kernel has no huge-page tmpfs");
    }
    return Fail(ErrnoError(errno, "mounting a huge-page tmpfs"));
  }
  std::unique_ptr<PagePool> pool(new PagePool(std::move(mount), budget));
  // A file that cannot be created now will not be later: say so at once.
  CKPT_RETURN_IF_ERROR(pool->NewFile());
  return pool;
}

Result<PagePool::File> PagePool::NewFile() const {
  File file;
  file.fd = Descriptor(openat(mount_.get(), ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!file.fd.valid()) return Fail(ErrnoError(errno, "creating a huge-page file"));
  return file;
}

bool PagePool::Reserve(uint64_t charge, File* reused, std::vector<File>* freed) {
  MutexLock lock(mutex_);
  if (lent_ + charge > budget_) return false;
  // The idle file nearest in size: to shrink one, or to add to one, is cheaper
  // than new pages.  For the smallest files not even this is worth it.
  const auto distance = [&](const File& file) {
    return file.charge > charge ? file.charge - charge : charge - file.charge;
  };
  const auto nearest =
      std::min_element(idle_.begin(), idle_.end(),
                       [&](const File& a, const File& b) { return distance(a) < distance(b); });
  const bool room = lent_ + idle_bytes_ + charge <= budget_;
  const bool close = nearest != idle_.end() && nearest->charge <= 2 * charge;
  if (nearest != idle_.end() && (!room || close || charge >= kWorthShrinking)) {
    idle_bytes_ -= nearest->charge;
    *reused = std::move(*nearest);
    idle_.erase(nearest);
  }
  lent_ += charge;
  last_taken_ = charge;
  while (lent_ + idle_bytes_ > budget_ && !idle_.empty()) {
    idle_bytes_ -= idle_.back().charge;
    freed->push_back(std::move(idle_.back()));
    idle_.pop_back();
  }
  return true;
}

bool PagePool::AwaitPrepared() {
  MutexLock lock(mutex_);
  if (preparing_ == 0) return false;
  prepared_.Wait(mutex_);
  return true;
}

Result<PagePool::File> PagePool::Take(uint64_t size) {
  const uint64_t charge = ChargeOf(size);
  File file;
  std::vector<File> freed;
  takers_.fetch_add(1);
  bool room = Reserve(charge, &file, &freed);
  for (bool waited = true; !room && waited && charge <= budget_;) {
    waited = AwaitPrepared();
    room = Reserve(charge, &file, &freed);
  }
  takers_.fetch_sub(1);
  if (!room) {
    return Fail(ErrorCode::kExhausted,
                StrCat(charge, " bytes do not fit the materialise budget of ", budget_));
  }
  freed.clear();  // their pages before new ones
  Result<File> result = file.fd.valid() ? Result<File>(std::move(file)) : NewFile();
  if (result && ftruncate(result->fd.get(), static_cast<off_t>(size)) != 0) {
    result = Fail(ErrnoError(errno, "sizing a huge-page file"));
  }
  if (!result) {
    MutexLock lock(mutex_);
    lent_ -= charge;
    return result;
  }
  result->size = size;
  result->charge = charge;
  return result;
}

void PagePool::Expect(uint64_t file, uint64_t size) {
  MutexLock lock(mutex_);
  const auto known = std::ranges::find(expected_, file, &Expected::file);
  if (known != expected_.end()) {
    known->charge = ChargeOf(size);
    return;
  }
  if (expected_.size() == kMostExpected) expected_.pop_front();
  expected_.push_back({file, ChargeOf(size)});
}

void PagePool::ExpectNoMore(uint64_t file) {
  MutexLock lock(mutex_);
  std::erase_if(expected_, [file](const Expected& one) { return one.file == file; });
}

uint64_t PagePool::Prepare(uint64_t size, const std::function<bool()>& stop) {
  constexpr uint64_t kStep = 32 * kHugePage;
  {
    MutexLock lock(mutex_);
    if (lent_ + idle_bytes_ + size > budget_) return 0;
    lent_ += size;  // ours until it is idle
    ++preparing_;
  }
  Result<File> file = NewFile();
  uint64_t done = 0;
  while (file && done < size && takers_ == 0 && !stop()) {
    const uint64_t length = std::min(kStep, size - done);
    if (ftruncate(file->fd.get(), static_cast<off_t>(done + length)) != 0) break;
    void* pages = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd.get(),
                       static_cast<off_t>(done));
    if (pages == MAP_FAILED) break;
    const bool touched = madvise(pages, length, MADV_POPULATE_WRITE) == 0;
    munmap(pages, length);
    if (!touched) break;
    done += length;
  }
  MutexLock lock(mutex_);
  lent_ -= size;
  --preparing_;
  prepared_.NotifyAll();
  if (done == 0) return 0;
  file->size = file->charge = done;
  idle_bytes_ += done;
  idle_.push_back(*std::move(file));
  return done;
}

void PagePool::Give(File file) {
  MutexLock lock(mutex_);
  lent_ -= file.charge;
  idle_bytes_ += file.charge;
  idle_.push_back(std::move(file));
}

void PagePool::Discard(File file) {
  file.fd = Descriptor();
  MutexLock lock(mutex_);
  lent_ -= file.charge;
}

bool PagePool::IsMapped(const File& file) {
  // A write lease is granted only while no other open file description refers
  // to the inode; a mapping holds one.
  if (fcntl(file.fd.get(), F_SETLEASE, F_WRLCK) != 0) return true;
  fcntl(file.fd.get(), F_SETLEASE, F_UNLCK);
  return false;
}

uint64_t PagePool::lent_bytes() const {
  MutexLock lock(mutex_);
  return lent_;
}

uint64_t PagePool::idle_bytes() const {
  MutexLock lock(mutex_);
  return idle_bytes_;
}

PagePool::Idle PagePool::idle() const {
  MutexLock lock(mutex_);
  Idle idle{idle_.size(), idle_bytes_, last_taken_};
  for (const Expected& one : expected_) idle.expected.push_back(one.charge);
  return idle;
}

}  // namespace ckptfs
