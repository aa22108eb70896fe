// SPDX-License-Identifier: Apache-2.0

#include "core/base/descriptor.h"

#include <fcntl.h>
#include <gtest/gtest.h>

namespace ckptfs {
namespace {

bool IsOpen(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

TEST(DescriptorTest, ClosesWhatItOwnsOnce) {
  int fd = -1;
  {
    Descriptor first = *OpenDescriptor("/dev/null", O_RDONLY);
    fd = first.get();
    EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
    Descriptor second(std::move(first));
    EXPECT_FALSE(first.valid());  // NOLINT(bugprone-use-after-move): what is tested
    Descriptor third;
    third = std::move(second);
    EXPECT_EQ(third.get(), fd);
    EXPECT_TRUE(IsOpen(fd));
  }
  EXPECT_FALSE(IsOpen(fd));
}

TEST(DescriptorTest, CloseAndReleaseLeaveItEmpty) {
  Descriptor file = *OpenDescriptor("/dev/null", O_RDONLY);
  const int fd = file.get();
  ASSERT_TRUE(file.Close("null"));
  EXPECT_FALSE(IsOpen(fd));
  ASSERT_TRUE(file.Close("null"));
  file = *OpenDescriptor("/dev/null", O_RDONLY);
  const Descriptor taken(file.Release());
  EXPECT_FALSE(file.valid());
  EXPECT_TRUE(taken.valid());
}

TEST(DescriptorTest, ErrorsNameThePath) {
  const auto missing = OpenDescriptor("/nowhere/at/all", O_RDONLY);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_NE(missing.error().message.find("/nowhere/at/all"), std::string::npos);
}

}  // namespace
}  // namespace ckptfs
