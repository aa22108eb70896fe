// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/publish.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/base/strings.h"
#include "core/check/verify.h"
#include "core/io/file_storage.h"
#include "core/manifest/manifest.h"
#include "fs/permissions.h"
#include "tests/core/adopt/pieces.h"
#include "tests/support/faulty_storage.h"

namespace ckptfs {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing_support::Pieces;
using testing_support::ReadWhole;

class PublishStepTest : public testing::Test {
 protected:
  PublishStepTest() {
    norm_ = pieces_.Add("norm", "master", 256);
    bias_ = pieces_.Add("bias", "master", 70);
    big_ = pieces_.Add("big", "master", 32 * 1025);
    pieces_.Write();
  }
  std::unique_ptr<Store> Open() {
    auto store = Store::Open(StorePath(), true);
    EXPECT_TRUE(store) << store.error().message;
    return *std::move(store);
  }
  PublishRequest Request(bool pack = true, const std::string& run = "run") {
    PublishRequest request;
    request.run = run;
    request.source = pieces_.directory();
    request.root = "/root";
    request.pack = pack;
    request.check = false;  // the pieces are not a model's
    return request;
  }
  StepRecord Publish(Store& store, bool pack = true, const std::string& run = "run") {
    auto done = PublishStep(store, pieces_.model(), Request(pack, run));
    EXPECT_TRUE(done) << done.error().message;
    return done ? done->record : StepRecord{};
  }
  void ExpectTruth(const StepModel& model) {
    for (const AtomIndex atom : {norm_, bias_, big_}) {
      EXPECT_TRUE(ReadWhole(model, atom) == Pieces::Truth(model, atom));
    }
  }
  std::string StorePath() const { return directory_.path() + "/store"; }
  std::vector<std::string> SideFiles() const {
    std::vector<std::string> names;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(StorePath() + "/blobs/side", none)) {
      names.push_back(entry.path().string());
    }
    return names;
  }

  Pieces pieces_;
  AtomIndex norm_{}, bias_{}, big_{};
  TemporaryDirectory directory_;
};

TEST_F(PublishStepTest, APackedStepReadsTheSameBytesFromOneFile) {
  auto store = Open();
  const auto step = store->Load(Publish(*store));
  ASSERT_TRUE(step) << step.error().message;
  const StepModel& model = (*step)->model;
  ExpectTruth(model);
  const auto side = FindSideBlob(model);
  ASSERT_TRUE(side);
  EXPECT_TRUE(IsPacked(model, model.atom(norm_)) && IsPacked(model, model.atom(bias_)));
  EXPECT_FALSE(IsPacked(model, model.atom(big_)));
  EXPECT_EQ(model.roots.back() + "/" + model.blob(*side).path, SideFiles().at(0));
  // Without any source file: what is packed is read from the side blob alone.
  for (uint32_t rank = 0; rank < Pieces::kRanks; ++rank) fs::remove(pieces_.PathOf(rank));
  EXPECT_TRUE(ReadWhole(model, norm_) == Pieces::Truth(model, norm_));
  EXPECT_EQ(ReadWhole(model, big_), ErrorCodeName(ErrorCode::kNotFound));
}

TEST_F(PublishStepTest, VerifyComparesTheSideBlobWithThePieces) {
  auto store = Open();
  const auto step = store->Load(Publish(*store));
  const auto verify = [&] {
    const auto blobs = BlobReader::Create((*step)->model, {});
    return *VerifyStep((*step)->model, *blobs, {});
  };
  EXPECT_EQ(verify().defect_count, 0u);
  EXPECT_EQ(verify().atoms_compared, 2u);
  EXPECT_EQ(verify().blobs, Pieces::kRanks + 1);
  // Damage that keeps size, times and inode.
  const std::string path = SideFiles().at(0);
  const auto time = fs::last_write_time(path);
  {
    std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(4096 + 5);
    file.put('\x7f');
  }
  fs::last_write_time(path, time);
  const VerifyReport report = verify();
  EXPECT_EQ(report.defect_count, 2u);  // its digest, and the atom
  EXPECT_THAT(report.defects[0].rule + report.defects[1].rule,
              HasSubstr("the digest of bytes 0 to "));
  EXPECT_THAT(report.defects[0].rule + report.defects[1].rule, HasSubstr("differs from replica 0"));
}

// Packing is not part of what a step is.
TEST_F(PublishStepTest, PublishingAgainChangesNothing) {
  auto store = Open();
  const StepRecord first = Publish(*store);
  ASSERT_TRUE(first.side);
  for (const bool pack : {true, false, true}) {
    const StepRecord again = Publish(*store, pack);
    EXPECT_EQ(again.id, "step1");
    EXPECT_EQ(again.manifest, first.manifest);
    EXPECT_EQ(again.side, first.side);
  }
  EXPECT_THAT(*Open()->Steps("run"), SizeIs(1));
  EXPECT_THAT(SideFiles(), SizeIs(1));
  // A step that was published before there was packing stays, too.
  const StepRecord plain = Publish(*store, false, "plain");
  EXPECT_FALSE(plain.side);
  EXPECT_EQ(Publish(*store, true, "plain").manifest, plain.manifest);
}

TEST_F(PublishStepTest, TheSideBlobGoesWithItsLastStep) {
  auto store = Open();
  const StepRecord one = Publish(*store, true, "one");
  const StepRecord two = Publish(*store, true, "two");
  EXPECT_EQ(one.side, two.side);
  EXPECT_THAT(SideFiles(), SizeIs(1));
  ASSERT_TRUE(store->Remove(one));
  ASSERT_TRUE(store->Sweep());
  EXPECT_THAT(SideFiles(), SizeIs(1));
  auto held = Open()->Load(two);  // as a mount holds what is open
  ASSERT_TRUE(store->Remove(two));
  ASSERT_TRUE(store->Sweep());
  EXPECT_THAT(SideFiles(), SizeIs(1));
  ExpectTruth((*held)->model);
  held = Fail(ErrorCode::kNotFound, "released");
  ASSERT_TRUE(store->Sweep());
  EXPECT_THAT(SideFiles(), IsEmpty());
  EXPECT_EQ(Publish(*store, true, "one").side, one.side);  // and it can be had again
}

TEST_F(PublishStepTest, ADamagedRecordKeepsEverySideBlob) {
  auto store = Open();
  const StepRecord gone = Publish(*store, true, "one");
  Publish(*store, false, "two");
  std::ofstream(StorePath() + "/steps/two/step1/0") << "{}\n";
  fs::remove(StorePath() + "/catalogue.sqlite");
  store = Open();  // this one has read the record
  ASSERT_TRUE(store->Remove(gone));
  ASSERT_TRUE(store->Sweep());
  EXPECT_THAT(SideFiles(), SizeIs(1));
}

// A side blob that is gone or another is done without.
TEST_F(PublishStepTest, WithoutItsSideBlobAStepReadsThePieces) {
  const StepRecord record = Publish(*Open());
  const std::string path = SideFiles().at(0);
  const std::vector<std::function<void()>> losses = {
      [&] { fs::resize_file(path, 5000); },
      [&] { fs::remove(path); },
      [&] { fs::create_symlink("/etc/passwd", path); },
  };
  for (const auto& lose : losses) {
    lose();
    const auto step = Open()->Load(record);
    ASSERT_TRUE(step) << step.error().message;
    EXPECT_FALSE(FindSideBlob((*step)->model));
    EXPECT_THAT((*step)->model.notes.back(), HasSubstr(path));
    ExpectTruth((*step)->model);
    EXPECT_TRUE(RenderManifest((*step)->model));
  }
}

TEST_F(PublishStepTest, AStoreThatWasMovedKeepsItsSideBlobs) {
  const StepRecord record = Publish(*Open());
  fs::rename(StorePath(), directory_.path() + "/moved");
  auto store = Store::Open(directory_.path() + "/moved", false);
  const auto step = (*store)->Load(record);
  ASSERT_TRUE(FindSideBlob((*step)->model));
  EXPECT_EQ((*step)->model.roots.back(), directory_.path() + "/moved/blobs");
  ExpectTruth((*step)->model);
}

// ---- faults -------------------------------------------------------------------

TEST_F(PublishStepTest, AFullStoreTakesTheStepUnpacked) {
  auto storage = std::make_shared<FaultyStorage>();
  auto store = *Store::OpenOn(storage);
  int warned = 0;
  int failed = 0;
  for (uint64_t call = 1; call <= 30; ++call) {
    storage->FailAt(call, ErrorCode::kExhausted);
    const std::string run = StrCat("run", call);
    const auto done = PublishStep(*store, pieces_.model(), Request(true, run));
    storage->FailAt(1u << 30);
    ASSERT_TRUE(store->Refresh());
    const auto found = store->Resolve(run, "step1");
    EXPECT_TRUE(found || !done) << call;
    EXPECT_TRUE(!found || store->Load(*found)) << call;
    failed += done ? 0 : 1;
    if (!done || done->warning.empty()) continue;
    ++warned;
    EXPECT_FALSE(done->record.side);
    EXPECT_THAT(done->warning, HasSubstr("not packed"));
  }
  EXPECT_GE(warned, 1);
  EXPECT_GE(failed, 1);  // no room for the manifest either
}

TEST_F(PublishStepTest, AStopAtAnyCallLeavesTheStepWholeOrAbsent) {
  int stops = 0;
  for (int stop_at = 0; stop_at < 12; ++stop_at) {
    for (const bool with_effect : {false, true}) {
      fs::remove_all(StorePath());
      Open();
      auto storage = std::make_shared<FaultyStorage>(*FileStorage::Open(StorePath(), true));
      storage->StopAt(stop_at + 1, with_effect);
      auto failing = Store::OpenOn(storage);
      const auto done = PublishStep(**failing, pieces_.model(), Request());
      stops += storage->stopped();
      auto store = Open();
      const auto found = store->Resolve("run", "step1");
      EXPECT_TRUE(found || !done);
      EXPECT_TRUE(!found || store->Load(*found));
      ASSERT_TRUE(store->Sweep());
      EXPECT_THAT(SideFiles(), SizeIs(found ? 1 : 0)) << stop_at;
      const auto step = store->Load(Publish(*store));  // and it can be finished
      ASSERT_TRUE(step) << step.error().message;
      ExpectTruth((*step)->model);
    }
  }
  EXPECT_GT(stops, 6);
}

TEST_F(PublishStepTest, ASourceThatChangesMeanwhileIsRefused) {
  const auto time = fs::last_write_time(pieces_.PathOf(3));
  fs::last_write_time(pieces_.PathOf(3), time + std::chrono::seconds(1));
  auto store = Open();
  const auto done = PublishStep(*store, pieces_.model(), Request());
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kStale);
  EXPECT_FALSE(store->Resolve("run", "step1"));
  EXPECT_THAT(SideFiles(), IsEmpty());
}

// While one process is between its side blob and its step no sweep takes it;
// when it was killed there, one does.
TEST_F(PublishStepTest, AKilledAdoptLeavesNothingThatASweepDoesNotRemove) {
  Open();
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto store = Store::Open(StorePath(), false);
    const auto side = store ? (*store)->PutSideBlob("bytes of a side blob")
                            : Result<SideBlob>(Fail(ErrorCode::kIo, "no store"));
    if (!side || write(ready[1], "x", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  auto store = Open();
  ASSERT_TRUE(store->Sweep());
  EXPECT_THAT(SideFiles(), SizeIs(1));
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(store->Sweep());
  EXPECT_THAT(SideFiles(), IsEmpty());
  EXPECT_FALSE(store->Resolve("run", "step1"));
  close(ready[0]);
  close(ready[1]);
}

// ---- who may see it -------------------------------------------------------------

TEST_F(PublishStepTest, TheSideBlobsGateIsThatOfTheSources) {
  chmod(pieces_.directory().c_str(), 0755);
  if (geteuid() != 0) GTEST_SKIP() << "only root can give files to others";
  pieces_.Restrict(5, 0600);  // one file is the owner's only
  auto store = Open();
  const auto step = store->Load(Publish(*store));
  const Blob& side = (*step)->model.blob(*FindSideBlob((*step)->model));
  EXPECT_EQ(side.mode, 0600u);
  EXPECT_EQ(side.uid, 1000u);
  EXPECT_EQ(side.gid, 100u);
  struct stat info;
  ASSERT_EQ(stat(SideFiles().at(0).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  // The pieces decide, also where what was adopted is at another place here.
  Step moved{(*step)->record, (*step)->model, nullptr};
  moved.record.source = "/not/on/this/machine";
  const auto blobs = BlobReader::Create(moved.model, {});
  const StepAccess access(moved, *blobs);
  GroupCache groups;
  EXPECT_TRUE(access.Allows(Caller{.uid = 1000, .gid = 7, .pid = 0}, groups));
  EXPECT_FALSE(access.Allows(Caller{.uid = 1001, .gid = 100, .pid = 0}, groups));
}

}  // namespace
}  // namespace ckptfs
