// SPDX-License-Identifier: Apache-2.0

#include "core/follow/follow.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "core/adopt/written.h"
#include "core/base/digest.h"
#include "core/base/strings.h"
#include "core/io/file_stamp.h"
#include "core/store/lives.h"

namespace ckptfs {
namespace {

constexpr std::chrono::seconds kPoll{10};  // whatever may or may not be heard
constexpr std::chrono::milliseconds kBreath{200};
constexpr int kBusy = 10;              // looking takes at most one part in so many of a processor
constexpr size_t kMaxFiles = 100'000;  // of a step whose files' times are looked at
constexpr size_t kMaxGrowing = 64;     // files of a step that only become longer
constexpr std::chrono::seconds kSurelyOld{60};  // by the clock of the files' machine

void AppendEntry(std::string& text, const std::string& path, const FileStamp& stamp) {
  text += StrCat(path, '\0', stamp.size, ' ', stamp.mtime_ns, '\n');
}

// The files of the step, those below it, too, unless it is the save directory itself; of very
// many the first.  Links to directories are not followed: they may lead in circles.
Result<std::vector<std::string>> FilesOf(const StepCandidate& step) {
  const Root& root = *step.root;
  CKPT_ASSIGN_OR_RETURN(const EntryStat itself, root.Stat(step.Own()));
  if (itself.kind != EntryKind::kDirectory) return std::vector{step.Own()};
  std::vector<std::string> files;
  std::vector<std::string> folders = {step.Own()};
  while (!folders.empty() && files.size() < kMaxFiles) {
    const std::string folder = std::move(folders.back());
    folders.pop_back();
    const auto entries = root.List(folder);
    if (!entries && folder == step.Own()) return Fail(entries.error());
    if (!entries) continue;  // somebody else's, or it went
    for (const RootEntry& entry : *entries) {
      const bool deeper = entry.kind == EntryKind::kDirectory && entry.link.empty();
      if (deeper && step.Own() != step.save) folders.push_back(JoinPath(folder, entry.name));
      if (entry.kind == EntryKind::kFile) files.push_back(JoinPath(folder, entry.name));
    }
  }
  return files;
}

// Not of its ctime: we may link it.
uint64_t HashOfFile(const std::string& path, const FileStamp& stamp) {
  return HashOf(StrCat(path, '\0', stamp.size, ' ', stamp.mtime_ns, ' ', stamp.inode));
}

std::optional<uint64_t> HashIfThere(const Root& root, const std::string& path) {
  const auto there = StatIfThere(root, path);
  return there && *there ? std::optional(HashOfFile(path, (*there)->stamp)) : std::nullopt;
}

std::vector<uint64_t> HashesOf(const std::map<std::string, FileStamp>& files) {
  std::vector<uint64_t> out;
  out.reserve(files.size());
  for (const auto& [path, stamp] : files) out.push_back(HashOfFile(path, stamp));
  std::ranges::sort(out);
  return out;
}

std::shared_ptr<const std::set<std::string>> NamesOf(
    const std::map<std::string, FileStamp>& files) {
  std::set<std::string> out;
  for (const auto& [path, _] : files) out.insert(path);
  return std::make_shared<const std::set<std::string>>(std::move(out));
}

auto OrderOf(const StepCandidate& step) { return std::pair(step.iteration, step.mtime_ns); }

// True if an error may be gone the next time though no file changed.
bool MayPass(ErrorCode code) {
  return code == ErrorCode::kIo || code == ErrorCode::kExhausted || code == ErrorCode::kStale ||
         code == ErrorCode::kNotFound || code == ErrorCode::kInternal;
}

// True for a step that is whole: what is cut off, is written or goes is not.
bool IsRefusal(ErrorCode code) {
  return code != ErrorCode::kInvalid && code != ErrorCode::kStale && code != ErrorCode::kNotFound;
}

}  // namespace

struct Follower::Files {
  Digest digest;
  int64_t newest_ns = 0;  // of the files, not of what they lie in
  std::map<std::string, FileStamp> stamps;

  static Result<Files> Of(const StepCandidate& step) {
    CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesOf(step));
    std::string text;
    Files out;
    for (size_t i = 0; i < files.size() && i < kMaxFiles; ++i) {
      CKPT_ASSIGN_OR_RETURN(const auto there, StatIfThere(*step.root, files[i]));
      if (!there) continue;
      AppendEntry(text, files[i], there->stamp);
      out.newest_ns = std::max(out.newest_ns, there->stamp.mtime_ns);
      out.stamps.emplace(files[i], there->stamp);
    }
    text += StrCat(files.size());
    out.digest = DigestOf(text);
    return out;
  }
};

Follower::Follower(Store& store, std::string directory, Sources sources, Options options)
    : store_(store), directory_(std::move(directory)), sources_(sources), options_([&] {
        options.adopt.refresh = options.adopt.ownership == Ownership::kReference;
        return std::move(options);
      }()) {}

void Follower::DropPointers(ScanResult& found) {
  pointer_.clear();
  std::erase_if(found.steps, [&](const FoundStep& step) {
    if (!step.candidate.pointer) return false;
    const SaveState state = step.source->StateOf(step.candidate, options_.adopt.source,
                                                 SaveHistory{.listings = listings_});
    if (state.missing && pointer_.empty()) pointer_ = state.missing->message;
    return true;
  });
}

Result<ScanResult> Follower::Find() {
  CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(directory_));
  CKPT_ASSIGN_OR_RETURN(ScanResult found, ScanIfAny(place, sources_, options_.adopt.hints));
  DropPointers(found);
  // It is renamed when it is whole; what was named was the directory itself, whatever it is called.
  std::erase_if(found.steps, [&](const FoundStep& step) {
    const std::string& own = step.candidate.Own();
    return own != place.directory && options_.adopt.hints.names.IsTemporary(LastComponent(own));
  });
  std::vector<std::string> directories;
  for (const FoundStep& step : found.steps) directories.push_back(step.candidate.SavePath());
  std::vector<FoundSave> saves;
  for (size_t i = 0; i < found.steps.size(); ++i) {
    const StepCandidate& step = found.steps[i].candidate;
    saves.push_back(
        {directories[i], step.iteration, step.mtime_ns, step.converted, step.latest, step.version});
  }
  found.steps = InOrder(std::move(found.steps), OrderOfSaves(saves));
  return found;
}

Follower::Duration Follower::QuietOf(const Known& known, SavePhase phase) const {
  if (phase == SavePhase::kAllButLast) return options_.missing_quiet;
  const bool sealed = phase == SavePhase::kSealed && known.growing.empty();
  return sealed ? options_.quiet : options_.unsealed_quiet;
}

SaveState Follower::StateOf(const FoundStep& found, const Known& known) const {
  StepCandidate step = found.candidate;
  if (known.last_hash && HashIfThere(*step.root, known.last) == known.last_hash) {
    return SaveState{SavePhase::kResaved, known.last, {}};
  }
  if (!known.growing.empty()) {
    step.mtime_ns = 0;
    for (const auto& [path, stamp] : known.files) {
      if (!known.growing.contains(path)) step.mtime_ns = std::max(step.mtime_ns, stamp.mtime_ns);
    }
  }
  return found.source->StateOf(step, options_.adopt.source,
                               SaveHistory{known.growing, before_, listings_});
}

bool Follower::OnlyGrew(Known& known, const std::map<std::string, FileStamp>& now) const {
  if (known.files.empty()) return false;
  const ToolNames& names = options_.adopt.hints.names;
  std::set<std::string> grown;
  for (const auto& [path, stamp] : now) {
    const auto before = known.files.find(path);
    if (before == known.files.end()) return false;
    if (before->second == stamp) continue;
    // One that is written, for the first time or anew, is empty first, or as long as it was.
    const FileStamp& was = before->second;
    if (was.size == 0 || names.IsSaved(path) || names.IsTemporary(LastComponent(path)))
      return false;
    if (stamp.size <= was.size || stamp.inode != was.inode || known.read.contains(path))
      return false;
    if (known.adopted() && !known.growing.contains(path)) return false;
    grown.insert(path);
  }
  // A step that was taken may lose files and still have only grown.
  if (grown.empty() || (!known.adopted() && now.size() != known.files.size())) return false;
  known.growing.merge(grown);
  return known.growing.size() <= kMaxGrowing;
}

Follower::Change Follower::ChangeOf(const Known& known,
                                    const std::map<std::string, FileStamp>& now) const {
  Change change = Change::kNone;
  for (const auto& [path, stamp] : now) {
    if (std::ranges::binary_search(known.taken, HashOfFile(path, stamp))) continue;
    if (options_.adopt.hints.names.IsSaved(path)) return Change::kSave;
    change = Change::kOther;
  }
  return change;
}

bool Follower::Note(const StepCandidate& step, Known& known, const Files& files, Time now,
                    Seen& seen) {
  const bool same = !known.id.empty() && known.stamp == files.digest;
  // By names, sizes and times, whatever clock these are of.
  const Change change = same              ? Change::kNone
                        : known.adopted() ? ChangeOf(known, files.stamps)
                                          : Change::kSave;
  known.mtime_ns = step.mtime_ns;
  if (change == Change::kNone) return false;
  if (OnlyGrew(known, files.stamps)) {
    known.stamp = files.digest;
    known.files = files.stamps;
    return true;
  }
  Known before = std::exchange(known, Known{});
  known.read = std::move(before.read);
  known.provisional = std::move(before.provisional);
  known.arrived = before.arrived;
  if (change == Change::kSave) {
    known.last = std::move(before.last);
    known.last_hash = before.last_hash;
    Withdraw(step, known, seen);
  }
  known.files = files.stamps;
  known.id = step.id;
  known.iteration = step.iteration;
  known.mtime_ns = step.mtime_ns;
  known.stamp = files.digest;
  // A save that lay there long before us is not waited for.
  const bool old = first_ && files.newest_ns != 0 &&
                   files.newest_ns < NowNs() - std::chrono::nanoseconds(kSurelyOld).count();
  known.since = old ? now - options_.missing_quiet : now;
  return false;
}

Follower::Time Follower::Visit(const FoundStep& found, Known& known, Time now, Seen& seen) {
  const StepCandidate& step = found.candidate;
  auto files = Files::Of(step);
  if (!files) {
    known.why = files.error().message;
    return now + options_.retry;
  }
  const bool grew = Note(step, known, *files, now, seen);
  if (known.due > now) return known.due;
  const bool taken = known.adopted();
  const auto begin = std::chrono::steady_clock::now();  // of taking, if it comes to that
  SaveState state = taken ? SaveState() : StateOf(found, known);
  const std::optional<Time> until = taken ? std::nullopt : Wait(state, grew, known, now);
  if (until) return *until;
  const Status closed = options_.adopt.check
                            ? CheckNoWriter(*step.root, files->stamps, options_.adopt.hints.names)
                            : Status();
  if (!closed) {
    known.why = closed.error().message;
    return now + options_.retry;
  }
  if (taken) {
    Confirm(known, seen);
    return known.due;
  }
  Take(found, std::move(state), known, now, seen);
  taking_ += std::chrono::steady_clock::now() - begin;
  return known.due;
}

std::optional<Follower::Time> Follower::Wait(const SaveState& state, bool grew, Known& known,
                                             Time now) const {
  if (state.phase == SavePhase::kResaved) {
    known.why = StrCat("the step is being rewritten: ", LastComponent(known.last),
                       ", which is written last, still belongs to the previous save");
    return now + options_.retry;
  }
  if (grew && state.phase != SavePhase::kSealed) {  // it is the save that writes
    known.growing.clear();
    known.since = now;
  }
  const std::string part = PartOf(known);
  const bool last = state.phase == SavePhase::kAllButLast || (state.missing && !state.last.empty());
  if (known.due == Time()) {
    known.why = last           ? "the file that its save writes last is missing"
                : part.empty() ? "the step is being written"
                               : StrCat(part,
                                        ": a copy is writing this partial file, or left it "
                                        "behind");
  }
  const Time until =
      known.since + (part.empty() ? QuietOf(known, state.phase) : options_.missing_quiet);
  return until > now ? std::optional(until) : std::nullopt;
}

std::string Follower::PartOf(const Known& known) const {
  for (const auto& [path, _] : known.files) {
    if (options_.adopt.hints.names.IsPart(LastComponent(path))) return LastComponent(path);
  }
  return "";
}

void Follower::Withdraw(const StepCandidate& step, Known& known, Seen& seen) {
  if (!known.provisional) return;
  const Status removed = store_.Remove(*known.provisional);
  if (!removed) {
    if (removed.error().code != ErrorCode::kNotFound) seen.said.push_back(removed.error().message);
    return;
  }
  seen.said.push_back(StrCat(step.id,
                             " is being written again: nothing proved that its save was "
                             "over when it "
                             "was adopted; the step is withdrawn until it is whole"));
  seen.withdrawn.push_back(*std::exchange(known.provisional, std::nullopt));
}

void Follower::Confirm(Known& known, Seen& seen) {
  const Status confirmed = store_.Confirm(*known.provisional);
  if (!confirmed) seen.said.push_back(confirmed.error().message);
  seen.confirmed.push_back(*std::exchange(known.provisional, std::nullopt));
  known.state = State::kAdopted;
  known.due = Time::max();
}

void Follower::Refuse(Known& known, const Error& error, Time now, Seen& seen) const {
  const bool said = known.why == error.message;
  const bool passes = MayPass(error.code);
  known.why = error.message;
  known.due = passes ? now + options_.retry : Time::max();
  if (IsRefusal(error.code)) {
    known.state = passes ? State::kRetried : State::kRefused;
  } else if (known.state != State::kLeftBehind) {
    known.state = passes ? State::kWritten : State::kCutOff;
  }
  // One that is malformed may be cut off, and is named when later ones come.
  if (error.code == ErrorCode::kInvalid || said) return;
  seen.said.push_back(StrCat("not adopted: ", known.id, ": ", error.message));
}

void Follower::Take(FoundStep found, SaveState state, Known& known, Time now, Seen& seen) {
  AdoptOptions options = options_.adopt;
  const bool sealed = state.phase == SavePhase::kSealed;
  // A copy of a finished run brings its steps in any order, and files in another than its tool.
  options.arrived = known.arrived && sealed;
  options.provisional = !sealed && now - known.since < options_.missing_quiet;
  // A tool may save zeros as holes, and its seal says so; else a copy goes on, or died.
  const bool rested = now - known.since >= options_.unsealed_quiet;
  options.refuse_blank = options.check && !(sealed && rested);
  for (const std::string& path : known.growing) {
    if (const auto at = known.files.find(path); at != known.files.end())
      options.growing.insert(at->second.inode);
  }
  // As it was before it was read: a save that begins meanwhile changes it.
  const std::string last = state.last;
  const auto last_hash = last.empty() ? std::nullopt : HashIfThere(*found.candidate.root, last);
  found.state = std::move(state);
  auto adopted = Adopt(store_, found, options);
  known.taken = HashesOf(known.files);
  auto names = NamesOf(known.files);
  if (known.growing.empty()) known.files.clear();
  if (!adopted) {
    if (!known.growing.empty()) known.since = now;
    known.read.merge(std::exchange(known.growing, {}));
    const bool soon = adopted.error().code == ErrorCode::kDataLoss && sealed && !rested;
    if (!soon) return Refuse(known, adopted.error(), now, seen);
    known.due = known.since + options_.unsealed_quiet;
    return;
  }
  before_ = std::move(names);
  known.provisional.reset();
  if (adopted->record.provisional) known.provisional = adopted->record;
  if (!known.provisional) {  // else what comes is the rest of this save
    known.last = last;
    known.last_hash = last_hash;
  }
  known.state = known.provisional ? State::kProvisional : State::kAdopted;
  known.due = known.provisional ? known.since + options_.missing_quiet : Time::max();
  known.why.clear();
  newest_ = std::max(newest_, Newest{adopted->record.life, OrderOf(found.candidate)});
  seen.said.insert(seen.said.end(), adopted->warnings.begin(), adopted->warnings.end());
  const std::string name = StrCat(adopted->record.run, "/", adopted->record.id);
  notices_.Add(name, adopted->left_out);
  notices_.Add(name, adopted->closed);
  if (!adopted->unproven.empty()) unproven_ = std::move(adopted->unproven);
  seen.adopted.push_back(std::move(adopted->record));
}

void Follower::NoteBegun(const std::vector<BegunStep>& begun, Time now) {
  for (const BegunStep& step : begun) {
    if (!first_ && newest_ != Newest() && step.iteration <= newest_.order.first) continue;
    const auto [it, fresh] = known_.try_emplace(step.directory);
    Known& known = it->second;
    if (fresh) {
      known.id = step.id;
      known.iteration = step.iteration;
      known.since = now;
      known.state = State::kBegun;
    }
    if (known.state == State::kBegun) known.why = step.missing;
  }
}

void Follower::Sort(const ScanResult& found, Time now, Seen& seen) {
  std::set<std::string> there, grown;
  for (const FoundStep& step : found.steps) {
    there.insert(step.candidate.directory);
    grown.insert(step.candidate.Own());
  }
  for (const BegunStep& step : found.begun) there.insert(step.directory);
  for (auto it = known_.begin(); it != known_.end();) {
    Known& known = it->second;
    const bool gone = there.count(it->first) == 0;
    // A tag is found within what was a step by itself as long as it had no tag.
    if (gone && !known.adopted() && !grown.contains(it->first)) {
      seen.said.push_back(StrCat(known.id, " disappeared before it could be adopted: ", known.why));
    }
    // It was whole, as far as that can be told of one that its tool has left.
    const bool rested =
        !known.adopted() && !known.files.empty() && now - known.since >= options_.quiet;
    if (gone && rested) before_ = NamesOf(known.files);
    if (gone && known.provisional && known.adopted())
      Confirm(known, seen);  // its tool had finished it
    if (gone) {
      it = known_.erase(it);
      continue;
    }
    const bool waits = !known.adopted() && !known.refused() && known.state != State::kLeftBehind;
    const bool earlier =
        Order(known.iteration, known.mtime_ns) < newest_.order ||
        (newest_.life > 0 && known.mtime_ns < newest_.order.second);  // of a life before
    if (waits && earlier && now - known.since >= options_.unsealed_quiet) {
      seen.said.push_back(StrCat(known.id, " was left behind unfinished: ", known.why));
      known.state = State::kLeftBehind;
    }
    ++it;
  }
}

Follower::Idle Follower::IdleOf(const ScanResult& found) const {
  if (newest_ != Newest()) return {};
  if (const std::vector<Waiting> steps = waiting(); !steps.empty()) {
    if (steps.front().refused) {
      return {StrCat(directory_, ": nothing is adopted yet: ", steps.front().id, ": ",
                     steps.front().why)};
    }
    return {StrCat(directory_, ": waits for the first step: ", steps.front().id, ": ",
                   steps.front().why)};
  }
  if (!found.unread.empty()) {
    return {StrCat(found.unread.front().message,
                   "; nothing of it is adopted: convert it, or follow a "
                   "directory in which steps of ",
                   FormatNames(sources_), " are saved"),
            true};
  }
  if (!pointer_.empty()) return {StrCat(directory_, ": waits for the first step: ", pointer_)};
  const auto place = PlaceOf(directory_);
  return {StrCat(directory_, ": waits for the first step: ",
                 place ? WhatIsThere(*place, sources_) : place.error().message)};
}

Follower::Seen Follower::Look(Time now) {
  Seen seen;
  seen.next = now + kPoll;
  seen.earliest = now + kBreath;
  using Clock = std::chrono::steady_clock;
  const Time start = Clock::now();
  taking_ = {};
  listings_ = std::make_shared<RunListings>();
  const auto found = Find();
  if (!found) {
    // A directory that is away says nothing of its steps, and one that loses a step while it
    // is listed is listed again.
    const bool gone = found.error().code == ErrorCode::kNotFound;
    if (gone && first_) {
      idle_ = {StrCat(directory_, ": waits for the first step: the directory is not there yet")};
    }
    if (!gone && found.error().message != failed_) {
      failed_ = found.error().message;
      seen.said.push_back(failed_);
    }
    seen.next = now + (gone ? options_.quiet : options_.retry);
    return seen;
  }
  failed_.clear();
  for (const FoundStep& step : found->steps) {
    const auto [at, fresh] = known_.try_emplace(step.candidate.directory);
    Known& known = at->second;
    if (fresh) known.arrived = !first_ && newest_.order.first > step.candidate.iteration;
    // Nothing of it is asked while its newest entry is what it was.
    if (known.state == State::kAdopted && known.mtime_ns == step.candidate.mtime_ns) continue;
    seen.next = std::min(seen.next, Visit(step, known, now, seen));
  }
  for (std::string& line : notices_.Take()) seen.said.push_back(std::move(line));
  if (!unproven_.empty()) seen.said.push_back(std::exchange(unproven_, {}));
  NoteBegun(found->begun, now);
  Sort(*found, now, seen);
  idle_ = IdleOf(*found);
  first_ = false;
  const Duration took = Clock::now() - start - taking_;
  seen.earliest = std::max(seen.earliest, now + took * kBusy);
  return seen;
}

std::vector<Follower::Waiting> Follower::waiting() const {
  std::vector<Waiting> out;
  const auto place = PlaceOf(directory_);
  for (const auto& [directory, known] : known_) {
    if (known.adopted()) continue;
    out.push_back(Waiting{known.id, known.why, place ? place->root->PathOf(directory) : "",
                          known.state == State::kLeftBehind, known.refused()});
  }
  std::stable_sort(out.begin(), out.end(), [](const Waiting& a, const Waiting& b) {
    return a.left_behind > b.left_behind;
  });
  return out;
}

}  // namespace ckptfs
