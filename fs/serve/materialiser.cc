// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/materialiser.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr int kFills = 3;  // of a file whose sources are touched meanwhile

// A writable mapping of a whole file, up to the end of its last huge page.
class FillMapping {
 public:
  explicit FillMapping(const PagePool::File& file)
      : length_(AlignUp(file.size, kHugePage)),
        bytes_(mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd.get(), 0)) {}
  ~FillMapping() {
    if (ok()) munmap(bytes_, length_);
  }
  FillMapping(const FillMapping&) = delete;
  FillMapping& operator=(const FillMapping&) = delete;
  bool ok() const { return bytes_ != MAP_FAILED; }
  std::byte* bytes() const { return static_cast<std::byte*>(bytes_); }

 private:
  const uint64_t length_;
  void* const bytes_;
};

}  // namespace

Status Materialiser::FillFile(const PreparedPlan& plan, const PagePool::File& file) {
  if (file.size == 0) return {};
  const FillMapping mapping(file);
  if (!mapping.ok()) return Fail(ErrnoError(errno, "mapping a huge-page file"));
  // Its blocks end on multiples of huge pages: no two threads fault the same.
  CKPT_ASSIGN_OR_RETURN(const size_t read,
                        plan.reader().ReadParallel(0, {mapping.bytes(), file.size}));
  if (read == file.size) return {};
  return Fail(ErrorCode::kInternal, StrCat("the plan ended at ", read, " of ", file.size));
}

// Gives one use back when the last holder of a backing lets go.
class Materialiser::Loan {
 public:
  Loan(Materialiser& owner, uint64_t inode) : owner_(owner), inode_(inode) {}
  ~Loan() {
    if (counted_) owner_.Return(inode_);
  }
  void Count() { counted_ = true; }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

 private:
  Materialiser& owner_;
  const uint64_t inode_;
  bool counted_ = false;
};

Materialiser::~Materialiser() {
  MutexLock lock(mutex_);
  for (auto& [inode, entry] : entries_) {
    CKPT_CHECK(entry.users == 0);
    pool_->Discard(std::move(entry.file));
  }
}

std::shared_ptr<const Backing> Materialiser::Lend(uint64_t inode, Entry& entry) {
  entry.used = ++clock_;
  if (auto lent = entry.lent.lock()) return lent;
  // Counted when nothing can fail any more: giving back takes the lock held here.
  const auto loan = std::make_shared<Loan>(*this, inode);
  auto backing =
      std::make_shared<const Backing>(ServingMode::kMaterialise, entry.file.fd.get(), loan);
  loan->Count();
  ++entry.users;
  entry.lent = backing;
  return backing;
}

void Materialiser::Return(uint64_t inode) {
  MutexLock lock(mutex_);
  --entries_.at(inode).users;
}

Materialiser::BackingPtr Materialiser::FindFilled(uint64_t inode) {
  MutexLock lock(mutex_);
  while (true) {
    const auto found = entries_.find(inode);
    if (found == entries_.end()) return nullptr;
    if (!found->second.leaving) {
      ++counts_.hits;
      return Lend(inode, found->second);
    }
    changed_.Wait(mutex_);
  }
}

Result<Materialiser::BackingPtr> Materialiser::Acquire(InodeNumber inode,
                                                       const PreparedPlan& plan) {
  const auto number = static_cast<uint64_t>(inode);
  if (auto filled = FindFilled(number)) return filled;
  auto flight = filling_.Join(number);
  if (flight.leads()) {
    auto made = Caught([&] { return Make(number, plan); });
    flight.Land(made);
    return made;
  }
  auto landed = flight.Wait();
  if (landed) {
    MutexLock lock(mutex_);
    ++counts_.hits;
  }
  return landed;
}

Result<Materialiser::BackingPtr> Materialiser::Make(uint64_t inode, const PreparedPlan& plan) {
  if (auto filled = FindFilled(inode)) return filled;
  if (Full()) EvictOne();
  if (Full()) return Fail(ErrorCode::kExhausted, "too many materialised files are in use");
  pool_->ExpectNoMore(inode);
  CKPT_ASSIGN_OR_RETURN(PagePool::File file, FillNew(plan));
  MutexLock lock(mutex_);
  Entry& entry = entries_[inode];
  entry.file = std::move(file);
  entry.step = plan.step().record().manifest;
  ++counts_.fills;
  counts_.filled_bytes += entry.file.size;
  counts_.bytes += entry.file.size;
  return Lend(inode, entry);
}

// A source that moved meanwhile may have been read half before, half after.
Status Materialiser::FillOnce(const PreparedPlan& plan, const PagePool::File& file) {
  const MountedStep& step = plan.step();
  const uint64_t moved = step.blobs().moved();
  CKPT_RETURN_IF_ERROR(fill_(plan, file));
  CKPT_RETURN_IF_ERROR(step.CheckStampsAgain(plan.blobs()));
  if (step.blobs().moved() == moved) return {};
  return Fail(ErrorCode::kStale, "a source file was touched while it was read");
}

Result<PagePool::File> Materialiser::FillNew(const PreparedPlan& plan) {
  CKPT_ASSIGN_OR_RETURN(PagePool::File file, TakeRoom(plan.plan().size()));
  Status filled;
  for (int attempt = 0; attempt < kFills; ++attempt) {
    const Status good = Caught([&] { return plan.step().CheckStampsNow(plan.blobs()); });
    filled = good ? Caught([&] { return FillOnce(plan, file); }) : good;
    if (filled) return file;
    if (!good || filled.error().code != ErrorCode::kStale) break;
  }
  pool_->Give(std::move(file));
  return Fail(std::move(filled).error());
}

Result<PagePool::File> Materialiser::TakeRoom(uint64_t size) {
  while (true) {
    Result<PagePool::File> file = pool_->Take(size);
    if (file || file.error().code != ErrorCode::kExhausted) return file;
    if (AlignUp(size, kHugePage) > pool_->budget() || !EvictOne()) return file;
  }
}

std::vector<uint64_t> Materialiser::Evictable() const {
  std::vector<std::pair<uint64_t, uint64_t>> by_use;
  {
    MutexLock lock(mutex_);
    for (const auto& [inode, entry] : entries_) {
      if (!entry.leaving && entry.users == 0) by_use.emplace_back(entry.used, inode);
    }
  }
  std::sort(by_use.begin(), by_use.end());
  std::vector<uint64_t> inodes;
  inodes.reserve(by_use.size());
  for (const auto& [used, inode] : by_use) inodes.push_back(inode);
  return inodes;
}

bool Materialiser::TryEvict(uint64_t inode) {
  const PagePool::File* held = nullptr;  // its entry stays while it is leaving
  {
    MutexLock lock(mutex_);
    const auto found = entries_.find(inode);
    if (found == entries_.end() || found->second.leaving || found->second.users > 0) {
      return false;
    }
    found->second.leaving = true;
    held = &found->second.file;
  }
  const bool mapped = PagePool::IsMapped(*held);
  PagePool::File file;
  {
    MutexLock lock(mutex_);
    changed_.NotifyAll();
    if (mapped) {
      entries_.at(inode).leaving = false;
      return false;
    }
    file = std::move(entries_.at(inode).file);
    entries_.erase(inode);
    ++counts_.evictions;
    counts_.bytes -= file.size;
  }
  // Not Give: a pipe or a socket may still hold its pages (splice, sendfile),
  // which no lease tells, and would show what is written to them next.
  pool_->Discard(std::move(file));
  return true;
}

bool Materialiser::EvictOne() {
  const std::vector<uint64_t> inodes = Evictable();
  return std::any_of(inodes.begin(), inodes.end(),
                     [this](uint64_t inode) { return TryEvict(inode); });
}

bool Materialiser::Full() const {
  MutexLock lock(mutex_);
  return entries_.size() >= kMaxFiles;
}

bool Materialiser::IsFilled(InodeNumber inode) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(static_cast<uint64_t>(inode));
  return found != entries_.end() && !found->second.leaving;
}

void Materialiser::DropStep(const Digest& manifest) {
  MutexLock lock(mutex_);
  for (auto& [inode, entry] : entries_) {
    if (entry.step == manifest) entry.used = 0;
  }
}

Materialiser::Counts Materialiser::counts() const {
  MutexLock lock(mutex_);
  Counts counts = counts_;
  counts.files = entries_.size();
  return counts;
}

}  // namespace ckptfs
