// SPDX-License-Identifier: Apache-2.0
//
// A portable program's own forms of newer glibc's functions, as on a machine that lacks these:
// dlsym finds nothing here (--wrap).

#include <fcntl.h>
#include <gtest/gtest.h>
#include <link.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

extern "C" void* __wrap_dlsym(void*, const char*) { return nullptr; }

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Asks the kernel, past glibc.
struct stat ByKernel(const char* path) {
  struct stat info {};
  EXPECT_EQ(::syscall(SYS_newfstatat, AT_FDCWD, path, &info, AT_SYMLINK_NOFOLLOW), 0);
  return info;
}

void ExpectSame(const struct stat& info, const struct stat& kernel) {
  EXPECT_EQ(std::memcmp(&info, &kernel, sizeof info), 0);
  EXPECT_GT(info.st_size, 0);
}

TEST(OlderGlibc, StatSaysWhatTheKernelSays) {
  const char* path = "/proc/self/exe";
  struct stat info {};
  ASSERT_EQ(::lstat("/etc/passwd", &info), 0);
  ExpectSame(info, ByKernel("/etc/passwd"));
  ASSERT_EQ(::stat("/etc/passwd", &info), 0);
  ExpectSame(info, ByKernel("/etc/passwd"));
  const int file = ::open("/etc/passwd", O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::fstat(file, &info), 0);
  ExpectSame(info, ByKernel("/etc/passwd"));
  ::close(file);
  ASSERT_EQ(::fstatat(AT_FDCWD, "/etc/passwd", &info, 0), 0);
  ExpectSame(info, ByKernel("/etc/passwd"));
  ASSERT_EQ(::lstat(path, &info), 0);
  EXPECT_TRUE(S_ISLNK(info.st_mode));
  ASSERT_EQ(::stat(path, &info), 0);
  EXPECT_TRUE(S_ISREG(info.st_mode));
  EXPECT_EQ(::stat("/no/such/file", &info), -1);
  EXPECT_EQ(errno, ENOENT);
}

TEST(OlderGlibc, AWaitIsAsLongAsItIsToBe) {
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  for (const auto wait : {milliseconds(30), milliseconds(1200)}) {  // in one part, and in two
    const auto start = steady_clock::now();
    EXPECT_FALSE(changed.wait_for(lock, wait, [] { return false; }));
    EXPECT_GE(steady_clock::now() - start, wait);
  }
}

TEST(OlderGlibc, AWaitEndsWhenItIsNotified) {
  std::mutex mutex;
  std::condition_variable changed;
  bool ready = false;
  std::thread other([&] {
    const std::lock_guard lock(mutex);
    ready = true;
    changed.notify_one();
  });
  {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, std::chrono::hours(1), [&] { return ready; }));
  }
  other.join();
}

TEST(OlderGlibc, AnExceptionFindsItsHandler) {
  dl_find_object found{};
  ASSERT_EQ(_dl_find_object(reinterpret_cast<void*>(&ByKernel), &found), 0);
  EXPECT_NE(found.dlfo_eh_frame, nullptr);
  EXPECT_EQ(_dl_find_object(nullptr, &found), -1);
  EXPECT_THROW(throw std::runtime_error("said"), std::runtime_error);
}

TEST(OlderGlibc, SystemCallsAndNumbers) {
  EXPECT_EQ(::gettid(), ::getpid());
  EXPECT_STREQ(::strerrordesc_np(ENOENT), "No such file or directory");
  for (const auto& [number, name] :
       std::initializer_list<std::pair<int, const char*>>{{EINVAL, "EINVAL"},
                                                          {ENOENT, "ENOENT"},
                                                          {EEXIST, "EEXIST"},
                                                          {EOPNOTSUPP, "EOPNOTSUPP"},
                                                          {ESTALE, "ESTALE"},
                                                          {EACCES, "EACCES"},
                                                          {ENOMEM, "ENOMEM"},
                                                          {EIO, "EIO"}}) {
    EXPECT_STREQ(::strerrorname_np(number), name);
  }
  EXPECT_EQ(::strerrorname_np(-1), nullptr);
  const int file = ::dup(STDERR_FILENO);
  EXPECT_EQ(::close_range(static_cast<unsigned>(file), static_cast<unsigned>(file), 0), 0);
  EXPECT_EQ(::fcntl(file, F_GETFD), -1);
  std::random_device device;
  const auto first = device();
  EXPECT_TRUE(device() != first || device() != first);
}

}  // namespace
