// SPDX-License-Identifier: Apache-2.0

#include "mount/mirror/mirror.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/fs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "core/base/strings.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

namespace fs = std::filesystem;

class MirrorTest : public ::testing::Test {
 protected:
  // `descriptors`: how many are kept.
  void Begin(size_t descriptors = 64) {
    auto opened = Mirror::Open(folder_.path(), descriptors,
                               [](const MirrorCaller&) { return std::string("nothing yet\n"); });
    ASSERT_TRUE(opened) << opened.error().message;
    mirror_ = *std::move(opened);
  }
  std::string Path(const std::string& name) const { return StrCat(folder_.path(), "/", name); }
  // Makes a file of this text and tells its number.
  MirrorId Write(MirrorId parent, const std::string& name, const std::string& text) {
    auto made = mirror_->Create(parent, name, 0644, O_WRONLY, me_);
    EXPECT_TRUE(made) << made.error();
    if (!made) return 0;
    EXPECT_EQ(::write(made->file->file.get(), text.data(), text.size()),
              static_cast<ssize_t>(text.size()));
    mirror_->Closed(*made->file);
    return made->entry.id;
  }
  std::string Read(MirrorId id) {
    const auto file = mirror_->Open(id, O_RDONLY, me_);
    if (!file) return StrCat("error ", file.error());
    std::string text(100, '\0');
    text.resize(static_cast<size_t>(::read((*file)->file.get(), text.data(), text.size())));
    return text;
  }
  MirrorId Directory(MirrorId parent, const std::string& name) {
    const auto made = mirror_->MakeDirectory(parent, name, 0755, me_);
    EXPECT_TRUE(made) << made.error();
    return made ? made->id : 0;
  }

  const TemporaryDirectory folder_;
  const MirrorCaller me_{::geteuid(), ::getegid(), 022, {}};
  std::unique_ptr<Mirror> mirror_;
};

TEST_F(MirrorTest, WhatIsWrittenIsInTheDirectory) {
  Begin();
  const MirrorId step = Directory(kMirrorRoot, "step");
  const MirrorId file = Write(step, "model.pt", "weights");
  EXPECT_EQ(Read(file), "weights");
  EXPECT_EQ(fs::file_size(Path("step/model.pt")), 7u);
  EXPECT_EQ(mirror_->Attributes(file)->st_mode & 07777, 0644u);
  ASSERT_TRUE(mirror_->Unlink(step, "model.pt", me_));
  EXPECT_FALSE(fs::exists(Path("step/model.pt")));
  ASSERT_TRUE(mirror_->RemoveDirectory(kMirrorRoot, "step", me_));
  EXPECT_EQ(mirror_->Lookup(kMirrorRoot, "step").error(), ENOENT);
}

TEST_F(MirrorTest, NoNameLeavesTheDirectory) {
  Begin();
  const TemporaryDirectory outside;
  std::ofstream(outside.path() + "/secret") << "secret";
  fs::create_directory_symlink(outside.path(), Path("away"));
  const auto link = mirror_->Lookup(kMirrorRoot, "away");
  ASSERT_TRUE(link);
  EXPECT_TRUE(S_ISLNK(link->status.st_mode));
  EXPECT_FALSE(mirror_->Lookup(link->id, "secret"));
  EXPECT_FALSE(mirror_->Open(link->id, O_RDONLY, me_));
  EXPECT_FALSE(mirror_->Create(link->id, "made", 0644, O_WRONLY, me_));
  EXPECT_EQ(mirror_->ReadLink(link->id).value(), outside.path());
  for (const std::string name : {"..", ".", "", "a/b", "/etc/passwd"}) {
    EXPECT_EQ(mirror_->Lookup(kMirrorRoot, name).error(), EINVAL) << name;
  }
  EXPECT_FALSE(mirror_->Lookup(kMirrorRoot, std::string(300, 'x')));
}

TEST_F(MirrorTest, AFileIsFoundAgainWhenItsDescriptorWasLetGo) {
  Begin(2);
  std::vector<MirrorId> files;
  const MirrorId step = Directory(kMirrorRoot, "step");
  for (int i = 0; i < 50; ++i) files.push_back(Write(step, StrCat("f", i), StrCat("text ", i)));
  for (int i = 0; i < 50; ++i) EXPECT_EQ(Read(files[i]), StrCat("text ", i));
  ASSERT_TRUE(mirror_->Rename(kMirrorRoot, "step", kMirrorRoot, "done", 0, me_));
  for (int i = 0; i < 50; ++i) EXPECT_EQ(Read(files[i]), StrCat("text ", i));
}

TEST_F(MirrorTest, AnotherFileUnderTheNameIsStale) {
  Begin(1);
  const MirrorId file = Write(kMirrorRoot, "f", "one");
  Write(kMirrorRoot, "g", "this one's descriptor is kept now");
  fs::rename(Path("f"), Path("away"));
  std::ofstream(Path("f")) << "two";
  EXPECT_EQ(Read(file), StrCat("error ", ESTALE));
  EXPECT_NE(mirror_->Lookup(kMirrorRoot, "f")->id, file);
  const auto again = mirror_->Lookup(kMirrorRoot, "away");
  EXPECT_EQ(again->id, file);
  EXPECT_EQ(Read(file), "one");
}

TEST_F(MirrorTest, AFileThatWasRemovedOrReplacedIsThereUntilItIsForgotten) {
  Begin(1);
  const MirrorId removed = Write(kMirrorRoot, "removed", "removed");
  const MirrorId old = Write(kMirrorRoot, "model", "old");
  const MirrorId fresh = Write(kMirrorRoot, "model.tmp", "fresh");
  ASSERT_TRUE(mirror_->Unlink(kMirrorRoot, "removed", me_));
  ASSERT_TRUE(mirror_->Rename(kMirrorRoot, "model.tmp", kMirrorRoot, "model", 0, me_));
  Write(kMirrorRoot, "other", "other");
  EXPECT_EQ(Read(removed), "removed");
  EXPECT_EQ(Read(old), "old");
  EXPECT_EQ(Read(fresh), "fresh");
  EXPECT_EQ(mirror_->Attributes(old)->st_nlink, 0u);
  EXPECT_EQ(mirror_->Lookup(kMirrorRoot, "model")->id, fresh);
  const size_t known = mirror_->nodes();
  mirror_->Forget(removed, 1);
  EXPECT_EQ(mirror_->nodes(), known - 1);
  EXPECT_EQ(Read(removed), StrCat("error ", ESTALE));
}

TEST_F(MirrorTest, NamesAreExchangedAndNotReplaced) {
  Begin(1);
  const MirrorId a = Write(kMirrorRoot, "a", "a");
  const MirrorId b = Write(kMirrorRoot, "b", "b");
  EXPECT_EQ(mirror_->Rename(kMirrorRoot, "a", kMirrorRoot, "b", RENAME_NOREPLACE, me_).error(),
            EEXIST);
  ASSERT_TRUE(mirror_->Rename(kMirrorRoot, "a", kMirrorRoot, "b", RENAME_EXCHANGE, me_));
  Write(kMirrorRoot, "c", "c");
  EXPECT_EQ(mirror_->Lookup(kMirrorRoot, "a")->id, b);
  EXPECT_EQ(mirror_->Lookup(kMirrorRoot, "b")->id, a);
  EXPECT_EQ(Read(a), "a");
  EXPECT_EQ(Read(b), "b");
}

TEST_F(MirrorTest, TwoNamesOfAFileAreOneNumber) {
  Begin(1);
  const MirrorId file = Write(kMirrorRoot, "one", "text");
  const auto two = mirror_->Link(file, kMirrorRoot, "two", me_);
  ASSERT_TRUE(two);
  EXPECT_EQ(two->id, file);
  EXPECT_EQ(two->status.st_nlink, 2u);
  ASSERT_TRUE(mirror_->Unlink(kMirrorRoot, "two", me_));
  Write(kMirrorRoot, "other", "other");
  EXPECT_EQ(Read(file), "text");
  ASSERT_TRUE(mirror_->Link(file, kMirrorRoot, "three", me_));
  ASSERT_TRUE(mirror_->Rename(kMirrorRoot, "one", kMirrorRoot, "three", 0, me_));
  EXPECT_EQ(Read(file), "text");
}

TEST_F(MirrorTest, AttributesAreChanged) {
  Begin();
  const MirrorId file = Write(kMirrorRoot, "f", "0123456789");
  MirrorChange change;
  change.mode = change.size = change.times = true;
  change.new_mode = 0600;
  change.new_size = 4;
  change.new_times[0] = {7, 8};
  change.new_times[1] = {9, 10};
  const auto status = mirror_->Change(file, change, nullptr, me_);
  ASSERT_TRUE(status) << status.error();
  EXPECT_EQ(status->st_mode & 07777, 0600u);
  EXPECT_EQ(status->st_size, 4);
  EXPECT_EQ(status->st_atim.tv_sec, 7);
  EXPECT_EQ(status->st_mtim.tv_nsec, 10);
  EXPECT_EQ(Read(file), "0123");
  EXPECT_EQ(mirror_->Change(kMirrorStatus, change, nullptr, me_).error(), EPERM);
}

TEST_F(MirrorTest, TheStatusIsATextThatNobodyChanges) {
  Begin();
  const auto found = mirror_->Lookup(kMirrorRoot, ".status");
  ASSERT_TRUE(found);
  EXPECT_EQ(found->id, kMirrorStatus);
  EXPECT_EQ((*mirror_->Open(kMirrorStatus, O_RDONLY, me_))->text, "nothing yet\n");
  EXPECT_EQ(mirror_->Open(kMirrorStatus, O_RDWR, me_).error(), EACCES);
  EXPECT_EQ(mirror_->Attribute(kMirrorStatus, "system.posix_acl_access", me_).error(), ENODATA);
  EXPECT_EQ(mirror_->Unlink(kMirrorRoot, ".status", me_).error(), EPERM);
  EXPECT_EQ(mirror_->MakeDirectory(kMirrorRoot, ".status", 0755, me_).error(), EEXIST);
  Write(kMirrorRoot, "f", "f");
  EXPECT_EQ(mirror_->Rename(kMirrorRoot, "f", kMirrorRoot, ".status", 0, me_).error(), EPERM);
  const MirrorId below = Directory(kMirrorRoot, "d");
  EXPECT_NE(Write(below, ".status", "of the job"), kMirrorStatus);
}

TEST_F(MirrorTest, WhatIsNotAFileIsNotOpened) {
  Begin();
  const auto pipe = mirror_->MakeNode(kMirrorRoot, "p", S_IFIFO | 0600, 0, me_);
  ASSERT_TRUE(pipe);
  EXPECT_EQ(mirror_->Open(pipe->id, O_RDONLY, me_).error(), ENXIO);  // it would wait for a writer
  if (::geteuid() != 0) return;
  const auto device = mirror_->MakeNode(kMirrorRoot, "d", S_IFCHR | 0666, makedev(1, 3), me_);
  if (device) {  // a container may not make any
    EXPECT_EQ(mirror_->Open(device->id, O_RDONLY, me_).error(), ENXIO);
  }
  fs::permissions(folder_.path(), fs::perms::all);
  std::thread([&] {
    const MirrorCaller other{4711, 4711, 0, {}};
    EXPECT_EQ(mirror_->MakeNode(kMirrorRoot, "c", S_IFCHR | 0666, makedev(1, 3), other).error(),
              EPERM);
  }).join();
}

TEST_F(MirrorTest, OtherAttributesThanUsersAreHidden) {
  Begin();
  const MirrorId file = Write(kMirrorRoot, "f", "f");
  const ErrnoStatus set = mirror_->SetAttribute(file, "user.note", "text", 0, me_);
  if (!set) GTEST_SKIP() << "the filesystem of /tmp has no user attributes";
  EXPECT_EQ(mirror_->Attribute(file, "user.note", me_).value(), "text");
  EXPECT_EQ(mirror_->AttributeNames(file, me_).value(), std::string("user.note\0", 10));
  EXPECT_EQ(mirror_->SetAttribute(file, "security.capability", "x", 0, me_).error(), EOPNOTSUPP);
  EXPECT_EQ(mirror_->Attribute(file, "trusted.x", me_).error(), EOPNOTSUPP);
  ASSERT_TRUE(mirror_->RemoveAttribute(file, "user.note", me_));
  EXPECT_EQ(mirror_->Attribute(file, "user.note", me_).error(), ENODATA);
}

// The thread that acts is another one: an umask of its own stays with it.
TEST_F(MirrorTest, ACallersFilesAreTheCallers) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root";
  Begin();
  const MirrorCaller other{4711, 4712, 027, {4713}};
  fs::permissions(folder_.path(), fs::perms::owner_all);
  std::thread([&] {
    EXPECT_EQ(mirror_->MakeDirectory(kMirrorRoot, "no", 0777, other).error(), EACCES);
    EXPECT_TRUE(mirror_->MakeDirectory(kMirrorRoot, "job", 0777, me_));
    fs::permissions(folder_.path(), fs::perms::all);
    const auto made = mirror_->MakeDirectory(kMirrorRoot, "mine", 0777, other);
    ASSERT_TRUE(made) << made.error();
    EXPECT_EQ(made->status.st_uid, 4711u);
    EXPECT_EQ(made->status.st_gid, 4712u);
    EXPECT_EQ(made->status.st_mode & 07777, 0750u);
    // Whoever may write to the directory above may remove it.
    EXPECT_TRUE(mirror_->RemoveDirectory(kMirrorRoot, "mine", MirrorCaller{4714, 4714, 0, {}}));
    EXPECT_EQ(mirror_->Lookup(kMirrorRoot, "job")->status.st_uid, 0u);
    // The group is a supplementary one.
    ASSERT_EQ(::chown(Path("job").c_str(), 0, 4713), 0);
    ASSERT_EQ(::chmod(Path("job").c_str(), 0770), 0);
    const MirrorId job = mirror_->Lookup(kMirrorRoot, "job")->id;
    EXPECT_TRUE(mirror_->MakeDirectory(job, "of the group", 0777, other));
    EXPECT_EQ(mirror_->MakeDirectory(job, "x", 0777, MirrorCaller{4711, 4712, 0, {}}).error(),
              EACCES);
  }).join();
  EXPECT_EQ(::access(folder_.path().c_str(), W_OK), 0);  // the thread is itself again
}

TEST_F(MirrorTest, ManyThreadsMakeRenameAndForget) {
  Begin(3);
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([this, t] {
      const MirrorId mine = Directory(kMirrorRoot, StrCat("t", t));
      for (int i = 0; i < 50; ++i) {
        const MirrorId file = Write(mine, "f.tmp", StrCat(i));
        ASSERT_TRUE(mirror_->Rename(mine, "f.tmp", mine, "f", 0, me_));
        ASSERT_EQ(Read(file), StrCat(i));
        if (i % 2 == 0) {
          ASSERT_TRUE(mirror_->Unlink(mine, "f", me_));
        }
        ASSERT_EQ(Read(file), StrCat(i));
        mirror_->Forget(file, 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mirror_->nodes(), 9u);
  EXPECT_EQ(mirror_->writers(), 0u);
}

}  // namespace
}  // namespace ckptfs
