// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/peer_service.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/commit/kept_files.h"
#include "core/io/file_stamp.h"
#include "core/peer/peer_root.h"
#include "core/records/records.h"
#include "fs/serve/page_pool.h"
#include "mount/daemon/memory_step.h"
#include "mount/logging.h"

namespace ckptfs {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kQuietLook{10};    // at what does not change
constexpr std::chrono::seconds kPeerPatience{3};  // with a peer that does nothing
constexpr std::chrono::minutes kLateRank0{10};    // until a save without one is left behind

void Warn(std::string_view line) { Log(LogLevel::kWarning, line); }

std::string HostName() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "?";
}

// True for a part of another life's save whose rank 0 never came, and with it no time.
bool IsLeftBehind(const MemoryAttempt& attempt, int64_t mtime_ns, const MemoryAttempt& shown) {
  const bool one_life = attempt.name.job == shown.name.job && attempt.name.life == shown.name.life;
  return !one_life && !attempt.ranks.contains(0) &&
         mtime_ns < shown.mtime_ns - std::chrono::nanoseconds(kLateRank0).count();
}

}  // namespace

PeerService::PeerService(Store& store, StepCatalogue& catalogue, PeerRequest request, Hooks hooks)
    : store_(store),
      catalogue_(catalogue),
      request_(std::move(request)),
      hooks_(std::move(hooks)),
      transport_(std::make_shared<TcpTransport>(TcpTransport::Options{
          ParseTcpAddress(request_.address).value_or(TcpAddress()).host, kPeerPatience})),
      shelf_(request_.memory_bytes.value_or(MemoryToUse() / 4)) {}

Result<std::unique_ptr<PeerService>> PeerService::Start(Store& store, StepCatalogue& catalogue,
                                                        const PeerRequest& request,
                                                        const Digest& node, Hooks hooks) {
  std::unique_ptr<PeerService> service(
      new PeerService(store, catalogue, request, std::move(hooks)));
  CKPT_RETURN_IF_ERROR(service->Begin(node));
  return service;
}

Status PeerService::Begin(const Digest& node) {
  CKPT_ASSIGN_OR_RETURN(const std::string format,
                        ReadWhole(*store_.storage(), "format", kRecordMaxBytes));
  CKPT_ASSIGN_OR_RETURN(const PeerKey key, StorePeerKey(*store_.storage()));
  CKPT_ASSIGN_OR_RETURN(auto listener, transport_->Listen(request_.address));
  const std::string host = HostName();
  self_ = {node, listener->address(), host,
           request_.failure_domain.empty() ? host : request_.failure_domain};
  const PeerIdentity identity{key, node, DigestOf(format)};
  pool_ = std::make_shared<PeerPool>(transport_, identity, Warn);
  PeerServerOptions serving;
  serving.self = identity;
  serving.shelf = &shelf_;
  serving.show = [this](const std::string& run) { return Answer(run); };
  serving.spooled = hooks_.spooled;
  serving.changed = [this] {
    MutexLock lock(mutex_);
    changed_ = true;
  };
  serving.log = Warn;
  server_ = std::make_unique<PeerServer>(std::move(listener), std::move(serving));
  presence_ = hooks_.say(PeerRecordName(node));
  CKPT_RETURN_IF_ERROR(AnnouncePeer(*store_.storage(), self_));
  LookForPeers();
  if (request_.scheme.kind != ProtectScheme::kOff) {
    ProtectorOptions options;
    options.scheme = request_.scheme;
    options.node = node;
    options.failure_domain = self_.failure_domain;
    options.shelf = &shelf_;
    options.pool = pool_.get();
    options.look = [this] { return Look(); };
    options.shown = [this](const std::string& run) { return ShownDirectory(run); };
    options.time_of = [this](const std::string& run, const std::string& job) {
      return store_.SaveTimeOf(run, job, NowNs());
    };
    options.rate = request_.rate;
    options.log = Warn;
    protector_ = std::make_unique<Protector>(std::move(options));
  }
  looked_ = Clock::now() - kQuietLook;
  searched_ = Clock::now();
  worker_.Start(
      Clock::now() + hooks_.turn, [this] { return Turn(); },
      [](const Error& error) { Warn(StrCat("peers: ", error.message)); });
  return {};
}

PeerService::~PeerService() {
  worker_.Ask();
  if (pool_) pool_->Stop();  // nobody waits for a peer then
  worker_.Stop();
  protector_.reset();
  server_.reset();
  if (pool_) pool_->Resume();  // steps that are open read from peers still
  std::map<std::string, Shown> shown;
  {
    MutexLock lock(mutex_);
    shown.swap(shown_);
  }
  for (const auto& [run, step] : shown) {
    catalogue_.HideMemory(step.record);
    (void)hooks_.refresh(step.record);
  }
  if (self_.address.empty()) return;
  (void)store_.storage()->Remove(PeerRecordName(self_.node));
}

Worker::Time PeerService::Turn() {
  bool quiet = false;
  {
    MutexLock lock(mutex_);
    quiet = !std::exchange(changed_, false) && shown_.empty() && shelf_.used() == 0;
  }
  if (Clock::now() - searched_ >= 2 * hooks_.turn) {
    LookForPeers();
    searched_ = Clock::now();
  }
  if (!quiet && Clock::now() - looked_ >= std::min<Clock::duration>(kQuietLook, 2 * hooks_.turn)) {
    Look();
    looked_ = Clock::now();
  }
  return Clock::now() + hooks_.turn;
}

void PeerService::LookForPeers() {
  MutexLock one(peers_mutex_);
  auto peers = ReadPeers(*store_.storage(), found_, Warn);
  if (!peers) return Warn(StrCat("peers: ", peers.error().message));
  found_ = *std::move(peers);
  pool_->Set(found_);
  // Somebody took this daemon for dead, or removed it.
  if (std::none_of(found_.begin(), found_.end(),
                   [&](const PeerRecord& peer) { return peer.node == self_.node; })) {
    const Status said = AnnouncePeer(*store_.storage(), self_);
    if (!said) Warn(StrCat("peers: ", said.error().message));
  }
  // A record of a daemon that does not answer and is gone by its presence goes, too.
  const std::vector<PeerRecord> away = pool_->away();
  if (away.empty()) return;
  const auto present = ReadPresences(*store_.storage());
  if (!present) return;
  for (const PeerRecord& peer : away) {
    const auto said = present->find(peer.node);
    const auto state = store_.presences().Look(
        store_.directory(), peer.node,
        said == present->end() ? std::nullopt : std::optional(said->second), Clock::now());
    if (state == PresenceState::kGone) (void)store_.storage()->Remove(PeerRecordName(peer.node));
  }
}

// ---- what is shown -------------------------------------------------------------

std::vector<MemoryAttempt> PeerService::Look() {
  MutexLock one(look_mutex_);
  PeerShelves shelves = pool_->ListAll();
  if (worker_.stopping()) return {};  // peers were not asked
  shelves[self_.node] = shelf_.List();
  const std::vector<MemoryAttempt> attempts = AttemptsOn(shelves);
  std::set<std::string> runs;
  for (const MemoryAttempt& attempt : attempts) runs.insert(attempt.name.run);
  {
    MutexLock lock(mutex_);
    for (const auto& [run, shown] : shown_) runs.insert(run);
  }
  for (const std::string& run : runs) ShowRun(run, attempts);
  return attempts;
}

void PeerService::ShowRun(const std::string& run, const std::vector<MemoryAttempt>& attempts) {
  const MemoryAttempt* const newest = NewestProtected(attempts, run);
  if (newest == nullptr) return KeepOrHide(run, attempts);
  const std::string directory = newest->Directory();
  {
    MutexLock lock(mutex_);
    const auto shown = shown_.find(run);
    if (shown != shown_.end() && shown->second.directory == directory) {
      return shown->second.root->Update(*newest);
    }
  }
  auto made = Caught([&] { return Show(*newest); });
  if (!made) KeepOrHide(run, attempts);
  const std::string why = made ? "" : made.error().message;
  std::map<std::string, Shown>::node_type before;  // goes outside of the lock
  {
    MutexLock lock(mutex_);
    if (made) {
      before = shown_.extract(run);
      shown_[run] = *made;
    }
    if (std::exchange(said_[run], why) == why && !why.empty()) return;
  }
  if (!made) return Warn(StrCat("memory step ", run, "/", newest->step, " is not shown: ", why));
  const StepRecord& record = made->record;
  if (!before.empty() && before.mapped().record.id != record.id) {
    catalogue_.HideMemory(before.mapped().record);
    (void)hooks_.refresh(before.mapped().record);
  }
  if (const Status shown = hooks_.refresh(record); !shown) Warn(shown.error().message);
  ForgetOlder(attempts, *newest);
}

void PeerService::KeepOrHide(const std::string& run, const std::vector<MemoryAttempt>& attempts) {
  std::string why = "no node has it any more";
  {
    MutexLock lock(mutex_);
    const auto shown = shown_.find(run);
    if (shown == shown_.end()) return;
    for (const MemoryAttempt& attempt : attempts) {
      if (attempt.name.run != run || attempt.Directory() != shown->second.directory) continue;
      if (attempt.is_protected()) return shown->second.root->Update(attempt);
      why = attempt.Hindrance();
    }
  }
  Hide(run, why);
}

std::string PeerService::ShownDirectory(const std::string& run) const {
  MutexLock lock(mutex_);
  const auto shown = shown_.find(run);
  return shown == shown_.end() ? "" : shown->second.directory;
}

Result<PeerService::Shown> PeerService::Show(const MemoryAttempt& attempt) {
  PeerRoot::Places places{&shelf_, pool_, RootBelow(store_.storage(), "blobs"), Warn};
  CKPT_ASSIGN_OR_RETURN(auto root, PeerRoot::Open(attempt, std::move(places)));
  std::vector<std::shared_ptr<const void>> said;
  const KeptFiles::Say say = [&](const std::string& directory) {
    said.push_back(hooks_.say(directory));
    return Result<std::shared_ptr<const void>>(nullptr);
  };
  CKPT_ASSIGN_OR_RETURN(MemoryStep step, StepOfMemory(root, store_, say));
  CKPT_ASSIGN_OR_RETURN(StepRecord record, catalogue_.ShowMemory(std::move(step)));
  return Shown{attempt.Directory(), std::move(record), std::move(root), std::move(said)};
}

void PeerService::Hide(const std::string& run, const std::string& why) {
  std::map<std::string, Shown>::node_type shown;  // goes outside of the lock
  {
    MutexLock lock(mutex_);
    shown = shown_.extract(run);
  }
  if (shown.empty()) return;
  const StepRecord& record = shown.mapped().record;
  catalogue_.HideMemory(record);
  Warn(StrCat(run, "/memory/", record.id, " is lost: ", why));
  if (const Status told = hooks_.refresh(record); !told) Warn(told.error().message);
}

void PeerService::ForgetOlder(const std::vector<MemoryAttempt>& attempts,
                              const MemoryAttempt& shown) {
  for (const ShelvedPart& part : shelf_.List()) {
    if (part.name.run != shown.name.run) continue;
    const std::string directory = part.Directory();
    const auto attempt =
        std::find_if(attempts.begin(), attempts.end(), [&](const MemoryAttempt& one) {
          return one.name.run == part.name.run && one.Directory() == directory;
        });
    if (attempt == attempts.end()) continue;  // it has come since
    if (IsEarlier(*attempt, shown) || IsLeftBehind(*attempt, part.mtime_ns, shown))
      (void)shelf_.Remove(directory, part.rank, part.slot());
  }
}

Result<std::vector<ShownMemoryStep>> PeerService::Answer(const std::string& run) {
  LookForPeers();
  Look();
  std::vector<ShownMemoryStep> steps;
  MutexLock lock(mutex_);
  const auto shown = shown_.find(run);
  if (shown == shown_.end()) return steps;
  const StepRecord& record = shown->second.record;
  steps.push_back({shown->second.root->part().name, record.id, record.manifest,
                   shown->second.directory, record.mtime_ns, record.iteration});
  return steps;
}

PeerServiceStatus PeerService::status() const {
  PeerServiceStatus status{.self = self_,
                           .memory = shelf_.budget(),
                           .used = shelf_.used(),
                           .links = server_->links(),
                           .received_bytes = server_->received_bytes(),
                           .rate_limit = request_.rate,
                           .pool = pool_->status(),
                           .protector = {},
                           .shown = {}};
  if (protector_) status.protector = protector_->status();
  MutexLock lock(mutex_);
  for (const auto& [run, shown] : shown_)
    status.shown.push_back(StrCat(run, "/memory/", shown.record.id));
  return status;
}

}  // namespace ckptfs
