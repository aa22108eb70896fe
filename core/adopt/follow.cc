// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/follow.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/digest.h"
#include "core/base/strings.h"
#include "core/io/file_stamp.h"
#include "core/store/lives.h"

namespace ckptfs {
namespace {

constexpr std::chrono::seconds kPoll{10};  // whatever may or may not be heard
constexpr std::chrono::milliseconds kBreath{200};
constexpr int kBusy = 10;                  // looking takes at most one part in so many of a processor
constexpr size_t kMaxFiles = 100'000;      // of a step whose files' times are looked at
constexpr size_t kMaxGrowing = 64;         // files of a step that only become longer
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

struct Stamped {
  Digest digest;
  int64_t newest_ns = 0;  // of the files, not of what they lie in
  std::map<std::string, FileStamp> files;
};

Result<Stamped> StampOfStep(const StepCandidate& step) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> files, FilesOf(step));
  std::string text;
  Stamped out;
  for (size_t i = 0; i < files.size() && i < kMaxFiles; ++i) {
    CKPT_ASSIGN_OR_RETURN(const auto there, StatIfThere(*step.root, files[i]));
    if (!there) continue;
    AppendEntry(text, files[i], there->stamp);
    out.newest_ns = std::max(out.newest_ns, there->stamp.mtime_ns);
    out.files.emplace(files[i], there->stamp);
  }
  text += StrCat(files.size());
  out.digest = DigestOf(text);
  return out;
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

std::shared_ptr<const std::set<std::string>> NamesOf(const std::map<std::string, FileStamp>& files) {
  std::set<std::string> out;
  for (const auto& [path, _] : files) out.insert(path);
  return std::make_shared<const std::set<std::string>>(std::move(out));
}

// Of names that tensors and objects are saved under.
bool IsOfSave(std::string_view path) {
  constexpr std::string_view kEnds[] = {".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors", ".distcp"};
  return std::ranges::any_of(kEnds, [&](std::string_view end) { return path.ends_with(end); });
}

// A name that is changed when the directory or file is whole: what tools that copy give theirs
// (rsync), and what trainers gave their steps.
bool IsTemporary(std::string_view name) {
  return name.starts_with(".") || name.starts_with("tmp-") || name.ends_with(".tmp") ||
         name.ends_with(".partial") || name.ends_with(".incomplete");
}

bool MayBeLog(std::string_view path) { return !IsOfSave(path) && !IsTemporary(LastComponent(path)); }

auto OrderOf(const StepCandidate& step) { return std::pair(step.iteration, step.mtime_ns); }

// What may be otherwise the next time though no file changed.
bool MayPass(ErrorCode code) {
  return code == ErrorCode::kIo || code == ErrorCode::kExhausted || code == ErrorCode::kStale ||
         code == ErrorCode::kNotFound || code == ErrorCode::kInternal;
}

// True for a step that is whole: what is cut off, is written or goes is not.
bool IsRefusal(ErrorCode code) {
  return code != ErrorCode::kInvalid && code != ErrorCode::kStale && code != ErrorCode::kNotFound;
}

}  // namespace

Follower::Follower(Store& store, std::string directory, Sources sources, Options options)
    : store_(store),
      directory_(std::move(directory)),
      sources_(sources),
      options_([&] {
        options.adopt.refresh = options.adopt.ownership == Ownership::kReference;
        return std::move(options);
      }()) {}

void Follower::DropPointers(ScanResult& found) {
  pointer_.clear();
  std::erase_if(found.steps, [&](const FoundStep& step) {
    if (!step.candidate.pointer) return false;
    const Status why = step.source->Complete(step.candidate, options_.adopt.source);
    if (!why && pointer_.empty()) pointer_ = why.error().message;
    return true;
  });
}

Result<ScanResult> Follower::Find() {
  CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(directory_));
  CKPT_ASSIGN_OR_RETURN(ScanResult found, ScanIfAny(place, sources_, options_.adopt.recognise));
  DropPointers(found);
  // It is renamed when it is whole; what was named was the directory itself, whatever it is called.
  std::erase_if(found.steps, [&](const FoundStep& step) {
    return step.candidate.Own() != place.directory && IsTemporary(LastComponent(step.candidate.Own()));
  });
  std::vector<std::string> directories;
  for (const FoundStep& step : found.steps) directories.push_back(step.candidate.SavePath());
  std::vector<FoundSave> saves;
  for (size_t i = 0; i < found.steps.size(); ++i) {
    const StepCandidate& step = found.steps[i].candidate;
    saves.push_back({directories[i], step.iteration, step.mtime_ns, step.converted, step.latest});
  }
  found.steps = InOrder(std::move(found.steps), OrderOfSaves(saves));
  return found;
}

Follower::Duration Follower::QuietOf(const Known& known, Seal seal) const {
  switch (seal) {
    case Seal::kThere: return known.growing.empty() ? options_.quiet : options_.unsealed_quiet;
    case Seal::kMissing: return options_.missing_quiet;
    case Seal::kUnknown: break;
  }
  return options_.unsealed_quiet;
}

StepCandidate Follower::WithoutGrowing(StepCandidate step, const Known& known) {
  if (known.growing.empty()) return step;
  step.growing = known.growing;
  step.mtime_ns = 0;
  for (const auto& [path, stamp] : known.files) {
    if (!known.growing.contains(path)) step.mtime_ns = std::max(step.mtime_ns, stamp.mtime_ns);
  }
  return step;
}

bool Follower::OnlyGrew(Known& known, const std::map<std::string, FileStamp>& now) {
  if (known.files.empty()) return false;
  std::set<std::string> grown;
  for (const auto& [path, stamp] : now) {
    const auto before = known.files.find(path);
    if (before == known.files.end()) return false;
    if (before->second == stamp) continue;
    // One that is written, for the first time or anew, is empty first, or as long as it was.
    const FileStamp& was = before->second;
    if (was.size == 0 || !MayBeLog(path)) return false;
    if (stamp.size <= was.size || stamp.inode != was.inode || known.read.contains(path)) return false;
    if (known.adopted && !known.growing.contains(path)) return false;
    grown.insert(path);
  }
  // Of a step that was taken files go without an end to that.
  if (grown.empty() || (!known.adopted && now.size() != known.files.size())) return false;
  known.growing.merge(grown);
  return known.growing.size() <= kMaxGrowing;
}

Follower::Change Follower::ChangeOf(const Known& known, const std::map<std::string, FileStamp>& now) {
  Change change = Change::kNone;
  for (const auto& [path, stamp] : now) {
    if (std::ranges::binary_search(known.taken, HashOfFile(path, stamp))) continue;
    if (IsOfSave(path)) return Change::kSave;
    change = Change::kOther;
  }
  return change;
}

bool Follower::GoesOn(const Known& known, const StepCandidate& step) {
  return known.last_hash && HashIfThere(*step.root, known.last) == known.last_hash;
}

std::optional<Follower::Time> Follower::Wait(const FoundStep& found, Known& known, Time now) {
  const StepCandidate& step = found.candidate;
  auto stamped = StampOfStep(step);
  if (!stamped) {
    known.why = stamped.error().message;
    return now + options_.retry;
  }
  const bool changed = known.id.empty() || known.stamp != stamped->digest;
  // By names, sizes and times, whatever clock these are of.
  const Change change = !changed ? Change::kNone : known.adopted ? ChangeOf(known, stamped->files) : Change::kSave;
  const bool written = change != Change::kNone;
  const bool grew = written && OnlyGrew(known, stamped->files);
  if (grew) {
    known.stamp = stamped->digest;
    known.files = std::move(stamped->files);
  } else if (written) {
    Known before = std::exchange(known, Known{});
    known.read = std::move(before.read);
    known.arrived = before.arrived;
    if (change == Change::kSave) {
      known.last = std::move(before.last);
      known.last_hash = before.last_hash;
    }
    known.files = std::move(stamped->files);
    known.id = step.id;
    known.iteration = step.iteration;
    known.stamp = stamped->digest;
    // What lay there before us, and long before, waits for nobody.
    const bool old = first_ && stamped->newest_ns != 0 &&
                     stamped->newest_ns < NowNs() - std::chrono::nanoseconds(kSurelyOld).count();
    known.since = old ? now - options_.missing_quiet : now;
  }
  known.mtime_ns = step.mtime_ns;
  if (known.settled) return Time::max();
  if (known.retry > now) return known.retry;
  if (GoesOn(known, step)) {
    known.why = StrCat("it is being saved again: ", LastComponent(known.last),
                       ", which is written last, is that of the save before");
    return now + options_.retry;
  }
  StepCandidate asked = WithoutGrowing(step, known);
  asked.before = before_;
  const Seal seal = found.source->SealOf(asked).value_or(Seal::kUnknown);
  if (grew && seal != Seal::kThere) {  // it is the save that writes
    known.growing.clear();
    known.since = now;
  }
  if (known.retry == Time()) {
    known.why = seal == Seal::kMissing ? "the file that is written last is not there"
                                       : "it is being written";
  }
  const Time until = known.since + QuietOf(known, seal);
  return until > now ? std::optional(until) : std::nullopt;
}

void Follower::Refuse(Known& known, const Error& error, Time now, Seen& seen) {
  const bool said = known.why == error.message;
  known.why = error.message;
  known.settled = !MayPass(error.code);
  known.refused = IsRefusal(error.code);
  known.retry = now + options_.retry;
  // One that is malformed may be cut off, and is named when later ones come.
  if (error.code == ErrorCode::kInvalid || said) return;
  seen.said.push_back(StrCat("not adopted: ", known.id, ": ", error.message));
}

void Follower::Take(const FoundStep& found, Known& known, Time now, Seen& seen) {
  AdoptOptions options = options_.adopt;
  options.arrived = known.arrived;
  for (const std::string& path : known.growing) {
    if (const auto at = known.files.find(path); at != known.files.end()) options.growing.insert(at->second.inode);
  }
  // As it was before it was read: a save that begins meanwhile changes it.
  const std::string last = found.source->LastFileOf(found.candidate).value_or("");
  const auto last_hash = last.empty() ? std::nullopt : HashIfThere(*found.candidate.root, last);
  auto adopted = Adopt(store_, found, options);
  known.taken = HashesOf(known.files);
  auto names = NamesOf(known.files);
  if (known.growing.empty()) known.files.clear();
  if (!adopted) {
    if (!known.growing.empty()) known.since = now;
    known.read.merge(std::exchange(known.growing, {}));
    return Refuse(known, adopted.error(), now, seen);
  }
  known.last = last;
  known.last_hash = last_hash;
  before_ = std::move(names);
  known.settled = known.adopted = true;
  known.refused = false;
  known.why.clear();
  newest_ = std::max(newest_, Newest{adopted->record.life, OrderOf(found.candidate)});
  seen.said.insert(seen.said.end(), adopted->warnings.begin(), adopted->warnings.end());
  left_out_.Add(*adopted);
  closed_.Add(StrCat(adopted->record.run, "/", adopted->record.id), adopted->closed);
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
      known.begun = true;
    }
    if (known.begun) known.why = step.missing;
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
    if (gone && !known.adopted && !grown.contains(it->first)) {
      seen.said.push_back(StrCat(known.id, " went before it could be adopted: ", known.why));
    }
    // It was whole, as far as that can be told of one that its tool has left.
    const bool rested = !known.adopted && !known.files.empty() && now - known.since >= options_.quiet;
    if (gone && rested) before_ = NamesOf(known.files);
    if (gone) {
      it = known_.erase(it);
      continue;
    }
    const bool earlier = Order(known.iteration, known.mtime_ns) < newest_.order ||
                         (newest_.life > 0 && known.mtime_ns < newest_.order.second);  // of a life before
    const bool behind = !known.adopted && !known.refused && earlier &&
                        now - known.since >= options_.unsealed_quiet;
    if (behind && !known.left_behind) {
      seen.said.push_back(StrCat(known.id, " was left behind unfinished: ", known.why));
    }
    known.left_behind = behind;
    ++it;
  }
}

Follower::Idle Follower::IdleOf(const ScanResult& found) const {
  if (newest_ != Newest()) return {};
  if (const std::vector<Waiting> steps = waiting(); !steps.empty()) {
    if (steps.front().refused) {
      return {StrCat(directory_, ": nothing is adopted yet: ", steps.front().id, ": ", steps.front().why)};
    }
    return {StrCat(directory_, ": waits for the first step: ", steps.front().id, ": ", steps.front().why)};
  }
  if (!found.unread.empty()) {
    return {StrCat(found.unread.front().message, "; nothing of it is adopted: convert it, or follow a "
                   "directory in which steps of ", FormatNames(sources_), " are saved"), true};
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
  Duration taking{};  // which waits for a disk, and is not a reason to look away
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
    if (known.adopted && known.mtime_ns == step.candidate.mtime_ns) continue;
    const std::optional<Time> until = Wait(step, known, now);
    if (until) {
      seen.next = std::min(seen.next, *until);
    } else {
      const Time begin = Clock::now();
      Take(step, known, now, seen);
      taking += Clock::now() - begin;
      if (!known.settled) seen.next = std::min(seen.next, known.retry);
    }
  }
  for (std::string& line : left_out_.Take()) seen.said.push_back(std::move(line));
  for (std::string& line : closed_.Take()) seen.said.push_back(std::move(line));
  if (!unproven_.empty()) seen.said.push_back(std::exchange(unproven_, {}));
  NoteBegun(found->begun, now);
  Sort(*found, now, seen);
  idle_ = IdleOf(*found);
  first_ = false;
  const Duration took = Clock::now() - start - taking;
  seen.earliest = std::max(seen.earliest, now + took * kBusy);
  return seen;
}

std::vector<Follower::Waiting> Follower::waiting() const {
  std::vector<Waiting> out;
  for (const auto& [directory, known] : known_) {
    if (!known.adopted) out.push_back(Waiting{known.id, known.why, known.left_behind, known.refused});
  }
  std::stable_sort(out.begin(), out.end(), [](const Waiting& a, const Waiting& b) {
    return a.left_behind > b.left_behind;
  });
  return out;
}

}  // namespace ckptfs
