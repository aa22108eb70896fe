// SPDX-License-Identifier: Apache-2.0

#include "core/io/open_beneath.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>

#include "core/base/strings.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

constexpr uid_t kBob = 65534;
constexpr uid_t kEve = 65533;

class OpenBeneathTest : public ::testing::Test {
 protected:
  std::string Path(std::string_view name) const { return StrCat(directory_.path(), "/", name); }
  std::string Root() const { return Path("root"); }

  void MakeDirectory(std::string_view name, mode_t mode, uid_t owner = 0) const {
    ASSERT_EQ(mkdir(Path(name).c_str(), 0700), 0);
    ASSERT_EQ(chmod(Path(name).c_str(), mode), 0);
    if (geteuid() == 0) {
      ASSERT_EQ(chown(Path(name).c_str(), owner, owner), 0);
    }
  }
  void MakeFile(std::string_view name, mode_t mode, uid_t owner = 0) const {
    directory_.Write(name, name);
    ASSERT_EQ(chmod(Path(name).c_str(), mode), 0);
    if (geteuid() == 0) {
      ASSERT_EQ(chown(Path(name).c_str(), owner, owner), 0);
    }
  }
  void MakeLink(const std::string& target, std::string_view name, uid_t owner = 0) const {
    ASSERT_EQ(symlink(target.c_str(), Path(name).c_str()), 0);
    if (geteuid() == 0) {
      ASSERT_EQ(lchown(Path(name).c_str(), owner, owner), 0);
    }
  }
  std::string Read(const std::string& path) const {
    auto opened = OpenBeneath(Root(), path);
    if (!opened) return StrCat(ErrorCodeName(opened.error().code), ": ", opened.error().message);
    std::string text(static_cast<size_t>(opened->status.st_size), '\0');
    EXPECT_EQ(read(opened->file.get(), text.data(), text.size()),
              static_cast<ssize_t>(text.size()));
    return text;
  }
  bool Refuses(const std::string& path, std::string_view why) const {
    const std::string said = Read(path);
    if (said.find(why) != said.npos && said.find(path) != said.npos) return true;
    ADD_FAILURE() << path << ": " << said;
    return false;
  }

  void SetUp() override {
    ASSERT_EQ(chmod(directory_.path().c_str(), 0755), 0);
    MakeDirectory("root", 0755);
  }

  TemporaryDirectory directory_;
};

#define NEEDS_ROOT() \
  if (geteuid() != 0) GTEST_SKIP() << "only root can give files to others"

TEST_F(OpenBeneathTest, PlainNamesAreOpened) {
  MakeFile("root/a/b.pt", 0644);
  EXPECT_EQ(Read("a/b.pt"), "root/a/b.pt");
  EXPECT_FALSE(RootDirectory::Open(Root())->Look("a/b.pt")->linked);
  EXPECT_TRUE(Refuses("a/c.pt", "not found"));
  EXPECT_TRUE(Refuses("a", "not a regular file"));
  EXPECT_EQ(OpenBeneath(Path("gone"), "x").error().code, ErrorCode::kNotFound);
}

TEST_F(OpenBeneathTest, NamesDoNotLeaveTheRoot) {
  MakeFile("outside", 0644);
  for (const char* path : {"../outside", "./../outside", "/etc/passwd"}) {
    const auto opened = OpenBeneath(Root(), path);
    EXPECT_FALSE(opened) << path;
  }
}

TEST_F(OpenBeneathTest, FifosDirectoriesAndSocketsAreRefusedAtOnce) {
  ASSERT_EQ(mkfifo(Path("root/fifo").c_str(), 0644), 0);
  EXPECT_TRUE(Refuses("fifo", "not a regular file"));
  MakeLink("fifo", "root/to_fifo");
  EXPECT_TRUE(Refuses("to_fifo", "not a regular file"));
  MakeLink(".", "root/to_directory");
  EXPECT_TRUE(Refuses("to_directory", "not a regular file"));
}

TEST_F(OpenBeneathTest, LinksOfACacheAreFollowed) {
  NEEDS_ROOT();
  MakeDirectory("blobs", 0755, kBob);
  MakeFile("blobs/abc", 0640, kBob);
  MakeDirectory("root/snap", 0755, kBob);
  MakeLink("../../blobs/abc", "root/snap/model.pt", kBob);
  MakeLink("snap", "root/main", kBob);
  EXPECT_EQ(Read("snap/model.pt"), "blobs/abc");
  EXPECT_EQ(Read("main/model.pt"), "blobs/abc");
  MakeLink(Path("blobs/abc"), "root/absolute.pt", kBob);
  EXPECT_EQ(Read("absolute.pt"), "blobs/abc");
  const auto found = RootDirectory::Open(Root())->Look("snap/model.pt");
  ASSERT_TRUE(found);
  EXPECT_TRUE(found->linked);
  EXPECT_EQ(found->access, (OwnerAndMode{0640, kBob, kBob, false}));
  const OwnerAndMode blobs{0755, kBob, kBob, false};
  EXPECT_NE(std::find(found->searched.begin(), found->searched.end(), blobs),
            found->searched.end());
}

TEST_F(OpenBeneathTest, ALinkLeadsNoFurtherThanItsOwnerCould) {
  NEEDS_ROOT();
  MakeFile("secret", 0600);
  MakeLink("../secret", "root/eve.pt", kEve);
  EXPECT_TRUE(Refuses("eve.pt", "user 65533"));
  MakeLink("../secret", "root/ours.pt", 0);
  EXPECT_EQ(Read("ours.pt"), "secret");
  // A chain counts as all of its owners.
  MakeLink("ours.pt", "root/chain.pt", kEve);
  EXPECT_TRUE(Refuses("chain.pt", "user 65533"));
  // A file that all may read, in a directory that is closed.
  MakeDirectory("closed", 0700);
  MakeFile("closed/file", 0644);
  MakeLink("../closed/file", "root/inside.pt", kEve);
  EXPECT_TRUE(Refuses("inside.pt", "user 65533"));
  // In again through a directory that is the owner's own: still no way around.
  MakeDirectory("eve", 0755, kEve);
  MakeLink("../closed", "eve/door", kEve);
  MakeLink("../eve/door/../closed/file", "root/around.pt", 0);
  EXPECT_TRUE(Refuses("around.pt", "user 65533"));
}

TEST_F(OpenBeneathTest, LinksOfAGroupAreFollowed) {
  NEEDS_ROOT();
  MakeFile("blob", 0640, kBob);
  MakeLink("../blob", "root/team.pt", kEve);
  EXPECT_TRUE(Refuses("team.pt", "user 65533"));
  ASSERT_EQ(lchown(Path("root/team.pt").c_str(), kEve, kBob), 0);
  EXPECT_EQ(Read("team.pt"), "blob");
}

TEST_F(OpenBeneathTest, NothingOfProcIsReached) {
  NEEDS_ROOT();
  MakeLink("/proc/self/environ", "root/environ", 0);
  EXPECT_TRUE(Refuses("environ", "/proc"));
  MakeFile("held", 0600);
  const Descriptor held = *OpenDescriptor(Path("held"), O_RDONLY);
  MakeLink(StrCat("/proc/self/fd/", held.get()), "root/held", kEve);
  EXPECT_TRUE(Refuses("held", "permission"));
  // Walked by name: what it leads to is asked of, as by any other way.
  MakeLink(StrCat("/proc/self/root", Path("held")), "root/way", kEve);
  EXPECT_TRUE(Refuses("way", "permission"));
}

TEST_F(OpenBeneathTest, LoopsAndLinksToNothingEnd) {
  MakeLink("b", "root/a");
  MakeLink("a", "root/b");
  EXPECT_FALSE(OpenBeneath(Root(), "a"));
  MakeLink("nowhere", "root/c");
  EXPECT_TRUE(Refuses("c", "not found"));
  MakeFile("root/file", 0644);
  MakeLink("file/below", "root/d");
  EXPECT_FALSE(OpenBeneath(Root(), "d"));
}

// A name that is exchanged all the time is its file, or refused, never the other.
TEST_F(OpenBeneathTest, AnExchangeIsNeverFollowed) {
  NEEDS_ROOT();
  MakeFile("secret", 0600);
  MakeFile("root/model.pt", 0644, kEve);
  MakeFile("root/own.pt", 0644, kEve);
  MakeLink("../secret", "root/link", kEve);
  MakeLink("own.pt", "root/harmless", kEve);
  std::atomic<bool> stop{false};
  std::thread eve([&] {
    while (!stop) {
      for (const char* name : {"root/link", "root/harmless", "root/own.pt"}) {
        renameat2(AT_FDCWD, Path(name).c_str(), AT_FDCWD, Path("root/model.pt").c_str(),
                  RENAME_EXCHANGE);
      }
    }
  });
  int opened = 0;
  for (int i = 0; i < 20'000; ++i) {
    const auto file = OpenBeneath(Root(), "model.pt");
    if (!file) continue;
    ++opened;
    EXPECT_EQ(file->status.st_uid, kEve);
  }
  stop = true;
  eve.join();
  EXPECT_GT(opened, 0);
}

}  // namespace
}  // namespace ckptfs
