// SPDX-License-Identifier: Apache-2.0
#include "core/store/prepared_sweep.h"

#include <unistd.h>

#include <map>
#include <optional>
#include <utility>

#include "core/base/strings.h"
#include "core/records/commit_records.h"
#include "core/records/records.h"

namespace ckptfs {
namespace {

using Kind = CommitName::Kind;

class PreparedSweep {
 public:
  PreparedSweep(Storage& storage, const std::string& directory, PresenceWatch& watch, bool dry_run)
      : storage_(storage), directory_(directory), watch_(watch), dry_run_(dry_run) {}

  Result<PreparedUse> Run();

 private:
  // All that is there of one attempt.
  struct Attempt {
    std::vector<std::pair<std::string, Digest>> parts;  // paths and daemons
    std::string outcome, done;                          // paths, if they are there
  };

  bool IsGone(const Digest& node);
  void Use(const Digest& node, const NodePresence& said);
  Status Remove(const std::string& path);
  Status JudgeAttempt(const CommitName& name, const Attempt& attempt);
  Status KeepPart(const std::string& path, const CommitName& name);
  // True if the parts are those of all ranks.
  bool IsWhole(const Attempt& attempt, const CommitName& name) const;
  Result<std::optional<std::string>> Read(const std::string& path) const;
  // Dropped, or published and that is said.
  Result<bool> IsOver(const Attempt& attempt, const CommitName& name);
  Status JudgeOutcome(const Attempt& attempt, const CommitName& name);
  // A record of an older build: what it names stays (core/commit/flat_records.h moves it).
  Status KeepFlat(const std::string& path, const CommitName& name);
  Status JudgeWorld(const std::string& path, const CommitName& name);
  void PruneBelow(const std::string& folder, int depth) const;

  Storage& storage_;
  const std::string& directory_;
  PresenceWatch& watch_;
  const bool dry_run_;
  std::map<Digest, NodePresence> present_;
  std::map<Digest, PresenceState> states_;
  PreparedUse use_;
};

bool PreparedSweep::IsGone(const Digest& node) {
  const auto [at, first] = states_.try_emplace(node, PresenceState::kGone);
  if (first) {
    const auto said = present_.find(node);
    at->second = watch_.Look(directory_, node,
                             said == present_.end() ? std::nullopt : std::optional(said->second),
                             PresenceWatch::Time::clock::now());
    if (at->second == PresenceState::kUnknown) ++use_.watched;
  }
  return at->second == PresenceState::kGone;
}

void PreparedSweep::Use(const Digest& node, const NodePresence& said) {
  constexpr std::string_view kSaidBlobs = "blobs/";
  constexpr std::string_view kSaidManifests = "manifests/";
  for (const std::string_view name : said.names) {
    if (name.starts_with(kSaidBlobs)) use_.directories.emplace(name.substr(kSaidBlobs.size()));
    if (!name.starts_with(kSaidManifests)) continue;
    if (const auto digest = DigestNamed(name.substr(kSaidManifests.size()))) {
      use_.manifests.insert(*digest);
    }
  }
  if (said.beat != 0) return;
  use_.unknown = true;
  use_.notes.push_back(StrCat("nothing is reclaimed: ", PresenceName(node), " cannot be read"));
}

Status PreparedSweep::Remove(const std::string& path) {
  ++use_.records;
  if (dry_run_) return {};
  Status removed = storage_.Remove(path);
  if (!removed && removed.error().code != ErrorCode::kNotFound) return removed;
  return {};
}

Result<std::optional<std::string>> PreparedSweep::Read(const std::string& path) const {
  auto text = ReadWhole(storage_, path, kPreparedMaxBytes);
  if (!text && text.error().code == ErrorCode::kNotFound) return std::optional<std::string>();
  if (!text) return Fail(Error(text.error()));
  return std::optional(*std::move(text));
}

Status PreparedSweep::KeepPart(const std::string& path, const CommitName& name) {
  CKPT_ASSIGN_OR_RETURN(const auto text, Read(path));
  if (!text) return {};  // its step is published, or it was dropped
  const auto part = ParsePart(*text, name);
  if (part) {
    use_.directories.insert(part->Directory());
    return {};
  }
  use_.unknown = true;
  use_.notes.push_back(StrCat("nothing is reclaimed: ", path, ": ", part.error().message));
  return {};
}

bool PreparedSweep::IsWhole(const Attempt& attempt, const CommitName& name) const {
  std::set<uint32_t> ranks;
  uint32_t world = 0;
  for (const auto& [path, node] : attempt.parts) {
    const auto text = Read(path);
    const auto part = text && *text ? ParsePart(**text, name) : Fail(ErrorCode::kDataLoss, "");
    if (!part) continue;
    world = part->world;
    for (const PreparedRank& rank : part->ranks) ranks.insert(rank.rank);
  }
  return world != 0 && ranks.size() == world;
}

// A step that is decided keeps its manifest until it is published, and so all files that the
// manifest names: those of earlier saves, too.
Result<bool> PreparedSweep::IsOver(const Attempt& attempt, const CommitName& name) {
  if (attempt.outcome.empty()) return !attempt.done.empty();
  CKPT_ASSIGN_OR_RETURN(const auto text, Read(attempt.outcome));
  if (!text) return !attempt.done.empty();
  const auto outcome = ParseOutcome(*text, name);
  if (!outcome) {
    use_.unknown = true;
    use_.notes.push_back(
        StrCat("nothing is reclaimed: ", attempt.outcome, ": ", outcome.error().message));
    return false;
  }
  if (outcome->manifest) use_.manifests.insert(*outcome->manifest);
  return !outcome->manifest || !attempt.done.empty();
}

// No part of it is there any more: the outcome goes with its writer.
Status PreparedSweep::JudgeOutcome(const Attempt& attempt, const CommitName& name) {
  std::optional<Digest> node;
  CKPT_ASSIGN_OR_RETURN(const auto text,
                        Read(attempt.outcome.empty() ? attempt.done : attempt.outcome));
  if (!text) return {};
  if (attempt.outcome.empty()) {
    const auto done = ParseDone(*text);
    if (done) node = done->node;
  } else {
    const auto outcome = ParseOutcome(*text, name);
    if (outcome) node = outcome->node;
  }
  if (node && !IsGone(*node)) return {};
  if (!attempt.outcome.empty()) CKPT_RETURN_IF_ERROR(Remove(attempt.outcome));
  return attempt.done.empty() ? Status() : Remove(attempt.done);
}

Status PreparedSweep::JudgeAttempt(const CommitName& name, const Attempt& attempt) {
  if (attempt.parts.empty()) return JudgeOutcome(attempt, name);
  CKPT_ASSIGN_OR_RETURN(const bool over, IsOver(attempt, name));
  bool all_gone = true;
  for (const auto& [path, node] : attempt.parts) all_gone = IsGone(node) && all_gone;
  // A whole save is published by the daemon that looks next.
  const bool lost = over || (all_gone && attempt.outcome.empty() && !IsWhole(attempt, name));
  for (const auto& [path, node] : attempt.parts) {
    if (lost && IsGone(node)) {
      CKPT_RETURN_IF_ERROR(Remove(path));
    } else {
      CKPT_RETURN_IF_ERROR(KeepPart(path, name));
    }
  }
  return {};
}

// Directories of attempts and jobs of which nothing is left.
void PreparedSweep::PruneBelow(const std::string& folder, int depth) const {
  const auto entries = storage_.List(folder);
  if (!entries) return;
  for (const RootEntry& entry : *entries) {
    if (entry.kind != EntryKind::kDirectory) continue;
    const std::string below = StrCat(folder, "/", entry.name);
    if (depth > 1) PruneBelow(below, depth - 1);
    (void)rmdir(StrCat(directory_, "/", below).c_str());
  }
}

Status PreparedSweep::KeepFlat(const std::string& path, const CommitName& name) {
  if (IsLayoutMark(name)) return {};
  CKPT_ASSIGN_OR_RETURN(const auto text, Read(path));
  if (!text && name.kind != Kind::kRanks) {  // it may just have got its new name
    use_.unknown = true;
    return {};
  }
  if (name.kind == Kind::kPart) return KeepPart(path, name);
  Attempt of;
  of.outcome = path;
  return name.kind == Kind::kOutcome ? IsOver(of, name).map([](bool) {}) : Status();
}

// Goes with the daemon that gathered it, once no daemon says that it has ranks of the job.
Status PreparedSweep::JudgeWorld(const std::string& path, const CommitName& name) {
  CKPT_ASSIGN_OR_RETURN(const auto text, Read(path));
  const auto world = text ? ParseWorld(*text, name) : Fail(ErrorCode::kDataLoss, "");
  if (!text || (world && !IsGone(world->node))) return {};
  CKPT_ASSIGN_OR_RETURN(const auto beside, ListFilesBelow(storage_, ParentPath(path)));
  if (beside.size() != 1) return {};
  CKPT_ASSIGN_OR_RETURN(const auto now, Read(path));  // a new leader's may have come
  return now == text ? Remove(path) : Status();
}

Result<PreparedUse> PreparedSweep::Run() {
  CKPT_ASSIGN_OR_RETURN(present_, ReadPresences(storage_));
  for (const auto& [node, said] : present_) {
    if (!IsGone(node)) Use(node, said);
  }
  CKPT_ASSIGN_OR_RETURN(const auto paths, ListFilesBelow(storage_, kPreparedFolder));
  std::map<std::pair<Digest, uint64_t>, std::pair<CommitName, Attempt>> attempts;
  std::set<std::pair<Digest, uint64_t>> flat;  // attempts with records of older builds
  for (const std::string& path : paths) {
    const auto name = ParseCommitName(path);
    if (!name) {
      const auto old = ParseFlatName(path);
      if (old) CKPT_RETURN_IF_ERROR(KeepFlat(path, *old));
      if (old) flat.insert({old->job, old->attempt});
      continue;
    }
    if (name->kind == Kind::kRanks) {
      if (IsGone(name->node)) CKPT_RETURN_IF_ERROR(Remove(path));
      continue;
    }
    if (name->kind == Kind::kWorld) {
      CKPT_RETURN_IF_ERROR(JudgeWorld(path, *name));
      continue;
    }
    auto& [of, attempt] = attempts[{name->job, name->attempt}];
    of = *name;
    if (name->kind == Kind::kPart) attempt.parts.emplace_back(path, name->node);
    if (name->kind == Kind::kOutcome) attempt.outcome = path;
    if (name->kind == Kind::kDone) attempt.done = path;
  }
  for (const auto& [key, found] : attempts) {
    const auto& [name, attempt] = found;
    if (attempt.parts.empty() && flat.contains(key)) {  // its parts are being given new names
      CKPT_RETURN_IF_ERROR(IsOver(attempt, name).map([](bool) {}));
      continue;
    }
    CKPT_RETURN_IF_ERROR(JudgeAttempt(name, attempt));
  }
  if (!directory_.empty() && !dry_run_) PruneBelow(std::string(kPreparedFolder), 2);
  for (const auto& [node, said] : present_) {
    if (IsGone(node)) CKPT_RETURN_IF_ERROR(Remove(PresenceName(node)));
  }
  return std::move(use_);
}

}  // namespace

Result<PreparedUse> SweepPrepared(Storage& storage, const std::string& directory,
                                  PresenceWatch& watch, bool dry_run) {
  return PreparedSweep(storage, directory, watch, dry_run).Run();
}

}  // namespace ckptfs
