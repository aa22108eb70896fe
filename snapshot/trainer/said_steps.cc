// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/said_steps.h"

#include <utility>

namespace ckptfs {

bool SaidSteps::Attempt::Ended() const {
  return shelved || (!said.empty() && said.back().word == SnapshotWord::kEnd);
}

bool SaidSteps::Attempt::Dropped() const {
  return !said.empty() && said.back().word == SnapshotWord::kDrop;
}

bool SaidSteps::Add(const SnapshotMessage& message) {
  const auto at = attempts_.try_emplace(message.attempt).first;
  if (at->second.muted) {
    const bool last = message.word == SnapshotWord::kEnd || message.word == SnapshotWord::kDrop;
    if (last) attempts_.erase(at);
    return false;
  }
  at->second.said.push_back(message);
  return true;
}

std::optional<SnapshotMessage> SaidSteps::Next() const {
  for (const auto& [number, attempt] : attempts_) {
    if (attempt.sent < attempt.said.size()) return attempt.said[attempt.sent];
  }
  return std::nullopt;
}

void SaidSteps::Sent(uint64_t attempt) {
  const auto at = attempts_.find(attempt);
  if (at == attempts_.end()) return;  // the answer was faster
  ++at->second.sent;
  // A drop is not always answered.
  if (at->second.Dropped() && at->second.sent == at->second.said.size()) attempts_.erase(at);
}

void SaidSteps::Shelve(uint64_t attempt, const std::string& place) {
  const auto at = attempts_.find(attempt);
  if (at == attempts_.end() || at->second.shelved || !at->second.Ended()) return;
  SnapshotMessage ask{SnapshotWord::kAsk};
  ask.attempt = attempt;
  ask.step = at->second.said.front().step;
  ask.text = place;
  at->second = {{ask}, 1, at->second.settled, false, true};
}

void SaidSteps::Settle(uint64_t attempt) {
  const auto at = attempts_.find(attempt);
  if (at == attempts_.end()) return;
  at->second.settled = true;
  if (at->second.Ended()) attempts_.erase(at);
}

bool SaidSteps::empty() const {
  for (const auto& [number, attempt] : attempts_) {
    if (!attempt.settled && !attempt.muted && !attempt.Dropped()) return false;
  }
  return true;
}

void SaidSteps::Restart() {
  for (auto& [number, attempt] : attempts_) {
    attempt.sent = 0;
    if (attempt.Dropped()) {
      attempt.said = {attempt.said.back()};
    } else if (attempt.settled) {
      attempt.muted = true;
    }
    if (attempt.muted) attempt.said.clear();
    if (!attempt.said.empty() && attempt.said.front().word == SnapshotWord::kBegin) {
      attempt.said.front().chunk = 1;
    }
  }
}

bool SaidSteps::Has(uint64_t attempt) const {
  const auto at = attempts_.find(attempt);
  return at != attempts_.end() && !at->second.muted && !at->second.shelved;
}

std::vector<uint64_t> SaidSteps::Chunks() const {
  std::vector<uint64_t> chunks;
  for (const auto& [number, attempt] : attempts_) {
    for (const SnapshotMessage& message : attempt.said) {
      if (message.word == SnapshotWord::kChunk) chunks.push_back(message.chunk);
    }
  }
  return chunks;
}

}  // namespace ckptfs
