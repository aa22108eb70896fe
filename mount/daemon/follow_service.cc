// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/follow_service.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "core/adopt/adopt.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "formats/families/shipped.h"
#include "formats/registry.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kPolled{2};  // where changes are not heard
constexpr std::chrono::seconds kLinks{10};  // where a link was given, whose change nobody hears
constexpr size_t kShown = 100;              // steps that wait, in a status

// One that a job will make is not there yet; a path that leads nowhere is a mistake.
Status CheckDirectory(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    const int error = errno;
    const std::string above = std::filesystem::path(path).parent_path();
    if (error != ENOENT) return Fail(ErrnoError(error, path));
    if (::stat(above.c_str(), &info) != 0) {
      return Fail(Error{ErrorCode::kNotFound, StrCat(path,
                                                     ": does not exist, and neither "
                                                     "does ",
                                                     above, ", which should contain it")}
                      .Needing("make that directory first, or correct the path"));
    }
  }
  if (S_ISDIR(info.st_mode)) return {};
  return Fail(ErrorCode::kInvalid, StrCat(path, ": not a directory; a job saves into a directory"));
}

}  // namespace

Status FollowService::Check(const std::string& store, const AdoptRequest& request) {
  CKPT_ASSIGN_OR_RETURN(const std::string path, AbsolutePath(request.ingest.path));
  CKPT_RETURN_IF_ERROR(CheckDirectory(path));
  return request.ownership == Ownership::kLink ? CheckLinks(store, path) : Status();
}

FollowService::FollowService(Store& store, Hooks hooks, TreeWatch watch)
    : store_(store), hooks_(std::move(hooks)), watch_(std::move(watch)) {}

Result<std::unique_ptr<FollowService>> FollowService::Create(Store& store,
                                                             const AdoptRequest& request,
                                                             Hooks hooks) {
  CKPT_ASSIGN_OR_RETURN(const std::string path, AbsolutePath(request.ingest.path));
  CKPT_RETURN_IF_ERROR(Check(store.directory(), request));
  CKPT_ASSIGN_OR_RETURN(TreeWatch watch, TreeWatch::Create(path));
  std::unique_ptr<FollowService> service(
      new FollowService(store, std::move(hooks), std::move(watch)));
  CKPT_ASSIGN_OR_RETURN(service->families_, ShippedFamilies());
  Follower::Options options;
  CKPT_ASSIGN_OR_RETURN(options.adopt,
                        AdoptOptionsOf(store.directory(), request, service->families_));
  service->link_ = request.ingest.link;
  service->run_ = RunNameOf(request.name, path, options.adopt.hints.names).value_or("");
  service->sources_ = MakeSources();
  service->follower_ =
      std::make_unique<Follower>(store, path, service->sources_, std::move(options));
  service->first_ = service->Look();
  service->SayIdle(true);
  return service;
}

// Tells once what is waited for; tells what is there and will never be read also when it
// comes later.
void FollowService::SayIdle(bool first) {
  const Follower::Idle& idle = follower_->idle();
  const bool news = first || (idle.unread && !told_unread_);
  told_unread_ = told_unread_ || idle.unread;
  if (news && !idle.why.empty()) hooks_.say(idle.why);
}

// A link to the current run ("runs/current") may be made to lead to the next one.
void FollowService::SaySwitched() {
  const auto now =
      link_.empty() ? Result<std::string>(follower_->directory()) : AbsolutePath(link_);
  if (!now) return;  // it is being made anew
  std::string text;
  if (*now != follower_->directory()) {
    text = StrCat(link_, " leads to ", *now, " now, but ", follower_->directory(),
                  " is followed: a mount that follows the new one shows its steps");
  }
  {
    const MutexLock lock(mutex_);
    if (text == status_.switched) return;
    status_.switched = text;
  }
  if (!text.empty()) hooks_.say(text);
}

FollowService::~FollowService() {
  Stop();
  worker_.Stop();
}

std::vector<StepRecord> FollowService::Look() {
  Follower::Seen seen;
  const auto begin = Clock::now();
  const Status looked = Caught([&]() -> Status {
    seen = follower_->Look(Clock::now());
    return {};
  });
  if (!looked) {  // a step that cannot be told of must not end who serves the others
    hooks_.say(StrCat(follower_->directory(), ": ", looked.error().message));
    seen.next = seen.earliest = Clock::now() + kPolled;
  }
  const bool hears = watch_.hears();
  earliest_ = seen.earliest;
  next_ = std::max(earliest_, hears ? seen.next : std::min(seen.next, Clock::now() + kPolled));
  if (!link_.empty()) next_ = std::min(next_, Clock::now() + kLinks);
  for (const std::string& line : seen.said) hooks_.say(line);
  if (!seen.withdrawn.empty()) hooks_.withdrawn(seen.withdrawn);
  if (!seen.adopted.empty()) hooks_.adopted(seen.adopted);
  const MutexLock lock(mutex_);
  status_.hears = hears;
  Count(seen, std::chrono::duration<double>(Clock::now() - begin).count());
  if (!seen.adopted.empty()) run_ = seen.adopted.back().run;
  return std::move(seen.adopted);
}

void FollowService::Count(const Follower::Seen& seen, double look_seconds) {
  FollowStatus& now = status_;
  now.look_seconds += look_seconds;
  now.adopted += seen.adopted.size();
  now.adopted -= std::min(now.adopted, seen.withdrawn.size());
  now.adopted_total += seen.adopted.size();
  now.withdrawn_total += seen.withdrawn.size();
  CountCommitted(seen);
  if (!seen.adopted.empty()) {
    const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
    now.last_adopted_ns = std::chrono::nanoseconds(since_1970).count();
    const int64_t lag = now.last_adopted_ns - seen.adopted.back().mtime_ns;
    now.lag_seconds = static_cast<double>(std::max<int64_t>(lag, 0)) / 1e9;
  }
  now.waiting = follower_->waiting();
  now.idle = follower_->idle().why;
  now.waiting_steps = now.left_behind_steps = now.refused_steps = 0;
  for (const Follower::Waiting& step : now.waiting) {
    ++(step.left_behind ? now.left_behind_steps
       : step.refused   ? now.refused_steps
                        : now.waiting_steps);
  }
  if (now.waiting.size() > kShown) now.waiting.resize(kShown);
}

void FollowService::CountCommitted(const Follower::Seen& seen) {
  std::vector<StepRecord>& committed = status_.committed;
  const auto same = [](const StepRecord& as) {
    return [&as](const StepRecord& one) { return one.run == as.run && one.id == as.id; };
  };
  for (const StepRecord& gone : seen.withdrawn) std::erase_if(committed, same(gone));
  for (const StepRecord& sure : seen.confirmed) {
    const auto found = std::ranges::find_if(committed, same(sure));
    if (found != committed.end()) found->provisional = false;
  }
  for (const StepRecord& fresh : seen.adopted) {
    std::erase_if(committed, same(fresh));
    committed.push_back(fresh);
  }
  if (committed.size() <= kShown) return;
  committed.erase(committed.begin(), committed.end() - static_cast<std::ptrdiff_t>(kShown));
}

void FollowService::Start() {
  worker_.Start(Clock::now(), [this] { return Turn(); });
}

// Waits for changes, which wake it, not for the time of its next turn.
Worker::Time FollowService::Turn() {
  const auto left = [](Follower::Time end) {
    return std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
  };
  watch_.Wait(left(next_));
  while (!worker_.stopping() && Clock::now() < earliest_) watch_.Wait(left(earliest_));
  if (worker_.stopping()) return Worker::kWhenWoken;
  Look();
  SayIdle(false);
  SaySwitched();
  return Clock::now();
}

void FollowService::Stop() {
  worker_.Ask();
  watch_.Wake();
}

FollowStatus FollowService::status() const {
  const MutexLock lock(mutex_);
  FollowStatus status = status_;
  status.path = follower_->directory();
  status.run = run_;
  return status;
}

}  // namespace ckptfs
