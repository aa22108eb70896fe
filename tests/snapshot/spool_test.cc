// SPDX-License-Identifier: Apache-2.0
//
// Saves on a disk of this node, on their way from memory to the store: whole or not there
// whenever the machine stops, and there only for what the store does not take at once.
// kill_test.cc has the daemons that die.
#include "core/commit/spool.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "core/io/file_root.h"
#include "core/store/record_text.h"
#include "snapshot/spooler.h"
#include "snapshot/world_parts.h"
#include "tests/snapshot/nodes.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::RankFileOf;

constexpr std::chrono::hours kNever{1'000};

// A save of two ranks, in memory.
struct Save {
  explicit Save(uint64_t step) {
    bytes = std::make_shared<SaveBytes>(AttemptName{"run", "job", step, RandomDigest()}, step, 2);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      auto text = std::make_shared<std::string>(RankFileOf(step, rank, 2));
      ReceivedFile file;
      file.bytes = text->size();
      file.rope = {std::as_bytes(std::span(*text)).first(999), std::as_bytes(std::span(*text)).subspan(999)};
      file.chunks = ChunkDigestsOf(*text);
      file.shelve = [places = places](const std::string& place) { places->push_back(place); };
      memory.push_back(text);
      file.lease = std::move(text);
      EXPECT_TRUE(bytes->Add(rank, file));
      EXPECT_EQ(file.lease, nullptr);
    }
  }
  const PreparedPart& part() const { return bytes->part(); }
  bool InMemory() const { return !memory[0].expired() || !memory[1].expired(); }

  std::shared_ptr<SaveBytes> bytes;
  std::vector<std::weak_ptr<std::string>> memory;
  std::shared_ptr<std::vector<std::string>> places = std::make_shared<std::vector<std::string>>();
};

void ExpectWhole(const Root& root, const PreparedPart& part) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const auto bytes = ReadWhole(root, part.PathOf(rank), 1 << 20);
    ASSERT_TRUE(bytes) << bytes.error().message;
    EXPECT_TRUE(*bytes == RankFileOf(part.step, rank, 2)) << "rank " << rank;
  }
}

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

// What is planted in a spool, and what the refusal says.
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
      {[](const auto& path) { EXPECT_EQ(symlink("/etc/passwd", (path + "/prepared/x").c_str()), 0); },
       ErrorCode::kPermission, "/prepared/x is a symbolic link"},
      {[](const auto& path) { EXPECT_EQ(mkfifo((path + "/.tmp/x").c_str(), 0600), 0); },
       ErrorCode::kPermission, "/.tmp/x is not a regular file"},
      {[](const auto& path) {
         const auto files = *ListFilesBelow(FileRoot(path), "snapshots");
         EXPECT_EQ(link((path + "/" + files[0]).c_str(), (path + ".second").c_str()), 0);
       },
       ErrorCode::kPermission, "rank-00000.safetensors is a file with a second name"},
      {[](const auto& path) {
         std::string deep = path + "/prepared";
         for (const char* name : {"/a", "/b", "/c", "/d"}) {
           EXPECT_EQ(mkdir((deep += name).c_str(), 0700), 0);
         }
       },
       ErrorCode::kPermission, "/prepared/a/b/c is a directory too deep"},
      {[&](const auto& path) { write(path + "/prepared/x", 0666); EXPECT_EQ(chmod((path + "/prepared/x").c_str(), 0666), 0); },
       ErrorCode::kPermission, "/prepared/x may be entered or read by others"},
  };
  if (geteuid() == 0) {
    cases.push_back({[](const auto& path) { EXPECT_EQ(chown(path.c_str(), 65534, 65534), 0); },
                     ErrorCode::kPermission, "belongs to user 65534"});
    cases.push_back({[](const auto& path) { EXPECT_EQ(chown((path + "/format").c_str(), 65534, 65534), 0); },
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
  const auto damaged = [](const std::function<void(Storage& disk, const PreparedPart& part)>& act) {
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
  const auto record = [](const PreparedPart& part) { return PartName(part, Digest()); };
  EXPECT_THAT(damaged([](Storage& disk, const PreparedPart& part) { (void)disk.Remove(part.PathOf(1)); }),
              HasSubstr("rank-00001.safetensors"));
  EXPECT_THAT(damaged([](Storage& disk, const PreparedPart& part) { Put(disk, part.PathOf(0), "short"); }),
              HasSubstr("5 bytes, its record says"));
  EXPECT_THAT(damaged([&](Storage& disk, const PreparedPart& part) { Put(disk, record(part), "{}\n"); }),
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
  const std::string record = PartName(save.part(), Digest());
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

// Whose record cannot be removed keeps its files: it is whole or not there.
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

// Whatever their names are.
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

// ---- which saves go there ------------------------------------------------------

class SpoolerTest : public testing::Test {
 protected:
  void Start(std::chrono::milliseconds patience, uint64_t budget = 1 << 20) {
    SpoolerOptions options;
    options.budget = budget;
    options.patience = patience;
    options.pause = std::chrono::milliseconds(1);
    options.log = [this](std::string_view line) { log_.emplace_back(line); };
    spooler_ = std::make_unique<Spooler>(*Spool::OpenOn(faulty_, "store"), std::move(options));
  }
  nlohmann::json status() const { return nlohmann::json::parse(spooler_->StatusJson()); }
  static void Await(const Save& save) {
    while (save.InMemory() || !save.bytes->on_disk()) std::this_thread::yield();
  }

  const std::shared_ptr<MemoryRoot> disk_ = std::make_shared<MemoryRoot>("disk");
  const std::shared_ptr<FaultyStorage> faulty_ = std::make_shared<FaultyStorage>(disk_);
  std::vector<std::string> log_;
  std::unique_ptr<Spooler> spooler_;
};

TEST_F(SpoolerTest, OnlyWhatTheStoreDoesNotTakeAtOnceGoesThere) {
  Start(kNever);
  const Save first(1), second(2), third(3);
  spooler_->Add(first.bytes);
  spooler_->Begin(*first.bytes);
  spooler_->Add(second.bytes);
  Await(second);
  EXPECT_THAT(*second.places, ElementsAre(second.part().Directory(), second.part().Directory()));
  EXPECT_TRUE(first.InMemory());
  EXPECT_FALSE(first.bytes->on_disk());
  ExpectWhole(*second.bytes, second.part());
  EXPECT_EQ(status()["saves"], 1);
  spooler_->Over(*first.bytes);
  spooler_->Add(third.bytes);  // the second waits still
  Await(third);
  spooler_->Over(*second.bytes);
  spooler_->Over(*third.bytes);
  EXPECT_THAT(*ListFilesBelow(*disk_, ""), ElementsAre("format"));
  EXPECT_EQ(status()["bytes"], 0);
  EXPECT_EQ(status()["spooled"], 2);
  const Save fourth(4);
  spooler_->Add(fourth.bytes);
  EXPECT_TRUE(fourth.InMemory());
}

TEST_F(SpoolerTest, AStoreThatFailsOrIsSlowGetsItFromThere) {
  Start(kNever);
  const Save failed(1);
  spooler_->Add(failed.bytes);
  const auto reader = *failed.bytes->Open(failed.part().PathOf(0));
  spooler_->Fails(*failed.bytes);
  Await(failed);
  // Who had it open reads the disk now, and goes on when the save is over.
  spooler_->Over(*failed.bytes);
  std::string bytes(reader->size(), '\0');
  ASSERT_TRUE(reader->ReadAt(0, std::as_writable_bytes(std::span(bytes))));
  EXPECT_TRUE(bytes == RankFileOf(1, 0, 2));
  spooler_.reset();
  Start(std::chrono::milliseconds(0));
  const Save slow(2);
  spooler_->Add(slow.bytes);
  spooler_->Begin(*slow.bytes);
  Await(slow);
}

TEST_F(SpoolerTest, WhatHasNoRoomStaysInMemoryUntilThereIs) {
  const Save first(1), second(2);
  Start(std::chrono::milliseconds(0), BytesOf(first.part()) + 1);
  spooler_->Add(first.bytes);
  Await(first);
  spooler_->Add(second.bytes);
  while (status()["full"] != 1) std::this_thread::yield();
  EXPECT_TRUE(second.InMemory());
  EXPECT_FALSE(spooler_->Leave(*second.bytes));
  EXPECT_EQ(status()["full"], 1);
  spooler_->Over(*first.bytes);
  Await(second);
  EXPECT_TRUE(spooler_->Leave(*second.bytes));
}

TEST_F(SpoolerTest, ADiskThatFailsIsTriedAgainAndSaidOnce) {
  Start(std::chrono::milliseconds(0));
  const uint64_t before = faulty_->calls();
  faulty_->FailAt(1, ErrorCode::kExhausted);
  const Save save(1);
  spooler_->Add(save.bytes);
  Await(save);
  EXPECT_GT(faulty_->calls(), before);
  EXPECT_EQ(status()["failed"], 1);
  EXPECT_EQ(status()["bytes"], BytesOf(save.part()));
  spooler_.reset();
  EXPECT_THAT(log_, ElementsAre(HasSubstr("spool: saves stay in memory: ")));
}

TEST_F(SpoolerTest, AtTheEndAllGoesThereAndNothingFurther) {
  Start(kNever);
  const Save save(1);
  spooler_->Add(save.bytes);
  const auto reader = *save.bytes->Open(save.part().PathOf(0));
  spooler_->End();
  EXPECT_TRUE(spooler_->Leave(*save.bytes));
  EXPECT_TRUE(save.bytes->stays());
  std::byte byte{};
  EXPECT_FALSE(reader->ReadAt(0, {&byte, 1}));
  spooler_.reset();
  Start(kNever);
  ASSERT_EQ(spooler_->left().size(), 1u);
  EXPECT_TRUE(spooler_->left()[0]->left());
  ExpectWhole(*spooler_->left()[0], save.part());
  EXPECT_EQ(status()["bytes"], BytesOf(save.part()));
}

TEST_F(SpoolerTest, WhatComesAtTheEndGoesThereToo) {
  Start(kNever);
  spooler_->End();
  const Save save(1);
  const auto reader = *save.bytes->Open(save.part().PathOf(0));
  spooler_->Add(save.bytes);
  spooler_->Begin(*save.bytes);  // the store has no more time for it
  Await(save);
  std::byte byte{};
  EXPECT_FALSE(reader->ReadAt(0, {&byte, 1}));
  EXPECT_TRUE(spooler_->Leave(*save.bytes));
}

// ---- parts of steps of several nodes -------------------------------------------

class SpooledPartTest : public SpoolerTest {
 protected:
  using Settled = std::vector<std::pair<uint64_t, std::string>>;
  std::unique_ptr<WorldParts> Parts(const testing_support::Node& node, bool found = false) {
    WorldPartsOptions options;
    options.commit = node.commit.get();
    options.turn = std::chrono::milliseconds(1);
    options.settled = [this](const AttemptName&, uint64_t step, const Status& done) {
      MutexLock lock(mutex_);
      settled_.emplace_back(step, done ? "" : done.error().message);
    };
    options.spooler = spooler_.get();
    options.found = [found](const SaveBytes&) { return found; };
    return std::make_unique<WorldParts>(std::move(options));
  }
  // Rank 0 of two; in memory unless the spool has left it.
  WorldPart Part(std::shared_ptr<SaveBytes> save = nullptr) {
    AttemptName name = testing_support::AttemptOf(1, 2);
    auto text = std::make_shared<std::string>(RankFileOf(5, 0, 2));
    ReceivedFile file{text->size(), {std::as_bytes(std::span(*text))}, ChunkDigestsOf(*text), false, text};
    if (!save) {
      memory_ = text;
      save = std::make_shared<SaveBytes>(name, 5, 2);
      EXPECT_TRUE(save->Add(0, file));
    }
    file.rope.clear();
    file.lease.reset();
    name.life = {};
    return {name, 5, 2, {{0, std::move(file)}}, IncomingSteps::Time::clock::now(), std::move(save)};
  }
  Settled Await() {
    while (true) {
      std::this_thread::yield();
      MutexLock lock(mutex_);
      if (!settled_.empty()) return std::exchange(settled_, {});
    }
  }
  Mutex mutex_;
  Settled settled_;
  std::weak_ptr<std::string> memory_;
};

TEST_F(SpooledPartTest, ItWaitsThereForTheStoreAndForTheOthers) {
  const auto disk = std::make_shared<MemoryRoot>("store");
  const auto away = std::make_shared<FaultyStorage>(disk);
  const testing_support::Node other(disk);
  Start(std::chrono::milliseconds(0));
  {
    const testing_support::Node node(away);
    away->StopAt(1, false);
    const auto parts = Parts(node);
    WorldPart part = Part();
    const auto save = part.save;
    parts->Hand(std::move(part));
    while (!memory_.expired()) std::this_thread::yield();
    EXPECT_TRUE(parts->Has({"run", "job", 1}));
    EXPECT_FALSE(parts->Has({"run", "job", 2}));
  }
  EXPECT_TRUE(settled_.empty());  // neither durable nor dropped
  spooler_.reset();
  Start(std::chrono::milliseconds(0));
  ASSERT_EQ(spooler_->left().size(), 1u);

  const testing_support::Node next(disk);
  {
    const auto parts = Parts(next);
    parts->Hand(Part(spooler_->left()[0]));
    ASSERT_TRUE(other.Prepare(testing_support::AttemptOf(1, 2), 5, {1}, 2));
    const Settled settled = Await();
    EXPECT_EQ(settled, (Settled{{5, ""}}));
  }
  EXPECT_TRUE(testing_support::IsStepThere(disk, "5", 5, 2));
  EXPECT_THAT(*ListFilesBelow(*disk_, ""), ElementsAre("format"));
}

// Its daemon died when the step was there, before the spool had forgotten it.
TEST_F(SpooledPartTest, WhatIsAStepAlreadyIsNotPreparedAgain) {
  const auto disk = std::make_shared<MemoryRoot>("store");
  {
    const auto spool = Spool::OpenOn(disk_, "store");
    const WorldPart part = Part();
    ASSERT_TRUE(spool->spool->Write(part.save->part(), *part.save));
  }
  Start(std::chrono::milliseconds(0));
  const testing_support::Node node(disk);
  const auto parts = Parts(node, true);
  parts->Hand(Part(spooler_->left().at(0)));
  EXPECT_EQ(Await(), (Settled{{5, ""}}));
  EXPECT_THAT(*ListFilesBelow(*disk, kPreparedFolder), ElementsAre());
  EXPECT_THAT(*ListFilesBelow(*disk_, ""), ElementsAre("format"));
}

TEST_F(SpooledPartTest, WhatOthersDroppedGoes) {
  const auto disk = std::make_shared<MemoryRoot>("store");
  Start(kNever);
  const testing_support::Node node(disk), other(disk);
  const auto parts = Parts(node);
  ASSERT_TRUE(other.commit->Drop(testing_support::AttemptOf(1, 2), 5, "a reason"));
  parts->Hand(Part());
  EXPECT_EQ(Await(), (Settled{{5, "a reason"}}));
  EXPECT_TRUE(memory_.expired());
  EXPECT_EQ(status()["spooled"], 0);
}

}  // namespace
}  // namespace ckptfs
