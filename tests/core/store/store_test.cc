// SPDX-License-Identifier: Apache-2.0
#include "core/store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "core/base/strings.h"
#include "core/io/file_storage.h"
#include "core/manifest/manifest.h"
#include "core/model/step_notes.h"
#include "core/records/record_text.h"
#include "core/records/records.h"
#include "core/store/lives.h"
#include "tests/core/store/sample_model.h"
#include "tests/support/faulty_storage.h"

namespace ckptfs {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing_support::SampleModel;
using testing_support::TinyModel;

class StoreTest : public testing::Test {
 protected:
  StoreTest() {
    std::string pattern = testing::TempDir() + "store_testXXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~StoreTest() override { fs::remove_all(directory_); }

  std::unique_ptr<Store> Open() {
    auto store = Store::Open(directory_, true);
    EXPECT_TRUE(store) << store.error().message;
    return store ? *std::move(store) : nullptr;
  }
  StepRecord Publish(Store& store, const StepModel& model, const std::string& run = "run",
                     const std::string& root = "/root") {
    auto record = store.Publish(run, model, root + "/" + model.id, root);
    EXPECT_TRUE(record) << record.error().message;
    return record ? *record : StepRecord{};
  }
  static std::vector<std::string> Ids(Store& store, std::string_view run = "run") {
    std::vector<std::string> ids;
    auto steps = store.Steps(run);
    if (!steps) return ids;
    for (const StepRecord& record : *steps) ids.push_back(record.id);
    return ids;
  }
  static std::string Latest(Store& store) {
    auto record = store.Resolve("run", "latest");
    return record ? record->id : record.error().message;
  }
  std::string Path(const std::string& name) const { return directory_ + "/" + name; }

  std::string directory_;
};

TEST_F(StoreTest, PublishesAndLoads) {
  auto store = Open();
  const StepRecord record = Publish(*store, SampleModel());
  EXPECT_EQ(record.id, "global_step5");
  EXPECT_EQ(record.root, "/root");
  EXPECT_EQ(record.source, "/root/global_step5");
  EXPECT_EQ(record.iteration, 5u);
  auto step = store->Load(record);
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ((*step)->model.parameters.size(), SampleModel().parameters.size());
  EXPECT_EQ(*store->Load(record), *step);  // shared
  EXPECT_EQ(*RenderManifest((*step)->model), *RenderManifest(SampleModel()));
}

TEST_F(StoreTest, ReopensToTheSame) {
  Publish(*Open(), TinyModel("a", 1, 10));
  auto store = Open();
  EXPECT_THAT(*store->Runs(), ElementsAre("run"));
  EXPECT_THAT(Ids(*store), ElementsAre("a"));
  EXPECT_TRUE(store->Load(*store->Resolve("run", "a")));
}

TEST_F(StoreTest, OpensOnlyWhatIsThere) {
  EXPECT_EQ(Store::Open(directory_ + "/none", false).error().code, ErrorCode::kNotFound);
  EXPECT_EQ(Store::Open(directory_, false).error().code, ErrorCode::kNotFound);
  Open();
  EXPECT_TRUE(Store::Open(directory_, false));
}

// A checkpoint, say: not a byte is written into it.
TEST_F(StoreTest, ADirectoryOfSomethingElseIsNoStore) {
  fs::create_directories(Path("ckpt/global_step5"));
  for (const bool create : {true, false}) {
    const auto store = Store::Open(Path("ckpt"), create);
    ASSERT_FALSE(store);
    EXPECT_EQ(store.error().code, ErrorCode::kInvalid);
    EXPECT_THAT(store.error().message, HasSubstr("do you mean --adopt " + Path("ckpt") + "?"));
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(Path("ckpt")), {}), 1);
  // The leftover of a store that was killed while it was made is a store.
  fs::create_directories(Path("half/.tmp"));
  EXPECT_TRUE(Store::Open(Path("half"), true));
}

// Lightning writes last.ckpt anew with every save, after the step's own file.
TEST(IsOlderTest, ANameThatEverySaveHasIsOlderThanTheStepsOwn) {
  const auto record = [](const std::string& id, uint64_t iteration, int64_t mtime_ns) {
    StepRecord out;
    out.id = id;
    out.iteration = iteration;
    out.mtime_ns = mtime_ns;
    return out;
  };
  EXPECT_TRUE(IsOlder(record("last.ckpt", 4, 9), record("epoch=0-step=4.ckpt", 4, 8)));
  EXPECT_TRUE(IsOlder(record("last.ckpt-1", 4, 9), record("epoch=0-step=4.ckpt", 4, 8)));
  EXPECT_TRUE(IsOlder(record("epoch=0-step=4.ckpt", 4, 8), record("last.ckpt", 6, 9)));
  EXPECT_TRUE(IsOlder(record("checkpoint-4", 4, 8), record("checkpoint-4-1", 4, 9)));
}

TEST_F(StoreTest, WhatWasConvertedIsOlderThanItsOriginal) {
  auto store = Open();
  Publish(*store, TinyModel("step5", 5, 100));
  const StepModel converted = TinyModel("step5_universal", 5, 900);
  EXPECT_TRUE(
      store->Publish("run", converted, "/root/step5_universal", "/root", PublishHow{true, false})
          ->converted);
  EXPECT_EQ(Latest(*store), "step5");
  EXPECT_THAT(Ids(*store), ElementsAre("step5_universal", "step5"));
  EXPECT_EQ(Latest(*Open()), "step5");
}

TEST_F(StoreTest, WhatNothingIsReadOfIsNoPartOfAStep) {
  auto store = Open();
  StepModel model = SampleModel();
  Blob log = model.blobs[0];
  log.path = "a/train.log";
  model.blobs.push_back(log);
  const StepRecord record = Publish(*store, model);
  model.blobs.back().stamp.mtime_ns += 5;
  model.blobs.push_back(log);
  model.blobs.back().path = "a/uploaded";
  model.notes.push_back(StrCat(kNotShownNote, "'a/private'"));
  model.texts.push_back({"run.sh", "ls", 0111});
  LeaveOut(model, {LeftOutPart::kDocument, "a file", "its reason is worded otherwise", ""});
  model.blobs[0].mode = 0600;
  model.blobs[0].stamp.ctime_ns += 5;
  EXPECT_EQ(Publish(*store, model).id, record.id);
  EXPECT_EQ(Publish(*store, model).manifest, record.manifest);
  model.texts = {{"run.sh", "ls", 0110}};
  EXPECT_EQ(ParseManifest(*RenderManifest(model))->texts[0].run_bits, 0110u);
  model.blobs[0].fingerprint = DigestOf("other bytes");
  EXPECT_EQ(Publish(*store, model).id, record.id + "-1");
}

TEST_F(StoreTest, AStepThatChangedIsReplacedIfAskedFor) {
  auto store = Open();
  PublishHow replace;
  replace.replace = true;
  const StepRecord first = Publish(*store, TinyModel("a", 1, 10));
  const StepModel changed = TinyModel("a", 1, 20);
  // Not that of another source.
  EXPECT_EQ(store->Publish("run", changed, "/root/other", "/root", replace)->id, "a-1");
  EXPECT_TRUE(store->Remove(*store->Resolve("run", "a-1")));
  const auto record = store->Publish("run", changed, "/root/a", "/root", replace);
  ASSERT_TRUE(record) << record.error().message;
  EXPECT_EQ(record->id, "a");
  EXPECT_EQ(record->replaces, first.manifest);
  EXPECT_THAT(Ids(*Open()), ElementsAre("a"));
  EXPECT_EQ(Open()->Resolve("run", "a")->manifest, record->manifest);
  EXPECT_EQ(Open()->Resolve("run", "a")->replaces, first.manifest);
  // Nothing to replace: the same.
  EXPECT_EQ(store->Publish("run", changed, "/root/a", "/root", replace)->manifest,
            record->manifest);
  EXPECT_EQ(store->Remove(first).error().code, ErrorCode::kNotFound);  // it is another one's name
}

// One that was taken while nothing proved that its save was over.
TEST_F(StoreTest, AProvisionalStepIsReplacedUnaskedUntilItIsConfirmed) {
  auto store = Open();
  PublishHow provisional;
  provisional.provisional = true;
  const auto publish = [&](int64_t mtime_ns, const PublishHow& how) {
    return *store->Publish("run", TinyModel("a", 1, mtime_ns), "/root/a", "/root", how);
  };
  const StepRecord first = publish(10, provisional);
  EXPECT_TRUE(Open()->Resolve("run", "a")->provisional);
  EXPECT_EQ(store->Publish("run", TinyModel("a", 1, 20), "/root/other", "/root")->id, "a-1");
  const StepRecord second = publish(20, provisional);
  EXPECT_EQ(second.id, "a");
  EXPECT_EQ(second.replaces, first.manifest);
  EXPECT_TRUE(store->Confirm(first));  // it is gone: nothing happens
  EXPECT_TRUE(Open()->Resolve("run", "a")->provisional);
  EXPECT_TRUE(store->Confirm(second));
  for (const auto& one : {Open()->Resolve("run", "a"), store->Resolve("run", "a")}) {
    EXPECT_FALSE(one->provisional);
    EXPECT_EQ(one->manifest, second.manifest);
    EXPECT_EQ(one->replaces, second.manifest);
  }
  EXPECT_TRUE(store->Load(*store->Resolve("run", "a")));
  EXPECT_EQ(publish(30, {}).id, "a-2");
  // The same step again, of which something proves that it is whole.
  publish(20, provisional);
  EXPECT_FALSE(store->Resolve("run", "a")->provisional);
  EXPECT_TRUE(store->Remove(*store->Resolve("run", "a")));
  EXPECT_TRUE(publish(40, provisional).provisional);
  EXPECT_FALSE(publish(40, {}).provisional);
  EXPECT_THAT(Ids(*Open()), testing::UnorderedElementsAre("a", "a-1", "a-2"));
}

TEST_F(StoreTest, LatestIsTheGreatestIterationThenMtime) {
  auto store = Open();
  Publish(*store, TinyModel("step9", 9, 100));
  Publish(*store, TinyModel("step10", 10, 50));
  Publish(*store, TinyModel("step2", 2, 900));  // adopted last, and newest of all files
  EXPECT_EQ(Latest(*store), "step10");
  EXPECT_THAT(Ids(*store), ElementsAre("step2", "step9", "step10"));
  Publish(*store, TinyModel("other10", 10, 51));
  EXPECT_EQ(Latest(*store), "other10");
}

TEST_F(StoreTest, TheNewestLifeHasTheLatest) {
  auto store = Open();
  Publish(*store, TinyModel("step9", 9, 100));
  PublishHow how;
  how.life = 1;
  ASSERT_TRUE(store->Publish("run", TinyModel("step2", 2, 900), "/root/step2", "/root", how));
  EXPECT_EQ(Latest(*store), "step2");
  EXPECT_EQ(Latest(*Open()), "step2");
  EXPECT_THAT(Ids(*Open()), ElementsAre("step9", "step2"));
  EXPECT_EQ(Open()->Resolve("run", "step2")->life, 1u);
}

TEST(StepRecordTest, ALifeIsANumberOf32BitsOrAbsent) {
  StepRecord record;
  record.run = "run";
  record.id = "a";
  const StepName name{"run", "a", 0};
  EXPECT_THAT(RenderStepRecord(record), testing::Not(HasSubstr("life")));
  record.life = UINT32_MAX;
  EXPECT_EQ(ParseStepRecord(RenderStepRecord(record), name)->life, UINT32_MAX);
  nlohmann::json object = *UnsealRecord(RenderStepRecord(record));
  for (const nlohmann::json& bad :
       {nlohmann::json(-1), nlohmann::json("1"), nlohmann::json(uint64_t{1} << 32)}) {
    object["life"] = bad;
    EXPECT_EQ(ParseStepRecord(SealRecord(object), name).error().code, ErrorCode::kDataLoss);
  }
}

TEST_F(StoreTest, TheSameStepAgainIsTheSameRecord) {
  auto store = Open();
  const StepRecord first = Publish(*store, TinyModel("a", 1, 10));
  const StepRecord again = Publish(*store, TinyModel("a", 1, 10));
  EXPECT_EQ(first.manifest, again.manifest);
  EXPECT_THAT(Ids(*store), ElementsAre("a"));
}

TEST_F(StoreTest, AnotherStepOfTheSameIdIsAnAttempt) {
  auto store = Open();
  Publish(*store, TinyModel("a", 1, 10, 1));
  EXPECT_EQ(Publish(*store, TinyModel("a", 1, 20, 2)).id, "a-1");
  EXPECT_EQ(Publish(*store, TinyModel("a", 1, 30, 3)).id, "a-2");
  EXPECT_EQ(Publish(*store, TinyModel("a", 1, 20, 2)).id, "a-1");
  EXPECT_EQ(Latest(*store), "a-2");
}

TEST_F(StoreTest, ARunBelongsToOneRoot) {
  auto store = Open();
  const StepRecord record = Publish(*store, TinyModel("a", 1, 10));
  auto other = store->Publish("run", TinyModel("b", 2, 10), "/other/b", "/other");
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, ErrorCode::kExists);
  EXPECT_THAT(other.error().message, HasSubstr("/root"));
  EXPECT_THAT(Ids(*store), ElementsAre("a"));
  ASSERT_TRUE(store->Remove(record));
  EXPECT_EQ(Publish(*store, TinyModel("b", 2, 10), "run", "/other").root, "/other");
  EXPECT_FALSE(store->Publish("run", TinyModel("c", 3, 10), "/root/c", "/root"));
}

TEST_F(StoreTest, RemovedNamesAreGoneAndFree) {
  auto store = Open();
  const StepRecord first = Publish(*store, TinyModel("a", 1, 10, 1));
  const auto held = *store->Load(first);
  ASSERT_TRUE(store->Remove(first));
  EXPECT_EQ(store->Remove(first).error().code, ErrorCode::kNotFound);
  EXPECT_THAT(*store->Runs(), IsEmpty());
  EXPECT_FALSE(store->Resolve("run", "a"));
  EXPECT_EQ(held->model.notes[0], "seed 1");
  EXPECT_TRUE(store->Load(first));  // its manifest is not reclaimed yet

  const StepRecord second = Publish(*store, TinyModel("a", 1, 10, 2));
  EXPECT_EQ(second.id, "a");
  EXPECT_EQ((*store->Load(second))->model.notes[0], "seed 2");
  EXPECT_EQ(store->Remove(first).error().code, ErrorCode::kNotFound);  // not this step
  ASSERT_TRUE(store->Remove(second));
  EXPECT_EQ(Publish(*store, TinyModel("a", 1, 10, 1)).id, "a");  // the very first again
  EXPECT_EQ((*Open()->Resolve("run", "a")).manifest, first.manifest);
}

TEST_F(StoreTest, SeesWhatOthersPublished) {
  auto one = Open();
  auto two = Open();
  EXPECT_THAT(Ids(*two), IsEmpty());  // from now on it looks when it is told to
  const StepRecord record = Publish(*one, TinyModel("a", 1, 10));
  EXPECT_THAT(Ids(*two), IsEmpty());
  ASSERT_TRUE(two->Refresh());
  EXPECT_THAT(Ids(*two), ElementsAre("a"));
  ASSERT_TRUE(two->Remove(record));
  ASSERT_TRUE(one->Refresh());
  EXPECT_THAT(*one->Runs(), IsEmpty());
}

TEST_F(StoreTest, NamesAreChecked) {
  auto store = Open();
  for (const std::string& bad : {std::string(), std::string("."), std::string(".."),
                                 std::string("a/b"), std::string("a\nb"), std::string(201, 'a')}) {
    EXPECT_FALSE(store->Publish(bad, TinyModel("a", 1, 1), "/r/a", "/r")) << bad;
    EXPECT_FALSE(store->Publish("run", TinyModel(bad, 1, 1), "/r/a", "/r")) << bad;
  }
  EXPECT_FALSE(store->Publish("run", TinyModel("latest", 1, 1), "/r/a", "/r"));
  EXPECT_TRUE(CheckName("checkpoint-500 \xc3\xa4", "step"));
  EXPECT_EQ(Publish(*store, TinyModel("\xff odd", 1, 1), "r\xfe", "/\xff").root, "/\xff");
  EXPECT_EQ(Open()->Resolve("r\xfe", "\xff odd")->root, "/\xff");
}

TEST_F(StoreTest, AModelThatCouldNotBeLoadedIsNotPublished) {
  auto store = Open();
  StepModel model = SampleModel();
  model.blobs[0].path = "../escape";
  EXPECT_FALSE(store->Publish("run", model, "/r/a", "/r"));
  EXPECT_THAT(*store->Runs(), IsEmpty());
}

TEST_F(StoreTest, ADamagedManifestIsDataLossAndPublishingRepairsIt) {
  auto store = Open();
  const StepRecord record = Publish(*store, SampleModel());
  const std::string path = Path("manifests/" + record.manifest.Hex());
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(500);
    file.put('#');
  }
  EXPECT_EQ(store->Load(record).error().code, ErrorCode::kDataLoss);
  Publish(*store, SampleModel());
  EXPECT_TRUE(store->Load(record));
  fs::rename(path, Path("manifests/00000000000000000000000000000000"));
  EXPECT_EQ(store->Load(record).error().code, ErrorCode::kNotFound);
}

TEST_F(StoreTest, AManifestUnderAnothersNameIsRefused) {
  auto store = Open();
  const StepRecord one = Publish(*store, TinyModel("a", 1, 1));
  const StepRecord two = Publish(*store, TinyModel("b", 2, 2));
  fs::copy_file(Path("manifests/" + one.manifest.Hex()), Path("manifests/" + two.manifest.Hex()),
                fs::copy_options::overwrite_existing);
  EXPECT_EQ(store->Load(two).error().code, ErrorCode::kDataLoss);
}

TEST_F(StoreTest, ADamagedRecordIsAnErrorOfItsStepAndOfLatest) {
  Publish(*Open(), TinyModel("a", 1, 1));
  Publish(*Open(), TinyModel("b", 2, 2));
  fs::remove(Path("catalogue.sqlite"));
  std::ofstream(Path("steps/run/b/0")) << "{}\n0123456789abcdef\n";
  auto store = Open();
  EXPECT_TRUE(store->Resolve("run", "a"));
  EXPECT_EQ(store->Resolve("run", "b").error().code, ErrorCode::kDataLoss);
  EXPECT_EQ(store->Resolve("run", "latest").error().code, ErrorCode::kDataLoss);
  EXPECT_THAT(Ids(*store), ElementsAre("a"));
  StepRecord damaged;
  damaged.run = "run";
  damaged.id = "b";
  ASSERT_TRUE(store->Remove(damaged));
  EXPECT_EQ(Latest(*store), "a");
}

TEST_F(StoreTest, ForeignFilesAreIgnored) {
  auto store = Open();
  Publish(*store, TinyModel("a", 1, 1));
  std::ofstream(Path("steps/README")) << "x";
  std::ofstream(Path("steps/run/a/0.bak")) << "x";
  std::ofstream(Path("steps/run/a/007")) << "x";
  ASSERT_TRUE(store->Refresh());
  EXPECT_THAT(Ids(*store), ElementsAre("a"));
}

// ---- the catalogue is a cache -------------------------------------------------

TEST_F(StoreTest, TheCatalogueMayVanishBeDamagedOrAnothers) {
  Publish(*Open(), TinyModel("a", 1, 1));
  ASSERT_TRUE(fs::exists(Path("catalogue.sqlite")));
  const std::string saved = Path("saved");
  fs::copy_file(Path("catalogue.sqlite"), saved);
  for (int damage = 0; damage < 5; ++damage) {
    fs::remove(Path("catalogue.sqlite"));
    if (damage == 1) std::ofstream(Path("catalogue.sqlite")) << "not a database at all";
    if (damage == 2) fs::create_directory(Path("catalogue.sqlite"));
    if (damage == 3) std::ofstream(Path("catalogue.sqlite")) << "";
    if (damage == 4) {
      fs::copy_file(saved, Path("catalogue.sqlite"));
      fs::resize_file(Path("catalogue.sqlite"), 5000);
    }
    EXPECT_THAT(Ids(*Open()), ElementsAre("a")) << damage;
    if (damage == 2) fs::remove(Path("catalogue.sqlite"));
  }
}

TEST_F(StoreTest, TheCatalogueNeverShowsWhatIsNotThere) {
  Publish(*Open(), TinyModel("a", 1, 1));
  fs::remove_all(Path("steps"));
  EXPECT_THAT(*Open()->Runs(), IsEmpty());
  // A store of another identity in the same place does not believe it either.
  fs::remove(Path("format"));
  Publish(*Open(), TinyModel("a", 7, 7));
  EXPECT_EQ(Open()->Resolve("run", "a")->iteration, 7u);
}

// ---- who wrote it, and whether it is there ---------------------------------------

TEST_F(StoreTest, WhatOthersWroteOrMayWriteIsNotRead) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give files to others";
  const StepRecord record = Publish(*Open(), TinyModel("a", 1, 1));
  const std::string manifest = StrCat("manifests/", record.manifest.Hex());
  const auto loads = [&](std::string_view name) {
    const auto store = Store::Open(directory_, false);
    const auto step = store ? (*store)->Resolve("run", "a") : Fail(Error(store.error()));
    const auto loaded = step ? (*store)->Load(*step) : Fail(Error(step.error()));
    if (loaded) return true;
    EXPECT_EQ(loaded.error().code, ErrorCode::kPermission) << loaded.error().message;
    EXPECT_THAT(loaded.error().message, HasSubstr(std::string(name)));
    return false;
  };
  for (const std::string& name :
       {std::string(), std::string("format"), std::string("steps"), std::string("steps/run/a/0"),
        std::string("manifests"), manifest}) {
    fs::remove(Path("catalogue.sqlite"));  // it remembers texts that it once trusted
    EXPECT_TRUE(loads(name));
    fs::remove(Path("catalogue.sqlite"));
    ASSERT_EQ(chown(Path(name).c_str(), 65534, 0), 0);
    EXPECT_FALSE(loads(name)) << name;
    ASSERT_EQ(chown(Path(name).c_str(), 0, 0), 0);
    const fs::perms before = fs::status(Path(name)).permissions();
    for (const fs::perms wider : {fs::perms::group_write, fs::perms::others_write}) {
      fs::permissions(Path(name), before | wider);
      EXPECT_FALSE(loads(name)) << name;
    }
    fs::permissions(Path(name), before);
  }
  // A sticky directory is one that others write into, too.
  fs::permissions(directory_, fs::perms::all | fs::perms::sticky_bit);
  EXPECT_FALSE(Store::Open(directory_, true));
}

TEST_F(StoreTest, LinksInAStoreAreNotFollowed) {
  const StepRecord record = Publish(*Open(), TinyModel("a", 1, 1));
  const std::string manifest = Path(StrCat("manifests/", record.manifest.Hex()));
  fs::rename(manifest, Path("elsewhere"));
  fs::create_symlink(Path("elsewhere"), manifest);
  EXPECT_FALSE(Open()->Load(record));
  fs::remove(manifest);
  fs::rename(Path("elsewhere"), manifest);
  EXPECT_TRUE(Open()->Load(record));
  fs::rename(Path("manifests"), Path("others"));
  fs::create_directory_symlink(Path("others"), Path("manifests"));
  EXPECT_FALSE(Open()->Load(record));
}

TEST_F(StoreTest, ACatalogueOfSomebodyElseIsNotBelieved) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give files to others";
  Publish(*Open(), TinyModel("a", 1, 1));
  EXPECT_EQ(fs::status(Path("catalogue.sqlite")).permissions(),
            fs::perms::owner_read | fs::perms::owner_write);
  // Its texts say what a damaged record does not any more.
  std::ofstream(Path("steps/run/a/0")) << "damaged";
  EXPECT_EQ(Latest(*Open()), "a");
  ASSERT_EQ(chown(Path("catalogue.sqlite").c_str(), 65534, 0), 0);
  EXPECT_NE(Latest(*Open()), "a");
  fs::remove(Path("catalogue.sqlite"));
  std::ofstream(Path("private")) << "not a catalogue";
  fs::create_symlink(Path("private"), Path("catalogue.sqlite"));
  Publish(*Open(), TinyModel("b", 2, 2), "other");
  EXPECT_EQ(fs::file_size(Path("private")), 15u);
}

TEST_F(StoreTest, AStoreThatIsAwayIsNoNews) {
  auto store = Open();
  Publish(*store, TinyModel("a", 1, 1));
  EXPECT_THAT(Ids(*store), ElementsAre("a"));
  const std::string away = directory_ + "-away";
  const auto expect_no_news = [&] {
    EXPECT_EQ(store->Refresh().error().code, ErrorCode::kIo);
    EXPECT_THAT(Ids(*store), ElementsAre("a"));
  };
  fs::rename(directory_, away);
  expect_no_news();
  fs::create_directory(directory_);  // an automounter's empty directory
  expect_no_news();
  ASSERT_TRUE(Store::Open(directory_, true));  // another store in its place
  expect_no_news();
  fs::remove_all(directory_);
  fs::rename(away, directory_);
  EXPECT_TRUE(store->Refresh());
  Publish(*Open(), TinyModel("b", 2, 2));
  EXPECT_TRUE(store->Refresh());
  EXPECT_THAT(Ids(*store), ElementsAre("a", "b"));
}

// ---- faults -------------------------------------------------------------------

TEST_F(StoreTest, AStopAtAnyCallLeavesTheStepWholeOrAbsent) {
  Publish(*Open(), TinyModel("a", 1, 1));
  int stops = 0;
  for (int stop_at = 0; stop_at < 20; ++stop_at) {
    for (const bool with_effect : {false, true}) {
      const std::string id = StrCat("s", stop_at, with_effect ? "e" : "n");
      auto storage = std::make_shared<FaultyStorage>(*FileStorage::Open(directory_, true));
      storage->StopAt(stop_at + 1, with_effect);
      auto failing = Store::OpenOn(storage);
      ASSERT_TRUE(failing) << failing.error().message;
      const auto record = (*failing)->Publish("run", TinyModel(id, 2, 2), "/root/x", "/root");
      EXPECT_EQ(record.has_value(), !storage->stopped());
      stops += storage->stopped();
      auto store = Open();
      auto found = store->Resolve("run", id);
      EXPECT_TRUE(found || !record);
      EXPECT_TRUE(!found || store->Load(*found));
      EXPECT_TRUE(store->Load(*store->Resolve("run", "a")));
      EXPECT_EQ(Publish(*store, TinyModel(id, 2, 2)).id, id);  // and it can be finished
    }
  }
  EXPECT_GE(stops, 4);
}

TEST(StoreOnMemoryTest, AFailureOfAnyCallIsReportedAndCanBeRepeated) {
  auto storage = std::make_shared<FaultyStorage>();
  auto store = *Store::OpenOn(storage);
  EXPECT_EQ(store->directory(), "");
  int failures = 0;
  for (uint64_t n = 1; n < 40; ++n) {
    const StepModel model = TinyModel(StrCat("s", n), n, 1);
    storage->FailAt(n);
    auto record = store->Publish("run", model, "/r/a", "/r");
    failures += !record;
    if (!record) {
      EXPECT_EQ(record.error().code, ErrorCode::kIo);
      record = store->Publish("run", model, "/r/a", "/r");
    }
    ASSERT_TRUE(record) << record.error().message;
    EXPECT_EQ(record->id, model.id);
    storage->FailAt(1);
    EXPECT_FALSE(store->Load(*record));
    EXPECT_TRUE(store->Load(*record));
    EXPECT_EQ(store->Resolve("run", "latest")->id, model.id);
  }
  EXPECT_GE(failures, 8);
}

TEST_F(StoreTest, OneOfManyConcurrentPublishersGetsTheName) {
  constexpr int kThreads = 8;
  std::vector<std::unique_ptr<Store>> stores;
  for (int i = 0; i < kThreads; ++i) stores.push_back(Open());
  std::vector<std::thread> threads;
  std::vector<std::string> ids(kThreads);
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      auto record = stores[static_cast<size_t>(i)]->Publish(
          "run", TinyModel("a", 1, 1, static_cast<uint64_t>(i)), "/root/a", "/root");
      ids[static_cast<size_t>(i)] = record ? record->id : record.error().message;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(ids,
              testing::UnorderedElementsAre("a", "a-1", "a-2", "a-3", "a-4", "a-5", "a-6", "a-7"));
  EXPECT_EQ(Ids(*Open()).size(), 8u);
}

TEST_F(StoreTest, ConcurrentClaimsOfARunNeverMixRoots) {
  for (int round = 0; round < 10; ++round) {
    const std::string run = StrCat("run", round);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        auto store = Open();
        const std::string root = StrCat("/root", i);
        (void)!store->Publish(run, TinyModel("a", 1, 1, static_cast<uint64_t>(i)), root + "/a",
                              root);
      });
    }
    for (std::thread& thread : threads) thread.join();
    auto steps = Open()->Steps(run);
    EXPECT_TRUE(!steps || steps->size() == 1);
  }
}

}  // namespace
}  // namespace ckptfs
