// SPDX-License-Identifier: Apache-2.0

#include "mount/logging.h"

#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "core/base/strings.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

// A mount moves its log once it serves: requests write to it meanwhile.
TEST(LoggingTest, TheTargetChangesUnderWriters) {
  const TemporaryDirectory folder;
  const std::vector<std::string> targets = {folder.path() + "/a.log", folder.path() + "/b.log"};
  ASSERT_TRUE(StartLogging(targets[0]));
  std::atomic<bool> done = false;
  std::atomic<int> written = 0;
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&, writer] {
      for (int i = 0; !done; ++i) {
        Log(LogLevel::kInfo, StrCat("line ", i, " of ", writer));
        ++written;
      }
    });
  }
  for (int change = 0; change < 300 || written < 1000; ++change) {
    ASSERT_TRUE(StartLogging(targets[change % 2]));
  }
  done = true;
  for (std::thread& writer : writers) writer.join();
  FlushLog();
  size_t lines = 0;
  for (const std::string& target : targets) {
    std::ifstream file(target);
    for (std::string line; std::getline(file, line);) lines += line.find(" of ") != line.npos;
  }
  EXPECT_GT(lines, 0u);
  ASSERT_TRUE(StartLogging("stderr"));
}

}  // namespace
}  // namespace ckptfs
