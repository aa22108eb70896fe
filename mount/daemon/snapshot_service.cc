// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/snapshot_service.h"

#include <sys/statvfs.h>
#include <unistd.h>

#include <utility>

#include "core/base/device_error.h"
#include "core/base/strings.h"
#include "core/commit/spool.h"
#include "core/io/file_storage.h"
#include "core/io/root.h"
#include "core/records/records.h"
#include "fs/serve/page_pool.h"
#include "mount/control/control_client.h"
#include "mount/logging.h"

namespace ckptfs {

SnapshotService::SnapshotService(Store& store, StepCatalogue& catalogue, SnapshotRequest request,
                                 Hooks hooks)
    : store_(store),
      catalogue_(catalogue),
      request_(std::move(request)),
      memory_bytes_(request_.memory_bytes.value_or(MemoryToUse() / 4)),
      hooks_(std::move(hooks)),
      hot_(request_.hot_steps, request_.hot_bytes.value_or(MemoryToUse() / 8)),
      retention_(request_.retention) {}

// The receiver goes before its landing, which it finishes.
SnapshotService::~SnapshotService() {
  if (spooler_) spooler_->End();  // first: what the landing is at ends with it
  if (landing_) landing_->End();
  std::shared_ptr<const Receiver> gone;
  {
    MutexLock lock(mutex_);
    gone.swap(receiver_);
  }
}

void SnapshotService::Hear(const StepMaker::News& news) {
  using What = StepMaker::News::What;
  if (news.what == What::kInVain) return collector_->Reclaim();
  if (news.what != What::kPersisted) {  // the keeper did not show it
    if (const Status shown = hooks_.refresh(news.record); !shown) {
      Log(LogLevel::kWarning, shown.error().message);
    }
  }
  KeepHot(news.record);
  RefreshDaemons(request_.store, {&news.record, 1});
  if (news.what != What::kHeard) collector_->Ask(news.record.run);
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
  if (!opened && opened.error().code == ErrorCode::kExists) return false;
  if (!opened && IsOfDevice(opened.error())) {
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

std::unique_ptr<Landing> SnapshotService::MakeLanding() {
  keeper_ = std::make_unique<SnapshotKeeper>(store_, catalogue_, hooks_.refresh,
                                             [this](const StepMaker::News& news) { Hear(news); });
  LandingOptions options;
  options.steps = keeper_.get();
  options.commit = commit_.get();
  options.spooler = spooler_.get();
  options.log = [](std::string_view line) { Log(LogLevel::kWarning, line); };
  return std::make_unique<Landing>(std::move(options));
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
    collector_ = std::make_unique<StepCollector>(store_, retention(),
                                                 StepCollector::Hooks{hooks_.let_go, removed});
    commit_ = std::make_unique<WorldCommit>(store_, ModelOfRankFiles());
  }
  landing_ = MakeLanding();
  ReceiverOptions options;
  options.store = request_.store;
  options.memory_bytes = memory_bytes_;
  options.landing = landing_.get();
  options.log = [](std::string_view line) { Log(LogLevel::kWarning, line); };
  options.shelf = shelf_;
  auto receiver = Receiver::Start(std::move(options));
  if (!receiver) {
    landing_.reset();
    spooler_.reset();  // it is the receiving daemon's
    if (receiver.error().code == ErrorCode::kExists) return {};
    Log(LogLevel::kWarning, StrCat("snapshots are not received: ", receiver.error().message));
    return {};
  }
  {
    MutexLock lock(mutex_);
    receiver_ = *std::move(receiver);
    collector_->SetRetention(retention_);  // it may have changed since it was made
  }
  CKPT_RETURN_IF_ERROR(StartPeers());
  peers_ready_ = peers_.get();
  if (peers_) landing_->ProtectBy(peers_->protector());
  return {};
}

Retention SnapshotService::retention() const {
  MutexLock lock(mutex_);
  return retention_;
}

// The collector is there once there is a receiver.
void SnapshotService::SetRetention(const Retention& retention) {
  MutexLock lock(mutex_);
  retention_ = retention;
  if (receiver_) collector_->SetRetention(retention);
}

std::shared_ptr<const Receiver> SnapshotService::Get() const {
  MutexLock lock(mutex_);
  return receiver_;
}

std::vector<DescriptorStore::Kept> SnapshotService::KeptArenas() const {
  return shelf_ ? shelf_->All() : std::vector<DescriptorStore::Kept>();
}

std::optional<SnapshotStatus> SnapshotService::status() const {
  const auto receiver = Get();
  if (!receiver) return std::nullopt;
  SnapshotStatus status{.receiver = receiver->status(),
                        .retention = collector_->status(),
                        .peers = {},
                        .spool = {},
                        .hot = hot_.status(),
                        .in_memory = catalogue_.held()};
  if (const PeerService* const peers = peers_ready_.load()) status.peers = peers->status();
  if (spooler_) status.spool = spooler_->status();
  return status;
}

nlohmann::json SnapshotsJson(const SnapshotService& service) {
  const auto status = service.status();
  return status ? ToJson(*status) : nlohmann::json();
}

}  // namespace ckptfs
