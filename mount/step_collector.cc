// SPDX-License-Identifier: Apache-2.0

#include "mount/step_collector.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "mount/logging.h"

namespace ckptfs {

StepCollector::StepCollector(Store& store, const Retention& retention, Hooks hooks)
    : store_(store), retention_(retention), hooks_(std::move(hooks)) {
  if (retention_.given()) Reclaim();
  thread_ = std::thread([this] { Run(); });
}

StepCollector::~StepCollector() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  thread_.join();
}

void StepCollector::Ask(const std::string& run) {
  if (retention_.given()) Wake(run);
}

void StepCollector::Reclaim() { Wake(std::nullopt); }

void StepCollector::Wake(std::optional<std::string> run) {
  MutexLock lock(mutex_);
  asked_.insert(std::move(run));
  wake_.NotifyAll();
}

void StepCollector::Run() {
  for (;;) {
    std::optional<std::string> run;
    {
      MutexLock lock(mutex_);
      while (asked_.empty() && !stopping_) wake_.Wait(mutex_);
      if (stopping_) return;  // the next daemon goes on
      run = std::move(asked_.extract(asked_.begin()).value());
    }
    const Status done = Caught([&]() -> Status {
      Collect(run);
      return {};
    });
    if (!done) Log(LogLevel::kWarning, StrCat("retention: ", done.error().message));
  }
}

void StepCollector::Collect(const std::optional<std::string>& run) {
  CollectRequest request;
  request.run = run;
  request.keep_last = run ? retention_.keep_last : 0;
  request.keep_every = run ? retention_.keep_every : 0;
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
  failure_ = failure;
  if (!report) return;
  removed_ += report->removed.size();
  bytes_ += report->bytes;
  if (run) in_use_ = report->held.size();
}

std::string StepCollector::StatusJson() const {
  MutexLock lock(mutex_);
  const nlohmann::json status{{"removed", removed_},
                              {"in_use", in_use_},
                              {"reclaimed_bytes", bytes_},
                              {"last_failure", failure_}};
  return status.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace ckptfs
