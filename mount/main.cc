// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "mount/commands/command_set.h"

namespace {

// A descriptor that is opened later must not take the place of a closed standard
// one.  Reading then finds the end of file; writing to stdout fails and is told.
void OpenMissingStandardFiles() {
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(standard, F_GETFD) >= 0) continue;
    const int mode = standard == STDERR_FILENO ? O_WRONLY : O_RDONLY;
    if (::open("/dev/null", mode) != standard) return;
  }
}

}  // namespace

int main(int argc, char** argv) {
  OpenMissingStandardFiles();
  return ckptfs::RunCommandLine(std::vector<std::string>(argv + 1, argv + argc));
}
