// SPDX-License-Identifier: Apache-2.0

#include "snapshot/landing/landing.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <string_view>

#include "core/base/fault_point.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

// A quarter of the time after which a store that failed is asked again (QuestionQueue::Spent).
constexpr std::chrono::milliseconds kStoreRests{250};

AttemptName WithoutLife(const AttemptName& name) { return {name.run, name.job, name.attempt}; }

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

bool IsForStore(LandingAction action) {
  return action == LandingAction::kEnter || action == LandingAction::kPersist;
}

}  // namespace

std::string Landing::Save::title() const { return StrCat(what.name.run, "/", what.step); }

Landing::Landing(LandingOptions options)
    : options_(std::move(options)),
      worlds_(options_.commit == nullptr
                  ? nullptr
                  : std::make_unique<Worlds>(*options_.commit, options_.patience, options_.log)) {}

Landing::~Landing() {
  StopWorlds();
  Finish();
}

Status Landing::Start() {
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_.valid()) return Fail(ErrnoError(errno, "eventfd"));
  for (auto& save : options_.spooler ? options_.spooler->left() : std::vector<Spooler::SavePtr>()) {
    const bool all_here = save->part().ranks.size() == save->part().world;
    if (all_here || worlds_) Take(std::move(save), Clock::now());
  }
  {
    MutexLock lock(mutex_);
    phase_ = Phase::kRuns;
  }
  const auto failed = [this](const Error& error) { Say(StrCat("snapshots: ", error.message)); };
  store_.Start(
      Clock::now(), [this] { return StoreTurn(); }, failed);
  if (options_.spooler)
    show_.Start(
        Clock::now(), [this] { return ShowTurn(); }, failed);
  if (worlds_)
    world_.Start(
        Clock::now() + options_.turn, [this] { return WorldTurn(); }, failed);
  return {};
}

void Landing::Say(const std::string& line) const {
  if (options_.log) options_.log(line);
}

void Landing::WakeStore() {
  store_.Wake();
  show_.Wake();
  MutexLock lock(mutex_);
  stored_.NotifyAll();
}

void Landing::Signal() const {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof one);  // fails only if it is readable already
}

void Landing::Hear() const {
  uint64_t count = 0;
  (void)!read(wake_.get(), &count, sizeof count);  // fails only if it was not readable
}

// ---- what ranks have handed over -----------------------------------------------

void Landing::Take(ReceivedPart part) {
  Protector* const protector = protector_;
  if (protector != nullptr) protector->Take(part.name, part.step, part.world, part.files);
  if (std::ranges::any_of(part.files, [](const auto& one) { return one.second.unproved > 0; })) {
    MutexLock lock(mutex_);
    ++status_.unproved;
  }
  const auto first = part.first;
  const auto moves =
      options_.spooler != nullptr ? SaveBytes::Moves::kMay : SaveBytes::Moves::kNever;
  Take(SaveBytes::Of(std::move(part), moves), first);
}

// A rank that was not told repeats what the spool has.  A daemon may have two parts of an attempt:
// ranks come back one after the other.
bool Landing::IsSame(const Save& save, const PreparedPart& part) {
  if (save.what.name == part.name) {
    return std::ranges::all_of(part.ranks, [&](const PreparedRank& one) {
      return std::ranges::find(save.what.ranks, one.rank, &PreparedRank::rank) !=
             save.what.ranks.end();
    });
  }
  return save.all_here() && WithoutLife(save.what.name) == WithoutLife(part.name) &&
         save.what.step == part.step && save.what.ranks == part.ranks;
}

void Landing::Take(std::shared_ptr<SaveBytes> bytes, Clock::time_point first) {
  Save save{.what = bytes->part(), .first = first};
  const bool all_here = save.all_here();
  save.action = FirstAction(all_here);
  save.tries.begun = first;
  save.may_be_step = bytes->may_be_stored();
  if (!all_here || !save.may_be_step) save.place = save.what.Directory();
  save.bytes = std::move(bytes);
  {
    MutexLock lock(mutex_);
    if (std::ranges::any_of(saves_, [&](const Save& one) { return IsSame(one, save.what); }))
      return;
    if (options_.spooler && !save.bytes->left()) options_.spooler->Add(save.bytes);
    saves_.push_back(std::move(save));
  }
  if (!all_here) world_.Wake();
  WakeStore();
}

void Landing::NoteDrop(const std::string& line) {
  MutexLock lock(mutex_);
  ++status_.dropped;
  ++status_.dropped_for.incomplete;
  status_.last_drop = line;
}

std::shared_ptr<BlobStream> Landing::Stream(PreparedPart part, std::weak_ptr<const void> owner) {
  if (options_.spooler != nullptr && options_.spooler->waits()) return nullptr;
  const PreparedRank& rank = part.ranks.front();
  return options_.steps->Stream(part.PathOf(rank.rank), rank.bytes, std::move(owner));
}

std::vector<AttemptName> Landing::names() const {
  MutexLock lock(mutex_);
  std::vector<AttemptName> found;
  for (const Save& save : saves_) found.push_back(WithoutLife(save.what.name));
  return found;
}

// ---- its hands -----------------------------------------------------------------

Landing::Save* Landing::FirstToStore() {
  const auto found =
      std::ranges::find_if(saves_, [](const Save& save) { return IsForStore(save.action); });
  return found == saves_.end() ? nullptr : &*found;
}

Landing::Save* Landing::NextToStore(Clock::time_point now, Worker::Time& due) {
  due = Worker::kWhenWoken;
  std::set<std::string_view> runs;
  for (Save& save : saves_) {
    if (!IsForStore(save.action) || !runs.insert(save.what.name.run).second || save.busy) continue;
    if (ending_ || save.tries.due <= now) return &save;
    due = std::min(due, save.tries.due);
  }
  return nullptr;
}

Worker::Time Landing::StoreTurn() {
  Save* save = nullptr;
  std::optional<PartAgain> question;
  {
    MutexLock lock(mutex_);
    const auto now = Clock::now();
    const bool asks = phase_ == Phase::kRuns;
    if (asks) question = questions_.Next(now);
    if (!question) {
      Worker::Time due;
      save = NextToStore(now, due);
      if (save == nullptr) {
        return asks && !questions_.empty() ? std::min(due, questions_.Due(now)) : due;
      }
      save->busy = true;
    }
  }
  if (question) {
    LookFor(*question);
  } else {
    Land(*save);
  }
  return Clock::now();
}

void Landing::Land(Save& save) {
  if (options_.spooler && std::exchange(save.met, Meets::kStore) != Meets::kStore) {
    options_.spooler->Begin(*save.bytes);
  }
  if (ending_ && save.tries.failed > 0 && Leaves(save)) return;
  if (save.tries.failed == 0) save.tries.begun = Clock::now();  // before, others were first
  if (save.action == LandingAction::kEnter) {
    auto entered = Caught([&] { return options_.steps->Enter(save.bytes); });
    if (!entered) return Failed(save, std::move(entered).error());
    return Entered(save, *std::move(entered));
  }
  auto stored = Caught([&] { return options_.steps->Persist(save.record); });
  if (!stored) return Failed(save, std::move(stored).error());
  Conclude(save, LandingEvent::kPersisted, {},
           StepMaker::News{StepMaker::News::What::kPersisted, *std::move(stored)});
}

void Landing::Entered(Save& save, StepMaker::Entered entered) {
  save.record = std::move(entered.record);
  if (!entered.stored) return Advance(save, LandingEvent::kEntered);
  Conclude(save, LandingEvent::kFound, {},
           StepMaker::News{StepMaker::News::What::kPersisted, save.record});
}

// Shows saves that wait behind others.
Worker::Time Landing::ShowTurn() {
  Save* save = nullptr;
  {
    MutexLock lock(mutex_);
    const auto found = std::ranges::find_if(saves_, [](const Save& one) {
      return one.action == LandingAction::kEnter && !one.busy && one.met == Meets::kNothing;
    });
    if (found == saves_.end() || ending_) return Worker::kWhenWoken;
    save = &*found;
    save->busy = true;
  }
  auto entered = Caught([&] { return options_.steps->Enter(save->bytes); });
  if (entered) {
    Entered(*save, *std::move(entered));
  } else {  // tried again when it is its turn
    MutexLock lock(mutex_);
    save->busy = false;
    save->met = Meets::kMemory;
  }
  WakeStore();
  return Clock::now();
}

// ---- what became of a save -----------------------------------------------------

void Landing::Advance(Save& save, LandingEvent event) {
  FaultPoint();
  {
    MutexLock lock(mutex_);
    const LandingTransition* const row = TransitionOf(save.state, event);
    CKPT_CHECK(row != nullptr);
    save.tries = {};
    if (!save.all_here()) save.tries.begun = save.first;
    save.state = row->to;
    save.action = row->action;
    save.busy = false;
  }
  WakeStore();
}

void Landing::Failed(Save& save, Error error) {
  if (IsFinal(save.action, error.code)) {
    return GiveUp(save, LandingEvent::kRefused, std::move(error));
  }
  const bool disk = save.bytes->on_disk();
  if (options_.spooler) options_.spooler->Fails(*save.bytes);
  if (save.tries.failed == 0) {
    Say(StrCat("snapshot ", save.title(), " stays in ",
               disk ? "the spool: " : "memory: ", error.message));
  }
  {
    MutexLock lock(mutex_);
    status_.last_failure = StrCat(save.title(), ": ", error.message);
  }
  const bool ends = save.all_here() ? ending_ : worlds_ending_;
  if (ends && Leaves(save)) return;
  // A name that another's run has is not free again.
  const bool safe = save.bytes->on_disk() && error.code != ErrorCode::kExists;
  using Patience = RetryRule::Patience;
  const auto patience = ends ? Patience::kOnceMore : safe ? Patience::kForEver : Patience::kLimited;
  {
    MutexLock lock(mutex_);
    if (options_.retry.Again(save.tries, Clock::now(), patience)) {
      save.busy = false;
      return;
    }
  }
  GiveUp(save, LandingEvent::kGaveUp, std::move(error));
}

bool Landing::Leaves(Save& save) {
  if (options_.spooler == nullptr || !options_.spooler->Leave(*save.bytes)) return false;
  FaultPoint();
  Saves gone;  // its bytes go outside of the lock
  {
    MutexLock lock(mutex_);
    CKPT_CHECK(TransitionOf(save.state, LandingEvent::kLeft) != nullptr);
    const auto at = std::ranges::find_if(saves_, [&](const Save& one) { return &one == &save; });
    gone.splice(gone.end(), saves_, at);
  }
  WakeStore();
  return true;
}

void Landing::GiveUp(Save& save, LandingEvent event, Error error) {
  if (save.state == LandingState::kShown) {
    const Status released = Caught([&]() -> Status {
      options_.steps->Release(save.record);
      return {};
    });
    if (!released) Say(released.error().message);
  }
  if (!save.all_here()) Drop({WithoutLife(save.what.name), save.what.step, error.message});
  const bool disk = save.bytes && save.bytes->on_disk() && error.code == ErrorCode::kDataLoss;
  if (disk) error = std::move(error).WithContext(options_.spooler->directory());
  Conclude(save, event, Fail(std::move(error)),
           StepMaker::News{StepMaker::News::What::kInVain, {}});
}

void Landing::Conclude(Save& save, LandingEvent event, Status done,
                       const std::optional<StepMaker::News>& news) {
  FaultPoint();
  auto bytes = std::move(save.bytes);
  if (options_.spooler && bytes) options_.spooler->Over(*bytes);
  bytes.reset();  // whoever is told finds that the memory is free
  if (news) Tell(*news);
  const std::string title = save.title();
  if (!done) Say(StrCat("snapshot ", title, " dropped: ", done.error().message));
  Saves gone;
  {
    MutexLock lock(mutex_);
    CKPT_CHECK(TransitionOf(save.state, event) != nullptr);
    Tally(title, save.first, event, done);
    const auto& what = save.what;
    news_.over.push_back({WithoutLife(what.name), what.step, std::move(done), save.place});
    const auto at = std::ranges::find_if(saves_, [&](const Save& one) { return &one == &save; });
    gone.splice(gone.end(), saves_, at);
  }
  WakeStore();
  Signal();
}

// The listener may fail; the save is over all the same.
void Landing::Tell(const StepMaker::News& news) {
  const Status told = Caught([&]() -> Status {
    options_.steps->Tell(news);
    return {};
  });
  if (!told) Say(told.error().message);
}

void Landing::Tally(const std::string& title, Clock::time_point first, LandingEvent event,
                    const Status& done) {
  if (done) {
    ++status_.durable;
    status_.last_durable = title;
    status_.last_failure.clear();
    status_.durable_seconds += SecondsSince(first);
    const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
    status_.last_durable_ns = std::chrono::nanoseconds(since_1970).count();
    return;
  }
  ++status_.dropped;
  status_.last_drop = StrCat("snapshot ", title, " dropped: ", done.error().message);
  LandingStatus::Drops& drops = status_.dropped_for;
  ++(event == LandingEvent::kRefused              ? drops.refused
     : done.error().code == ErrorCode::kExhausted ? drops.exhausted
                                                  : drops.failed);
}

Landing::News Landing::TakeNews() {
  MutexLock lock(mutex_);
  return std::exchange(news_, {});
}

// ---- questions -----------------------------------------------------------------

void Landing::Ask(std::vector<PartAgain> questions) {
  if (questions.empty()) return;
  {
    MutexLock lock(mutex_);
    for (PartAgain& part : questions) {
      looked_for_.insert(part.name);
      questions_.Add(std::move(part));
    }
  }
  store_.Wake();
}

std::vector<AttemptName> Landing::ForgetOver(uint64_t asker) {
  MutexLock lock(mutex_);
  auto names = questions_.ForgetOver(asker);
  for (const AttemptName& name : names) looked_for_.erase(looked_for_.find(name));
  return names;
}

bool Landing::MayBeOver(const AttemptName& name) const {
  MutexLock lock(mutex_);
  return looked_for_.contains(name) ||
         std::ranges::any_of(news_.over, [&](const Outcome& one) { return one.name == name; });
}

void Landing::LookFor(const PartAgain& part) {
  const auto begin = Clock::now();
  // One that waits is told when that is over.
  bool waits = false;
  if (!part.place.empty()) {
    const auto here = names();
    waits = std::ranges::find(here, part.name) != here.end();
  }
  using Found = std::optional<StepRecord>;
  const Result<Found> looked = waits ? Result<Found>(std::nullopt)
                                     : Caught([&] { return options_.steps->FindStored(part); });
  const bool stored = looked && looked->has_value();
  if (!looked) Say(looked.error().message);
  {
    MutexLock lock(mutex_);
    questions_.Spent(Clock::now() - begin);
    if (!looked && part.over) {  // nobody else knows what became of it
      questions_.Spent(kStoreRests);
      questions_.Add(part);
      return;
    }
    looked_for_.erase(looked_for_.find(part.name));
    news_.answered.emplace_back(part.asker, part.name);
    if (stored || (part.over && !waits)) {
      news_.over.push_back(
          {part.name, part.step,
           stored ? Status() : Fail(ErrorCode::kNotFound, "it was dropped before")});
    }  // else the other parts may come
  }
  Signal();
}

// ---- the end -------------------------------------------------------------------

void Landing::End() {
  ending_ = true;
  WakeStore();
}

void Landing::Finish() {
  {
    MutexLock lock(mutex_);
    if (phase_ != Phase::kRuns) return;
    phase_ = Phase::kFinishes;
  }
  store_.Wake();
  {
    MutexLock lock(mutex_);
    while (FirstToStore() != nullptr) stored_.Wait(mutex_);
  }
  show_.Stop();
  store_.Stop();
}

LandingStatus Landing::status() const {
  MutexLock lock(mutex_);
  LandingStatus status = status_;
  for (const Save& save : saves_) {
    status.waiting += IsForStore(save.action) ? 1 : 0;
    status.oldest_waiting_seconds =
        std::max(status.oldest_waiting_seconds, SecondsSince(save.first));
    if (save.all_here()) continue;
    const bool leads = save.what.ranks.front().rank == 0;
    std::string what;
    if (save.state == LandingState::kWhole) {
      what = save.busy ? "this node's part is being written" : "this node's part is to be written";
    } else if (!save.missing.empty()) {
      what = StrCat("waiting for ", RanksOf(save.missing));
    } else if (leads || save.turns >= kFirstLook || save.state == LandingState::kDecided) {
      what = "is being published";
    } else {
      what = "waiting for other nodes";
    }
    status.steps.push_back(StrCat(save.title(), ": ", what));
  }
  return status;
}

}  // namespace ckptfs
