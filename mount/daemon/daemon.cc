// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/daemon.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/close_range.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/base/descriptor.h"

namespace ckptfs {
namespace {

// The terminal, the working directory and inherited files are not ours to keep.
void Detach() {
  const Descriptor null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!null.valid()) return;
  for (const int standard : {0, 1, 2}) ::dup2(null.get(), standard);
}

// Everything above stderr but `keep`.
void CloseInherited(int keep) {
  if (keep > 3) ::syscall(SYS_close_range, 3, keep - 1, 0);
  ::syscall(SYS_close_range, keep + 1, ~0U, 0);
}

int WaitForChild(pid_t child, const Descriptor& pipe) {
  char byte = 0;
  ssize_t got = 0;
  do {
    got = ::read(pipe.get(), &byte, 1);
  } while (got < 0 && errno == EINTR);
  if (got == 1) return 0;
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) != 0) return WEXITSTATUS(status);
  if (WIFSIGNALED(status)) {
    fmt::print(stderr, "ckptfs: the daemon died before it was ready: {}\n",
               ::strsignal(WTERMSIG(status)));
  }
  return 1;
}

}  // namespace

int RunInBackground(const std::function<int(const std::function<void()>& ready)>& body) {
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC) != 0) {
    std::perror("ckptfs: pipe");
    return 1;
  }
  Descriptor answer(pipe[0]);
  Descriptor answers(pipe[1]);
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child < 0) {
    std::perror("ckptfs: fork");
    return 1;
  }
  if (child > 0) {
    answers = Descriptor();
    return WaitForChild(child, answer);
  }
  ::setsid();
  answer = Descriptor();
  CloseInherited(answers.get());
  // A service manager's descriptors are for the process that it started.
  ::unsetenv("NOTIFY_SOCKET");
  if (::chdir("/") != 0) std::perror("ckptfs: chdir /");
  const int code = body([&] {
    Detach();
    if (::write(answers.get(), "r", 1) != 1) return;  // the parent was killed: go on serving
    answers = Descriptor();
  });
  std::exit(code);  // not _exit: sanitizers look for leaks on the way out
}

}  // namespace ckptfs
