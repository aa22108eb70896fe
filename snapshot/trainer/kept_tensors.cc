// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/kept_tensors.h"

#include <algorithm>
#include <utility>

namespace ckptfs {
namespace {

constexpr uint64_t kMostWhole = 1024;

}  // namespace

std::string HeadOf(std::span<const std::byte> bytes) {
  const auto head = bytes.first(std::min(bytes.size(), kHeadBytes));
  return {reinterpret_cast<const char*>(head.data()), head.size()};
}

void TensorDigests::Take(uint64_t begin, std::span<const std::byte> bytes) {
  const uint64_t end = begin + bytes.size();
  for (; next_ < all_.size(); ++next_) {
    One& one = all_[next_];
    if (one.entry.begin >= end) return;
    if (one.wanted) {
      const uint64_t from = std::max(begin, one.entry.begin);
      const uint64_t to = std::min(end, one.entry.end);
      stream_.Add(bytes.subspan(from - begin, to - from));
    }
    if (one.entry.end > end) return;
    if (one.wanted) one.digest = stream_.Finish();
  }
}

std::optional<KeptTensors::Place> KeptTensors::Find(const SafetensorsEntry& entry,
                                                    std::span<const std::byte> now) const {
  Held held;
  {
    MutexLock lock(mutex_);
    const auto found = held_.find(entry.name);
    if (rest_ > 0 || found == held_.end()) return {};
    if (!found->second.IsLike(entry) || !found->second.digest) return {};
    if (found->second.head != HeadOf(now)) return {};
    for (const auto& [attempt, pending] : pending_) {
      if (!pending.kept.contains(entry.name)) return {};
    }
    held = found->second;
  }
  if (DigestOf(now) != *held.digest) return {};
  return std::move(held.place);
}

bool KeptTensors::IsWanted(const SafetensorsEntry& entry, std::string_view head) const {
  MutexLock lock(mutex_);
  const auto found = held_.find(entry.name);
  return found == held_.end() || !found->second.IsLike(entry) || found->second.head == head;
}

void KeptTensors::Begin(uint64_t attempt, std::shared_ptr<const TensorDigests> digests,
                        std::set<std::string> kept, uint64_t bytes) {
  MutexLock lock(mutex_);
  pending_[attempt] = {std::move(digests), std::move(kept), bytes};
}

void KeptTensors::Durable(uint64_t attempt, const std::string& place) {
  MutexLock lock(mutex_);
  const auto node = pending_.extract(attempt);
  if (node.empty() || attempt < last_) return;
  last_ = attempt;
  if (!node.mapped().kept.empty()) pause_ = 1;
  if (node.mapped().kept.empty() && rest_ > 0) --rest_;
  std::map<std::string, Held> held;
  for (const std::string& key : node.mapped().kept) {
    if (auto there = held_.extract(key); !there.empty()) held.insert(std::move(there));
  }
  for (const TensorDigests::One& one : node.mapped().digests->all()) {
    held[one.entry.name] = {one.entry.dtype, one.entry.shape, one.head, one.digest,
                            Place{place, node.mapped().bytes}};
  }
  held_ = place.empty() ? std::map<std::string, Held>() : std::move(held);
}

void KeptTensors::Forget(uint64_t attempt) {
  MutexLock lock(mutex_);
  pending_.erase(attempt);
}

void KeptTensors::Refused(uint64_t attempt) {
  MutexLock lock(mutex_);
  const auto node = pending_.extract(attempt);
  if (node.empty() || node.mapped().kept.empty()) return;
  held_.clear();
  rest_ = pause_;
  pause_ = std::min(2 * pause_, kMostWhole);
}

}  // namespace ckptfs
