// SPDX-License-Identifier: Apache-2.0

#include "core/io/bus_guard.h"

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include "core/base/result.h"

namespace ckptfs {
namespace {

struct Frame {
  sigjmp_buf jump;
  const void* volatile address = nullptr;
};

thread_local Frame* volatile current_frame = nullptr;
struct sigaction previous_action;

void PassOn(int number, siginfo_t* info, void* context) {
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    if (previous_action.sa_sigaction != nullptr) {
      return previous_action.sa_sigaction(number, info, context);
    }
  } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
    return previous_action.sa_handler(number);
  }
  const bool sent = info->si_code <= 0;
  if (previous_action.sa_handler == SIG_IGN && sent) return;
  signal(number, SIG_DFL);
  raise(number);
}

void HandleBusError(int number, siginfo_t* info, void* context) {
  // A page was lost that nobody touches now; whoever does gets a fault of his own.
  if (info->si_code == BUS_MCEERR_AO) return;
  Frame* frame = current_frame;
  // Only faults of the processor (BUS_ADRERR and the like) carry an address.
  if (frame == nullptr || info->si_code <= 0) return PassOn(number, info, context);
  frame->address = info->si_addr;
  // The mask that the fault found: whoever wraps sigaction (ThreadSanitizer)
  // blocks every signal here, and a blocked SIGBUS ends the process.
  pthread_sigmask(SIG_SETMASK, &static_cast<ucontext_t*>(context)->uc_sigmask, nullptr);
  siglongjmp(frame->jump, 1);
}

bool Install() {
  struct sigaction action = {};
  action.sa_sigaction = HandleBusError;
  // The handler restores the mask before it jumps, so that a guard that nothing
  // happens in costs no system call.
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  CKPT_CHECK(sigaction(SIGBUS, &action, &previous_action) == 0);
  return true;
}

}  // namespace

bool RunGuarded(void (*function)(void*), void* context, const std::byte** fault_address) {
  static const bool installed = Install();
  (void)installed;
  Frame frame;
  Frame* const outer = current_frame;
  if (sigsetjmp(frame.jump, 0) != 0) {
    current_frame = outer;
    *fault_address = static_cast<const std::byte*>(frame.address);
    return false;
  }
  current_frame = &frame;
  function(context);
  current_frame = outer;
  return true;
}

}  // namespace ckptfs
