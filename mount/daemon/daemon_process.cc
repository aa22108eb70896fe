// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/daemon_process.h"

#include <poll.h>

#include <cerrno>

#include "core/base/strings.h"
#include "mount/control/control_server.h"
#include "mount/control/daemon_record.h"
#include "mount/daemon/process_setup.h"
#include "mount/logging.h"
#include "mount/metrics/metrics_service.h"

namespace ckptfs {
namespace {

constexpr int kLookMilliseconds = 10'000;  // at whether nobody receives, as a mount does

// Until a signal comes.
void WaitForSignal(StepCatalogue& catalogue, SnapshotService& service, int signals,
                   Configuration& configuration, const DaemonRecord* record) {
  for (bool receiving = service.receiving();; receiving = service.receiving()) {
    pollfd event{signals, POLLIN, 0};
    const int ready = ::poll(&event, 1, kLookMilliseconds);
    if (ready < 0 && errno != EINTR) return;
    if (ready > 0 && ObeySignal(signals, configuration)) return;
    if (ready > 0) continue;
    if (record != nullptr) record->Beat();
    // Names that others have published are taken.
    if (const Status seen = catalogue.Refresh(); !seen) {
      Log(LogLevel::kWarning, seen.error().message);
    }
    if (const Status receives = service.StartReceiving(); !receives) {
      Log(LogLevel::kWarning, receives.error().message);
    }
    if (!receiving && service.receiving()) Log(LogLevel::kInfo, "receives now");
  }
}

}  // namespace

Status RunDaemon(const DaemonRequest& request, const std::function<void()>& ready) {
  CKPT_RETURN_IF_ERROR(
      StartLogging("stderr", request.log == "stderr" ? request.log_format : LogFormat::kText));
  CKPT_RETURN_IF_ERROR(CheckLog(request.log));
  CKPT_ASSIGN_OR_RETURN(const Descriptor signals, SignalDescriptor());
  RaiseDescriptorLimit();
  const std::string& path = request.snapshots.store;
  CKPT_ASSIGN_OR_RETURN(const auto store, Store::Open(path, true));
  StepCatalogue catalogue(*store);
  SnapshotService::Hooks hooks;
  hooks.refresh = [&](const StepRecord& record) {
    return catalogue.RefreshStep(record.run, record.id);
  };
  SnapshotService service(*store, catalogue, request.snapshots, std::move(hooks));
  CKPT_RETURN_IF_ERROR(service.StartReceiving());
  DaemonStatus status;
  status.snapshots = [&] { return SnapshotsJson(service); };
  const std::string log = LogTarget(request.log, path, "daemon");
  Configuration configuration(request.configuration);
  status.configuration = [&] { return configuration.Describe(); };
  CKPT_ASSIGN_OR_RETURN(auto metrics, ServeMetrics(request.metrics_listen, path, "", status));
  AllowSharedChanges(configuration, log, service);
  configuration.May({"metrics-listen"}, [&](const OptionValues& now) {
    return MoveMetrics(ValueOf(now, "metrics-listen"), path, "", status, metrics);
  });
  const auto control = ControlServer::Start(path, "", status, &catalogue, "",
                                            {[&] { return configuration.Reload(); }, {}});
  if (!control) {
    Log(LogLevel::kWarning, StrCat("no control socket: ", control.error().message));
  }
  Log(LogLevel::kInfo,
      StrCat(service.receiving() ? "receives snapshots for " : "another daemon receives for ", path,
             service.receiving() ? ""
                                 : "; this one waits until it "
                                   "ends",
             "; log: ", log));
  MoveLog(log, request.log_format);
  const auto record = DaemonRecord::Write(path, "", log, request.again);
  if (!record) Log(LogLevel::kWarning, record.error().message);
  ready();
  WaitForSignal(catalogue, service, signals.get(), configuration, record ? record->get() : nullptr);
  Log(LogLevel::kInfo, "ended by a signal");
  return {};
}

}  // namespace ckptfs
