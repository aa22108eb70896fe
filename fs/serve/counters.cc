// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/counters.h"

namespace ckptfs {

std::string_view RequestName(Request request) {
  switch (request) {
    case Request::kLookup: return "lookup";
    case Request::kForget: return "forget";
    case Request::kAttributes: return "getattr";
    case Request::kReadLink: return "readlink";
    case Request::kReadDirectory: return "readdir";
    case Request::kOpen: return "open";
    case Request::kRead: return "read";
    case Request::kRelease: return "release";
  }
  return "lookup";
}

void Counters::CountOpen(RecentOpen open) {
  const auto mode = static_cast<size_t>(open.mode);
  opens_[mode].value.fetch_add(1, std::memory_order_relaxed);
  opened_bytes_[mode].value.fetch_add(open.size, std::memory_order_relaxed);
  MutexLock lock(mutex_);
  if (recent_opens_.size() >= kRecent) recent_opens_.pop_front();
  recent_opens_.push_back(std::move(open));
}

void Counters::CountError(const Error& error) {
  if (error.code == ErrorCode::kNotFound) return;
  MutexLock lock(mutex_);
  ++errors_[std::string(ErrorCodeName(error.code))];
  if (!recent_errors_.empty() && recent_errors_.back() == error.message) return;
  if (recent_errors_.size() >= kRecent) recent_errors_.pop_front();
  recent_errors_.push_back(error.message);
}

void Counters::CountRefusal(ErrorCode code) {
  MutexLock lock(mutex_);
  ++errors_[std::string(ErrorCodeName(code))];
}

std::map<std::string, uint64_t> Counters::Errors() const {
  std::map<std::string, uint64_t> errors;
  for (int code = 0; code <= static_cast<int>(ErrorCode::kInternal); ++code) {
    errors[std::string(ErrorCodeName(static_cast<ErrorCode>(code)))] = 0;
  }
  errors.erase(std::string(ErrorCodeName(ErrorCode::kNotFound)));  // CountError leaves it out
  MutexLock lock(mutex_);
  for (const auto& [name, count] : errors_) errors[name] = count;
  return errors;
}

std::vector<std::string> Counters::RecentErrors() const {
  MutexLock lock(mutex_);
  return {recent_errors_.begin(), recent_errors_.end()};
}

std::vector<RecentOpen> Counters::RecentOpens() const {
  MutexLock lock(mutex_);
  return {recent_opens_.begin(), recent_opens_.end()};
}

}  // namespace ckptfs
