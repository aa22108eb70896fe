// SPDX-License-Identifier: Apache-2.0

#include "core/blob/blob_reader.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <unordered_map>

#include "core/base/checked_math.h"
#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/blob/bus_guard.h"
#include "core/blob/file_stamp.h"
#include "core/blob/fingerprint.h"

namespace ckptfs {
namespace {

constexpr size_t kStripes = 64;
// The kernel reads no more of one madvise than the device's read-ahead or its
// largest request, and drops the rest.
constexpr uint64_t kReadAheadCall = 128 << 10;

uint64_t PageSize() {
  static const uint64_t size = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return size;
}

// Good enough for recency and for check intervals, and cheap.
int64_t CoarseNow() {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

class FileMapping final : public BlobReader::Mapping {
 public:
  FileMapping(BlobIndex blob, void* address, size_t length, int64_t now)
      : next_check(now), last_use(now) {
    blob_ = blob;
    bytes_ = {static_cast<const std::byte*>(address), length};
  }
  ~FileMapping() override {
    if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }

  mutable std::atomic<int64_t> next_check;  // when the stamp is compared again
  mutable std::atomic<int64_t> last_use;
};

using MappingPointer = std::shared_ptr<const FileMapping>;

// The mappings of the blobs whose index is the stripe's modulo kStripes.
struct Stripe {
  Mutex mutex;
  std::unordered_map<uint32_t, MappingPointer> open GUARDED_BY(mutex);
};

Result<MappingPointer> MapFile(const OpenedFile& opened, const std::string& path, BlobIndex index) {
  const auto size = static_cast<size_t>(opened.status.st_size);
  void* address = nullptr;
  if (size > 0) {
    address = mmap(nullptr, size, PROT_READ, MAP_SHARED, opened.file.get(), 0);
    if (address == MAP_FAILED) return Fail(ErrnoError(errno, StrCat("mmap ", path)));
  }
  return std::make_shared<const FileMapping>(index, address, size, CoarseNow());
}

}  // namespace

struct BlobReader::State {
  State(const StepModel& step, Options wanted)
      : model(step),
        options(std::move(wanted)),
        interval_ns(std::chrono::nanoseconds(options.check_interval).count()) {}

  Stripe& StripeOf(BlobIndex blob) { return stripes[static_cast<uint32_t>(blob) % kStripes]; }
  MappingPointer FindOpen(BlobIndex blob);
  MappingPointer Insert(MappingPointer mapping);
  void Drop(const FileMapping& mapping);
  std::vector<MappingPointer> AllOpen();
  void Recycle();

  const StepModel& model;
  const Options options;
  const int64_t interval_ns;
  FileCheck files;
  std::array<Stripe, kStripes> stripes;
  std::atomic<size_t> open_count{0};
  std::atomic<uint64_t> bytes_read{0};
};

MappingPointer BlobReader::State::FindOpen(BlobIndex blob) {
  Stripe& stripe = StripeOf(blob);
  MutexLock lock(stripe.mutex);
  const auto it = stripe.open.find(static_cast<uint32_t>(blob));
  return it == stripe.open.end() ? nullptr : it->second;
}

// The mapping kept for the blob: another thread's if it was faster.
MappingPointer BlobReader::State::Insert(MappingPointer mapping) {
  Stripe& stripe = StripeOf(mapping->blob());
  MutexLock lock(stripe.mutex);
  const auto [it, inserted] =
      stripe.open.try_emplace(static_cast<uint32_t>(mapping->blob()), mapping);
  if (inserted) open_count.fetch_add(1, std::memory_order_relaxed);
  return it->second;
}

void BlobReader::State::Drop(const FileMapping& mapping) {
  MappingPointer victim;  // unmapped after the lock is gone
  Stripe& stripe = StripeOf(mapping.blob());
  MutexLock lock(stripe.mutex);
  const auto it = stripe.open.find(static_cast<uint32_t>(mapping.blob()));
  if (it == stripe.open.end() || it->second.get() != &mapping) return;
  victim = std::move(it->second);
  stripe.open.erase(it);
  open_count.fetch_sub(1, std::memory_order_relaxed);
}

std::vector<MappingPointer> BlobReader::State::AllOpen() {
  std::vector<MappingPointer> all;
  for (Stripe& stripe : stripes) {
    MutexLock lock(stripe.mutex);
    for (const auto& [index, mapping] : stripe.open) all.push_back(mapping);
  }
  return all;
}

// Drops the least recently used eighth when more than max_open are mapped, so
// that the scan is paid once per max_open / 8 opens.
void BlobReader::State::Recycle() {
  const size_t limit = std::max<size_t>(options.max_open, 1);
  if (open_count.load(std::memory_order_relaxed) <= limit) return;
  std::vector<MappingPointer> all = AllOpen();
  if (all.size() <= limit) return;
  const size_t surplus = std::min(all.size() - limit + limit / 8, all.size());
  const auto older = [](const MappingPointer& a, const MappingPointer& b) {
    return a->last_use.load(std::memory_order_relaxed) <
           b->last_use.load(std::memory_order_relaxed);
  };
  std::nth_element(all.begin(), all.begin() + static_cast<ptrdiff_t>(surplus - 1), all.end(),
                   older);
  for (size_t i = 0; i < surplus; ++i) Drop(*all[i]);
}

std::unique_ptr<BlobReader> BlobReader::Create(const StepModel& model, Options options) {
  return std::unique_ptr<BlobReader>(
      new BlobReader(std::make_unique<State>(model, std::move(options))));
}

BlobReader::BlobReader(std::unique_ptr<State> state) : state_(std::move(state)) {}
BlobReader::~BlobReader() = default;

const std::string& BlobReader::RootOf(BlobIndex blob) const {
  const std::string& root = state_->model.roots.at(state_->model.blob(blob).root);
  const auto moved = state_->options.roots.find(root);
  return moved == state_->options.roots.end() ? root : moved->second;
}

std::string BlobReader::PathOf(BlobIndex blob) const {
  return StrCat(RootOf(blob), "/", state_->model.blob(blob).path);
}

Result<OpenedFile> BlobReader::Open(BlobIndex blob) const {
  const Blob& described = state_->model.blob(blob);
  CKPT_ASSIGN_OR_RETURN(OpenedFile opened, OpenBeneath(RootOf(blob), described.path));
  CKPT_RETURN_IF_ERROR(
      state_->files.CheckOpen(opened.file.get(), PathOf(blob), blob, described));
  return opened;
}

Status BlobReader::Check(BlobIndex blob, FoundFile* found) {
  const Blob& described = state_->model.blob(blob);
  const std::string path = PathOf(blob);
  FoundFile here;
  // One call where there is no link, which is nearly everywhere.
  if (lstat(path.c_str(), &here.status) != 0) return Fail(ErrnoError(errno, path));
  if (S_ISLNK(here.status.st_mode)) {
    CKPT_ASSIGN_OR_RETURN(const RootDirectory root, RootDirectory::Open(RootOf(blob)));
    CKPT_ASSIGN_OR_RETURN(here, root.Look(described.path));
  } else {
    here.access = {here.status.st_mode & 0777u, here.status.st_uid, here.status.st_gid, false};
  }
  if (!S_ISREG(here.status.st_mode)) {
    return Fail(ErrorCode::kInvalid, StrCat(path, " is not a regular file"));
  }
  const BlobStamp now = StampOf(here.status);
  if (found != nullptr) *found = std::move(here);
  if (CompareStamps(path, described.stamp, now) || state_->files.IsExcused(blob, now)) return {};
  // Times may have moved alone: what is opened is compared as bytes, too.
  const auto opened = Open(blob);
  return opened ? Status() : Fail(opened.error());
}

Status BlobReader::CheckAgain(BlobIndex blob) {
  return state_->files.CheckAgain(PathOf(blob), blob, state_->model.blob(blob));
}

Status BlobReader::CheckOpen() {
  for (const MappingPointer& mapping : state_->AllOpen()) {
    CKPT_RETURN_IF_ERROR(CheckAgain(mapping->blob()));
  }
  return {};
}

Result<std::shared_ptr<const BlobReader::Mapping>> BlobReader::Map(BlobIndex blob) {
  if (static_cast<uint32_t>(blob) >= state_->model.blobs.size()) {
    return Fail(ErrorCode::kInvalid, StrCat("no blob ", static_cast<uint32_t>(blob)));
  }
  const int64_t now = CoarseNow();
  if (MappingPointer open = state_->FindOpen(blob)) {
    if (open->last_use.load(std::memory_order_relaxed) != now) {
      open->last_use.store(now, std::memory_order_relaxed);
    }
    int64_t due = open->next_check.load(std::memory_order_relaxed);
    // One thread compares; the others go on with what was compared last.
    if (now >= due && open->next_check.compare_exchange_strong(due, now + state_->interval_ns)) {
      if (Status same = Check(blob); !same) {
        state_->Drop(*open);
        return Fail(std::move(same).error());
      }
    }
    return open;
  }
  CKPT_ASSIGN_OR_RETURN(const OpenedFile opened, Open(blob));
  CKPT_ASSIGN_OR_RETURN(MappingPointer fresh, MapFile(opened, PathOf(blob), blob));
  fresh->next_check.store(now + state_->interval_ns, std::memory_order_relaxed);
  MappingPointer kept = state_->Insert(std::move(fresh));
  state_->Recycle();
  return kept;
}

void BlobReader::Prefetch(const Mapping& mapping, uint64_t offset, uint64_t length) {
  const std::span<const std::byte> bytes = mapping.bytes();
  if (offset >= bytes.size()) return;
  const uint64_t begin = offset & ~(PageSize() - 1);
  const uint64_t end = offset + std::min<uint64_t>(length, bytes.size() - offset);
  for (uint64_t at = begin; at < end; at += kReadAheadCall) {
    // Only a hint: what cannot be read ahead is read when it is copied.
    (void)madvise(const_cast<std::byte*>(bytes.data()) + at, std::min(kReadAheadCall, end - at),
                  MADV_WILLNEED);
  }
}

bool BlobReader::Resident(const Mapping& mapping, uint64_t offset) {
  if (offset >= mapping.bytes().size()) return true;
  const uint64_t page = offset & ~(PageSize() - 1);
  unsigned char resident = 1;
  (void)mincore(const_cast<std::byte*>(mapping.bytes().data()) + page, 1, &resident);
  return (resident & 1) != 0;
}

Error BlobReader::Vanished(BlobIndex blob) const {
  return Error{ErrorCode::kDataLoss, StrCat(PathOf(blob),
                                            " no longer holds all bytes it had when it was opened "
                                            "(truncated, or its device failed)")};
}

Status BlobReader::Guard(BlobIndex blob, void (*function)(void*), void* context) {
  const std::byte* address = nullptr;
  if (!RunGuarded(function, context, &address)) return Fail(Vanished(blob));
  return {};
}

Status BlobReader::Read(BlobIndex blob, uint64_t offset, std::span<std::byte> out) {
  CKPT_ASSIGN_OR_RETURN(const std::shared_ptr<const Mapping> mapping, Map(blob));
  if (!RangeInside(offset, out.size(), mapping->bytes().size())) {
    return Fail(ErrorCode::kDataLoss,
                StrCat(PathOf(blob), " has ", mapping->bytes().size(), " bytes; bytes ", offset,
                       " + ", out.size(), " are not there"));
  }
  struct Copy {
    const std::byte* from;
    std::byte* to;
    size_t length;
  } copy{mapping->bytes().data() + offset, out.data(), out.size()};
  if (!Resident(*mapping, offset)) Prefetch(*mapping, offset, out.size());
  CKPT_RETURN_IF_ERROR(Guard(
      blob,
      [](void* context) {
        const Copy& todo = *static_cast<Copy*>(context);
        if (todo.length > 0) std::memcpy(todo.to, todo.from, todo.length);
      },
      &copy));
  CountRead(out.size());
  return {};
}

uint64_t BlobReader::bytes_read() const {
  return state_->bytes_read.load(std::memory_order_relaxed);
}

void BlobReader::CountRead(uint64_t bytes) {
  state_->bytes_read.fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace ckptfs
