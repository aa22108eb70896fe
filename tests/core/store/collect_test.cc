// SPDX-License-Identifier: Apache-2.0
//
// Steps and files that are collected, and those that stay, in a real directory.
#include "core/store/collect.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <random>
#include <thread>

#include "core/base/digest.h"
#include "core/base/file_lock.h"
#include "core/base/strings.h"
#include "core/blob/blob_reader.h"
#include "core/blob/chunk_digests.h"
#include "core/io/file_storage.h"
#include "core/io/memory_root.h"
#include "core/records/records.h"
#include "core/store/step_catalogue.h"
#include "core/store/store_index.h"
#include "tests/core/store/counting_storage.h"
#include "tests/core/store/sample_model.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

namespace fs = std::filesystem;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::UnorderedElementsAre;
using testing_support::CountingStorage;
using testing_support::StorageCalls;
using testing_support::TinyModel;

// "snapshots/<digest>" of a name.
std::string FolderOf(const std::string& name) { return StrCat("snapshots/", DigestOf(name).Hex()); }

// A step whose one file, in memory so far, will be the store's own.
MemoryStep SnapshotOf(const Store& store, const std::string& run, int iteration,
                      const std::string& folder, int64_t mtime_ns) {
  const std::string id = std::to_string(iteration);
  const auto bytes = std::make_shared<const std::string>(StrCat(run, " of ", id));
  Blob blob;
  blob.path = StrCat(folder, "/rank-00000.safetensors");
  blob.stamp.size = bytes->size();
  blob.store_owned = true;
  blob.chunk_bytes = kChunkBytes;
  blob.chunks = ChunkDigestsOf(*bytes);
  MemoryStep step{run, "snapshot:" + run, "snapshot:" + run,
                  TinyModel(id, static_cast<uint64_t>(iteration), mtime_ns), nullptr};
  step.model.roots = {store.blobs()};
  step.model.blobs = {blob};
  auto root = std::make_shared<MemoryRoot>("memory");
  const OwnerAndMode access{0600, 0, 0, false};
  EXPECT_TRUE(root->Add(blob.path, {std::as_bytes(std::span(*bytes))}, bytes, access));
  step.bytes = std::move(root);
  return step;
}

// `again`: its time is that many nanoseconds after it would be.
Result<StepRecord> Save(Store& store, const std::string& run, int iteration, int again = 0) {
  StepCatalogue catalogue(store);
  const std::string folder = FolderOf(StrCat(run, iteration, again == 0 ? "" : " again"));
  CKPT_ASSIGN_OR_RETURN(
      const StepRecord held,
      catalogue.Hold(SnapshotOf(store, run, iteration, folder, iteration + again)));
  return catalogue.Persist(held);
}

class CollectTest : public testing::Test {
 protected:
  CollectTest() : store_(*Store::Open(directory_.path() + "/store", true)) {}

  void SaveAll(const std::string& run, int count) {
    for (int i = 0; i < count; ++i) {
      const auto record = Save(*store_, run, i);
      ASSERT_TRUE(record) << record.error().message;
    }
  }
  CollectReport Collect(const CollectRequest& request = {}) {
    auto report = store_->Collect(request);
    EXPECT_TRUE(report) << report.error().message;
    return report ? *std::move(report) : CollectReport{};
  }
  CollectReport KeepLast(uint64_t count) {
    CollectRequest request;
    request.keep_last = count;
    return Collect(request);
  }
  std::vector<std::string> Ids(const std::string& run) {
    std::vector<std::string> ids;
    const auto steps = store_->Steps(run);
    for (const StepRecord& step : steps ? *steps : std::vector<StepRecord>()) {
      ids.push_back(step.id);
    }
    return ids;
  }
  std::string Below(const std::string& path) const {
    return StrCat(store_->directory(), "/", path);
  }
  // Names in a folder of the store.
  std::vector<std::string> In(const std::string& folder) const {
    std::vector<std::string> names;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(Below(folder), none)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<Store> store_;
};

TEST_F(CollectTest, KeepsTheNewestTheMultiplesAndTheLatest) {
  SaveAll("a", 10);
  SaveAll("b", 3);
  CollectRequest request;
  request.run = "a";
  request.keep_last = 2;
  request.keep_every = 4;
  request.dry_run = true;
  const CollectReport told = Collect(request);
  EXPECT_THAT(Ids("a"), SizeIs(10));
  EXPECT_THAT(In("manifests"), SizeIs(13));
  request.dry_run = false;
  const CollectReport done = Collect(request);
  EXPECT_THAT(Ids("a"), ElementsAre("0", "4", "8", "9"));
  EXPECT_THAT(Ids("b"), SizeIs(3));
  for (const CollectReport& report : {told, done}) {
    EXPECT_THAT(report.removed, SizeIs(6));
    EXPECT_EQ(report.manifests, 6u);
    EXPECT_EQ(report.directories, 6u);
    EXPECT_EQ(report.bytes, 6 * std::string("a of 1").size());
    EXPECT_THAT(report.notes, IsEmpty());
  }
  EXPECT_THAT(In("manifests"), SizeIs(7));
  EXPECT_THAT(In("blobs/snapshots"), SizeIs(7));
  EXPECT_THAT(In("holds"), SizeIs(7));  // of what is there
  CollectRequest every;
  every.keep_every = 100;  // 0 is a multiple, and the latest stays
  Collect(every);
  EXPECT_THAT(Ids("a"), ElementsAre("0", "9"));
  EXPECT_THAT(Collect().removed, IsEmpty());
}

// Training that went back to an earlier step saves smaller iterations than those that are there.
TEST_F(CollectTest, TheNewestLifeIsKeptFirst) {
  SaveAll("a", 5);
  ASSERT_TRUE(Save(*store_, "a", 2, 100));
  EXPECT_EQ(store_->Resolve("a", "latest")->id, "2-1");
  KeepLast(3);
  EXPECT_THAT(Ids("a"), ElementsAre("3", "4", "2-1"));
  ASSERT_TRUE(Save(*store_, "a", 3, 101));
  KeepLast(3);
  EXPECT_THAT(Ids("a"), ElementsAre("4", "2-1", "3-1"));
  CollectRequest every;  // of whichever life
  every.keep_every = 2;
  Collect(every);
  EXPECT_THAT(Ids("a"), ElementsAre("4", "2-1", "3-1"));
  KeepLast(1);
  EXPECT_THAT(Ids("a"), ElementsAre("3-1"));
}

// Manifests of before version 2 name the store as it was called then; it may have
// other names (a link, a mount elsewhere).
TEST_F(CollectTest, AManifestThatNamesTheStoreOtherwiseNeedsItsBlobs) {
  SaveAll("a", 1);
  fs::create_directory_symlink(store_->directory(), directory_.path() + "/name");
  const std::string digest = DigestOf("copied").Hex();
  for (const std::string& folder : {digest, FolderOf("another")}) {
    fs::create_directories(Below("blobs/" + folder + "/tag"));
    StepModel model = TinyModel(StrCat("r", folder.size()), 9, 9);
    model.roots = {StrCat(directory_.path(), "/name/blobs/", folder)};
    Blob blob;
    blob.path = "tag/file";
    blob.stamp = FileStamp{5, 6, 7, 8};
    model.blobs = {blob};
    ASSERT_TRUE(store_->Publish("b", model, "/s", "/r"));
  }
  fs::create_directories(Below("blobs/" + DigestOf("unneeded").Hex()));
  EXPECT_EQ(Collect().directories, 1u);
  EXPECT_TRUE(fs::exists(Below("blobs/" + digest + "/tag")));
  EXPECT_TRUE(fs::exists(Below("blobs/" + FolderOf("another") + "/tag")));
}

TEST_F(CollectTest, WhatIsUsedStays) {
  SaveAll("a", 3);
  const StepRecord first = *store_->Resolve("a", "0");
  auto loaded = store_->Load(first);
  ASSERT_TRUE(loaded) << loaded.error().message;
  std::shared_ptr<const void> pin = store_->Hold(*store_->Resolve("a", "1"));
  ASSERT_TRUE(pin);
  EXPECT_THAT(KeepLast(1).held, SizeIs(2));
  EXPECT_THAT(Ids("a"), ElementsAre("0", "1", "2"));
  pin = nullptr;
  EXPECT_THAT(KeepLast(1).removed, SizeIs(1));
  // Removed by hand while somebody reads it: the bytes stay until that one ends.
  ASSERT_TRUE(store_->Remove(first));
  EXPECT_EQ(Collect().directories, 0u);
  EXPECT_TRUE(fs::exists(Below("blobs/" + FolderOf("a0"))));
  loaded = Fail(ErrorCode::kNotFound, "released");
  EXPECT_EQ(Collect().directories, 1u);
  EXPECT_THAT(In("manifests"), SizeIs(1));
}

TEST_F(CollectTest, LetsGoOfWhatIsOnlyKeptAtHand) {
  SaveAll("a", 2);
  auto loaded = store_->Load(*store_->Resolve("a", "0"));
  CollectRequest request;
  request.keep_last = 1;
  std::vector<std::string> asked;
  request.let_go = [&](const StepRecord& record) {
    asked.push_back(record.id);
    loaded = Fail(ErrorCode::kNotFound, "released");
  };
  EXPECT_THAT(Collect(request).removed, SizeIs(1));
  EXPECT_THAT(asked, ElementsAre("0"));
}

TEST_F(CollectTest, AWriterHoldsWhatNoStepNeedsYet) {
  const std::string path = FolderOf("new") + "/rank-00000.safetensors";
  auto hold = store_->HoldBlobs(path);
  ASSERT_TRUE(hold && *hold);
  auto writer = *store_->CreateBlob(path);
  ASSERT_TRUE(writer->Close());
  const auto unnamed = *store_->CreateBlob(path);  // in .tmp
  EXPECT_EQ(Collect().directories, 0u);
  EXPECT_THAT(In(".tmp"), SizeIs(1));
  EXPECT_TRUE(fs::exists(Below("blobs/" + path)));
  hold = Fail(ErrorCode::kNotFound, "released");
  EXPECT_EQ(Collect().directories, 1u);
  std::ofstream(Below(".tmp/left")) << "of a writer that died";
  Collect();
  EXPECT_THAT(In(".tmp"), SizeIs(1));
  EXPECT_TRUE(unnamed->Close());
}

TEST_F(CollectTest, StepsThatShareAManifestAndReferencesStay) {
  SaveAll("a", 1);
  const auto step = store_->Load(*store_->Resolve("a", "0"));
  const RenderedStep rendered = *store_->Render((*step)->model);
  ASSERT_TRUE(store_->Publish("b", (*step)->model, rendered, "/s", "/r"));
  for (int i = 1; i < 4; ++i) {  // of files that are not the store's
    ASSERT_TRUE(store_->Publish("b", TinyModel(StrCat("r", i), 9, i), "/s", "/r"));
  }
  ASSERT_TRUE(store_->Remove(*store_->Resolve("a", "0")));
  EXPECT_THAT(KeepLast(1).removed, IsEmpty());
  EXPECT_THAT(Ids("b"), SizeIs(4));
  EXPECT_TRUE(fs::exists(Below("blobs/" + FolderOf("a0"))));
}

TEST_F(CollectTest, WhatCannotBeReadMightNeedEverything) {
  SaveAll("a", 3);
  ASSERT_TRUE(store_->Remove(*store_->Resolve("a", "0")));
  const std::string record = Below("steps/a/1/0");
  fs::permissions(record, fs::perms::owner_all);
  std::ofstream(record) << "{}\n";
  fs::remove(Below("catalogue.sqlite"));
  store_ = *Store::Open(Below(""), false);
  const CollectReport report = KeepLast(1);
  EXPECT_THAT(report.removed, IsEmpty());
  EXPECT_EQ(report.directories + report.manifests, 0u);
  EXPECT_THAT(report.notes, ElementsAre(HasSubstr("a: all steps stay"), HasSubstr("nothing is")));
  EXPECT_THAT(In("blobs/snapshots"), SizeIs(3));
}

TEST_F(CollectTest, AManifestThatIsGoneOrDamagedMightNeedAnyBlob) {
  SaveAll("a", 3);
  const std::string manifest =
      Below(StrCat("manifests/", store_->Resolve("a", "2")->manifest.Hex()));
  ASSERT_TRUE(store_->Remove(*store_->Resolve("a", "0")));
  std::ofstream(manifest) << "damaged";
  store_ = *Store::Open(Below(""), false);
  EXPECT_THAT(Collect().notes, ElementsAre(HasSubstr("no blobs are reclaimed")));
  fs::remove(manifest);
  EXPECT_THAT(Collect().notes, ElementsAre(HasSubstr("is missing")));
  EXPECT_THAT(In("blobs/snapshots"), SizeIs(3));
  ASSERT_TRUE(store_->Remove(*store_->Resolve("a", "2")));
  EXPECT_EQ(Collect().directories, 2u);
  EXPECT_THAT(Ids("a"), ElementsAre("1"));
}

TEST_F(CollectTest, NothingOutsideIsTouched) {
  SaveAll("a", 1);
  const std::string outside = directory_.path() + "/outside";
  fs::create_directories(outside + "/inner");
  std::ofstream(outside + "/inner/file") << "precious";
  const std::string hex = DigestOf("orphan").Hex();
  fs::create_directories(Below("blobs/" + hex + "/inner"));
  fs::create_directory_symlink(outside, Below("blobs/" + hex + "/inner/link"));
  fs::create_symlink(outside + "/inner/file", Below("blobs/" + hex + "/file"));
  fs::create_hard_link(outside + "/inner/file", Below("blobs/" + hex + "/hard\nlink"));
  const std::string linked = Below("blobs/" + DigestOf("link").Hex());
  fs::create_directory_symlink(outside, linked);
  fs::create_directory_symlink(outside, Below("blobs/snapshots/" + DigestOf("link").Hex()));
  for (const char* name : {"blobs/mine", "blobs/snapshots/mine", "blobs/0123456789ABCDEF"}) {
    fs::create_directories(Below(name));
  }
  std::ofstream(Below("blobs/" + DigestOf("file").Hex())) << "a file, not a directory";
  fs::create_symlink(outside + "/inner/file", Below("manifests/" + DigestOf("m").Hex()));
  const CollectReport report = Collect();
  EXPECT_EQ(report.directories, 1u);
  EXPECT_EQ(report.bytes, 0u);  // all of it has another name
  EXPECT_FALSE(fs::exists(Below("blobs/" + hex)));
  EXPECT_TRUE(fs::exists(outside + "/inner/file"));
  EXPECT_TRUE(fs::is_symlink(linked));
  EXPECT_TRUE(fs::exists(Below("blobs/mine")));
  EXPECT_THAT(Ids("a"), ElementsAre("0"));
}

// ---- records of removed steps ----------------------------------------------------

TEST_F(CollectTest, RecordsOfRemovedStepsGoAndTheirNumbersStayUsed) {
  SaveAll("a", 4);
  const auto other = *Store::Open(store_->directory(), false);
  ASSERT_THAT(*other->Steps("a"), SizeIs(4));
  ASSERT_TRUE(store_->Remove(*store_->Resolve("a", "0")));  // not by who collects
  KeepLast(1);
  EXPECT_THAT(In("steps/a"), ElementsAre("3"));
  EXPECT_THAT(In("deleted/a"), UnorderedElementsAre("0", "1", "2"));
  ASSERT_TRUE(other->RefreshStep("a", "1"));
  EXPECT_THAT(*other->Steps("a"), SizeIs(3));
  ASSERT_TRUE(Save(*store_, "a", 1, 100));
  EXPECT_THAT(In("steps/a/1"), ElementsAre("1"));
  ASSERT_TRUE(other->RefreshStep("a", "1"));
  EXPECT_EQ(other->Resolve("a", "1")->mtime_ns, 101);
  ASSERT_TRUE(other->Refresh());
  EXPECT_THAT(*other->Steps("a"), SizeIs(2));
  EXPECT_THAT(Ids("a"), ElementsAre("3", "1"));  // the one that was saved last
}

TEST_F(CollectTest, TheHundredthTimeAsksWhatTheTenthDid) {
  const auto storage =
      std::make_shared<CountingStorage>(*FileStorage::Open(store_->directory(), false));
  store_ = *Store::OpenOn(storage, false, store_->directory());
  StorageCalls tenth;
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(Save(*store_, "a", i));
    storage->Take();
    KeepLast(3);
    if (i == 10) tenth = storage->Take();
  }
  EXPECT_EQ(storage->Take(), tenth);
}

// A number that others used, and of which nothing is listed any more, after it was found free.
TEST_F(CollectTest, ANumberThatWasUsedMeanwhileIsNotTaken) {
  class Racing final : public CountingStorage {
   public:
    using CountingStorage::CountingStorage;
    Status PublishIfAbsent(std::string_view path, std::span<const std::byte> bytes) override {
      if (path.starts_with("steps/") && before) std::exchange(before, nullptr)();
      return CountingStorage::PublishIfAbsent(path, bytes);
    }
    std::function<void()> before;
  };
  const auto storage = std::make_shared<Racing>(*FileStorage::Open(store_->directory(), false));
  const auto late = *Store::OpenOn(storage, false, store_->directory());
  storage->before = [this] {
    SaveAll("a", 1);
    ASSERT_TRUE(store_->Remove(*store_->Resolve("a", "0")));
    Collect();
    ASSERT_THAT(In("steps/a"), IsEmpty());
  };
  ASSERT_TRUE(Save(*late, "a", 0));
  ASSERT_TRUE(store_->Refresh());
  EXPECT_THAT(Ids("a"), ElementsAre("0"));
  EXPECT_THAT(In("steps/a/0"), UnorderedElementsAre("0", "1"));
}

// A process was killed between a step and the deletion of the one that it replaces.
TEST_F(CollectTest, RecordsWithoutADeletionStay) {
  StepModel model = TinyModel("s", 1, 1);
  ASSERT_TRUE(store_->Publish("a", model, "/s", "/r"));
  model.mtime_ns = 2;
  PublishHow replace;
  replace.replace = true;
  ASSERT_TRUE(store_->Publish("a", model, "/s", "/r", replace));
  ASSERT_TRUE(store_->Remove(*store_->Resolve("a", "s")));
  fs::remove(Below("deleted/a/s/0"));
  Collect();
  EXPECT_THAT(In("steps/a/s"), SizeIs(2));
  ASSERT_TRUE(store_->Refresh());
  EXPECT_FALSE(store_->Steps("a"));
}

// Builds that look for used numbers among steps alone cannot read the run's claim any more.
TEST_F(CollectTest, ARunOfAnOlderBuildIsClaimedAnew) {
  const std::string root = "snapshot:a";
  for (const char* name : {"runs/a/0", "runs/a/0.settled"}) {
    ASSERT_TRUE(PublishText(*store_->storage(), name, RenderText("root", root)));
  }
  SaveAll("a", 2);
  EXPECT_THAT(In("runs/a"), SizeIs(2));
  KeepLast(1);
  EXPECT_THAT(In("runs/a"), UnorderedElementsAre("0", "0.settled", "1", "1.settled"));
  const std::string claim = *ReadWhole(*store_->storage(), "runs/a/1", kRecordMaxBytes);
  EXPECT_EQ(ParseText(claim, "root").error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(*ParseText(claim, "root", kClaimVersion), root);
  EXPECT_TRUE(Save(*store_, "a", 5));
  EXPECT_FALSE(store_->Publish("a", TinyModel("x", 9, 9), "/s", "/another"));
  KeepLast(1);
  EXPECT_THAT(In("runs/a"), SizeIs(4));
}

// ---- beside another that collects -------------------------------------------------

// A process that removes a step has its manifest alone for that moment.
TEST_F(CollectTest, AStepThatAnotherRemovesIsNotInUse) {
  SaveAll("a", 3);
  const StepRecord first = *store_->Resolve("a", "0");
  auto alone = FileLock::Take(Below(ManifestName(first.manifest)), O_RDWR, LOCK_EX | LOCK_NB);
  ASSERT_TRUE(alone);
  const auto other = *Store::Open(store_->directory(), false);
  std::promise<void> asked;
  CollectRequest request;
  request.keep_last = 1;
  request.let_go = [&](const StepRecord& record) {
    if (record.id == first.id) asked.set_value();
  };
  Result<CollectReport> report = CollectReport{};
  std::thread collects([&] { report = other->Collect(request); });
  asked.get_future().wait();
  usleep(20000);  // it has found by now that the step is locked
  ASSERT_TRUE(store_->Remove(first));
  fs::remove(Below(ManifestName(first.manifest)));
  alone.reset();
  collects.join();
  ASSERT_TRUE(report);
  EXPECT_THAT(report->held, IsEmpty());
  EXPECT_THAT(report->notes, IsEmpty());
  ASSERT_THAT(report->removed, SizeIs(1));
  EXPECT_EQ(report->removed[0].id, "1");
}

// The steps that it removed, and 100 for everything that is not true of them.
[[noreturn]] void CollectAlone(const std::string& directory, int go) {
  const auto store = Store::Open(directory, false);
  char byte = 0;
  if (!store || read(go, &byte, 1) < 0) _exit(100);
  CollectRequest request;
  request.keep_last = 1;
  const auto report = (*store)->Collect(request);
  if (!report || !report->notes.empty() || !report->held.empty()) _exit(100);
  _exit(static_cast<int>(report->removed.size()));
}

TEST_F(CollectTest, TwoThatCollectTellOfWhatEachTook) {
  constexpr int kSteps = 40;
  SaveAll("a", kSteps);
  int go[2];
  ASSERT_EQ(pipe(go), 0);
  pid_t pids[2];
  for (pid_t& pid : pids) {
    pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      close(go[1]);
      CollectAlone(store_->directory(), go[0]);
    }
  }
  close(go[0]);
  close(go[1]);  // both begin
  int removed = 0;
  for (const pid_t pid : pids) {
    int status = 0;
    waitpid(pid, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    ASSERT_LT(WEXITSTATUS(status), 100);
    removed += WEXITSTATUS(status);
  }
  EXPECT_EQ(removed, kSteps - 1);
  EXPECT_THAT(In("blobs/snapshots"), SizeIs(1));
}

// Publishes and collects for ever, beside another that does.
[[noreturn]] void Churn(const std::string& directory, int child) {
  auto store = Store::Open(directory, false);
  if (!store) _exit(1);
  for (int i = 0;; ++i) {
    if (!(*store)->Refresh()) _exit(4);
    const int iteration = child * 1000 + i % 4;  // names are used again
    if (!Save(**store, StrCat("run", child % 2), iteration, 1 + i)) _exit(2);
    CollectRequest request;
    request.keep_last = 2;
    if (!(*store)->Collect(request)) _exit(3);
  }
}

TEST_F(CollectTest, KilledCollectorsLeaveASoundStore) {
  std::mt19937 random(5);
  for (int child = 0; child < 12; child += 2) {
    pid_t pids[2];
    for (int i = 0; i < 2; ++i) {
      pids[i] = fork();
      ASSERT_GE(pids[i], 0);
      if (pids[i] == 0) Churn(store_->directory(), child + i);
    }
    usleep(1000 + random() % 500000);
    for (const pid_t pid : pids) {
      int status = 0;
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      ASSERT_TRUE(WIFSIGNALED(status)) << "it failed: " << WEXITSTATUS(status);
    }
    ASSERT_TRUE(store_->Refresh());
    const auto runs = *store_->Runs();
    for (const std::string& run : runs) {
      const auto steps = *store_->Steps(run);
      for (const StepRecord& record : steps) {
        const auto step = store_->Load(record);
        ASSERT_TRUE(step) << step.error().message;
        const auto blobs = BlobReader::Create((*step)->model, {});
        std::string bytes((*step)->model.blobs[0].stamp.size, '\0');
        const Status read = blobs->Read(BlobIndex{0}, 0, std::as_writable_bytes(std::span(bytes)));
        ASSERT_TRUE(read) << read.error().message;
        EXPECT_EQ(bytes, StrCat(run, " of ", record.iteration));
      }
    }
  }
  ASSERT_TRUE(store_->Refresh());
  KeepLast(1);
  ASSERT_TRUE(store_->Refresh());
  size_t left = 0;
  const auto runs = *store_->Runs();
  for (const std::string& run : runs) {
    const size_t steps = store_->Steps(run)->size();
    EXPECT_THAT(steps, AnyOf(1u, 2u)) << "the newest one, and what was saved last";
    left += steps;
  }
  EXPECT_THAT(In("manifests"), SizeIs(left));
  EXPECT_THAT(In("blobs/snapshots"), SizeIs(left));
  EXPECT_THAT(In(".tmp"), IsEmpty());
  EXPECT_THAT(In("blobs"), ElementsAre("snapshots"));
}

}  // namespace
}  // namespace ckptfs
