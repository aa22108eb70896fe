// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/snapshot_service.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/strings.h"
#include "core/commit/spool.h"
#include "core/io/file_storage.h"
#include "core/io/root.h"
#include "core/records/records.h"
#include "fs/serve/page_pool.h"
#include "mount/control/control_client.h"
#include "mount/control/step_json.h"
#include "mount/logging.h"

namespace ckptfs {

SnapshotService::SnapshotService(Store& store, StepCatalogue& catalogue, SnapshotRequest request,
                                 Hooks hooks)
    : store_(store),
      catalogue_(catalogue),
      request_(std::move(request)),
      memory_bytes_(request_.memory_bytes.value_or(MemoryToUse() / 4)),
      hooks_(std::move(hooks)),
      hot_(request_.hot_steps, request_.hot_bytes.value_or(MemoryToUse() / 8)) {}

// The receiver goes first: what it has whole is kept by the keeper still.
SnapshotService::~SnapshotService() {
  if (spooler_) spooler_->End();  // first: what the keeper is at ends with it
  if (keeper_) keeper_->Stop();
  std::shared_ptr<const Receiver> gone;
  {
    MutexLock lock(mutex_);
    gone.swap(receiver_);
  }
}

Status SnapshotService::Keep(ReceivedStep step) {
  const auto save = step.save;
  const auto kept = keeper_->Keep(std::move(step));
  if (save && save->stays()) return Fail(Error(kept.error()));
  if (save) spooler_->Over(*save);
  if (!kept) {
    collector_->Reclaim();
    return Fail(Error(kept.error()));
  }
  KeepHot(*kept);
  RefreshDaemons(request_.store, {&*kept, 1});
  collector_->Ask(kept->run);
  return {};
}

void SnapshotService::Stored(const StepRecord& record, bool published) {
  if (const Status shown = hooks_.refresh(record); !shown) {
    Log(LogLevel::kWarning, shown.error().message);
  }
  KeepHot(record);
  RefreshDaemons(request_.store, {&record, 1});
  if (published) collector_->Ask(record.run);
}

void SnapshotService::KeepHot(const StepRecord& record) {
  if (request_.hot_steps == 0) return;
  const auto step = store_.Load(record);
  std::vector<std::string> paths;
  if (step) {
    for (const Blob& blob : (*step)->model.blobs) paths.push_back((*step)->model.PathOf(blob));
  }
  const Status hot = step ? hot_.Add(record, paths) : Fail(Error(step.error()));
  if (!hot) Log(LogLevel::kWarning, StrCat("not kept in memory: ", hot.error().message));
}

Result<bool> SnapshotService::OpenSpool() {
  if (request_.spool.empty() || spooler_) return true;
  CKPT_ASSIGN_OR_RETURN(const std::string format,
                        ReadWhole(*store_.storage(), "format", kRecordMaxBytes));
  auto opened = Spool::Open(request_.spool, format);
  const ErrorCode code = opened ? ErrorCode::kInternal : opened.error().code;
  if (!opened && code == ErrorCode::kExists) return false;
  if (!opened && (code == ErrorCode::kIo || code == ErrorCode::kExhausted)) {
    Log(LogLevel::kWarning, StrCat("the spool cannot be used: ", opened.error().message));
    return true;
  }
  if (!opened) return Fail(std::move(opened).error());
  SpoolerOptions options;
  options.budget = request_.spool_bytes.value_or(0);
  if (!request_.spool_bytes) {
    struct statvfs room {};
    if (statvfs(request_.spool.c_str(), &room) == 0)
      options.budget = room.f_bavail * room.f_frsize / 2;
    for (const PreparedPart& part : opened->left) options.budget += BytesOf(part);
  }
  options.log = [](std::string_view line) { Log(LogLevel::kWarning, line); };
  spooler_ = std::make_unique<Spooler>(*std::move(opened), std::move(options));
  return true;
}

Status SnapshotService::StartPeers() {
  if (request_.peers.address.empty() || peers_) return {};
  PeerService::Hooks hooks;
  hooks.refresh = hooks_.refresh;
  hooks.say = [this](const std::string& name) -> std::shared_ptr<const void> {
    const auto held = commit_->presence().Hold(name);
    if (!held) Log(LogLevel::kWarning, held.error().message);
    return held ? *held : nullptr;
  };
  if (!request_.spool.empty()) {
    hooks.spooled = [this]() -> Result<std::vector<PreparedPart>> {
      CKPT_ASSIGN_OR_RETURN(const std::string format,
                            ReadWhole(*store_.storage(), "format", kRecordMaxBytes));
      CKPT_ASSIGN_OR_RETURN(const auto storage, FileStorage::Open(request_.spool, false));
      return Spool::Look(*storage, format);
    };
  }
  CKPT_ASSIGN_OR_RETURN(peers_, PeerService::Start(store_, catalogue_, request_.peers,
                                                   commit_->node(), std::move(hooks)));
  return {};
}

Status SnapshotService::StartReceiving() {
  if (receiving() || memory_bytes_ == 0) return {};
  CKPT_ASSIGN_OR_RETURN(const bool ready, OpenSpool());
  if (!ready) return {};
  if (!collector_) {
    shelf_ = ArenaShelf::FromEnvironment(request_.store);
    const auto removed = [this](const StepRecord& record) {
      hot_.Remove(record);
      const Status told = hooks_.refresh(record);
      if (!told) Log(LogLevel::kWarning, told.error().message);
      RefreshDaemons(request_.store, {&record, 1});
    };
    collector_ = std::make_unique<StepCollector>(store_, request_.retention,
                                                 StepCollector::Hooks{hooks_.let_go, removed});
    commit_ = std::make_unique<WorldCommit>(store_, ModelOfRankFiles());
  }
  keeper_ = std::make_unique<SnapshotKeeper>(store_, catalogue_, hooks_.refresh, spooler_.get());
  ReceiverOptions options;
  options.store = request_.store;
  options.spooler = spooler_.get();
  options.waits = [this](const ReceivedStep& step) { keeper_->ShowSoon(step); };
  options.memory_bytes = memory_bytes_;
  options.keep = [this](ReceivedStep step) { return Keep(std::move(step)); };
  options.stored = [this](const PartAgain& part) {
    return keeper_->FindStored(part).map([](const auto& found) { return found.has_value(); });
  };
  options.stream = [this](const std::string& path, uint64_t bytes,
                          std::weak_ptr<const void> owner) {
    return store_.StreamBlob(path, bytes, std::move(owner));
  };
  options.log = [](std::string_view line) { Log(LogLevel::kWarning, line); };
  options.commit = commit_.get();
  options.shown = [this](const StepRecord& record, bool published) { Stored(record, published); };
  options.reclaim = [this] { collector_->Reclaim(); };
  options.shelf = shelf_;
  if (!request_.peers.address.empty()) {
    options.protect = [this](const AttemptName& name, uint64_t step, uint32_t world,
                             const std::map<uint32_t, ReceivedFile>& files) {
      PeerService* const peers = peers_ready_.load();
      if (peers != nullptr) peers->Protect(name, step, world, files);
    };
  }
  auto receiver = Receiver::Start(std::move(options));
  if (!receiver) {
    spooler_.reset();  // it is the receiving daemon's
    if (receiver.error().code == ErrorCode::kExists) return {};
    Log(LogLevel::kWarning, StrCat("snapshots are not received: ", receiver.error().message));
    return {};
  }
  {
    MutexLock lock(mutex_);
    receiver_ = *std::move(receiver);
  }
  CKPT_RETURN_IF_ERROR(StartPeers());
  peers_ready_ = peers_.get();
  return {};
}

std::shared_ptr<const Receiver> SnapshotService::Get() const {
  MutexLock lock(mutex_);
  return receiver_;
}

std::string SnapshotService::StatusJson() const {
  const auto receiver = Get();
  if (!receiver) return "";
  auto status = nlohmann::json::parse(receiver->StatusJson(), nullptr, false);
  status["retention"] = nlohmann::json::parse(collector_->StatusJson(), nullptr, false);
  if (const PeerService* const peers = peers_ready_.load()) {
    status["peers"] = nlohmann::json::parse(peers->StatusJson(), nullptr, false);
  }
  if (spooler_) status["spool"] = nlohmann::json::parse(spooler_->StatusJson(), nullptr, false);
  status["hot"] = nlohmann::json::parse(hot_.StatusJson(), nullptr, false);
  status["in_memory"] = nlohmann::json::array();
  for (const StepRecord& record : catalogue_.held()) {
    status["in_memory"].push_back(RecordJson(record));
  }
  return status.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace ckptfs
