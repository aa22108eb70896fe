// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/snapshot_status.h"

#include "mount/control/step_json.h"

namespace ckptfs {

using Json = nlohmann::json;

namespace {

// Null: it did not happen so far.
Json TimeOf(int64_t nanoseconds) { return nanoseconds == 0 ? Json(nullptr) : Json(nanoseconds); }

}  // namespace

Json ToJson(const ReceiverStatus& status) {
  return {
      {"ranks", status.ranks},
      {"arena_bytes", status.arena_bytes},
      {"arena_limit_bytes", status.arena_limit_bytes},
      {"huge_bytes", status.huge_bytes},
      {"full_drops", status.full_drops},
      {"full_waits", status.full_waits},
      {"incoming", status.incoming},
      {"waiting", status.saves.waiting},
      {"durable", status.saves.durable},
      {"oldest_waiting_seconds", status.saves.oldest_waiting_seconds},
      {"dropped", status.saves.dropped},
      {"dropped_for",
       {{"incomplete", status.saves.dropped_for.incomplete},
        {"refused", status.saves.dropped_for.refused},
        {"exhausted", status.saves.dropped_for.exhausted},
        {"failed", status.saves.dropped_for.failed}}},
      {"durable_lag", {{"count", status.saves.durable}, {"seconds", status.saves.durable_seconds}}},
      {"last_durable_ns", TimeOf(status.saves.last_durable_ns)},
      {"unproved", status.saves.unproved},
      {"last_durable", status.saves.last_durable},
      {"last_drop", status.saves.last_drop},
      {"last_failure", status.saves.last_failure},
      {"steps", status.steps}};
}

Json ToJson(const CollectorStatus& status) {
  return {{"removed", status.removed},
          {"in_use", status.in_use},
          {"reclaimed_bytes", status.reclaimed_bytes},
          {"last_failure", status.last_failure}};
}

Json ToJson(const PeerPoolStatus& status) {
  Json list = Json::array();
  for (const PeerPoolStatus::Peer& peer : status.peers) {
    list.push_back({{"node", peer.record.node.Hex()},
                    {"host", peer.record.host},
                    {"address", peer.record.address},
                    {"failure_domain", peer.record.failure_domain},
                    {"link", peer.link},
                    {"sent_bytes", peer.sent_bytes},
                    {"rate", peer.rate},
                    {"away", peer.away}});
  }
  return list;
}

Json ToJson(const ProtectorStatus& status) {
  return {{"scheme", status.scheme},
          {"protected", status.held},
          {"passed_over", status.passed_over},
          {"full", status.full},
          {"last_protected", status.last_protected},
          {"steps", status.steps}};
}

Json ToJson(const PeerServiceStatus& status) {
  Json json{{"address", status.self.address},
            {"failure_domain", status.self.failure_domain},
            {"memory", status.memory},
            {"used", status.used},
            {"links", status.links},
            {"received_bytes", status.received_bytes},
            {"rate_limit", status.rate_limit},
            {"peers", ToJson(status.pool)},
            {"shown", status.shown}};
  if (status.protector) json["protect"] = ToJson(*status.protector);
  return json;
}

Json ToJson(const SpoolerStatus& status) {
  return {{"directory", status.directory}, {"saves", status.saves},
          {"bytes", status.bytes},         {"budget", status.budget},
          {"spooled", status.spooled},     {"full", status.full},
          {"failed", status.failed},       {"last_failure", status.last_failure}};
}

Json ToJson(const HotStepsStatus& status) {
  return {{"steps", status.steps}, {"bytes", status.bytes}, {"why_not", status.why_not}};
}

Json ToJson(const FollowStatus& status) {
  Json waiting = Json::array();
  for (const Follower::Waiting& step : status.waiting) {
    waiting.push_back({{"id", step.id},
                       {"why", step.why},
                       {"path", step.path},
                       {"left_behind", step.left_behind},
                       {"refused", step.refused}});
  }
  Json committed = Json::array();
  for (const StepRecord& step : status.committed) {
    committed.push_back({{"run", step.run}, {"id", step.id}, {"path", step.source}});
  }
  return {{"path", status.path},
          {"run", status.run},
          {"by", status.hears ? "events" : "polling"},
          {"adopted", status.adopted},
          {"adopted_total", status.adopted_total},
          {"withdrawn_total", status.withdrawn_total},
          {"last_adopted_ns", TimeOf(status.last_adopted_ns)},
          {"lag_seconds", status.last_adopted_ns == 0 ? Json(nullptr) : Json(status.lag_seconds)},
          {"look_seconds", status.look_seconds},
          {"waiting_steps", status.waiting_steps},
          {"left_behind_steps", status.left_behind_steps},
          {"refused_steps", status.refused_steps},
          {"waiting", std::move(waiting)},
          {"committed", std::move(committed)},
          {"idle", status.idle.empty() ? Json(nullptr) : Json(status.idle)},
          {"switched", status.switched.empty() ? Json(nullptr) : Json(status.switched)}};
}

Json ToJson(const SnapshotStatus& status) {
  Json json = ToJson(status.receiver);
  json["retention"] = ToJson(status.retention);
  if (status.peers) json["peers"] = ToJson(*status.peers);
  if (status.spool) json["spool"] = ToJson(*status.spool);
  json["hot"] = ToJson(status.hot);
  json["in_memory"] = Json::array();
  for (const StepRecord& record : status.in_memory) json["in_memory"].push_back(RecordJson(record));
  return json;
}

}  // namespace ckptfs
