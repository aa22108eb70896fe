// SPDX-License-Identifier: Apache-2.0
//
// Saves on a disk of this node, on their way from memory to the store: whole or not there
// whenever the machine stops.  spooler_test.cc has which saves go there, kill_test.cc the
// daemons that die.
#include "core/commit/spool.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/io/file_root.h"
#include "core/records/record_text.h"
#include "tests/snapshot/nodes.h"
#include "tests/snapshot/spooling.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::ExpectWhole;
using testing_support::Save;

TEST(SpoolTest, WhatIsThereIsFoundAgainAndGoesOnce) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/new/spool";
  const Save save(3);
  {
    auto opened = Spool::Open(path, "store");
    ASSERT_TRUE(opened) << opened.error().message;
    EXPECT_TRUE(opened->left.empty());
    ASSERT_TRUE(opened->spool->Write(save.part(), *save.bytes));
    ASSERT_FALSE(Spool::Open(path, "store"));
    EXPECT_EQ(Spool::Open(path, "store").error().code, ErrorCode::kExists);
  }
  {
    auto opened = Spool::Open(path, "store");
    ASSERT_TRUE(opened) << opened.error().message;
    ASSERT_EQ(opened->left.size(), 1u);
    EXPECT_EQ(opened->left[0].name, save.part().name);
    EXPECT_EQ(RenderPart(opened->left[0]), RenderPart(save.part()));
    ExpectWhole(*opened->spool->files(), opened->left[0]);
    ASSERT_TRUE(opened->spool->Remove(opened->left[0]));
  }
  EXPECT_THAT(*ListFilesBelow(FileRoot(path), ""), ElementsAre("format"));
  EXPECT_TRUE(Spool::Open(path, "store")->left.empty());
  struct stat info {};
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST(SpoolTest, WheneverTheMachineStopsASaveIsWholeOrNotThere) {
  uint64_t found = 0;
  bool went_through = false;
  for (uint64_t at = 1; !went_through; ++at) {
    ASSERT_LT(at, 100u);
    for (const bool with_effect : {false, true}) {
      const auto disk = std::make_shared<MemoryRoot>("disk");
      const auto faulty = std::make_shared<FaultyStorage>(disk);
      const Save save(3);
      {
        auto opened = Spool::OpenOn(faulty, "store");
        faulty->StopAt(at, with_effect);
        const bool written = opened->spool->Write(save.part(), *save.bytes).has_value();
        const bool removed = written && opened->spool->Remove(save.part());
        went_through = removed && !faulty->stopped();
      }
      const auto opened = Spool::OpenOn(disk, "store");
      ASSERT_TRUE(opened) << opened.error().message;
      EXPECT_THAT(opened->notes, ElementsAre());
      found += opened->left.size();
      for (const PreparedPart& part : opened->left) {
        ExpectWhole(*disk, part);
        EXPECT_TRUE(opened->spool->Remove(part));
      }
      EXPECT_THAT(*ListFilesBelow(*disk, ""), ElementsAre("format")) << at << with_effect;
    }
  }
  EXPECT_EQ(found, 2u);  // the record's publication with effect, its removal without
}

TEST(SpoolTest, ADiskThatFailsLeavesNothing) {
  for (const ErrorCode code : {ErrorCode::kIo, ErrorCode::kExhausted}) {
    bool failed = true;
    for (uint64_t at = 1; failed; ++at) {
      const auto disk = std::make_shared<MemoryRoot>("disk");
      const auto faulty = std::make_shared<FaultyStorage>(disk);
      const Save save(3);
      auto opened = Spool::OpenOn(faulty, "store");
      faulty->FailAt(at, code);
      const Status done = opened->spool->Write(save.part(), *save.bytes);
      failed = !done;
      if (!failed) continue;
      EXPECT_EQ(done.error().code, code);
      EXPECT_THAT(*ListFilesBelow(*disk, ""), ElementsAre("format")) << at;
      EXPECT_TRUE(opened->spool->Write(save.part(), *save.bytes)) << at;
      ExpectWhole(*disk, save.part());
    }
  }
}

// Files planted in a spool, and the words of the refusals.
TEST(SpoolTest, AForeignOneIsRefusedWithFileAndRule) {
  struct Case {
    std::function<void(const std::string& path)> plant;
    ErrorCode code;
    std::string says;
  };
  const auto write = [](const std::string& path, mode_t mode = 0600) {
    const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT, mode));
    EXPECT_TRUE(file.valid());
  };
  std::vector<Case> cases{
      {[&](const auto& path) { write(path + "/model.pt"); }, ErrorCode::kInvalid,
       "is not a spool, and it is not empty (model.pt)"},
      {[](const auto& path) { EXPECT_EQ(chmod(path.c_str(), 0755), 0); }, ErrorCode::kPermission,
       "may be entered or read by others"},
      {[](const auto& path) {
         EXPECT_EQ(rename((path + "/snapshots").c_str(), (path + ".aside").c_str()), 0);
         EXPECT_EQ(symlink("/tmp", (path + "/snapshots").c_str()), 0);
       },
       ErrorCode::kPermission, "/snapshots is a symbolic link"},
      {[](const auto& path) {
         EXPECT_EQ(symlink("/etc/passwd", (path + "/prepared/x").c_str()), 0);
       },
       ErrorCode::kPermission, "/prepared/x is a symbolic link"},
      {[](const auto& path) { EXPECT_EQ(mkfifo((path + "/.tmp/x").c_str(), 0600), 0); },
       ErrorCode::kPermission, "/.tmp/x is not a regular file"},
      {[](const auto& path) {
         const auto files = *ListFilesBelow(FileRoot(path), "snapshots");
         EXPECT_EQ(link((path + "/" + files[0]).c_str(), (path + ".second").c_str()), 0);
       },
       ErrorCode::kPermission, "rank-00000.safetensors is a file with a second hard link"},
      {[](const auto& path) {
         std::string deep = path + "/prepared";
         for (const char* name : {"/a", "/b", "/c", "/d"}) {
           EXPECT_EQ(mkdir((deep += name).c_str(), 0700), 0);
         }
       },
       ErrorCode::kPermission, "/prepared/a/b/c is nested too deeply"},
      {[&](const auto& path) {
         write(path + "/prepared/x", 0666);
         EXPECT_EQ(chmod((path + "/prepared/x").c_str(), 0666), 0);
       },
       ErrorCode::kPermission, "/prepared/x may be entered or read by others"},
  };
  if (geteuid() == 0) {
    cases.push_back({[](const auto& path) { EXPECT_EQ(chown(path.c_str(), 65534, 65534), 0); },
                     ErrorCode::kPermission, "belongs to user 65534"});
    cases.push_back(
        {[](const auto& path) { EXPECT_EQ(chown((path + "/format").c_str(), 65534, 65534), 0); },
         ErrorCode::kPermission, "/format belongs to user 65534"});
  }
  for (const Case& one : cases) {
    SCOPED_TRACE(one.says);
    const TemporaryDirectory directory;
    const std::string path = directory.path() + "/spool";
    const Save save(3);
    ASSERT_TRUE(Spool::Open(path, "store")->spool->Write(save.part(), *save.bytes));
    one.plant(path);
    const auto opened = Spool::Open(path, "store");
    ASSERT_FALSE(opened);
    EXPECT_EQ(opened.error().code, one.code) << opened.error().message;
    EXPECT_THAT(opened.error().message, HasSubstr(one.says));
  }
}

TEST(SpoolTest, ItIsOfOneStoreForEver) {
  const auto disk = std::make_shared<MemoryRoot>("disk");
  ASSERT_TRUE(Spool::OpenOn(disk, "one"));
  ASSERT_TRUE(Spool::OpenOn(disk, "one"));
  EXPECT_THAT(Spool::OpenOn(disk, "another").error().message, HasSubstr("of another store"));
}

// Between the link and the unlink by which a record gets its name.
TEST(SpoolTest, ARecordWhoseWriterWasKilledIsOurs) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/spool";
  const Save save(3);
  ASSERT_TRUE(Spool::Open(path, "store")->spool->Write(save.part(), *save.bytes));
  const std::string record = (*ListFilesBelow(FileRoot(path), "prepared"))[0];
  ASSERT_EQ(link((path + "/" + record).c_str(), (path + "/.tmp/1-2-3").c_str()), 0);
  const auto opened = Spool::Open(path, "store");
  ASSERT_TRUE(opened) << opened.error().message;
  EXPECT_EQ(opened->left.size(), 1u);
}

void Put(Storage& disk, const std::string& path, std::string_view text) {
  const auto writer = *disk.Create(path);
  EXPECT_TRUE(writer->WriteAt(0, std::as_bytes(std::span(text))));
  EXPECT_TRUE(writer->Close());
}

TEST(SpoolTest, WhatIsNotWholeGoesAndIsNamed) {
  const auto damaged =
      [](const std::function<void(Storage & disk, const PreparedPart& part)>& act) {
        const auto disk = std::make_shared<MemoryRoot>("disk");
        const Save save(3), other(4);
        {
          const auto opened = Spool::OpenOn(disk, "store");
          EXPECT_TRUE(opened->spool->Write(save.part(), *save.bytes));
          EXPECT_TRUE(opened->spool->Write(other.part(), *other.bytes));
        }
        act(*disk, save.part());
        const auto opened = Spool::OpenOn(disk, "store");
        EXPECT_TRUE(opened) << opened.error().message;
        EXPECT_EQ(opened->left.size(), 1u);
        EXPECT_EQ(opened->left[0].step, 4u);
        EXPECT_EQ(ListFilesBelow(*disk, "")->size(), 4u);  // format, a record, two files
        return opened->notes.empty() ? std::string() : opened->notes[0];
      };
  const auto record = [](const PreparedPart& part) { return FlatPartName(part, Digest()); };
  EXPECT_THAT(
      damaged([](Storage& disk, const PreparedPart& part) { (void)disk.Remove(part.PathOf(1)); }),
      HasSubstr("rank-00001.safetensors"));
  EXPECT_THAT(
      damaged([](Storage& disk, const PreparedPart& part) { Put(disk, part.PathOf(0), "short"); }),
      HasSubstr("5 bytes, but its record says"));
  EXPECT_THAT(
      damaged([&](Storage& disk, const PreparedPart& part) { Put(disk, record(part), "{}\n"); }),
      HasSubstr(": removed: "));
  EXPECT_THAT(damaged([&](Storage& disk, const PreparedPart& part) {
                PreparedPart lies = part;
                lies.name.run = "../x";
                Put(disk, record(part), RenderPart(lies));
              }),
              HasSubstr(": removed: "));
  EXPECT_EQ(damaged([&](Storage& disk, const PreparedPart& part) {
              EXPECT_TRUE(disk.Remove(record(part)));  // as one that was being written
            }),
            "");
}

// It is another daemon's, which had a later version; nothing is lost by looking.
TEST(SpoolTest, ARecordOfAnotherVersionRefusesAll) {
  const auto disk = std::make_shared<MemoryRoot>("disk");
  const Save save(3), other(4);
  const std::string record = FlatPartName(save.part(), Digest());
  {
    const auto opened = Spool::OpenOn(disk, "store");
    EXPECT_TRUE(opened->spool->Write(save.part(), *save.bytes));
    EXPECT_TRUE(opened->spool->Write(other.part(), *other.bytes));
  }
  Put(*disk, record, SealRecord({{"version", 1000}}));
  const auto opened = Spool::OpenOn(disk, "store");
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(opened.error().message, HasSubstr(record));
  Put(*disk, record, RenderPart(save.part()));
  EXPECT_EQ(Spool::OpenOn(disk, "store")->left.size(), 2u);
}

TEST(SpoolTest, ADiskThatFailsWhileItIsLookedAtLosesNothing) {
  for (uint64_t at = 1, failed = 0; at < 2 || failed > 0; ++at) {
    const auto disk = std::make_shared<MemoryRoot>("disk");
    const Save save(3);
    EXPECT_TRUE(Spool::OpenOn(disk, "store")->spool->Write(save.part(), *save.bytes));
    const auto faulty = std::make_shared<FaultyStorage>(disk);
    faulty->FailAt(at);
    failed = Spool::OpenOn(faulty, "store") ? 0 : 1;
    const auto opened = Spool::OpenOn(disk, "store");
    ASSERT_TRUE(opened) << opened.error().message;
    EXPECT_THAT(opened->notes, ElementsAre()) << at;
    ASSERT_EQ(opened->left.size(), 1u) << at;
    ExpectWhole(*disk, save.part());
  }
}

// A save whose record cannot be removed keeps its files: it is whole or not there.
TEST(SpoolTest, ADiskThatFailsWhileOneIsRemovedLosesNoHalf) {
  for (uint64_t at = 1, failed = 0; at < 2 || failed > 0; ++at) {
    const auto disk = std::make_shared<MemoryRoot>("disk");
    const auto faulty = std::make_shared<FaultyStorage>(disk);
    const Save save(3);
    {
      const auto opened = Spool::OpenOn(faulty, "store");
      ASSERT_TRUE(opened->spool->Write(save.part(), *save.bytes));
      faulty->FailAt(at);
      failed = opened->spool->Remove(save.part()) ? 0 : 1;
    }
    const auto opened = Spool::OpenOn(disk, "store");
    EXPECT_THAT(opened->notes, ElementsAre()) << at;
    for (const PreparedPart& part : opened->left) ExpectWhole(*disk, part);
  }
}

// Their names do not matter.
TEST(SpoolTest, TheOldestIsTheFirst) {
  const Save one(9), other(3);
  for (const Save* older : {&one, &other}) {
    const auto disk = std::make_shared<MemoryRoot>("disk");
    {
      const auto opened = Spool::OpenOn(disk, "store");
      for (const Save* save : {&one, &other}) {
        PreparedPart part = save->part();
        part.mtime_ns = save == older ? 1000 : 2000;
        ASSERT_TRUE(opened->spool->Write(part, *save->bytes));
      }
    }
    const auto opened = Spool::OpenOn(disk, "store");
    ASSERT_EQ(opened->left.size(), 2u);
    EXPECT_EQ(opened->left[0].step, older->part().step);
  }
}

// While its daemon uses it; what goes or is damaged meanwhile is left out.
TEST(SpoolTest, SomebodyElseSeesWhatIsInIt) {
  const auto disk = std::make_shared<MemoryRoot>("disk");
  EXPECT_FALSE(Spool::Look(*disk, "store")) << "it is not a spool";
  const auto opened = Spool::OpenOn(disk, "store");
  const Save one(3), other(9);
  ASSERT_TRUE(opened->spool->Write(other.part(), *other.bytes));
  ASSERT_TRUE(opened->spool->Write(one.part(), *one.bytes));
  const auto saves = Spool::Look(*disk, "store");
  ASSERT_TRUE(saves) << saves.error().message;
  ASSERT_EQ(saves->size(), 2u);
  for (const PreparedPart& save : *saves) {
    const PreparedPart& written = save.step == one.part().step ? one.part() : other.part();
    EXPECT_EQ(RenderPart(save), RenderPart(written));
  }
  EXPECT_TRUE(Spool::Look(*disk, "another store")->empty());
  ASSERT_TRUE(opened->spool->Remove(one.part()));
  const std::string damaged = "prepared/x", text = "not a record";
  ASSERT_TRUE(disk->PublishIfAbsent(damaged, std::as_bytes(std::span(text))));
  EXPECT_EQ(Spool::Look(*disk, "store")->size(), 1u);
}

// Bytes that are not those of the record are found when they are read for the store.
TEST(SpoolTest, BytesThatChangeAreNotWritten) {
  Save save(3);
  const auto text = save.memory[1].lock();
  (*text)[500] = static_cast<char>((*text)[500] ^ 1);
  const auto disk = std::make_shared<MemoryRoot>("disk");
  const auto opened = Spool::OpenOn(disk, "store");
  const Status done = opened->spool->Write(save.part(), *save.bytes);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kDataLoss);
  EXPECT_THAT(*ListFilesBelow(*disk, ""), ElementsAre("format"));
}

}  // namespace
}  // namespace ckptfs
