// SPDX-License-Identifier: Apache-2.0

#include "mount/fuse/fuse_session.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "mount/fuse/mount_table.h"
#include "mount/logging.h"

namespace ckptfs {
namespace {

// An open may fill a file for a second; they start on demand.
constexpr unsigned kLeastThreads = 32;
constexpr int kWakeSignal = SIGUSR2;  // interrupts libfuse's wait; does nothing itself

std::string EscapeOption(std::string_view text) {  // libfuse splits options at commas
  std::string out;
  for (const char letter : text) {
    if (letter == ',' || letter == '\\') out += '\\';
    out += letter;
  }
  return out;
}

// The options both libfuse and the kernel get.
std::string MountOptionsText(const SessionOptions& options) {
  return StrCat(
      options.access == MountAccess::kRead ? "ro" : "rw",
      ",nosuid,nodev,noatime,default_permissions,subtype=ckptfs,max_read=", kMaxRequestBytes,
      ",fsname=", EscapeOption(options.source), options.allow_other ? ",allow_other" : "");
}

// The kernel's own mount, for those who may: libfuse's unmounting would detach
// whatever lies at the mount point by then.  errno of the failure in the error.
Result<int> MountPrivileged(const SessionOptions& options) {
  Descriptor device(::open("/dev/fuse", O_RDWR | O_CLOEXEC));
  if (!device.valid()) return Fail(ErrnoError(errno, "/dev/fuse"));
  const std::string data =
      StrCat("fd=", device.get(), ",rootmode=40000,user_id=", ::geteuid(),
             ",group_id=", ::getegid(), ",default_permissions,max_read=", kMaxRequestBytes,
             options.allow_other ? ",allow_other" : "");
  const unsigned long access = options.access == MountAccess::kRead ? MS_RDONLY : 0;
  if (::mount(options.source.c_str(), options.mountpoint.c_str(), "fuse.ckptfs",
              access | MS_NOSUID | MS_NODEV | MS_NOATIME, data.c_str()) == 0) {
    return device.Release();
  }
  return Fail(ErrnoError(errno, StrCat("mounting at ", options.mountpoint)));
}

// Says what a container lacks, and what there is without it; elsewhere the error itself.
Error ExplainNoFuse(Error error) {
  std::error_code ignored;
  const bool device = ::access("/dev/fuse", R_OK | W_OK) == 0;
  const bool capable = HasSysAdmin();
  const bool helper = std::filesystem::exists("/usr/bin/fusermount3", ignored) ||
                      std::filesystem::exists("/bin/fusermount3", ignored);
  if (device && capable && error.code == ErrorCode::kPermission) {
    return std::move(error).Needing(
        "a security profile may forbid it; in a container: `--security-opt apparmor:unconfined`");
  }
  if (device && (capable || (::geteuid() != 0 && helper))) return error;
  const std::string missing = device             ? "CAP_SYS_ADMIN"
                              : capable          ? "/dev/fuse"
                              : ::geteuid() == 0 ? "/dev/fuse and CAP_SYS_ADMIN"
                                                 : "/dev/fuse";
  return std::move(error).Needing(
      StrCat("this process does not have ", missing, "; in a container: `docker run --device ",
             "/dev/fuse --cap-add SYS_ADMIN` (Kubernetes: privileged). Without FUSE there are ",
             "`ckptfs export`, `ckptfs read`, and ckptfs://STORE/RUN/STEP in a trainer"));
}

// Through mount(2), else through setuid fusermount3.
Status MountSession(fuse_session* session, const SessionOptions& options) {
  const auto fd = MountPrivileged(options);
  if (!fd && ::geteuid() == 0) return Fail(ExplainNoFuse(Error(fd.error())));
  const std::string where = fd ? StrCat("/dev/fd/", *fd) : options.mountpoint;
  if (fuse_session_mount(session, where.c_str()) == 0) return {};
  return Fail(
      ExplainNoFuse(Error{// libfuse or fusermount3 has said why
                          ErrorCode::kPermission,
                          StrCat("cannot mount at ", options.mountpoint,
                                 "; without root it needs a readable /dev/fuse and fusermount3")}));
}

void InstallWakeSignal() {
  struct sigaction action {};
  action.sa_handler = [](int) {};
  ::sigaction(kWakeSignal, &action, nullptr);
}

}  // namespace

bool HasSysAdmin() {
  constexpr unsigned kCapSysAdmin = 21;  // linux/capability.h
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("CapEff:")) continue;
    return (std::strtoull(line.c_str() + 7, nullptr, 16) >> kCapSysAdmin & 1) != 0;
  }
  return false;
}

Result<std::unique_ptr<FuseSession>> FuseSession::Mount(const SessionOptions& options,
                                                        SessionHandlers handlers) {
  std::unique_ptr<FuseSession> session(new FuseSession(options, std::move(handlers)));
  CKPT_RETURN_IF_ERROR(session->Begin());
  if (Status mounted = MountSession(session->session_, options); !mounted) {
    fuse_session_destroy(std::exchange(session->session_, nullptr));
    return Fail(std::move(mounted).error());
  }
  CKPT_RETURN_IF_ERROR(session->Greet());
  CKPT_RETURN_IF_ERROR(session->Start());
  return session;
}

Result<std::unique_ptr<FuseSession>> FuseSession::Resume(const SessionOptions& options,
                                                         SessionHandlers handlers,
                                                         FuseConnection connection) {
  std::unique_ptr<FuseSession> session(new FuseSession(options, std::move(handlers)));
  CKPT_RETURN_IF_ERROR(session->Begin());
  const std::string device = StrCat("/dev/fd/", connection.device.get());
  if (fuse_session_mount(session->session_, device.c_str()) != 0) {
    fuse_session_destroy(std::exchange(session->session_, nullptr));
    return Fail(ErrorCode::kInternal, "libfuse refused the connection of an earlier process");
  }
  connection.device.Release();  // it is the session's now
  session->greeting_ = std::move(connection.greeting);
  fuse_buf greeting{};
  greeting.mem = session->greeting_.data();
  greeting.size = session->greeting_.size();
  // The kernel has its answer: it does not find what a second one is to.
  fuse_session_process_buf(session->session_, &greeting);
  session->AskAgain();
  CKPT_RETURN_IF_ERROR(session->Start());
  return session;
}

Status FuseSession::Begin() {
  std::string program = "ckptfs";
  std::string flag = "-o";
  std::string text = MountOptionsText(options_);
  char* words[] = {program.data(), flag.data(), text.data(), nullptr};
  fuse_args arguments = FUSE_ARGS_INIT(3, words);
  session_ = fuse_session_new(&arguments, handlers_.operations, sizeof(fuse_lowlevel_ops),
                              handlers_.userdata);
  fuse_opt_free_args(&arguments);
  if (session_ == nullptr) return Fail(ErrorCode::kInternal, "libfuse refused its options");
  return {};
}

// The kernel's first request, which a successor is shown, too.
Status FuseSession::Greet() {
  fuse_buf request{};
  int bytes = 0;
  do {
    bytes = fuse_session_receive_buf(session_, &request);
  } while (bytes == -EINTR);
  const std::unique_ptr<void, void (*)(void*)> owned(request.mem, std::free);
  if (bytes <= 0) {
    return Fail(
        ErrnoError(bytes == 0 ? ENOTCONN : -bytes, StrCat("the mount at ", options_.mountpoint)));
  }
  greeting_.assign(static_cast<const char*>(request.mem), static_cast<size_t>(bytes));
  fuse_session_process_buf(session_, &request);
  return {};
}

void FuseSession::AskAgain() {
  // libfuse has no call for it.
  constexpr int32_t kNotifyResend = 7;  // FUSE_NOTIFY_RESEND of linux/fuse.h
  struct {
    uint32_t length = 16;
    int32_t kind = kNotifyResend;
    uint64_t unique = 0;
  } const notice;
  static_assert(sizeof notice == 16, "a fuse_out_header");
  if (::write(fuse_session_fd(session_), &notice, sizeof notice) == sizeof notice) return;
  Log(LogLevel::kWarning, StrCat("requests that the earlier process was answering when it ended "
                                 "stay without an answer (Linux 6.9 asks them again): ",
                                 std::generic_category().message(errno)));
}

Status FuseSession::Start() {
  ended_ = Descriptor(::eventfd(0, EFD_CLOEXEC));
  InstallWakeSignal();
  loop_ = std::thread([this] { Loop(); });
  return {};
}

FuseSession::~FuseSession() {
  if (session_ == nullptr) return;
  if (loop_.joinable()) Stop();
  fuse_session_destroy(session_);  // closes the connection
  if (IsDeadMount(options_.mountpoint)) {
    const Status done = UnmountLazily(options_.mountpoint);
    if (!done) Log(LogLevel::kWarning, done.error().message);
  }
}

void FuseSession::Loop() {
  sigset_t wake;
  sigemptyset(&wake);
  sigaddset(&wake, kWakeSignal);
  pthread_sigmask(SIG_UNBLOCK, &wake, nullptr);
  fuse_loop_config* config = fuse_loop_cfg_create();
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  fuse_loop_cfg_set_max_threads(
      config, options_.threads != 0 ? options_.threads : std::max(kLeastThreads, 2 * cores));
  fuse_loop_cfg_set_clone_fd(config, options_.clone_fd);
  fuse_session_loop_mt(session_, config);
  fuse_loop_cfg_destroy(config);
  loop_ended_ = true;
  if (handlers_.abandon) handlers_.abandon();
  const uint64_t one = 1;
  if (::write(ended_.get(), &one, sizeof one) < 0) Log(LogLevel::kError, "eventfd: cannot write");
}

void FuseSession::InvalidateEntry(InodeNumber parent, const std::string& name) {
  // ENOENT only means that the kernel does not know the name.
  fuse_lowlevel_notify_inval_entry(session_, static_cast<fuse_ino_t>(parent), name.c_str(),
                                   name.size());
}

void FuseSession::InvalidateContent(InodeNumber inode) {
  // ENOENT only means that the kernel does not know the inode.
  fuse_lowlevel_notify_inval_inode(session_, static_cast<fuse_ino_t>(inode), 0, 0);
}

Result<FuseConnection> FuseSession::Share() const {
  FuseConnection connection{Descriptor(::fcntl(fuse_session_fd(session_), F_DUPFD_CLOEXEC, 0)),
                            greeting_};
  if (connection.device.valid()) return connection;
  return Fail(ErrnoError(errno, "the descriptor of the mount"));
}

void FuseSession::EndLoop() {
  fuse_session_exit(session_);
  // libfuse's loop waits on a semaphore that only a signal interrupts.
  while (!loop_ended_) {
    pthread_kill(loop_.native_handle(), kWakeSignal);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void FuseSession::Detach() {
  if (stopped_.exchange(true)) return;
  EndLoop();
  loop_.join();
}

void FuseSession::Stop() {
  if (stopped_.exchange(true)) return;
  if (!loop_ended_) {
    if (const auto status = UnmountLazily(options_.mountpoint); !status) {
      Log(LogLevel::kWarning, status.error().message);
    }
    if (handlers_.abandon) handlers_.abandon();
    EndLoop();
  }
  loop_.join();
}

}  // namespace ckptfs
