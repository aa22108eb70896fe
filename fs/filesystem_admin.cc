// SPDX-License-Identifier: Apache-2.0

#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/jobs/source_state.h"
#include "fs/filesystem_state.h"
#include "fs/tree/names.h"

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

Json OpensJson(const Counters& counters) {
  Json json = Json::object();
  for (const ServingMode mode :
       {ServingMode::kStream, ServingMode::kMaterialise, ServingMode::kDirect}) {
    json[std::string(ServingModeName(mode))] = counters.opens(mode);
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

Json RunsJson(const Tree& tree) {
  Json json = Json::object();
  for (const auto& [name, run] : tree.runs) {
    json[name] = {{"steps", run->steps.size()}, {"latest", run->latest->record().id}};
  }
  return json;
}

// Steps in use whose files are not what was adopted, and why.
Json SourcesJson(const RecentSteps& recent) {
  Json json = Json::object();
  for (const auto& step : recent.Loaded()) {
    const SourceReport report = LookAtSources(step->model(), step->blobs());
    if (report.state == SourceState::kSound) continue;
    json[StrCat(step->record().run, "/", step->record().id)] = {
        {"state", SourceStateName(report.state)}, {"reason", report.reason}};
  }
  return json;
}

}  // namespace

void Filesystem::State::Say(std::string_view line) const {
  if (options.log) options.log(line);
}

void Filesystem::State::StartMaterialiser() {
  const bool wanted = options.passthrough || options.force_mode == ServingMode::kMaterialise;
  if (!wanted) return;
  const uint64_t budget =
      options.materialise_budget > 0 ? options.materialise_budget : DefaultMaterialiseBudget();
  auto pool = PagePool::Create(budget);
  if (!pool) {
    Say(StrCat("files are not materialised but streamed: ", pool.error().message));
    return;
  }
  PagePool& pages = **pool;
  materialiser = std::make_unique<Materialiser>(*std::move(pool));
  reserve = std::make_unique<PageReserve>(pages, options.reserve.value_or(DefaultReserve(budget)),
                                          [this] { return counters.activity(); });
}

bool Filesystem::State::Apply(const StepNews& news, uint64_t seen) {
  const MakeStepEntry make = [this](const StepRecord& record) {
    return std::make_shared<StepEntry>(catalogue, record, options.roots, formats, recent);
  };
  NextTree next;
  std::string reason;
  bool view_moved = false;
  {
    MutexLock lock(snapshot_mutex);
    if (generation != seen) return false;
    generation = news.generation;
    next = TakeIn(snapshot ? snapshot->tree : Tree{}, news, make);
    const auto before = view_target.step();
    view_target.Update(next.tree, &reason);
    view_moved = before != view_target.step();
    snapshot = std::make_shared<const TreeSnapshot>(
        TreeSnapshot{std::move(next.tree), view_target.step()});
  }
  if (!reason.empty()) Say(StrCat("/view is absent: ", reason));
  if (seen != 0) Announce(next.changes, view_moved);
  return true;
}

void Filesystem::State::Announce(const std::vector<TreeChange>& changes, bool view_moved) {
  for (const TreeChange& change : changes) {
    if (change.kept) {  // the same names and inodes; whoever has it open goes on
      change.kept->Reload();
      const Digest manifest = change.kept->record().manifest;
      ForgetPlans(manifest);
      recent.Drop(manifest);
      continue;
    }
    if (change.removed) Forget(*change.removed);
    invalidator.Add(InodeOf(0, StrCat("/run/", change.run, "/step")), change.id);
    invalidator.Add(InodeOf(0, "/run"), change.run);
  }
  if (view_moved) invalidator.Add(kRootInode, "view");
  invalidator.Drain();
}

void Filesystem::State::ForgetPlans(const Digest& manifest) {
  plans.DropIf([&](InodeNumber, const std::shared_ptr<const PreparedPlan>& plan) {
    return plan->step().record().manifest == manifest;
  });
}

void Filesystem::State::Forget(StepEntry& step) {
  step.MarkRemoved();
  const Digest manifest = step.record().manifest;
  listings.DropStep(&step);
  ForgetPlans(manifest);
  recent.Drop(manifest);
  if (materialiser) materialiser->DropStep(manifest);
  Say(StrCat(step.path(), " was removed; what is open of it stays readable"));
}

Status Filesystem::Refresh() {
  State& s = *state_;
  CKPT_RETURN_IF_ERROR(s.catalogue.Refresh());
  return s.TakeInNews();
}

Status Filesystem::RefreshStep(std::string_view run, std::string_view id) {
  State& s = *state_;
  CKPT_RETURN_IF_ERROR(s.catalogue.RefreshStep(run, id));
  return s.TakeInNews();
}

Status Filesystem::State::TakeInNews() {
  for (;;) {
    uint64_t seen = 0;
    {
      MutexLock lock(snapshot_mutex);
      seen = generation;
    }
    CKPT_ASSIGN_OR_RETURN(const StepNews news, catalogue.News(seen));
    if (seen != 0 && !news.all && news.changes.empty()) return {};
    if (Apply(news, seen)) return {};
  }
}

Status Filesystem::SwitchView(std::string_view run, std::string_view id) {
  State& s = *state_;
  bool moved = false;
  {
    MutexLock lock(s.snapshot_mutex);
    const auto before = s.view_target.step();
    CKPT_RETURN_IF_ERROR(s.view_target.Switch(s.snapshot->tree, run, id));
    moved = before != s.view_target.step();
    s.snapshot = std::make_shared<const TreeSnapshot>(
        TreeSnapshot{s.snapshot->tree, s.view_target.step()});
  }
  if (!moved) return {};
  s.invalidator.Add(kRootInode, "view");
  s.invalidator.Drain();
  return {};
}

void Filesystem::EndInvalidation() { state_->invalidator.End(); }

void Filesystem::DisablePassthrough(std::string_view reason) {
  if (!state_->passthrough.exchange(false)) return;
  state_->Say(StrCat("files are streamed from now on: ", reason));
}

std::string Filesystem::State::StatusText() const {
  const auto now = Snapshot();
  Json json;
  json["view"] = now->view ? Json(now->view->path() + "/view") : Json(nullptr);
  json["runs"] = RunsJson(now->tree);
  json["unsound"] = SourcesJson(recent);
  json["passthrough"] = passthrough.load();
  json["mode"] = options.force_mode ? std::string(ServingModeName(*options.force_mode)) : "auto";
  json["requests"] = RequestsJson(counters);
  json["bytes_served"] = counters.served();
  json["bytes_read"] = recent.bytes_read();
  json["open_files"] = handles.size();
  json["opens"] = OpensJson(counters);
  json["known_names"] = nodes.size();
  json["listed_bytes"] = listings.bytes();
  json["loaded_steps"] = recent.loaded();
  const OpenViews& views = recent.shared()->views;
  json["views"] = {{"layouts", views.size()}, {"bytes", views.bytes()}};
  json["plans"] = {{"files", plans.size()}, {"bytes", plans.weight()}};
  json["materialised"] = MaterialisedJson(materialiser.get(), reserve.get());
  json["errors"] = counters.Errors();
  json["recent_errors"] = counters.RecentErrors();
  json["recent_opens"] = RecentJson(counters);
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string Filesystem::StatusJson() const { return state_->StatusText(); }

}  // namespace ckptfs
