// SPDX-License-Identifier: Apache-2.0
//
// A SnapshotWriter's links: the daemon that it has, the arena that is made before the first save,
// and the page-locking of arenas.

#include <algorithm>
#include <utility>

#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "snapshot/trainer/writer_state.h"

namespace ckptfs {
namespace {

using Clock = SaveJob::Clock;
using LinkPtr = std::shared_ptr<SnapshotLink>;
using Interrupted = SnapshotLink::Interrupted;

constexpr std::chrono::seconds kSlowAnswer{1};
constexpr uint64_t kPinned = uint64_t{64} << 20;  // bytes at a time: the driver's locks are held
constexpr std::chrono::milliseconds kLookSlice{200};  // between looks if a wait is interrupted

}  // namespace

// Returns a link whose arena has room for captures of this size.  A daemon that is slow
// to say no (it is stopped, say) is asked a tenth of the time at most: training goes on.
Result<LinkPtr> SnapshotWriter::State::Connected(uint64_t bytes, const Interrupted& asked) {
  CKPT_RETURN_IF_ERROR(AwaitAhead(asked));
  const auto start = Clock::now();
  const uint64_t door = SnapshotDoorOf(options.store);
  if (start < next_greeting && door == silent && !(link && link->connected())) {
    return Fail(ErrorCode::kIo, "the daemon did not answer; it will be asked again later");
  }
  bool interrupted = false;  // an interrupt says nothing of the daemon
  auto connected = Greet(bytes, [&] { return interrupted = asked && asked(); });
  const auto now = Clock::now();
  if (!connected && !interrupted && now - start >= kSlowAnswer) {
    next_greeting = now + 9 * (now - start);
    silent = door;
  }
  return connected;
}

Result<LinkPtr> SnapshotWriter::State::Greet(uint64_t bytes, const Interrupted& asked) {
  const uint32_t slots = std::max<uint32_t>(options.slots, 1);
  if (link && (link->gone() || !link->Fits(bytes, slots))) {
    retired.push_back(std::exchange(link, nullptr));
  }
  uint64_t attempt = 0;  // the attempt that is being saved
  std::vector<LinkPtr> over;
  {
    MutexLock lock(mutex);
    attempt = last_attempt;
    for (auto& one : retired) {
      if (one->gone() || !HasUnderWay(one.get())) over.push_back(std::exchange(one, nullptr));
    }
  }
  std::erase(retired, nullptr);
  if (link) {
    CKPT_RETURN_IF_ERROR(link->ComeBack(asked));
    return link;
  }
  over.clear();  // before more is asked for: the daemon may have room for one arena only
  CKPT_ASSIGN_OR_RETURN(link, OpenLink(bytes, attempt, asked));
  MutexLock lock(mutex);
  status.connected = link->connected();  // its reader may have told of that first
  return link;
}

Result<LinkPtr> SnapshotWriter::State::OpenLink(uint64_t bytes, uint64_t attempt,
                                                const Interrupted& asked) {
  const uint32_t slots = std::max<uint32_t>(options.slots, 1);
  const LinkRequest request{
      options.store, options.run, options.job, options.rank,       options.world,        bytes,
      slots,         life,        attempt,     options.away_limit, options.welcome_limit};
  const auto hear = [this](auto& from, auto news, auto& words) { Hear(from, news, words); };
  CKPT_ASSIGN_OR_RETURN(auto opened, SnapshotLink::Open(request, hear, asked));
  MutexLock lock(mutex);
  status.arena_bytes = opened->shape().bytes();
  status.pinned_bytes = 0;
  return opened;
}

// Opens a link before the first save.
void SnapshotWriter::State::MakeAhead(uint64_t bytes, int device) {
  LinkPtr made;
  (void)Caught([&]() -> Status {
    CKPT_ASSIGN_OR_RETURN(made, OpenLink(bytes, 0, [this] {
                            MutexLock lock(mutex);
                            return stopping;
                          }));
    PinArena(*made, device);
    return {};
  });
  MutexLock lock(mutex);
  ready = std::move(made);
  making = false;
  moved.NotifyAll();
}

// Takes the link that was opened ahead, when it is there.
Status SnapshotWriter::State::AwaitAhead(const Interrupted& asked) {
  while (true) {
    {
      MutexLock lock(mutex);
      const auto slice = Clock::now() + kLookSlice;
      while (making && moved.WaitUntil(mutex, slice)) {
      }
      if (!making) {
        if (!ready) return {};
        link = std::move(ready);
        status.connected = link->connected();
        return {};
      }
    }
    if (asked && asked()) return Fail(ErrorCode::kIo, "interrupted while the arena was made");
  }
}

// Begins to page-lock an arena.
void SnapshotWriter::State::PinArena(SnapshotLink& of, int device) {
  const uint64_t chunk = of.shape().chunk_bytes;
  const uint64_t piece = std::max<uint64_t>(1, kPinned / chunk) * chunk;
  of.KeepPinned(std::make_unique<ArenaPinner>(
      of.arena().All(), piece,
      [this, device](std::span<std::byte> memory) { return eager_copier->Pin(memory, device); },
      [this](uint64_t pinned, const std::string& why) {
        MutexLock lock(mutex);
        status.pinned_bytes = pinned;
        if (why.empty() || std::exchange(said_unpinned, why) == why) return;
        Say(StrCat("the memory for snapshots could not be page-locked (", why,
                   "): copies out of devices are slower, and updates wait for them; it is tried "
                   "again"));
      }));
}

}  // namespace ckptfs
