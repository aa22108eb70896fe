// SPDX-License-Identifier: Apache-2.0
//
// How the daemons of a job find each other: WorldCommit's part that knows who has which ranks.
#include <algorithm>
#include <utility>

#include "core/base/fault_point.h"
#include "core/base/strings.h"
#include "core/commit/world_commit.h"
#include "core/store/store_index.h"

namespace ckptfs {
namespace {

using Kind = CommitName::Kind;

Status Replace(Storage& storage, const std::string& path, const std::string& text) {
  CKPT_ASSIGN_OR_RETURN(const auto writer, storage.Create(path));
  CKPT_RETURN_IF_ERROR(writer->WriteAt(0, std::as_bytes(std::span(text))));
  return writer->Close();
}

Result<JobWorld> WorldOf(const WorldRecord& record, const NodeRanks& mine) {
  if (!record.refused.empty()) return Fail(ErrorCode::kExists, record.refused);
  JobWorld world;
  std::map<uint32_t, uint64_t> lives;
  for (const WorldRecord::Host& host : record.hosts) {
    lives.insert(host.ranks.begin(), host.ranks.end());
    for (const auto& [rank, life] : host.ranks) {
      if (!mine.ranks.contains(rank)) world.elsewhere[rank] = host.name;
    }
  }
  if (lives.size() == mine.world) world.life = LifeOf(lives);
  return world;
}

}  // namespace

Status WorldCommit::Say(const NodeRanks& mine) {
  const Job job{mine.run, mine.job};
  NodeRanks& said = joined_[job];
  if (said == mine) return {};
  const std::string path = NodeRanksName(mine.run, mine.job, node());
  if (!joined_holds_[job]) {
    CKPT_ASSIGN_OR_RETURN(joined_holds_[job], said_.Hold(path));
  }
  CKPT_RETURN_IF_ERROR(Replace(*store_.storage(), path, RenderNodeRanks(mine)));
  FaultPoint();
  said = mine;
  return {};
}

Result<JobWorld> WorldCommit::Join(NodeRanks mine) {
  for (const std::string& mark : LayoutMarks()) {
    if (marked_) break;
    const Status published = PublishText(*store_.storage(), mark, LayoutMarkText());
    if (published || published.error().code == ErrorCode::kExists) continue;
    return Fail(Error(published.error()));
  }
  marked_ = true;
  mine.host = said_.host();
  CKPT_RETURN_IF_ERROR(Say(mine));
  return mine.ranks.contains(0) ? Gather(mine) : ReadWorld(mine);
}

Status WorldCommit::CheckNoOlderBuild(const NodeRanks& mine) {
  const auto entries = store_.storage()->List(kPreparedFolder);
  if (!entries) return Fail(Error(entries.error()));
  const Digest job = ParseCommitName(WorldName(mine.run, mine.job))->job;
  for (const RootEntry& entry : *entries) {
    const auto name = ParseFlatName(StrCat(kPreparedFolder, "/", entry.name));
    if (!name || name->kind != Kind::kRanks || name->job != job) continue;
    CKPT_ASSIGN_OR_RETURN(const auto said, ReadPresence(*store_.storage(), name->node));
    if (store_.presences().Look(store_.directory(), name->node, said, Clock::now()) ==
        PresenceState::kGone) {
      continue;
    }
    return Fail(ErrorCode::kExists, StrCat("the ckptfs on ", said ? said->host : "another machine",
                                           " is of an older build, with which this one makes no "
                                           "steps: update it"));
  }
  return {};
}

Result<JobWorld> WorldCommit::Gather(const NodeRanks& mine) {
  CKPT_RETURN_IF_ERROR(CheckNoOlderBuild(mine));
  WorldRecord record{mine.run, mine.job, mine.world, node(), {{mine.host, mine.ranks}}, ""};
  std::map<uint32_t, uint64_t> lives = mine.ranks;
  CKPT_ASSIGN_OR_RETURN(const auto paths,
                        ListFilesBelow(*store_.storage(), JobFolder(mine.run, mine.job)));
  for (const std::string& path : paths) {
    const auto name = ParseCommitName(path);
    if (!name || name->kind != Kind::kRanks || name->node == node()) continue;
    CKPT_ASSIGN_OR_RETURN(const bool gone, HasGone(name->node));
    if (gone) continue;
    const auto text = ReadWhole(*store_.storage(), path, kPreparedMaxBytes);
    if (!text && text.error().code == ErrorCode::kNotFound) continue;
    if (!text) return Fail(Error(text.error()));
    CKPT_ASSIGN_OR_RETURN(NodeRanks theirs, ParseNodeRanks(*text, *name));
    if (theirs.world != mine.world) {
      record.refused = StrCat("the job has ", mine.world, " ranks on ", mine.host, ", but ",
                              theirs.world, " on ", theirs.host);
      record.world = std::max(record.world, theirs.world);
    }
    for (const auto& [rank, life] : theirs.ranks) {
      if (lives.emplace(rank, life).first->second == life) continue;
      record.refused = StrCat("rank ", rank, " has another life on ", theirs.host,
                              "; give each life of a job a `job` text of its own");
    }
    record.hosts.push_back({std::move(theirs.host), std::move(theirs.ranks)});
  }
  if (worlds_[{mine.run, mine.job}] != record) {
    CKPT_RETURN_IF_ERROR(
        Replace(*store_.storage(), WorldName(mine.run, mine.job), RenderWorld(record)));
    FaultPoint();
    worlds_[{mine.run, mine.job}] = record;
  }
  return WorldOf(record, mine);
}

// A record that does not name all of `mine` is of another life, or older than what we said.
Result<JobWorld> WorldCommit::ReadWorld(const NodeRanks& mine) {
  const std::string path = WorldName(mine.run, mine.job);
  const auto text = ReadWhole(*store_.storage(), path, kPreparedMaxBytes);
  if (!text && text.error().code == ErrorCode::kNotFound) {
    CKPT_RETURN_IF_ERROR(CheckNoOlderBuild(mine));  // which would never write one
    return JobWorld();
  }
  if (!text) return Fail(Error(text.error()));
  CKPT_ASSIGN_OR_RETURN(const WorldRecord record, ParseWorld(*text, *ParseCommitName(path)));
  std::map<uint32_t, uint64_t> unnamed = mine.ranks;
  for (const WorldRecord::Host& host : record.hosts) {
    for (const auto& one : host.ranks) {
      const auto at = unnamed.find(one.first);
      if (at != unnamed.end() && at->second == one.second) unnamed.erase(at);
    }
  }
  const bool others = record.world != mine.world && record.refused.empty();
  return unnamed.empty() && !others ? WorldOf(record, mine) : JobWorld();
}

Status WorldCommit::KeepWorlds() {
  for (const auto& [job, record] : worlds_) {
    const std::string path = WorldName(job.first, job.second);
    CKPT_ASSIGN_OR_RETURN(const bool there, HasFile(*store_.storage(), path));
    if (there || record.run.empty()) continue;
    CKPT_RETURN_IF_ERROR(Replace(*store_.storage(), path, RenderWorld(record)));
  }
  return {};
}

bool WorldCommit::IsMyWorld(const std::string& run, const std::string& job) const {
  const std::string path = WorldName(run, job);
  const auto text = ReadWhole(*store_.storage(), path, kPreparedMaxBytes);
  const auto record = text ? ParseWorld(*text, *ParseCommitName(path)) : Fail(Error(text.error()));
  return record && record->node == node();
}

void WorldCommit::Leave(const std::string& run, const std::string& job) {
  joined_.erase({run, job});
  joined_holds_.erase({run, job});
  if (worlds_.erase({run, job}) != 0 && IsMyWorld(run, job)) Forget(WorldName(run, job));
  Forget(NodeRanksName(run, job, node()));
  Prune(JobFolder(run, job));
}

}  // namespace ckptfs
