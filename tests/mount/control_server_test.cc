// SPDX-License-Identifier: Apache-2.0

#include "mount/control/control_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <stdexcept>

#include "core/base/runtime_directory.h"
#include "core/base/strings.h"
#include "mount/control/control_client.h"
#include "mount/control/control_protocol.h"
#include "tests/fs/tree_fixture.h"

namespace ckptfs {
namespace {

// It used to end the daemon.
TEST(ControlServerTest, ARequestThatThrowsIsRefusedAndTheNextIsAnswered) {
  testing::TreeFixture t;
  const StepRecord record = t.AddStep("r", "s", 1);
  std::atomic<bool> throws{false};
  FilesystemOptions options;
  options.log = [&](std::string_view line) {
    if (throws) throw std::runtime_error(StrCat("cannot log: ", line));
  };
  auto& filesystem = t.Mount(std::move(options));
  const LiveMount mount{
      StrCat(SocketDirectory(true).value(), "/", SocketName(t.directory(), "/mnt/throws")),
      t.directory(), "/mnt/throws", getpid()};
  const auto server =
      ControlServer::Start(t.directory(), "/mnt/throws", DaemonStatus{.filesystem = &filesystem});
  ASSERT_TRUE(server) << server.error().message;
  ASSERT_TRUE(AskDaemon(mount, "status"));
  ASSERT_TRUE(t.store().Remove(record));
  throws = true;
  const auto failed = AskDaemon(mount, "refresh");
  ASSERT_FALSE(failed);
  EXPECT_THAT(failed.error().message, ::testing::HasSubstr("cannot log"));
  throws = false;
  EXPECT_TRUE(AskDaemon(mount, "status"));
}

// A caller that only lists daemons goes on without it.
TEST(ControlServerTest, ADaemonThatDoesNotAnswerIsNotWaitedFor) {
  const std::string store = "/silent/store";
  const std::string path =
      StrCat(SocketDirectory(true).value(), "/", SocketName(store, "/mnt/silent"));
  unlink(path.c_str());
  const Descriptor listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_un address = SocketAddress(path).value();
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  EXPECT_TRUE(FindLiveMounts(store, std::chrono::milliseconds(1)).empty());
  unlink(path.c_str());
}

}  // namespace
}  // namespace ckptfs
