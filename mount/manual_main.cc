// SPDX-License-Identifier: Apache-2.0
//
// manual MARKDOWN DESCRIPTION PAGE: writes the man page of a manual; part of the build.

#include <cstdio>
#include <fstream>
#include <sstream>

#include "mount/manual.h"

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  std::ifstream in(argv[1]);
  std::ostringstream text;
  text << in.rdbuf();
  std::ofstream out(argv[3]);
  out << ckptfs::ManPageOf(text.str(), argv[2]);
  out.close();
  if (in && out) return 0;
  std::fprintf(stderr, "manual: cannot turn %s into %s\n", argv[1], argv[3]);
  return 1;
}
