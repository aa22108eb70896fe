// SPDX-License-Identifier: Apache-2.0

#include "core/blob/blob_reader.h"

#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <unordered_map>

#include "core/base/checked_math.h"
#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/blob/fingerprint.h"
#include "core/io/bus_guard.h"
#include "core/io/file_root.h"
#include "core/io/file_stamp.h"

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

class OpenBlob final : public BlobReader::Held {
 public:
  OpenBlob(BlobIndex blob, std::shared_ptr<const Mapping> mapping, int64_t now)
      : next_check(now), last_use(now), mapping_(std::move(mapping)) {
    blob_ = blob;
    size_ = mapping_->bytes().size();
    // Never null, so that it tells what is mapped also of an empty file.
    mapped_ = size_ == 0 ? &kNothing : mapping_->bytes().data();
  }
  OpenBlob(BlobIndex blob, BlockCache::Source source, int64_t now)
      : next_check(now), last_use(now) {
    blob_ = blob;
    size_ = source.file->size();
    source_ = std::move(source);
  }

  mutable std::atomic<int64_t> next_check;  // when the stamp is compared again
  mutable std::atomic<int64_t> last_use;

 private:
  static constexpr std::byte kNothing{};
  const std::shared_ptr<const Mapping> mapping_;
};

using OpenPointer = std::shared_ptr<const OpenBlob>;

// The open blobs whose index is the stripe's modulo kStripes.  No Lru: its lock
// would be taken by every run of every read; here recency is an atomic of the
// blob, and finding the oldest ones is paid once per max_open / 8 opens.
struct Stripe {
  Mutex mutex;
  std::unordered_map<uint32_t, OpenPointer> open GUARDED_BY(mutex);
};

// Another key for other bytes, as far as the stamp tells that the file has when it is opened.
Digest KeyOf(const File& file, const FileStamp& stamp) {
  return DigestOf(StrCat(file.name(), "\n", stamp.size, " ", stamp.mtime_ns, " ", stamp.ctime_ns,
                         " ", stamp.inode));
}

const std::byte* PageOf(const std::byte* byte) {
  return reinterpret_cast<const std::byte*>(reinterpret_cast<uintptr_t>(byte) & ~(PageSize() - 1));
}

std::vector<std::shared_ptr<const Root>> RootsOf(const StepModel& model,
                                                 const BlobReader::Options& options) {
  std::vector<std::shared_ptr<const Root>> roots;
  for (const std::string& name : model.roots) {
    const auto open = options.open_roots.find(name);
    const auto moved = options.roots.find(name);
    roots.push_back(open != options.open_roots.end() ? open->second
                    : moved != options.roots.end()   ? std::make_shared<FileRoot>(moved->second)
                                                     : std::make_shared<FileRoot>(name));
  }
  return roots;
}

}  // namespace

struct BlobReader::State {
  State(const StepModel& step, Options wanted)
      : model(step),
        options(std::move(wanted)),
        interval_ns(std::chrono::nanoseconds(options.check_interval).count()),
        files(options.touched),
        roots(RootsOf(step, options)),
        far(!std::all_of(roots.begin(), roots.end(), [](const auto& r) { return r->local(); })),
        cache(options.cache) {}

  Stripe& StripeOf(BlobIndex blob) { return stripes[static_cast<uint32_t>(blob) % kStripes]; }
  OpenPointer FindOpen(BlobIndex blob);
  OpenPointer Insert(OpenPointer held);
  Result<OpenPointer> Open(const std::shared_ptr<const File>& file, BlobIndex blob);
  void Drop(const OpenBlob& held);
  std::vector<OpenPointer> AllOpen();
  void Recycle();

  const StepModel& model;
  const Options options;
  const int64_t interval_ns;
  FileCheck files;
  const std::vector<std::shared_ptr<const Root>> roots;  // of the model, in its order
  const bool far;
  Mutex cache_mutex;
  std::shared_ptr<BlockCache> cache GUARDED_BY(cache_mutex);
  std::array<Stripe, kStripes> stripes;
  std::atomic<size_t> open_count{0};
  std::atomic<uint64_t> bytes_read{0};
};

OpenPointer BlobReader::State::FindOpen(BlobIndex blob) {
  Stripe& stripe = StripeOf(blob);
  MutexLock lock(stripe.mutex);
  const auto it = stripe.open.find(static_cast<uint32_t>(blob));
  return it == stripe.open.end() ? nullptr : it->second;
}

// Returns what the cache holds for the blob, which another thread may have put there first.
OpenPointer BlobReader::State::Insert(OpenPointer held) {
  Stripe& stripe = StripeOf(held->blob());
  MutexLock lock(stripe.mutex);
  const auto [it, inserted] = stripe.open.try_emplace(static_cast<uint32_t>(held->blob()), held);
  if (inserted) open_count.fetch_add(1, std::memory_order_relaxed);
  return it->second;
}

void BlobReader::State::Drop(const OpenBlob& held) {
  OpenPointer victim;  // let go after the lock is gone
  Stripe& stripe = StripeOf(held.blob());
  MutexLock lock(stripe.mutex);
  const auto it = stripe.open.find(static_cast<uint32_t>(held.blob()));
  if (it == stripe.open.end() || it->second.get() != &held) return;
  victim = std::move(it->second);
  stripe.open.erase(it);
  open_count.fetch_sub(1, std::memory_order_relaxed);
}

std::vector<OpenPointer> BlobReader::State::AllOpen() {
  std::vector<OpenPointer> all;
  for (Stripe& stripe : stripes) {
    MutexLock lock(stripe.mutex);
    for (const auto& [index, held] : stripe.open) all.push_back(held);
  }
  return all;
}

// Drops the least recently used eighth when more than max_open are open, so
// that the scan is paid once per max_open / 8 opens.
void BlobReader::State::Recycle() {
  const size_t limit = std::max<size_t>(options.max_open, 1);
  if (open_count.load(std::memory_order_relaxed) <= limit) return;
  std::vector<OpenPointer> all = AllOpen();
  if (all.size() <= limit) return;
  const size_t surplus = std::min(all.size() - limit + limit / 8, all.size());
  const auto older = [](const OpenPointer& a, const OpenPointer& b) {
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

const Root& BlobReader::RootOf(BlobIndex blob) const {
  return *state_->roots.at(state_->model.blob(blob).root);
}

std::string BlobReader::PathOf(BlobIndex blob) const {
  return RootOf(blob).PathOf(state_->model.blob(blob).path);
}

bool BlobReader::far() const { return state_->far; }

BlockCache& BlobReader::cache() const {
  MutexLock lock(state_->cache_mutex);
  if (!state_->cache) state_->cache = std::make_shared<BlockCache>(BlockCache::Options{});
  return *state_->cache;
}

Result<std::shared_ptr<const File>> BlobReader::Open(BlobIndex blob) const {
  if (static_cast<uint32_t>(blob) >= state_->model.blobs.size()) {
    return Fail(ErrorCode::kInvalid, StrCat("no blob ", static_cast<uint32_t>(blob)));
  }
  const Blob& described = state_->model.blob(blob);
  CKPT_ASSIGN_OR_RETURN(const auto file, RootOf(blob).Open(described.path));
  CKPT_RETURN_IF_ERROR(state_->files.CheckOpen(*file, blob, described));
  return file;
}

Result<OpenPointer> BlobReader::State::Open(const std::shared_ptr<const File>& file,
                                            BlobIndex blob) {
  CKPT_ASSIGN_OR_RETURN(auto mapping, file->Map());
  if (mapping) return std::make_shared<const OpenBlob>(blob, std::move(mapping), CoarseNow());
  // Not the stamp that was adopted: blocks of a file that was touched since are not those of it.
  CKPT_ASSIGN_OR_RETURN(const FileIdentity identity, file->Identity());
  BlockCache::Source source{file, KeyOf(*file, identity.stamp)};
  return std::make_shared<const OpenBlob>(blob, std::move(source), CoarseNow());
}

Result<Look> BlobReader::LookAt(BlobIndex blob, std::optional<EntryStat>* found) {
  const Blob& described = state_->model.blob(blob);
  CKPT_ASSIGN_OR_RETURN(const EntryStat now, StatFile(RootOf(blob), described.path));
  if (found != nullptr) *found = now;
  return state_->files.LookAt(PathOf(blob), now.stamp, blob, described);
}

Status BlobReader::Check(BlobIndex blob, std::optional<EntryStat>* found) {
  CKPT_ASSIGN_OR_RETURN(const Look look, LookAt(blob, found));
  if (look == Look::kNothing) return {};
  // Times moved alone: what is opened is compared as bytes, too.
  const auto opened = Open(blob);
  return opened ? Status() : Fail(opened.error());
}

Status BlobReader::CheckAgain(BlobIndex blob) {
  const Blob& described = state_->model.blob(blob);
  CKPT_ASSIGN_OR_RETURN(const EntryStat now, StatFile(RootOf(blob), described.path));
  return CheckAgain(blob, now.stamp);
}

Status BlobReader::CheckAgain(BlobIndex blob, const FileStamp& now) {
  return state_->files.CheckAgain(PathOf(blob), now, blob, state_->model.blob(blob));
}

Status BlobReader::CheckOpen() {
  for (const OpenPointer& held : state_->AllOpen()) {
    CKPT_RETURN_IF_ERROR(CheckAgain(held->blob()));
  }
  if (moved() == 0) return {};
  return Fail(ErrorCode::kStale, "a source file was touched while it was read");
}

uint64_t BlobReader::moved() const { return state_->files.moved(); }

Result<std::shared_ptr<const BlobReader::Held>> BlobReader::Hold(BlobIndex blob) {
  const int64_t now = CoarseNow();
  if (OpenPointer open = state_->FindOpen(blob)) {
    if (open->last_use.load(std::memory_order_relaxed) != now) {
      open->last_use.store(now, std::memory_order_relaxed);
    }
    int64_t due = open->next_check.load(std::memory_order_relaxed);
    // One thread looks; the others go on with what was compared last.
    if (now < due || !open->next_check.compare_exchange_strong(due, now + state_->interval_ns)) {
      return open;
    }
    const auto look = LookAt(blob);
    if (look && *look == Look::kNothing) return open;
    // Nobody goes on with it while its bytes are compared, which may take long.
    state_->Drop(*open);
    if (!look) return Fail(Error(look.error()));
  }
  CKPT_ASSIGN_OR_RETURN(const std::shared_ptr<const File> file, Open(blob));
  CKPT_ASSIGN_OR_RETURN(OpenPointer fresh, state_->Open(file, blob));
  fresh->next_check.store(now + state_->interval_ns, std::memory_order_relaxed);
  OpenPointer kept = state_->Insert(std::move(fresh));
  state_->Recycle();
  return kept;
}

void BlobReader::Prefetch(const Held& held, uint64_t offset, uint64_t length) {
  if (offset >= held.size() || length == 0) return;
  const uint64_t end = offset + std::min<uint64_t>(length, held.size() - offset);
  const std::byte* const stop = held.mapped() + end;
  for (const std::byte* at = PageOf(held.mapped() + offset); at < stop; at += kReadAheadCall) {
    // Only a hint: what cannot be read ahead is read when it is copied.
    (void)madvise(const_cast<std::byte*>(at),
                  std::min(kReadAheadCall, static_cast<uint64_t>(stop - at)), MADV_WILLNEED);
  }
}

bool BlobReader::Resident(const Held& held, uint64_t offset) {
  if (offset >= held.size()) return true;
  if (held.mapped() == nullptr) {
    return cache().Has({&held.source(), offset / cache().block()});
  }
  unsigned char resident = 1;
  (void)mincore(const_cast<std::byte*>(PageOf(held.mapped() + offset)), 1, &resident);
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
  CKPT_ASSIGN_OR_RETURN(const std::shared_ptr<const Held> held, Hold(blob));
  if (!RangeInside(offset, out.size(), held->size())) {
    return Fail(ErrorCode::kDataLoss, StrCat(PathOf(blob), " has ", held->size(), " bytes; bytes ",
                                             offset, " + ", out.size(), " are not there"));
  }
  CountRead(out.size());
  if (held->mapped() == nullptr) return cache().Read(held->source(), offset, out);
  struct Copy {
    const std::byte* from;
    std::byte* to;
    size_t length;
  } copy{held->mapped() + offset, out.data(), out.size()};
  if (!Resident(*held, offset)) Prefetch(*held, offset, out.size());
  return Guard(
      blob,
      [](void* context) {
        const Copy& todo = *static_cast<Copy*>(context);
        if (todo.length > 0) std::memcpy(todo.to, todo.from, todo.length);
      },
      &copy);
}

uint64_t BlobReader::bytes_read() const {
  return state_->bytes_read.load(std::memory_order_relaxed);
}

void BlobReader::CountRead(uint64_t bytes) {
  state_->bytes_read.fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace ckptfs
