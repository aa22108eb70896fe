// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/mount_process.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <set>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "formats/registry.h"
#include "formats/torch/file_records.h"
#include "mount/control/control_client.h"
#include "mount/control/control_server.h"
#include "mount/control/daemon_record.h"
#include "mount/daemon/follow_service.h"
#include "mount/daemon/mount_handover.h"
#include "mount/daemon/mountpoint_claim.h"
#include "mount/daemon/process_setup.h"
#include "mount/daemon/shown_warnings.h"
#include "mount/daemon/snapshot_service.h"
#include "mount/fuse/fuse_ops.h"
#include "mount/fuse/fuse_session.h"
#include "mount/fuse/mount_table.h"
#include "mount/logging.h"
#include "mount/metrics/metrics_service.h"
#include "mount/options.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

// Other nodes publish into a shared store.
constexpr int kRefreshMilliseconds = 1000 * DaemonRecord::kBeatSeconds;

void Say(std::string_view line) { Log(LogLevel::kInfo, line); }

// The mounted filesystem, for threads that may still be at work when it is gone.
class Mounted {
 public:
  // With null it waits for those who use the old one.
  void Set(Filesystem* filesystem) {
    const MutexLock lock(mutex_);
    filesystem_ = filesystem;
  }
  // Calls it with what is mounted, if anything is.
  template <class Use>
  void With(const Use& use) {
    const MutexLock lock(mutex_);
    if (filesystem_ != nullptr) use(*filesystem_);
  }

 private:
  Mutex mutex_;
  Filesystem* filesystem_ GUARDED_BY(mutex_) = nullptr;
};

// The daemon's parts; destroyed in reverse: first nobody asks any more, then
// nothing is mounted, then the tree goes.
struct Daemon {
  ~Daemon() {
    for (const auto& one : follows) one->Stop();
    mounted.Set(nullptr);
    control.reset();  // it may have the metrics listen elsewhere
    metrics.reset();
    snapshots.reset();
    // While requests are still answered: the kernel may wait for them first.
    if (filesystem) filesystem->EndInvalidation();
  }
  std::unique_ptr<Store> store;
  Mounted mounted;
  // Their copies are finished after the mount has gone.
  std::vector<std::unique_ptr<FollowService>> follows;
  std::set<std::string> adopted;  // "run/id", by this mount: their files are there
  std::atomic<bool> awaits_view =
      false;  // it is known of which run, and none of its steps is there
  std::unique_ptr<StepCatalogue> catalogue;
  std::vector<std::unique_ptr<ViewFormat>> formats;
  std::unique_ptr<Filesystem> filesystem;
  RequestTarget target;
  std::unique_ptr<FuseSession> session;
  uint64_t generation = 0;  // programs that served the mount before
  std::unique_ptr<SnapshotService> snapshots;
  std::unique_ptr<ControlServer> control;
  std::unique_ptr<MetricsServer> metrics;  // null: nobody is to ask
  std::unique_ptr<Configuration> configuration;
  std::unique_ptr<DaemonRecord> record;
  Succession succession;
};

MountpointNeeds NeedsOf(const MountRequest& request) {
  return {request.mountpoint,
          request.mkdir,
          request.nonempty,
          {{"store", request.store}, {"spool", request.snapshots.spool}}};
}

// --adopt: what was adopted decides what /view shows unless --run and --step do.
Status AdoptAll(const MountRequest& request, StoreForAdoption& store, FilesystemOptions& options,
                std::set<std::string>& adopted) {
  std::set<std::string> runs;
  std::string step;
  for (const AdoptRequest& adopt : request.adopt) {
    if (request.adopt.size() > 1) CKPT_RETURN_IF_ERROR(CheckRequested(store.directory(), adopt));
  }
  for (const AdoptRequest& adopt : request.adopt) {
    CKPT_ASSIGN_OR_RETURN(const AdoptReport outcome, AdoptRequested(store, adopt));
    for (const std::string& line : outcome.said) Say(line);
    for (const Error& error : outcome.refused) Say(StrCat("not adopted: ", error.message));
    for (const std::string& line : outcome.skipped) Say(StrCat("skipped ", line));
    for (const std::string& line : outcome.warnings) Say(line);
    for (const StepRecord& record : outcome.steps) {
      runs.insert(record.run);
      adopted.insert(StrCat(record.run, "/", record.id));
    }
    step = outcome.whole_run ? "latest" : outcome.steps.back().id;
  }
  const bool one = runs.size() == 1 && !request.run;
  if (one) options.run = *runs.begin();
  if (one && request.adopt.size() == 1 && !request.step) options.step = step;
  return {};
}

// --step may be a tag; one that names nothing yet is awaited as an id.
void ResolveTag(Store& store, FilesystemOptions& options) {
  if (options.step == "latest") return;
  std::string run = options.run.value_or("");
  if (!options.run) {
    const auto runs = store.Runs();
    if (!runs || runs->size() != 1) return;
    run = runs->front();
  }
  const auto step = store.Resolve(run, options.step);
  if (step) options.step = step->id;
}

// "run/ckpt/step/global_step5/view", where /view leads.
Result<std::string> ViewTargetOf(Filesystem& filesystem) {
  const Caller caller{::geteuid(), ::getegid(), static_cast<uint32_t>(::getpid())};
  CKPT_ASSIGN_OR_RETURN(const Attributes view, filesystem.Lookup(kRootInode, "view", caller));
  auto target = filesystem.ReadLink(view.inode, caller);
  filesystem.Forget(view.inode, 1);
  return target;
}

// A directory that is followed may hold runs of other names than its own.
void ShowIfNothingIs(const MountRequest& request, Daemon& daemon, const StepRecord& step) {
  if (!daemon.awaits_view || request.run || request.step) return;
  daemon.mounted.With([&](Filesystem& filesystem) {
    if (ViewTargetOf(filesystem)) return;
    const auto shown = filesystem.SwitchView(step.run, "latest");
    if (!shown) Log(LogLevel::kWarning, shown.error().message);
  });
}

// --follow of directories: each is looked at once; what /view shows comes from theirs.
Status FollowAll(const MountRequest& request, Daemon& daemon, FilesystemOptions& options) {
  std::set<std::string> runs;
  for (const AdoptRequest& adopt : request.adopt) {
    FollowService::Hooks hooks;
    hooks.say = Say;
    const auto tell = [&request](const std::vector<StepRecord>& records) {
      for (const std::string& line : RefreshDaemons(request.store, records)) {
        Log(LogLevel::kWarning, StrCat("a live mount was not told: ", line));
      }
    };
    hooks.withdrawn = tell;
    hooks.adopted = [&request, &daemon, tell](const std::vector<StepRecord>& records) {
      for (const StepRecord& record : records) {
        Say(StrCat("adopted ", record.run, "/", record.id));
      }
      tell(records);
      ShowIfNothingIs(request, daemon, records.back());
    };
    CKPT_ASSIGN_OR_RETURN(auto follow,
                          FollowService::Create(*daemon.store, adopt, std::move(hooks)));
    if (!follow->run().empty()) runs.insert(follow->run());
    daemon.follows.push_back(std::move(follow));
  }
  if (runs.size() == 1 && !request.run) options.run = *runs.begin();
  daemon.awaits_view = daemon.follows.size() == 1;
  return {};
}

nlohmann::json FollowsJson(const Daemon& daemon) {
  auto list = nlohmann::json::array();
  for (const auto& one : daemon.follows) list.push_back(ToJson(one->status()));
  return list;
}

FilesystemOptions OptionsOf(const MountRequest& request) {
  FilesystemOptions options;
  options.run = request.run;
  options.step = request.step.value_or("latest");
  options.follow = request.follow;
  options.layouts = request.layouts;
  options.roots = request.roots;
  options.force_mode = request.mode;
  options.materialise_budget = request.budget_bytes;
  options.reserve = request.reserve_bytes;
  options.log = [](std::string_view line) { Log(LogLevel::kWarning, line); };
  options.touched =
      std::make_shared<TouchedFiles>(TouchedFiles::Options{RecordsOfFile, options.log});
  return options;
}

// "view -> run/ckpt/step/global_step5", or why there is none.
std::string DescribeView(const MountRequest& request, const Daemon& daemon,
                         const Result<std::string>& target) {
  if (target) return StrCat("view -> ", *target);
  if (target.error().code != ErrorCode::kNotFound) return StrCat("view: ", target.error().message);
  if (request.run || request.step || daemon.awaits_view)
    return "no view yet: it appears when its step is adopted";
  return "no view yet: give --run, or `ckptfs switch RUN/ID` picks one";
}

// The mount and what it shows, on the caller's terminal.
void SayMounted(const MountRequest& request, const Daemon& daemon, const std::string& log) {
  const Result<std::string> target = ViewTargetOf(*daemon.filesystem);
  if (target) {
    WarnOfShown({request, *daemon.store, daemon.formats, daemon.adopted, *target});
  }
  Say(StrCat(request.store, " mounted at ", request.mountpoint, "; ",
             DescribeView(request, daemon, target), "; log: ", log));
}

// Opens the store with what is to be adopted or followed; what /view shows comes from there.
// `again`: an earlier program adopted it.
Status OpenForMount(const MountRequest& request, bool again, Daemon& daemon,
                    FilesystemOptions& options) {
  StoreForAdoption store(request.store);
  if (request.follow) {
    for (const AdoptRequest& adopt : request.adopt) {
      CKPT_RETURN_IF_ERROR(FollowService::Check(request.store, adopt));
    }
    CKPT_RETURN_IF_ERROR(store.Open());
    daemon.store = store.Take();
    CKPT_RETURN_IF_ERROR(FollowAll(request, daemon, options));
  } else {
    if (!again) CKPT_RETURN_IF_ERROR(AdoptAll(request, store, options, daemon.adopted));
    CKPT_RETURN_IF_ERROR(store.Open());
    daemon.store = store.Take();
  }
  ResolveTag(*daemon.store, options);
  return {};
}

SessionOptions SessionOf(const MountRequest& request) {
  SessionOptions session;
  session.mountpoint = request.mountpoint;
  session.source = request.store;
  session.allow_other = request.allow_other;
  session.threads = request.threads;
  session.clone_fd = request.clone_fd;
  return session;
}

// Goes on where an earlier program ended.
void GoOn(const MountState& before, Daemon& daemon) {
  for (const TakenFile& taken : daemon.filesystem->TakeOver(before.kernel)) {
    const auto id = before.backing_ids.find(static_cast<uint64_t>(taken.file.handle));
    if (id == before.backing_ids.end()) continue;
    daemon.target.backing_ids().Restore(taken.inode, taken.file, id->second);
  }
}

// Another program may show other bytes under a name: the kernel reads again what nobody has open.
void ForgetContents(const MountState& before, Daemon& daemon) {
  if (before.program == ThisProgram()) return;
  std::set<InodeNumber> open;
  for (const KnownFile& file : before.kernel.files) open.insert(file.inode);
  for (const KnownName& name : before.kernel.names) {
    if (!open.contains(name.inode)) daemon.session->InvalidateContent(name.inode);
  }
}

// `left`: the mount as an earlier program left it; null: it is to be made.
Status StartDaemon(const MountRequest& request, ServedMount* left, Daemon& daemon) {
  FilesystemOptions options = OptionsOf(request);
  CKPT_ASSIGN_OR_RETURN(MountpointClaim claim, MountpointClaim::Take(request.mountpoint));
  if (left == nullptr) CKPT_RETURN_IF_ERROR(PrepareMountpoint(NeedsOf(request), claim));
  CKPT_RETURN_IF_ERROR(OpenForMount(request, left != nullptr, daemon, options));
  RefreshDaemons(request.store);
  daemon.catalogue = std::make_unique<StepCatalogue>(*daemon.store);
  daemon.formats = MakeViewFormats(request.models);
  if (left == nullptr) {
    CKPT_ASSIGN_OR_RETURN(daemon.session,
                          FuseSession::Mount(SessionOf(request), ViewHandlers(daemon.target)));
  } else {
    daemon.generation = left->state.generation + 1;
    CKPT_ASSIGN_OR_RETURN(daemon.session,
                          FuseSession::Resume(SessionOf(request), ViewHandlers(daemon.target),
                                              {std::move(left->device), left->state.greeting}));
  }
  if (!daemon.target.WaitForInit()) {
    return Fail(ErrorCode::kIo, StrCat("the kernel ended the mount at ", request.mountpoint));
  }
  const SessionFeatures& features = daemon.target.features();
  const bool privileged = HasSysAdmin();  // registering backing files needs it
  options.passthrough = features.passthrough && privileged;
  options.direct_io_mmap = features.direct_io_mmap;
  if (!options.passthrough) {
    Say(StrCat("files are streamed: kernel passthrough needs ",
               privileged ? "Linux 6.9 and a build with libfuse 3.17" : "root"));
  }
  options.invalidate = [raw = daemon.session.get()](InodeNumber parent, const std::string& name) {
    raw->InvalidateEntry(parent, name);
  };
  CKPT_ASSIGN_OR_RETURN(daemon.filesystem,
                        Filesystem::Create(*daemon.catalogue, daemon.formats, std::move(options)));
  daemon.mounted.Set(daemon.filesystem.get());
  if (left != nullptr) GoOn(left->state, daemon);
  daemon.target.Serve(*daemon.filesystem);
  if (left != nullptr) ForgetContents(left->state, daemon);
  return {};
}

std::unique_ptr<SnapshotService> MakeSnapshots(const MountRequest& request, Daemon& daemon) {
  SnapshotService::Hooks hooks;
  hooks.refresh = [raw = daemon.filesystem.get()](const StepRecord& record) {
    return raw->RefreshStep(record.run, record.id);
  };
  hooks.let_go = [raw = daemon.filesystem.get()](const StepRecord& record) {
    raw->LetGo(record.run, record.id);
  };
  SnapshotRequest snapshots = request.snapshots;
  snapshots.store = request.store;
  return std::make_unique<SnapshotService>(*daemon.store, *daemon.catalogue, std::move(snapshots),
                                           std::move(hooks));
}

// REQUIRES: its snapshots are there.
DaemonStatus StatusOf(const Daemon& daemon) {
  DaemonStatus status;
  status.filesystem = daemon.filesystem.get();
  status.snapshots = [raw = daemon.snapshots.get()] { return SnapshotsJson(*raw); };
  if (!daemon.follows.empty()) status.following = [&daemon] { return FollowsJson(daemon); };
  status.configuration = [raw = daemon.configuration.get()] { return raw->Describe(); };
  return status;
}

// Names what a change of the configuration file changes at once.
void MakeConfiguration(const MountRequest& request, Daemon& daemon) {
  daemon.configuration = std::make_unique<Configuration>(request.configuration);
  AllowSharedChanges(*daemon.configuration,
                     LogTarget(request.log, request.store, request.mountpoint.substr(1)),
                     *daemon.snapshots);
  daemon.configuration->May({"metrics-listen"}, [&](const OptionValues& now) -> Status {
    return MoveMetrics(ValueOf(now, "metrics-listen"), request.store, request.mountpoint,
                       StatusOf(daemon), daemon.metrics);
  });
  daemon.configuration->May({"read-ahead"}, [&](const OptionValues& now) -> Status {
    CKPT_ASSIGN_OR_RETURN(const uint32_t kibibytes,
                          ParseCount(ValueOf(now, "read-ahead", "16384")));
    return kibibytes == 0 ? Status() : SetReadAhead(request.mountpoint, kibibytes);
  });
}

// The kernel's knobs, and proof that the mount answers.
Status CheckMount(const MountRequest& request, Daemon& daemon) {
  if (request.read_ahead_kib != 0) {
    const Status set = SetReadAhead(request.mountpoint, request.read_ahead_kib);
    if (!set) Log(LogLevel::kWarning, set.error().message);
  }
  CKPT_RETURN_IF_ERROR(AskMount(request.mountpoint));
  daemon.snapshots = MakeSnapshots(request, daemon);
  CKPT_RETURN_IF_ERROR(daemon.snapshots->StartReceiving());
  MakeConfiguration(request, daemon);
  const DaemonStatus status = StatusOf(daemon);
  CKPT_ASSIGN_OR_RETURN(daemon.metrics, ServeMetrics(request.metrics_listen, request.store,
                                                     request.mountpoint, status));
  auto control = ControlServer::Start(
      request.store, request.mountpoint, status, daemon.catalogue.get(), request.hf_config,
      {[&daemon] { return daemon.configuration->Reload(); },
       [&daemon](const std::string& by) { return daemon.succession.Ask(by); }},
      daemon.generation);
  if (!control) {
    Log(LogLevel::kWarning, StrCat("no control socket: ", control.error().message));
  } else {
    daemon.control = *std::move(control);
  }
  return {};
}

void WriteRecord(const MountRequest& request, const std::string& log, Daemon& daemon) {
  auto record = DaemonRecord::Write(request.store, request.mountpoint, log, request.again);
  if (record) {
    daemon.record = *std::move(record);
  } else {
    Log(LogLevel::kWarning, record.error().message);
  }
}

enum class End { kUnmounted, kSignal, kSuccessor };

// Until somebody unmounts, a signal comes, or another program is to go on.
End WaitForEnd(Daemon& daemon, int signals) {
  pollfd events[] = {{signals, POLLIN, 0},
                     {daemon.session->ended_fd(), POLLIN, 0},
                     {daemon.succession.asked_fd(), POLLIN, 0}};
  while (true) {
    const int ready = ::poll(events, 3, kRefreshMilliseconds);
    if (ready < 0 && errno != EINTR) return End::kSignal;
    if (ready == 0) {
      if (daemon.record) daemon.record->Beat();
      const Status done = daemon.filesystem->Refresh();
      if (!done) Log(LogLevel::kWarning, done.error().message);
      const Status receives = daemon.snapshots->StartReceiving();  // once nobody else does
      if (!receives) Log(LogLevel::kWarning, receives.error().message);
    }
    if (ready <= 0) continue;
    if ((events[1].revents & POLLIN) != 0) return End::kUnmounted;
    if ((events[2].revents & POLLIN) != 0) return End::kSuccessor;
    if ((events[0].revents & POLLIN) != 0 && ObeySignal(signals, *daemon.configuration)) {
      return End::kSignal;
    }
  }
}

// Whoever serves the mount next has to know this, and what the kernel knows of it.
MountState StateOf(const MountRequest& request, const std::string& log, const Daemon& daemon) {
  MountState state;
  state.store = request.store;
  state.mountpoint = request.mountpoint;
  state.log = log;
  state.program = ThisProgram();
  state.generation = daemon.generation;
  state.process = ::getpid();
  return state;
}

// Returns only if it could not begin; the mount ends where the other program cannot be run.
Status GiveWay(const MountRequest& request, const std::string& log, Daemon& daemon) {
  const std::string program = daemon.succession.program();
  Say(StrCat(program, " takes over"));
  // All that is not the mount ends as with the daemon, while requests are answered.
  for (const auto& follow : daemon.follows) follow->Stop();
  daemon.mounted.Set(nullptr);
  daemon.control.reset();
  daemon.metrics.reset();
  auto arenas = daemon.snapshots->KeptArenas();
  daemon.snapshots.reset();
  daemon.record.reset();
  CKPT_ASSIGN_OR_RETURN(FuseConnection connection, daemon.session->Share());
  daemon.session->Detach();
  daemon.filesystem->EndInvalidation();
  MountState state = StateOf(request, log, daemon);
  state.greeting = std::move(connection.greeting);
  state.kernel = daemon.filesystem->HandOver();
  state.backing_ids = daemon.target.backing_ids().All();
  std::vector<std::string> words = request.words;
  words.insert(words.begin(), program);
  Error failed =
      BecomeSuccessor(program, words, state, std::move(connection.device), std::move(arenas));
  Log(LogLevel::kError, failed.message);
  ::_exit(1);  // the connection ends with the process, and nothing here waits for its answers
}

// Has the service manager keep the connection for who is started after this process was killed.
void KeepForRestart(const MountRequest& request, const std::string& log, const Daemon& daemon) {
  auto connection = daemon.session->Share();
  if (!connection) return Log(LogLevel::kWarning, connection.error().message);
  MountState state = StateOf(request, log, daemon);
  state.greeting = std::move(connection->greeting);
  KeepMount(state, connection->device);
}

// The mount that an earlier program left; nothing if this one is to make it.
Result<std::optional<ServedMount>> TakeLeft(const MountRequest& request) {
  auto left = TakeServedMount();
  if (!left) return Fail(std::move(left).error().WithContext(request.mountpoint));
  if (!*left) return std::nullopt;
  const auto entry = FindMount(request.mountpoint);
  const bool there = entry && *entry && (*entry)->type == "fuse.ckptfs";
  const MountState& state = (*left)->state;
  const bool ours = state.store == request.store && state.mountpoint == request.mountpoint;
  if (there && ours) return left;
  if (ours && state.process == ::getpid()) {
    return Fail(ErrorCode::kNotFound, StrCat(state.mountpoint, ": unmounted meanwhile"));
  }
  Say(StrCat("the mount at ", state.mountpoint, " that an earlier process left is not this one"));
  return std::nullopt;
}

}  // namespace

Status RunMount(const MountRequest& request, const std::function<void()>& ready) {
  CKPT_RETURN_IF_ERROR(
      StartLogging("stderr", request.log == "stderr" ? request.log_format : LogFormat::kText));
  CKPT_RETURN_IF_ERROR(CheckLog(request.log));
  CKPT_ASSIGN_OR_RETURN(const Descriptor signals, SignalDescriptor());
  RaiseDescriptorLimit();
  CKPT_ASSIGN_OR_RETURN(std::optional<ServedMount> left, TakeLeft(request));
  Daemon daemon;
  CKPT_RETURN_IF_ERROR(StartDaemon(request, left ? &*left : nullptr, daemon));
  CKPT_RETURN_IF_ERROR(CheckMount(request, daemon));
  const std::string log =
      left ? left->state.log : LogTarget(request.log, request.store, request.mountpoint.substr(1));
  SayMounted(request, daemon, log);
  MoveLog(log, request.log_format);
  WriteRecord(request, log, daemon);
  ready();
  Say(StrCat(request.store, " mounted at ", request.mountpoint));
  KeepForRestart(request, log, daemon);
  for (const auto& follow : daemon.follows) follow->Start();
  const End end = WaitForEnd(daemon, signals.get());
  if (end == End::kSuccessor) return GiveWay(request, log, daemon);
  ForgetMount();
  Say(end == End::kUnmounted ? "unmounted" : "ended by a signal");
  return {};
}

}  // namespace ckptfs
