// SPDX-License-Identifier: Apache-2.0

#include "snapshot/landing/spooler.h"

#include <algorithm>
#include <utility>

#include "core/base/single_flight.h"
#include "core/base/strings.h"

namespace ckptfs {

Spooler::Spooler(OpenedSpool opened, SpoolerOptions options)
    : options_(std::move(options)), spool_(std::move(opened.spool)) {
  for (const std::string& note : opened.notes) options_.log(note);
  for (PreparedPart& part : opened.left) {
    const uint64_t bytes = BytesOf(part);
    auto save = SaveBytes::OnDisk(std::move(part), *spool_->files());
    if (!save) {
      options_.log(StrCat("spool: ", save.error().message));
      continue;
    }
    entries_.push_back({*std::move(save), bytes, Clock::time_point::max()});
    used_ += bytes;
  }
  worker_.Start(Clock::now(), [this] { return Turn(); });
}

std::vector<Spooler::SavePtr> Spooler::left() const {
  MutexLock lock(mutex_);
  std::vector<SavePtr> found;
  for (const Entry& entry : entries_) {
    if (entry.save->left()) found.push_back(entry.save);
  }
  return found;
}

Spooler::Entries::iterator Spooler::Find(const SaveBytes& save) {
  return std::find_if(entries_.begin(), entries_.end(),
                      [&](const Entry& entry) { return entry.save.get() == &save; });
}

bool Spooler::AnyWaits() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.waits; });
}

bool Spooler::waits() const {
  MutexLock lock(mutex_);
  return AnyWaits();
}

// ---- what happens to saves -----------------------------------------------------

void Spooler::Add(SavePtr save) {
  const auto now = Clock::now();
  const uint64_t bytes = BytesOf(save->part());
  MutexLock lock(mutex_);
  const bool behind = AnyWaits();
  if (ending_) save->End();
  entries_.push_back({std::move(save), bytes, now});
  if (!behind && !ending_) entries_.back().due += options_.patience;
  moved_.NotifyAll();
  worker_.Wake();
}

void Spooler::Begin(const SaveBytes& save) {
  MutexLock lock(mutex_);
  const auto entry = Find(save);
  if (entry == entries_.end() || ending_) return;
  entry->due = std::max(entry->due, Clock::now() + options_.patience);
}

void Spooler::Fails(const SaveBytes& save) {
  MutexLock lock(mutex_);
  const auto entry = Find(save);
  if (entry == entries_.end() || entry->tried) return;
  entry->due = std::min(entry->due, Clock::now());
  moved_.NotifyAll();
  worker_.Wake();
}

void Spooler::Stored(const SaveBytes& save) {
  MutexLock lock(mutex_);
  const auto entry = Find(save);
  if (entry != entries_.end()) entry->waits = false;
}

void Spooler::Over(const SaveBytes& save) {
  uint64_t bytes = 0;
  SavePtr gone;
  {
    MutexLock lock(mutex_);
    const auto entry = Find(save);
    if (entry == entries_.end()) return;
    entry->waits = false;
    entry->over = true;
    if (entry->writing) return;  // its writer sees that
    bytes = entry->bytes;
    gone = std::move(entry->save);
    entries_.erase(entry);
  }
  if (gone->on_disk()) Forget(*gone, bytes);
}

void Spooler::Forget(const SaveBytes& save, uint64_t bytes) {
  const Status removed = Caught([&] { return spool_->Remove(save.part()); });
  if (!removed) options_.log(StrCat("spool: ", removed.error().message));
  MutexLock lock(mutex_);
  used_ -= bytes;
  moved_.NotifyAll();
  worker_.Wake();
}

void Spooler::End() {
  MutexLock lock(mutex_);
  ending_ = true;
  for (Entry& entry : entries_) {
    entry.save->End();
    entry.due = std::min(entry.due, Clock::now());
  }
  moved_.NotifyAll();
  worker_.Wake();
}

bool Spooler::Leave(SaveBytes& save) {
  MutexLock lock(mutex_);
  auto entry = Find(save);
  if (entry == entries_.end()) return false;
  entry->tried = false;
  entry->due = Clock::now();
  worker_.Wake();
  while (!save.on_disk() && !entry->tried) moved_.Wait(mutex_);
  if (save.on_disk()) save.Leave();
  return save.on_disk();
}

// ---- its thread ----------------------------------------------------------------

Spooler::Entries::iterator Spooler::Next(Clock::time_point& again) {
  const auto now = Clock::now();
  again = Clock::time_point::max();
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if (!entry->waits || entry->save->on_disk()) continue;
    if (entry->due > now) {
      again = std::min(again, entry->due);
      continue;
    }
    if (used_ + entry->bytes <= options_.budget) return entry;
    full_ += std::exchange(entry->full, true) ? 0 : 1;
    if (!std::exchange(entry->tried, true)) moved_.NotifyAll();
  }
  return entries_.end();
}

Worker::Time Spooler::Turn() {
  Entries::iterator entry;
  {
    MutexLock lock(mutex_);
    Clock::time_point again;
    entry = Next(again);
    if (entry == entries_.end()) return again;
    entry->writing = true;
    used_ += entry->bytes;
  }
  Wrote(entry, Caught([&] { return Write(*entry->save); }));
  return Clock::now();
}

Status Spooler::Write(SaveBytes& save) {
  CKPT_RETURN_IF_ERROR(spool_->Write(save.part(), save));
  Status moved = save.MoveTo(*spool_->files());
  if (!moved) (void)spool_->Remove(save.part());
  return moved;
}

void Spooler::Wrote(Entries::iterator entry, const Status& done) {
  SavePtr over;
  uint64_t bytes = 0;
  std::string line;
  {
    MutexLock lock(mutex_);
    entry->writing = false;
    entry->tried = true;
    bytes = entry->bytes;
    if (!done) {
      used_ -= bytes;
      // The store must refuse bytes that changed in the arena.
      const bool lost = done.error().code == ErrorCode::kDataLoss;
      // It is safe in memory, and tried as long as the store does not have it.
      (void)options_.retry.Again(entry->tries, Clock::now(), RetryRule::Patience::kForEver);
      entry->due = lost ? Clock::time_point::max() : entry->tries.due;
      failed_ += lost ? 0 : 1;
      const std::string& why = done.error().message;
      if (!lost && last_failure_ != why) line = StrCat("spool: saves stay in memory: ", why);
      if (!lost) last_failure_ = why;
    } else {
      ++spooled_;
      last_failure_.clear();
    }
    if (entry->over) {
      over = std::move(entry->save);
      entries_.erase(entry);
    }
    moved_.NotifyAll();
  }
  if (!line.empty()) options_.log(line);
  if (over && done) Forget(*over, bytes);
}

SpoolerStatus Spooler::status() const {
  MutexLock lock(mutex_);
  const auto saves =
      std::ranges::count_if(entries_, [](const Entry& entry) { return entry.save->on_disk(); });
  return {.directory = directory(),
          .saves = static_cast<uint64_t>(saves),
          .bytes = used_,
          .budget = options_.budget,
          .spooled = spooled_,
          .full = full_,
          .failed = failed_,
          .last_failure = last_failure_};
}

}  // namespace ckptfs
