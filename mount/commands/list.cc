// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <vector>

#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "core/check/source_state.h"
#include "core/store/lives.h"
#include "mount/commands/command_set.h"
#include "mount/commands/held_steps.h"
#include "mount/commands/step_access.h"
#include "mount/control/step_json.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

struct ListFlags {
  std::string run;
  std::string store;
  bool names = false;
  bool json = false;
};

SourceReport LookAt(Store& store, const StepRecord& record) {
  const auto step = store.Load(record);
  if (!step) return SourceReport{SourceState::kMissing, step.error().message};
  const auto blobs = BlobReader::Create((*step)->model, ReaderOptions());
  return LookAtSources((*step)->model, *blobs);
}

// Tells for each step if its files are what was adopted.
std::vector<SourceReport> LookAtAll(Store& store, const std::vector<StepRecord>& records) {
  std::vector<SourceReport> states(records.size());
  ParallelFor(records.size(), [&](size_t i) { states[i] = LookAt(store, records[i]); });
  return states;
}

std::string TagsOf(const Json& step) {
  std::string names;
  for (const Json& tag : step.value("tags", Json::array())) {
    names += StrCat(names.empty() ? "" : ", ", tag.get<std::string>());
  }
  return names;
}

// Steps as RecordJson has them, with their "state" and "life".  Lives have a column where some run
// has several.
void PrintTable(const Json& steps) {
  if (steps.empty()) return;
  const bool lives = std::any_of(steps.begin(), steps.end(), [](const Json& step) {
    return step.value("life", size_t{1}) > 1;
  });
  std::vector<std::vector<std::string>> rows = {
      {"STEP", "ITERATION", "SAVED", "AGE", "STATE", "SOURCE"}};
  const bool tags = std::any_of(steps.begin(), steps.end(),
                                [](const Json& step) { return !TagsOf(step).empty(); });
  if (lives) rows[0].insert(rows[0].begin() + 1, "LIFE");
  if (tags) rows[0].insert(rows[0].begin() + 1, "TAGS");
  for (const Json& step : steps) {
    const int64_t saved = step.value("mtime_ns", int64_t{0});
    rows.push_back(
        {Printable(step.value("step", "")), std::to_string(step.value("iteration", uint64_t{0})),
         LocalTime(saved), Ago(saved), Printable(step.value("state", "")),
         step.value("compacted", false) ? "(the store)" : Printable(step.value("source", ""))});
    if (lives) {
      rows.back().insert(rows.back().begin() + 1, std::to_string(step.value("life", size_t{1})));
    }
    if (tags) rows.back().insert(rows.back().begin() + 1, Printable(TagsOf(step)));
  }
  PrintColumns(rows);
}

// The life of each step by "run/id", counted from 1.  Steps in memory count with those that are
// published.
std::map<std::string, size_t> LivesOf(const std::vector<StepRecord>& published,
                                      const HeldSteps& held) {
  std::map<std::string, std::map<std::string, StepRecord>> runs;
  for (const HeldStep& one : held.steps) runs[one.run()][one.id()] = one.AsRecord();
  for (const StepRecord& record : published) runs[record.run][record.id] = record;
  std::map<std::string, size_t> out;
  for (auto& [run, steps] : runs) {
    std::vector<StepRecord> records;
    for (auto& [id, record] : steps) records.push_back(std::move(record));
    size_t number = 0;
    for (const Life& life : SplitIntoLives(std::move(records))) {
      ++number;
      for (const StepRecord& step : life) out[StrCat(step.run, "/", step.id)] = number;
    }
  }
  return out;
}

Result<std::vector<StepRecord>> Published(Store& store, const std::string& run, bool held) {
  CKPT_ASSIGN_OR_RETURN(std::vector<std::string> runs, store.Runs());
  if (!run.empty()) runs = {run};
  std::vector<StepRecord> records;
  for (const std::string& one : runs) {
    const auto steps = store.Steps(one);
    if (!steps && held && steps.error().code == ErrorCode::kNotFound) continue;
    if (!steps) return Fail(Error(steps.error()));
    records.insert(records.end(), steps->begin(), steps->end());
  }
  return records;
}

HeldSteps HeldOf(const std::string& store, const std::string& run) {
  HeldSteps held = FindHeldSteps(store);
  if (run.empty()) return held;
  std::erase_if(held.steps, [&](const HeldStep& one) { return one.run() != run; });
  std::erase_if(held.waiting,
                [&](const std::string& line) { return !line.starts_with(StrCat(run, "/")); });
  return held;
}

// Those that are not published.
Json InMemory(const HeldSteps& held, const Json& published) {
  std::set<std::string> known;
  for (const Json& step : published) known.insert(step.value("step", ""));
  Json steps = Json::array();
  for (const HeldStep& one : held.steps) {
    if (known.contains(one.record.value("step", ""))) continue;
    steps.push_back(one.record);
    steps.back()["state"] = "in memory";
  }
  return steps;
}

// The names that users gave to each step, by "run/id".
Result<std::map<std::string, std::vector<std::string>>> TagsOf(
    Store& store, const std::vector<StepRecord>& records) {
  std::map<std::string, std::vector<StepTag>> runs;
  std::map<std::string, std::vector<std::string>> names;
  for (const StepRecord& record : records) {
    const auto [tags, first] = runs.try_emplace(record.run);
    if (first) {
      CKPT_ASSIGN_OR_RETURN(tags->second, store.Tags(record.run));
    }
    for (const StepTag& tag : tags->second) {
      const bool its = tag.id == record.id && tag.unpacked == record.unpacked;
      if (its) names[StrCat(record.run, "/", record.id)].push_back(tag.name);
    }
  }
  return names;
}

Status RunList(const ListFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const std::string path, StorePath(options.store));
  const HeldSteps held = HeldOf(path, options.run);  // before the store is looked at
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  const bool some = !held.steps.empty() || !held.waiting.empty();
  CKPT_ASSIGN_OR_RETURN(const std::vector<StepRecord> records,
                        Published(*store, options.run, some));
  std::vector<SourceReport> states = LookAtAll(*store, records);
  const std::map<std::string, size_t> lives = LivesOf(records, held);
  CKPT_ASSIGN_OR_RETURN(auto tags, TagsOf(*store, records));
  Json steps = Json::array();
  for (size_t i = 0; i < records.size(); ++i) {
    const std::string name = StrCat(records[i].run, "/", records[i].id);
    // A daemon compares the bytes of what was touched.
    const auto stale = held.stale.find(name);
    if (stale != held.stale.end() && states[i].state != SourceState::kMissing) {
      states[i] = {SourceState::kStale, stale->second};
    }
    steps.push_back(RecordJson(records[i]));
    steps.back()["life"] = lives.at(name);
    steps.back()["tags"] = tags[name];
    steps.back()["state"] = SourceStateName(states[i].state);
    if (!states[i].reason.empty()) steps.back()["reason"] = states[i].reason;
  }
  Json in_memory = InMemory(held, steps);
  for (Json& step : in_memory) {
    const auto life = lives.find(step.value("step", ""));
    if (life != lives.end()) step["life"] = life->second;
  }
  if (options.json) {
    PrintJson({{"store", store->directory()},
               {"steps", steps},
               {"in_memory", in_memory},
               {"waiting", held.waiting}});
    return {};
  }
  steps.insert(steps.end(), in_memory.begin(), in_memory.end());
  if (options.names) {
    for (const Json& step : steps) fmt::print("{}\n", Printable(step.value("step", "")));
    return {};
  }
  PrintTable(steps);
  for (const std::string& line : held.waiting) fmt::print("{}\n", Printable(line));
  return {};
}

}  // namespace

void AddListCommand(CommandSet& commands) {
  auto options = std::make_shared<ListFlags>();
  Command& command = commands.Add("list", "List runs and their steps");
  command.Add("RUN", options->run, "Only this run").Offers(kOfferRuns);
  AddStoreOption(command, options->store);
  AddJsonOption(command, options->json);
  command.Add("--names", options->names, "Print RUN/ID alone, a line each").Excludes("--json");
  command.body = [options] { return RunList(*options); };
}

}  // namespace ckptfs
