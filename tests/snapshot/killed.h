// SPDX-License-Identifier: Apache-2.0
//
// A process of a test that is ended at one of its fault points (core/base/fault_point.h), and
// what it leaves.
//
// Thread safety: none.

#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <functional>

#include "core/base/descriptor.h"
#include "core/base/strings.h"
#include "core/check/verify.h"
#include "core/store/store.h"

namespace ckptfs::testing_support {

// The thread sanitizer ends processes that were forked beside threads and start their own.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kForks = false;
#else
inline constexpr bool kForks = true;
#endif

inline constexpr uint64_t kMostPoints = 300;  // more than any process of a test reaches

// Checks a step that survived as `ckptfs verify` does.
inline void ExpectVerified(const Step& step) {
  const auto report = VerifyStep(step.model, *BlobReader::Create(step.model, {}), {});
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_GT(report->blob_bytes, 0u);
  for (const VerifyDefect& found : report->defects) {
    ADD_FAILURE() << found.subject << ": " << found.rule;
  }
}

// A process that is killed at its n-th point (0: never).  It says that it is ready, and goes
// on when End is called.
class Killed {
 public:
  Killed(uint64_t at, const std::function<void(std::function<void()> ready)>& work) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) abort();
    pid_ = fork();
    if (pid_ == 0) {
      close(ends[0]);
      if (at != 0) setenv("CKPTFS_KILL_AT", StrCat(at).c_str(), 1);
      work([&] {
        char byte = 'r';
        if (write(ends[1], &byte, 1) != 1 || read(ends[1], &byte, 1) != 1) _exit(2);
      });
      _exit(0);
    }
    close(ends[1]);
    end_ = Descriptor(ends[0]);
  }
  ~Killed() { End(); }

  void WaitUntilReady() const {
    char byte;
    if (read(end_.get(), &byte, 1) < 0) abort();  // 0: it is dead
  }
  bool IsDead() const {
    siginfo_t info{};
    return waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == pid_;
  }
  // On from where it said that it is ready.
  void Go() const {
    const char byte = 'g';
    (void)send(end_.get(), &byte, 1, MSG_NOSIGNAL);  // unless it is dead
  }
  void Kill() const { kill(pid_, SIGKILL); }
  // Returns true if it was killed.
  bool End() {
    if (pid_ == 0) return killed_;
    Go();
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    EXPECT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << status;
    pid_ = 0;
    return killed_ = WIFSIGNALED(status);
  }

 private:
  pid_t pid_ = 0;
  bool killed_ = false;
  Descriptor end_;
};

}  // namespace ckptfs::testing_support
