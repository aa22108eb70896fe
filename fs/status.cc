// SPDX-License-Identifier: Apache-2.0

#include "fs/status.h"

#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/check/source_state.h"
#include "core/store/lives.h"

namespace ckptfs {
namespace {

using Json = nlohmann::ordered_json;

Json RequestsJson(const Counters& counters) {
  Json json = Json::object();
  for (size_t i = 0; i < kRequestKinds; ++i) {
    const auto request = static_cast<Request>(i);
    json[std::string(RequestName(request))] = counters.requests(request);
  }
  return json;
}

// A number for each way of serving.
template <class Count>
Json ByMode(const Count& count) {
  Json json = Json::object();
  for (const ServingMode mode :
       {ServingMode::kStream, ServingMode::kMaterialise, ServingMode::kDirect}) {
    json[std::string(ServingModeName(mode))] = count(mode);
  }
  return json;
}

Json RecentJson(const Counters& counters) {
  Json json = Json::array();
  for (const RecentOpen& open : counters.RecentOpens()) {
    json.push_back({{"path", open.path},
                    {"mode", std::string(ServingModeName(open.mode))},
                    {"reason", open.reason}});
  }
  return json;
}

Json MaterialisedJson(const Materialiser* materialiser, const PageReserve* reserve) {
  if (materialiser == nullptr) return nullptr;
  const Materialiser::Counts counts = materialiser->counts();
  return {{"budget", materialiser->pool().budget()},
          {"files", counts.files},
          {"bytes", counts.bytes},
          {"idle_bytes", materialiser->pool().idle_bytes()},
          {"reserve", reserve->bytes()},
          {"reserve_ready", reserve->settled()},
          {"fills", counts.fills},
          {"filled_bytes", counts.filled_bytes},
          {"hits", counts.hits},
          {"evictions", counts.evictions}};
}

size_t LivesOf(const Tree::Run& run) {
  std::vector<StepRecord> records;
  run.steps.Any([&](const std::string&, const auto& step) {
    records.push_back(step->record());
    return false;
  });
  return SplitIntoLives(std::move(records)).size();
}

Json RunsJson(const Tree& tree) {
  Json json = Json::object();
  for (const auto& [name, run] : tree.runs) {
    json[name] = {{"steps", run->steps.size()},
                  {"latest", run->latest ? run->latest->record().id : ""},
                  {"lives", LivesOf(*run)}};
    if (!run->latest) continue;
    json[name]["iteration"] = run->latest->record().iteration;
    json[name]["saved_ns"] = run->latest->record().mtime_ns;
  }
  return json;
}

uint64_t LoadedBytes(const RecentSteps& recent) {
  uint64_t bytes = 0;
  for (const auto& step : recent.Loaded()) bytes += step->MemoryBytes();
  return bytes;
}

// Steps in use whose files are not what was adopted, and why.  A touched one is not
// known to be so.
Json SourcesJson(const RecentSteps& recent) {
  Json json = Json::object();
  for (const auto& step : recent.Loaded()) {
    const SourceReport report = LookAtSources(step->model(), step->blobs());
    if (report.state == SourceState::kSound || report.state == SourceState::kTouched) continue;
    json[StrCat(step->record().run, "/", step->record().id)] = {
        {"state", SourceStateName(report.state)}, {"reason", report.reason}};
  }
  return json;
}

}  // namespace

std::string RenderStatus(const Namespace& names, const OpenFiles& files, const Counters& counters,
                         const FilesystemOptions& options, StatusDepth depth) {
  const auto now = names.Snapshot();
  Json json;
  json["view"] = now->view ? Json(now->view->path() + "/view") : Json(nullptr);
  json["runs"] = RunsJson(now->tree);
  if (depth == StatusDepth::kAll) json["unsound"] = SourcesJson(names.recent());
  if (options.touched) {
    json["touched"] = {{"files", options.touched->files_read()},
                       {"bytes", options.touched->bytes_read()}};
  }
  json["passthrough"] = files.passthrough();
  json["mode"] = options.force_mode ? std::string(ServingModeName(*options.force_mode)) : "auto";
  json["requests"] = RequestsJson(counters);
  json["bytes_served"] = counters.served();
  json["served"] = ByMode([&](ServingMode mode) { return counters.served(mode); });
  json["bytes_read"] = names.recent().bytes_read();
  json["open_files"] = files.open();
  json["opens"] = ByMode([&](ServingMode mode) { return counters.opens(mode); });
  json["opened_bytes"] = ByMode([&](ServingMode mode) { return counters.opened_bytes(mode); });
  json["known_names"] = names.nodes().size();
  json["listed_bytes"] = names.listings().bytes();
  json["loaded_steps"] = names.recent().loaded();
  json["loaded_bytes"] = LoadedBytes(names.recent());
  const OpenViews& views = names.recent().shared()->views;
  json["views"] = {{"layouts", views.size()}, {"bytes", views.bytes()}};
  json["plans"] = {{"files", files.plans()}, {"bytes", files.plan_bytes()}};
  json["materialised"] = MaterialisedJson(files.materialiser(), files.reserve());
  json["errors"] = counters.Errors();
  json["recent_errors"] = counters.RecentErrors();
  json["recent_opens"] = RecentJson(counters);
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace ckptfs
