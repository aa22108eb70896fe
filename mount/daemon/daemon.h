// SPDX-License-Identifier: Apache-2.0
//
// Running a body in the background: the process forks before anything else
// (threads do not survive a fork), the child does the work and tells the parent
// when it is ready; until then its messages still go to the caller's terminal.
//
// Thread safety: REQUIRES a process with one thread.

#pragma once

#include <functional>

namespace ckptfs {

// `body(ready)` calls ready() once when the mount answers.  Returns, in the
// parent: 0 as soon as the child was ready, else the exit code of a child that
// was not; in the child it does not return.
int RunInBackground(const std::function<int(const std::function<void()>& ready)>& body);

}  // namespace ckptfs
