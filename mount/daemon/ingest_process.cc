// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/ingest_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/strings.h"
#include "core/store/store.h"
#include "mount/control/control_client.h"
#include "mount/control/control_server.h"
#include "mount/control/daemon_record.h"
#include "mount/daemon/follow_service.h"
#include "mount/daemon/ingest_status.h"
#include "mount/daemon/mountpoint_claim.h"
#include "mount/daemon/process_setup.h"
#include "mount/daemon/snapshot_status.h"
#include "mount/fuse/fuse_session.h"
#include "mount/fuse/mount_table.h"
#include "mount/metrics/metrics_service.h"
#include "mount/mirror/mirror_ops.h"
#include "mount/options.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

constexpr int kBeatMilliseconds = 1000 * DaemonRecord::kBeatSeconds;
// A rank that syncs its files waits in a thread for the disk.
constexpr unsigned kLeastThreads = 64;
constexpr rlim_t kMostPlaces = 16'384;

// The daemon's parts; destroyed in reverse: first nobody asks any more, then nothing is mounted,
// then what is being adopted is finished.
struct IngestDaemon {
  std::unique_ptr<Store> store;
  Descriptor root;
  std::unique_ptr<FollowService> follow;
  std::unique_ptr<Mirror> mirror;
  std::unique_ptr<MirrorTarget> target;
  std::unique_ptr<FuseSession> session;
  std::unique_ptr<Configuration> configuration;
  std::unique_ptr<ControlServer> control;
  std::unique_ptr<MetricsServer> metrics;
  std::unique_ptr<DaemonRecord> record;
};

// The directory that jobs write to, made if it is missing.
Result<Descriptor> OpenDirectory(const IngestMountRequest& request) {
  const std::string& path = request.adopt.ingest.path;
  if (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) return Fail(ErrnoError(errno, path));
  Descriptor root(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (root.valid()) return root;
  return Fail(ErrnoError(errno, path));
}

// A mount over its own directory would wait for itself, and jobs must not reach the store.
Status CheckPlaces(const IngestMountRequest& request) {
  CKPT_ASSIGN_OR_RETURN(const std::string path, AbsolutePath(request.adopt.ingest.path));
  if (LiesIn(path, request.mountpoint) || LiesIn(request.mountpoint, path)) {
    return Fail(ErrorCode::kInvalid, StrCat(request.mountpoint, ": the mount point and ", path,
                                            " must not lie in each other"));
  }
  if (LiesIn(path, request.store)) {
    return Fail(ErrorCode::kInvalid, StrCat(path, ": the store ", request.store,
                                            " lies in it, and jobs would write into the store"));
  }
  CKPT_ASSIGN_OR_RETURN(const std::vector<MountEntry> mounts, ReadMounts());
  for (const MountEntry& mount : mounts) {
    if (mount.type != "fuse.ckptfs" || !LiesIn(mount.mountpoint, path)) continue;
    return Fail(ErrorCode::kUnsupported,
                StrCat(path, ": lies in the ckptfs mount at ", mount.mountpoint));
  }
  return {};
}

size_t KeptPlaces() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 256;
  return std::clamp<rlim_t>(limit.rlim_cur / 4, 64, kMostPlaces);
}

FollowService::Hooks HooksOf(const IngestMountRequest& request) {
  const auto tell = [store = request.store](const std::vector<StepRecord>& records) {
    for (const std::string& line : RefreshDaemons(store, records)) {
      Log(LogLevel::kWarning, StrCat("a live mount was not told: ", line));
    }
  };
  FollowService::Hooks hooks;
  hooks.say = [](std::string_view line) { Log(LogLevel::kInfo, line); };
  hooks.withdrawn = tell;
  hooks.adopted = [tell](const std::vector<StepRecord>& records) {
    for (const StepRecord& record : records)
      Log(LogLevel::kInfo, StrCat("adopted ", record.run, "/", record.id));
    tell(records);
  };
  return hooks;
}

Status Open(const IngestMountRequest& request, IngestDaemon& daemon) {
  CKPT_ASSIGN_OR_RETURN(daemon.root, OpenDirectory(request));
  CKPT_RETURN_IF_ERROR(CheckPlaces(request));
  CKPT_RETURN_IF_ERROR(FollowService::Check(request.store, request.adopt));
  StoreForAdoption store(request.store);
  CKPT_RETURN_IF_ERROR(store.Open());
  daemon.store = store.Take();
  CKPT_ASSIGN_OR_RETURN(daemon.follow,
                        FollowService::Create(*daemon.store, request.adopt, HooksOf(request)));
  const auto status = [&daemon](const MirrorCaller& caller) {
    return IngestStatusText(daemon.follow->status(), daemon.root, caller);
  };
  CKPT_ASSIGN_OR_RETURN(daemon.mirror,
                        Mirror::Open(request.adopt.ingest.path, KeptPlaces(), status));
  const bool passes = request.passthrough && HasSysAdmin();
  daemon.target = std::make_unique<MirrorTarget>(*daemon.mirror, passes);
  return {};
}

SessionOptions SessionOf(const IngestMountRequest& request) {
  SessionOptions session;
  session.mountpoint = request.mountpoint;
  session.source = request.store;
  session.access = MountAccess::kWrite;
  session.allow_other = ::geteuid() == 0;  // others' files could not be made theirs
  session.threads = request.threads != 0
                        ? request.threads
                        : std::max(kLeastThreads, 2 * std::thread::hardware_concurrency());
  return session;
}

Status MountIt(const IngestMountRequest& request, IngestDaemon& daemon) {
  CKPT_ASSIGN_OR_RETURN(MountpointClaim claim, MountpointClaim::Take(request.mountpoint));
  CKPT_RETURN_IF_ERROR(
      PrepareMountpoint({request.mountpoint,
                         request.mkdir,
                         request.nonempty,
                         {{"store", request.store}, {"directory", request.adopt.ingest.path}}},
                        claim));
  CKPT_RETURN_IF_ERROR(Open(request, daemon));
  CKPT_ASSIGN_OR_RETURN(daemon.session,
                        FuseSession::Mount(SessionOf(request), MirrorHandlers(*daemon.target)));
  if (!daemon.target->passthrough()) {
    Log(LogLevel::kInfo,
        StrCat("files are written through the daemon, which is slower: kernel passthrough ",
               !request.passthrough ? "is switched off"
               : HasSysAdmin()      ? "needs Linux 6.9 and a build with libfuse 3.17"
                                    : "needs root"));
  }
  return AskMount(request.mountpoint);
}

nlohmann::json MirrorJson(const IngestMountRequest& request, const IngestDaemon& daemon) {
  return {{"directory", request.adopt.ingest.path},
          {"passthrough", daemon.target->passthrough()},
          {"open_for_writing", daemon.mirror->writers()},
          {"known_files", daemon.mirror->nodes()},
          {"read_requests", daemon.target->reads.load()},
          {"write_requests", daemon.target->writes.load()},
          {"not_passed_through", daemon.target->refused.load()}};
}

DaemonStatus StatusOf(const IngestMountRequest& request, const IngestDaemon& daemon) {
  DaemonStatus status;
  status.following = [&daemon] { return nlohmann::json::array({ToJson(daemon.follow->status())}); };
  status.configuration = [&daemon] { return daemon.configuration->Describe(); };
  status.mirror = [&request, &daemon] { return MirrorJson(request, daemon); };
  return status;
}

void MakeConfiguration(const IngestMountRequest& request, const std::string& log,
                       IngestDaemon& daemon) {
  daemon.configuration = std::make_unique<Configuration>(request.configuration);
  daemon.configuration->May({"log-format"}, [log](const OptionValues& now) -> Status {
    CKPT_ASSIGN_OR_RETURN(const LogFormat format,
                          ParseLogFormat(ValueOf(now, "log-format", "text")));
    return StartLogging(log, format);
  });
  daemon.configuration->May({"metrics-listen"}, [&](const OptionValues& now) -> Status {
    return MoveMetrics(ValueOf(now, "metrics-listen"), request.store, request.mountpoint,
                       StatusOf(request, daemon), daemon.metrics);
  });
}

// Starts to answer commands and scrapers.
Status Listen(const IngestMountRequest& request, IngestDaemon& daemon) {
  const DaemonStatus status = StatusOf(request, daemon);
  CKPT_ASSIGN_OR_RETURN(daemon.metrics, ServeMetrics(request.metrics_listen, request.store,
                                                     request.mountpoint, status));
  auto control = ControlServer::Start(request.store, request.mountpoint, status, nullptr, "",
                                      {[&daemon] { return daemon.configuration->Reload(); }, {}});
  if (control) {
    daemon.control = *std::move(control);
  } else {
    Log(LogLevel::kWarning, StrCat("no control socket: ", control.error().message));
  }
  return {};
}

void WriteRecord(const IngestMountRequest& request, const std::string& log, IngestDaemon& daemon) {
  auto record = DaemonRecord::Write(request.store, request.mountpoint, log, request.again);
  if (record) {
    daemon.record = *std::move(record);
  } else {
    Log(LogLevel::kWarning, record.error().message);
  }
}

// Until somebody unmounts, or a signal comes.
std::string_view WaitForEnd(IngestDaemon& daemon, int signals) {
  pollfd events[] = {{signals, POLLIN, 0}, {daemon.session->ended_fd(), POLLIN, 0}};
  while (true) {
    const int ready = ::poll(events, 2, kBeatMilliseconds);
    if (ready < 0 && errno != EINTR) return "ended by an error";
    if (ready == 0 && daemon.record) daemon.record->Beat();
    if (ready <= 0) continue;
    if ((events[1].revents & POLLIN) != 0) return "unmounted";
    if (ObeySignal(signals, *daemon.configuration)) return "ended by a signal";
  }
}

}  // namespace

Status RunIngest(const IngestMountRequest& request, const std::function<void()>& ready) {
  CKPT_RETURN_IF_ERROR(
      StartLogging("stderr", request.log == "stderr" ? request.log_format : LogFormat::kText));
  CKPT_RETURN_IF_ERROR(CheckLog(request.log));
  CKPT_ASSIGN_OR_RETURN(const Descriptor signals, SignalDescriptor());
  RaiseDescriptorLimit();
  GiveUpResourceRight();
  CKPT_RETURN_IF_ERROR(CheckActAs());
  IngestDaemon daemon;
  CKPT_RETURN_IF_ERROR(MountIt(request, daemon));
  const std::string log = LogTarget(request.log, request.store, request.mountpoint.substr(1));
  MakeConfiguration(request, log, daemon);
  CKPT_RETURN_IF_ERROR(Listen(request, daemon));
  const std::string mounted = StrCat(request.mountpoint, " takes saves for ",
                                     request.adopt.ingest.path, " into ", request.store);
  Log(LogLevel::kInfo, StrCat(mounted, "; `ckptfs mount --store ", ShellWord(request.store),
                              " MOUNTPOINT` shows them; log: ", log));
  MoveLog(log, request.log_format);
  WriteRecord(request, log, daemon);
  ready();
  Log(LogLevel::kInfo, mounted);
  daemon.follow->Start();
  const std::string_view end = WaitForEnd(daemon, signals.get());
  daemon.follow->Stop();
  Log(LogLevel::kInfo, end);
  return {};
}

}  // namespace ckptfs
