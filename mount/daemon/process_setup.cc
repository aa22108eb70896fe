// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/process_setup.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/digest.h"
#include "core/base/strings.h"
#include "mount/logging.h"
#include "mount/options.h"

namespace ckptfs {

void RaiseDescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) {
    Log(LogLevel::kWarning, "the limit of open files cannot be raised");
  }
}

void CloseAllDescriptors() {
  if (::close_range(0, ~0u, 0) == 0) return;
  rlimit limit{};  // a kernel before 5.9
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = 1 << 20;
  for (rlim_t file = 0; file < limit.rlim_cur; ++file) ::close(static_cast<int>(file));
}

Status AskMount(const std::string& mountpoint) {
  const pid_t child = ::fork();
  if (child == 0) {  // of a process with threads: system calls only
    CloseAllDescriptors();
    struct stat info {};
    ::_exit(::stat(mountpoint.c_str(), &info) == 0 ? 0 : errno);
  }
  if (child < 0) {  // no more processes for this user: no reason not to serve
    Log(LogLevel::kWarning, StrCat("the new mount is not "
                                   "tested: ",
                                   ErrnoError(errno, "fork").message));
    return {};
  }
  int ended = 0;
  pid_t waited = 0;
  do {
    waited = ::waitpid(child, &ended, 0);
  } while (waited < 0 && errno == EINTR);
  const int error = waited < 0 ? errno : WIFEXITED(ended) ? WEXITSTATUS(ended) : EIO;
  return error == 0 ? Status() : Fail(ErrnoError(error, StrCat("the new mount at ", mountpoint)));
}

Result<Descriptor> SignalDescriptor() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1}) sigaddset(&signals, number);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGXFSZ, SIG_IGN);  // beyond `ulimit -f` a write fails, as on a full disk
  ::signal(SIGCHLD,
           SIG_DFL);  // whoever started us may have ignored it: no child could be waited for
  Descriptor signal_events(::signalfd(-1, &signals, SFD_CLOEXEC));
  if (!signal_events.valid()) return Fail(ErrnoError(errno, "signalfd"));
  return signal_events;
}

bool ObeySignal(int signals, Configuration& configuration) {
  signalfd_siginfo info{};
  if (::read(signals, &info, sizeof info) != sizeof info) return false;
  const bool hangup = info.ssi_signo == SIGHUP;
  if (!hangup && info.ssi_signo != SIGUSR1) return true;
  if (hangup && ::isatty(STDIN_FILENO) != 0) return true;
  if (const Status opened = ReopenLog(); !opened) {
    Log(LogLevel::kWarning, opened.error().message);
  }
  if (!hangup || !configuration.has_file()) return false;
  if (const auto done = configuration.Reload(); !done) {
    Log(LogLevel::kWarning, StrCat("the options stay as they were: ", done.error().message));
  }
  return false;
}

void AllowSharedChanges(Configuration& configuration, const std::string& log,
                        SnapshotService& snapshots) {
  configuration.May({"log-format"}, [log](const OptionValues& now) -> Status {
    CKPT_ASSIGN_OR_RETURN(const LogFormat format,
                          ParseLogFormat(ValueOf(now, "log-format", "text")));
    return StartLogging(log, format);
  });
  configuration.May({"keep-last", "keep-every"}, [&](const OptionValues& now) -> Status {
    Retention retention;
    CKPT_ASSIGN_OR_RETURN(retention.keep_last, ParseCount(ValueOf(now, "keep-last", "0")));
    CKPT_ASSIGN_OR_RETURN(retention.keep_every, ParseCount(ValueOf(now, "keep-every", "0")));
    snapshots.SetRetention(retention);
    return {};
  });
}

namespace {

std::string LogInStore(const std::string& store, std::string name) {
  const std::string directory = StrCat(store, "/log");
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) return "syslog";
  struct stat info {};
  if (::lstat(directory.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) return "syslog";
  for (char& letter : name) letter = letter == '/' ? '-' : letter;
  if (name.size() > 100) name = DigestOf(name).Hex();
  return StrCat(directory, "/", name, ".log");
}

}  // namespace

std::string LogTarget(const std::string& log, const std::string& store, std::string name) {
  return log.empty() ? LogInStore(store, std::move(name)) : log;
}

void MoveLog(const std::string& target, LogFormat format) {
  const Status moved = StartLogging(target, format);
  if (!moved) Log(LogLevel::kWarning, moved.error().message);
}

Status CheckLog(const std::string& log) {
  constexpr int kLogFlags =
      O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
  if (log.empty() || log == "stderr" || log == "syslog") return {};
  const Descriptor file(::open(log.c_str(), kLogFlags, 0600));
  if (!file.valid()) return Fail(ErrnoError(errno, StrCat("--log ", log)));
  struct stat info {};
  if (::fstat(file.get(), &info) == 0 && S_ISREG(info.st_mode)) return {};
  return Fail(ErrorCode::kInvalid, StrCat("--log ", log, ": not a regular file"));
}

}  // namespace ckptfs
