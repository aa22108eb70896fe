// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/held_steps.h"

#include <utility>

#include "core/base/strings.h"
#include "core/base/utf8.h"
#include "core/store/lives.h"

namespace ckptfs {

StepRecord HeldStep::AsRecord() const {
  StepRecord out;
  out.run = run();
  out.id = id();
  out.iteration = record.value("iteration", uint64_t{0});
  out.mtime_ns = record.value("mtime_ns", int64_t{0});
  out.root = StrCat(kSnapshotRoot, out.run);
  return out;
}

HeldSteps FindHeldSteps(const std::string& store, Patience patience) {
  using Json = nlohmann::json;
  HeldSteps found;
  for (const LiveMount& daemon : FindLiveMounts(store, patience)) {
    const auto text = AskDaemon(daemon, "status", {}, patience);
    if (!text) continue;
    const Json status = Json::parse(*text, nullptr, false);
    const Json none = Json::object();
    const Json unsound = status.is_object() ? status.value("unsound", none) : none;
    for (const auto& [step, why] : unsound.items()) {
      if (why.is_object()) found.stale.emplace(BytesOfUtf8(step), why.value("reason", ""));
    }
    const Json& snapshots =
        status.is_object() && status.contains("snapshots") ? status["snapshots"] : none;
    if (!snapshots.is_object()) continue;
    for (const Json& record : snapshots.value("in_memory", Json::array())) {
      if (record.is_object()) found.steps.push_back({daemon, record});
    }
    for (const Json& line : snapshots.value("steps", Json::array())) {
      if (line.is_string()) found.waiting.push_back(line.get<std::string>());
    }
  }
  return found;
}

}  // namespace ckptfs
