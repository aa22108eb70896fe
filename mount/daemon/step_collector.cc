// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/step_collector.h"

#include <algorithm>
#include <utility>

#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "mount/logging.h"

namespace ckptfs {
namespace {

constexpr std::chrono::steady_clock::duration kFirstPause = std::chrono::seconds(2);
constexpr std::chrono::steady_clock::duration kLastPause = std::chrono::minutes(5);

}  // namespace

StepCollector::StepCollector(Store& store, const Retention& retention, Hooks hooks)
    : store_(store), hooks_(std::move(hooks)), retention_(retention) {
  if (retention.given()) Reclaim();
  worker_.Start(Clock::now(), [this] { return Turn(); });
}

// The next daemon does what this one leaves undone.
StepCollector::~StepCollector() { worker_.Stop(); }

void StepCollector::Ask(const std::string& run) {
  if (retention().given()) Wake(run);
}

void StepCollector::SetRetention(const Retention& retention) {
  MutexLock lock(mutex_);
  retention_ = retention;
}

Retention StepCollector::retention() const {
  MutexLock lock(mutex_);
  return retention_;
}

void StepCollector::Reclaim() { Wake(std::nullopt); }

void StepCollector::Wake(std::optional<std::string> run) {
  {
    MutexLock lock(mutex_);
    asked_.insert_or_assign(std::move(run), Look{Clock::now(), kFirstPause});
  }
  worker_.Wake();
}

Worker::Time StepCollector::Turn() {
  std::optional<std::string> run;
  Clock::duration pause{};
  {
    MutexLock lock(mutex_);
    const auto next =
        std::min_element(asked_.begin(), asked_.end(),
                         [](const auto& a, const auto& b) { return a.second.due < b.second.due; });
    if (next == asked_.end()) return Worker::kWhenWoken;
    if (next->second.due > Clock::now()) return next->second.due;
    const auto node = asked_.extract(next);
    run = node.key();
    pause = node.mapped().pause;
  }
  bool held = false;
  const Status done = Caught([&]() -> Status {
    held = Collect(run);
    return {};
  });
  if (!done) Log(LogLevel::kWarning, StrCat("retention: ", done.error().message));
  if (held) {
    MutexLock lock(mutex_);
    asked_.try_emplace(run, Look{Clock::now() + pause, std::min(2 * pause, kLastPause)});
  }
  return Clock::now();  // another run's look may be due
}

bool StepCollector::Collect(const std::optional<std::string>& run) {
  CollectRequest request;
  request.run = run;
  const Retention policy = retention();
  request.keep_last = run ? policy.keep_last : 0;
  request.keep_every = run ? policy.keep_every : 0;
  request.let_go = hooks_.let_go;
  const auto report = store_.Collect(request);
  const std::string failure = report ? "" : report.error().message;
  if (!report) Log(LogLevel::kWarning, StrCat("retention: ", failure));
  if (report && hooks_.removed) {
    for (const StepRecord& record : report->removed) hooks_.removed(record);
  }
  for (const std::string& note : report ? report->notes : std::vector<std::string>()) {
    Log(LogLevel::kWarning, StrCat("retention: ", note));
  }
  MutexLock lock(mutex_);
  status_.last_failure = failure;
  if (!report) return false;
  status_.removed += report->removed.size();
  status_.reclaimed_bytes += report->bytes;
  if (run) status_.in_use = report->held.size();
  return report->busy != 0 || !report->held.empty();
}

CollectorStatus StepCollector::status() const {
  MutexLock lock(mutex_);
  return status_;
}

}  // namespace ckptfs
