// SPDX-License-Identifier: Apache-2.0

#include <string>
#include <vector>

#include "mount/commands/command_set.h"

int main(int argc, char** argv) {
  return ckptfs::RunCommandLine(std::vector<std::string>(argv + 1, argv + argc));
}
