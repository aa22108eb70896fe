// SPDX-License-Identifier: Apache-2.0

#include "snapshot/landing/question_queue.h"

#include <algorithm>
#include <utility>

namespace ckptfs {

void QuestionQueue::Add(PartAgain question) {
  auto& queue = of_[question.asker];
  if (queue.empty()) order_.push_back(question.asker);
  queue.push_back(std::move(question));
}

std::vector<AttemptName> QuestionQueue::ForgetOver(uint64_t asker) {
  std::vector<AttemptName> over;
  const auto at = of_.find(asker);
  if (at == of_.end()) return over;
  std::erase_if(at->second, [&](const PartAgain& question) {
    if (question.over) over.push_back(question.name);
    return question.over;
  });
  if (at->second.empty()) {
    of_.erase(at);
    std::erase(order_, asker);
  }
  return over;
}

void QuestionQueue::Count(Time now) {
  if (now <= counted_) return;
  credit_ = std::min(kMostCredit, credit_ + (now - counted_) / kShare);
  counted_ = now;
}

QuestionQueue::Time QuestionQueue::Due(Time now) {
  Count(now);
  if (credit_ > Clock::duration::zero()) return now;
  return now + (Clock::duration(1) - credit_) * kShare;
}

std::optional<PartAgain> QuestionQueue::Next(Time now) {
  if (order_.empty() || Due(now) > now) return std::nullopt;
  const uint64_t asker = order_.front();
  order_.pop_front();
  const auto at = of_.find(asker);
  PartAgain question = std::move(at->second.front());
  at->second.pop_front();
  if (at->second.empty()) {
    of_.erase(at);
  } else {
    order_.push_back(asker);
  }
  return question;
}

}  // namespace ckptfs
