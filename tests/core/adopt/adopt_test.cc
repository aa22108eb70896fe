// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/adopt.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/base/descriptor.h"
#include "core/blob/blob_reader.h"
#include "core/blob/fingerprint.h"
#include "core/io/file_root.h"
#include "core/io/local_filesystem.h"
#include "core/io/memory_root.h"
#include "tests/support/fake_source.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

class AdoptTest : public testing::Test {
 protected:
  AdoptTest() {
    auto source = std::make_unique<FakeSource>();
    fake_ = source.get();
    sources_.push_back(std::move(source));
    store_ = *Store::Open(directory_.path() + "/store", true);
    options_.hints.names = FakeNames();
    WriteStep(1);
    WriteStep(2);
  }
  void WriteStep(int number) {
    const std::string step = "run7/step" + std::to_string(number);
    directory_.Write(step + "/data", std::string(4000, static_cast<char>('a' + number)));
    directory_.Write(step + "/done", "w 1000 data 0\n");
  }
  // Another training's step of that number, later by the filesystem's clock, which ticks slowly.
  void WriteAnew(int number) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const std::string step = "run7/step" + std::to_string(number);
    directory_.Write(step + "/data", std::string(4000, static_cast<char>('A' + number)));
    directory_.Write(step + "/done", "w 1000 data 0\n");
  }
  std::string Path() const { return directory_.path() + "/run7"; }
  std::string Latest() { return store_->Resolve(options_.run, "latest")->id; }
  Result<AdoptReport> AdoptAll() {
    return AdoptPlace(*store_, *PlaceOf(Path()), sources_, options_);
  }
  StepModel Load(const StepRecord& record) { return (*store_->Load(record))->model; }

  TemporaryDirectory directory_;
  std::vector<std::unique_ptr<Source>> sources_;
  FakeSource* fake_ = nullptr;
  std::unique_ptr<Store> store_;
  AdoptOptions options_;
};

TEST_F(AdoptTest, OneStepIsReadOnceHoweverItIsTaken) {
  const auto found = Scan(*PlaceOf(Path()), sources_);
  ASSERT_TRUE(found);
  ASSERT_EQ(found->size(), 2u);
  for (const Ownership ownership : {Ownership::kReference, Ownership::kCopy, Ownership::kLink}) {
    options_.ownership = ownership;
    options_.run = "run" + std::to_string(static_cast<int>(ownership));
    fake_->FailAt(3);  // one Complete and one Read are left
    const auto adopted = Adopt(*store_, found->front(), options_);
    ASSERT_TRUE(adopted) << adopted.error().message;
    const StepModel model = Load(adopted->record);
    const bool owned = ownership != Ownership::kReference;
    EXPECT_EQ(model.blobs[0].store_owned, owned);
    EXPECT_EQ(model.blobs[0].path, model.id + "/data");
    EXPECT_EQ(model.roots[0].starts_with(store_->directory()), owned);
    EXPECT_EQ(model.PathOf(model.blobs[0]).starts_with(Path()), !owned);
    EXPECT_TRUE(std::filesystem::exists(model.PathOf(model.blobs[0])));
    EXPECT_EQ(adopted->record.source, Path() + "/" + model.id);
    EXPECT_EQ(adopted->record.root, Path());
  }
}

TEST_F(AdoptTest, ACopyOfWhatWasWrittenSinceItWasReadIsRefused) {
  const auto found = Scan(*PlaceOf(Path()), sources_);
  ASSERT_TRUE(found);
  auto model = IngestStep(found->front(), options_.source);
  ASSERT_TRUE(model);
  const std::string path = model->PathOf(model->blobs[0]);
  const auto time = std::filesystem::last_write_time(path);
  std::ofstream(path, std::ios::in | std::ios::out) << "other";
  std::filesystem::last_write_time(path, time);
  const auto taken = Own(store_->directory(), found->front().candidate.Path(), *std::move(model),
                         Ownership::kCopy);
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code, ErrorCode::kStale);
}

TEST_F(AdoptTest, WhatTheStoreHasFilesOfStaysItsOwnWhenItIsAdoptedAgain) {
  for (const Ownership ownership : {Ownership::kCopy, Ownership::kLink}) {
    options_.run = "run" + std::to_string(static_cast<int>(ownership));
    for (const bool refresh : {false, true}) {
      options_.ownership = ownership;
      ASSERT_TRUE(AdoptAll());
      options_.ownership = Ownership::kReference;
      options_.refresh = refresh;
      const auto again = AdoptAll();
      ASSERT_TRUE(again) << again.error().message;
      EXPECT_EQ(store_->Steps(options_.run)->size(), 2u);
      for (const StepRecord& record : again->steps) {
        EXPECT_TRUE(Load(record).blobs[0].store_owned);
      }
    }
  }
}

// A copy goes on beside a step that is whole.
TEST_F(AdoptTest, AStepThatAProcessWritesIsLeftOut) {
  if (!IsLocalFilesystem(directory_.path())) GTEST_SKIP() << "the filesystem may tell nothing";
  const Descriptor writer = *OpenDescriptor(Path() + "/step2/data", O_WRONLY);
  const Descriptor log = *OpenDescriptor(directory_.Write("run7/step1/train.log", "x"), O_WRONLY);
  for (const bool fresh : {true, false}) {
    const LaterStore later{[&]() -> Result<Store*> { return store_.get(); }, fresh};
    const auto all = AdoptPlace(later, *PlaceOf(Path()), sources_, options_);
    ASSERT_TRUE(all) << all.error().message;
    ASSERT_EQ(all->steps.size(), 1u);
    EXPECT_EQ(all->steps[0].id, "step1");
    ASSERT_EQ(all->skipped.size(), 1u);
    EXPECT_THAT(all->skipped[0], testing::StartsWith("step2: incomplete: " + Path() +
                                                     "/step2/data: a process has it"));
  }
  for (const Ownership ownership : {Ownership::kReference, Ownership::kLink, Ownership::kCopy}) {
    options_.ownership = ownership;
    const auto one = AdoptPlace(*store_, *PlaceOf(Path() + "/step2"), sources_, options_);
    ASSERT_FALSE(one);
    EXPECT_THAT(one.error().message, HasSubstr("`adopt --check never` takes the step as it is"));
  }
  options_.check = false;
  EXPECT_TRUE(AdoptPlace(*store_, *PlaceOf(Path() + "/step2"), sources_, options_));
}

TEST_F(AdoptTest, NoStepIsLeftWhereAProcessWritesAll) {
  if (!IsLocalFilesystem(directory_.path())) GTEST_SKIP() << "the filesystem may tell nothing";
  const Descriptor one = *OpenDescriptor(Path() + "/step1/data", O_WRONLY);
  const Descriptor two = *OpenDescriptor(Path() + "/step2/data", O_WRONLY);
  const auto all = AdoptAll();
  ASSERT_FALSE(all);
  EXPECT_THAT(all.error().message, HasSubstr("step2/data: a process has it open for writing"));
}

TEST_F(AdoptTest, ZerosThatNobodyWroteAreTakenAndSaid) {
  if (!IsLocalFilesystem(directory_.path())) GTEST_SKIP() << "the filesystem may tell nothing";
  const std::string path = Path() + "/step2/data";
  std::filesystem::resize_file(path, 0);
  std::filesystem::resize_file(path, 8192);
  const auto all = AdoptAll();
  ASSERT_TRUE(all);
  EXPECT_EQ(all->steps.size(), 2u);
  ASSERT_EQ(all->warnings.size(), 1u);
  EXPECT_THAT(all->warnings[0],
              HasSubstr("run7/step2: " + path + ": 8192 of its 8192 bytes were never written"));
}

TEST_F(AdoptTest, AStepsOwnDirectoryGivesTheSameStep) {
  const auto all = AdoptAll();
  ASSERT_TRUE(all);
  EXPECT_TRUE(all->whole_run);
  const auto one = AdoptPlace(*store_, *PlaceOf(Path() + "/step2"), sources_, options_);
  ASSERT_TRUE(one);
  EXPECT_FALSE(one->whole_run);
  ASSERT_EQ(one->steps.size(), 1u);
  EXPECT_EQ(one->steps[0].manifest, all->steps[1].manifest);
  EXPECT_EQ(one->steps[0].id, "step2");
}

TEST_F(AdoptTest, OneBrokenStepRefusesNoOther) {
  directory_.Write("run7/step2/done", "broken\n");
  directory_.Write("run7/step2/latest", "");
  const auto report = AdoptAll();
  ASSERT_TRUE(report);
  ASSERT_EQ(report->steps.size(), 1u);
  EXPECT_EQ(report->steps[0].id, "step1");
  ASSERT_EQ(report->refused.size(), 1u);
  EXPECT_THAT(report->refused[0].message, HasSubstr("step2"));
}

TEST_F(AdoptTest, WhyAnOptimizerIsNotTakenIsToldOnce) {
  WriteStep(3);
  for (const char* step : {"step2", "step3"}) {
    directory_.Write(std::string("run7/") + step + "/left_out", "nobody knows whose");
  }
  directory_.Write("run7/step1/note", "two layers are tied");
  for (int pass = 0; pass < 2; ++pass) {
    const auto report = AdoptAll();
    ASSERT_TRUE(report);
    EXPECT_THAT(
        report->warnings,
        testing::ElementsAre("run7/step2 (and 1 other step): left out: the optimizer: nobody "
                             "knows whose; give more"));
  }
}

TEST_F(AdoptTest, EachReasonIsToldOfItsFirstStep) {
  WriteStep(3);
  directory_.Write("run7/step1/left_out", "nobody knows whose");
  directory_.Write("run7/step2/left_out", "it is of an unknown kind");
  directory_.Write("run7/step3/left_out", "nobody knows whose");
  const auto report = AdoptAll();
  ASSERT_TRUE(report);
  EXPECT_THAT(report->warnings,
              testing::ElementsAre(
                  HasSubstr("run7/step1 (and 1 other step): left out: the optimizer: nobody"),
                  HasSubstr("run7/step2: left out: the optimizer: it is of an unknown kind")));
}

TEST_F(AdoptTest, AnOptimizerThatIsRequiredMustBeWhole) {
  directory_.Write("run7/step2/left_out", "nobody knows whose");
  options_.require_optimizer = true;
  const auto report = AdoptAll();
  ASSERT_FALSE(report);  // of step1 there is no optimizer at all
  EXPECT_EQ(report.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(report.error().message, HasSubstr("--require"));
}

TEST_F(AdoptTest, SeveralSaveDirectoriesAreOneRunWhereItIsNamed) {
  directory_.Write("later/step2/data", std::string(4000, 'z'));
  directory_.Write("later/step2/done", "w 1000 data 0\n");
  directory_.Write("later/step3/data", std::string(4000, 'y'));
  directory_.Write("later/step3/done", "w 1000 data 0\n");
  options_.run = "both";
  ASSERT_TRUE(AdoptAll());
  const Place later = *PlaceOf(directory_.path() + "/later");
  const auto report = AdoptPlace(*store_, later, sources_, options_);
  ASSERT_TRUE(report) << report.error().message;
  ASSERT_EQ(report->steps.size(), 2u);
  EXPECT_EQ(report->steps[0].id, "step2-1");  // the name is taken by the other's
  EXPECT_THAT(report->warnings,
              testing::ElementsAre(HasSubstr("both/step2-1: both/step2 was adopted "
                                             "from " +
                                             Path() + "/step2")));
  EXPECT_EQ(report->steps[1].id, "step3");
  EXPECT_EQ(store_->Resolve("both", "latest")->id, "step3");
  EXPECT_TRUE(AdoptPlace(*store_, later, sources_, options_)) << "again changes nothing";
  // Unnamed it is a run of its own, and nobody else's.
  options_.run = "";
  ASSERT_TRUE(AdoptAll());
  directory_.Write("elsewhere/run7/step9/done", "");
  const auto taken =
      AdoptPlace(*store_, *PlaceOf(directory_.path() + "/elsewhere/run7"), sources_, options_);
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code, ErrorCode::kExists);
  EXPECT_THAT(taken.error().message, HasSubstr("--name"));
}

TEST_F(AdoptTest, ATrainingThatBeganAgainInItsDirectoryIsTheLatest) {
  for (const Ownership ownership : {Ownership::kReference, Ownership::kCopy, Ownership::kLink}) {
    options_.ownership = ownership;
    options_.run = "run" + std::to_string(static_cast<int>(ownership));
    std::filesystem::remove_all(Path());
    WriteStep(1);
    WriteStep(2);
    ASSERT_TRUE(AdoptAll());
    EXPECT_EQ(Latest(), "step2");
    std::filesystem::remove_all(Path());
    WriteAnew(1);
    const auto report = AdoptAll();
    ASSERT_TRUE(report) << report.error().message;
    EXPECT_EQ(report->steps[0].life, 1u);
    EXPECT_EQ(Latest(), report->steps[0].id);
    EXPECT_THAT(report->warnings, testing::Contains(HasSubstr("begins another life")));
    // It goes on, and nothing of that is told again.
    WriteAnew(3);
    const auto more = AdoptAll();
    ASSERT_TRUE(more);
    EXPECT_EQ(more->steps.back().life, 1u);
    EXPECT_EQ(Latest(), "step3");
    EXPECT_THAT(more->warnings, testing::Not(testing::Contains(HasSubstr("life"))));
    // The same from another process, which knows only what the store says.
    EXPECT_EQ(
        (*Store::Open(directory_.path() + "/store", false))->Resolve(options_.run, "latest")->id,
        "step3");
  }
}

TEST_F(AdoptTest, ATrainingThatSavesOverTheStepsOfAnotherIsTheLatest) {
  options_.run = "run";
  ASSERT_TRUE(AdoptAll());
  WriteAnew(1);
  const auto report = AdoptAll();
  ASSERT_TRUE(report);
  EXPECT_EQ(Latest(), "step1-1");
  EXPECT_EQ(report->steps[0].life, 1u);
}

TEST_F(AdoptTest, AFinishedRunIsOneLifeInWhateverOrderItIsAdopted) {
  options_.run = "run";
  ASSERT_TRUE(AdoptPlace(*store_, *PlaceOf(Path() + "/step2"), sources_, options_));
  std::filesystem::remove_all(Path() + "/step2");
  const auto older = AdoptPlace(*store_, *PlaceOf(Path() + "/step1"), sources_, options_);
  ASSERT_TRUE(older);
  EXPECT_EQ(older->steps[0].life, 0u);
  EXPECT_EQ(Latest(), "step2");
  EXPECT_THAT(older->warnings, testing::IsEmpty());
}

TEST_F(AdoptTest, WhatIsCopiedBackWithANewTimeBeginsNoLife) {
  options_.run = "run";
  options_.ownership = Ownership::kCopy;
  ASSERT_TRUE(AdoptAll());
  std::filesystem::remove_all(Path());
  WriteStep(1);  // the same bytes
  const auto report = AdoptAll();
  ASSERT_TRUE(report);
  EXPECT_EQ(report->steps[0].life, 0u);
  EXPECT_EQ(Latest(), "step2");
}

TEST_F(AdoptTest, ALaterTimeAloneIsToldAndMovesNothing) {
  options_.run = "run";
  ASSERT_TRUE(AdoptPlace(*store_, *PlaceOf(Path() + "/step2"), sources_, options_));
  WriteAnew(1);
  const auto report = AdoptAll();
  ASSERT_TRUE(report);
  EXPECT_EQ(Latest(), "step2");
  EXPECT_THAT(report->warnings, testing::ElementsAre(HasSubstr("nothing proves")));
}

TEST_F(AdoptTest, WhatTheJobsPointerNamesIsTheLatestIfItWasSavedLast) {
  options_.run = "run";
  WriteStep(6);
  WriteAnew(3);
  WriteAnew(4);
  directory_.Write("run7/step4/latest", "");
  const auto report = AdoptAll();
  ASSERT_TRUE(report);
  EXPECT_EQ(report->steps.back().id, "step4");
  EXPECT_EQ(Latest(), "step4");
  EXPECT_EQ(store_->Resolve("run", "step3")->life, 1u);
  EXPECT_EQ(store_->Resolve("run", "step2")->life, 0u);
}

TEST_F(AdoptTest, RunsThatAreOnlyFoundAreNotMixedUnderOneName) {
  directory_.Write("all/a/step1/done", "");
  directory_.Write("all/b/step1/done", "");
  const Place all = *PlaceOf(directory_.path() + "/all");
  options_.run = "mixed";
  const auto report = AdoptPlace(*store_, all, sources_, options_);
  ASSERT_FALSE(report);
  EXPECT_THAT(report.error().message, HasSubstr("adopt --name mixed"));
  options_.run = "";
  const auto apart = AdoptPlace(*store_, all, sources_, options_);
  ASSERT_TRUE(apart) << apart.error().message;
  ASSERT_EQ(apart->steps.size(), 2u);
  EXPECT_EQ(apart->steps[0].run, "a");
  EXPECT_EQ(apart->steps[1].run, "b");
}

TEST_F(AdoptTest, AFolderOfStepsDoesNotNameTheRun) {
  directory_.Write("version_0/checkpoints/step1/done", "");
  const auto report = AdoptPlace(*store_, *PlaceOf(directory_.path() + "/version_0/checkpoints"),
                                 sources_, options_);
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->steps[0].run, "version_0");
}

TEST_F(AdoptTest, NothingAdoptedIsAnError) {
  for (const char* step : {"run7/step1", "run7/step2"}) {
    directory_.Write(std::string(step) + "/done", "broken\n");
    directory_.Write(std::string(step) + "/latest", "");
  }
  const auto report = AdoptAll();
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code, ErrorCode::kInvalid);
}

// A checkpoint need not consist of files: it may lie in memory, and the step is read there.
TEST_F(AdoptTest, AStepInMemoryIsAdoptedAndRead) {
  const auto memory = std::make_shared<MemoryRoot>("/memory");
  const auto owner = std::make_shared<const std::vector<std::string>>(
      std::vector<std::string>{"w 6 data 4\n", "headABCDEFGHIJKLMNOP", "QRSTUVWX"});
  const auto span = [&](size_t i) { return std::as_bytes(std::span((*owner)[i])); };
  ASSERT_TRUE(memory->Add("runs/run7/step3/done", {span(0)}, owner, {0600, 1, 2}));
  ASSERT_TRUE(memory->Add("runs/run7/step3/data", {span(1), span(2)}, owner, {0640, 1, 2}));
  const auto report = AdoptPlace(*store_, Place{memory, "runs/run7"}, sources_, options_);
  ASSERT_TRUE(report) << report.error().message;
  ASSERT_EQ(report->steps.size(), 1u);
  EXPECT_EQ(report->steps[0].run, "run7");
  const auto step = store_->Load(report->steps[0]);
  ASSERT_TRUE(step) << step.error().message;
  ASSERT_EQ((*step)->model.roots, std::vector<std::string>{"/memory/runs/run7"});
  BlobReader::Options options;
  options.open_roots = {{"/memory/runs/run7", RootBelow(memory, "runs/run7")}};
  const auto blobs = BlobReader::Create((*step)->model, options);
  std::string bytes(24, '\0');
  ASSERT_TRUE(blobs->Read(BlobIndex{0}, 4, std::as_writable_bytes(std::span(bytes))));
  EXPECT_EQ(bytes, "ABCDEFGHIJKLMNOPQRSTUVWX");
}

TEST_F(AdoptTest, AChangeWhileFilesAreTakenIsRefused) {
  const auto found = Scan(*PlaceOf(Path()), sources_);
  auto model = IngestStep(found->front(), {});
  ASSERT_TRUE(model);
  directory_.Write("run7/" + model->id + "/data", "changed");
  const auto owned =
      Own(store_->directory(), found->front().candidate.Path(), *model, Ownership::kCopy);
  ASSERT_FALSE(owned);
  EXPECT_EQ(owned.error().code, ErrorCode::kStale);
  EXPECT_TRUE(std::filesystem::is_empty(store_->directory() + "/blobs"));
}

// No tensor is read of these files: somebody's notes are taken as they are, but a training tool's
// files belong to its save.
TEST_F(AdoptTest, WhatAToolWroteIsNotTakenOfItsNextSave) {
  const auto found = Scan(*PlaceOf(Path()), sources_);
  auto model = IngestStep(found->front(), {});
  ASSERT_TRUE(model);
  const std::string step = found->front().candidate.Path();
  for (const bool tool : {true, false}) {
    directory_.Write("run7/" + model->id + "/scheduler.pt", "of this save");
    const FileIdentity written = *(*OpenLocalFile(step + "/scheduler.pt"))->Identity();
    StepModel with = *model;
    Blob beside = with.blobs.front();
    beside.path = beside.path.substr(0, beside.path.rfind('/') + 1) + "scheduler.pt";
    beside.stamp = written.stamp;
    beside.mode = written.access.mode;
    beside.fingerprint = *FingerprintOf(**OpenLocalFile(step + "/scheduler.pt"));
    with.blobs.push_back(beside);
    if (tool) with.facts.tool = {"trainer", ""};
    const auto own = [&] { return Own(store_->directory(), step, with, Ownership::kCopy); };
    directory_.Write("run7/" + model->id + "/scheduler.pt", "of the next save");
    const auto changed = own();
    ASSERT_EQ(changed.has_value(), !tool);
    std::filesystem::remove(step + "/scheduler.pt");
    with.blobs.back().stamp.mtime_ns = 1;  // another step to the store
    const auto gone = own();
    ASSERT_EQ(gone.has_value(), !tool);
    if (!tool) continue;
    EXPECT_EQ(changed.error().code, ErrorCode::kStale);
    EXPECT_EQ(gone.error().code, ErrorCode::kNotFound);
    EXPECT_TRUE(std::filesystem::is_empty(store_->directory() + "/blobs"));
    directory_.Write("run7/" + model->id + "/scheduler.pt", "of this save, and on");  // it is a log
    with.blobs.back().stamp = (*(*OpenLocalFile(step + "/scheduler.pt"))->Identity()).stamp;
    with.blobs.back().stamp.size = std::string("of this save").size();
    EXPECT_TRUE(own());
  }
}

// A file that the store has linked before may have been written since, by its other name.
TEST_F(AdoptTest, ALinkThatWasWrittenSinceIsRefused) {
  const auto found = Scan(*PlaceOf(Path()), sources_);
  auto model = IngestStep(found->front(), {});
  ASSERT_TRUE(model);
  const std::string step = found->front().candidate.Path();
  const auto own = [&] { return Own(store_->directory(), step, *model, Ownership::kLink); };
  ASSERT_TRUE(own());
  const std::string data = step + "/data";
  if (std::filesystem::hard_link_count(data) == 1) GTEST_SKIP() << "reflinks are copies";
  EXPECT_TRUE(own()) << "it is there already";
  std::fstream(data, std::ios::in | std::ios::out) << "!";
  std::filesystem::last_write_time(data, std::filesystem::file_time_type::clock::now());
  const auto changed = own();
  ASSERT_FALSE(changed);
  EXPECT_EQ(changed.error().code, ErrorCode::kStale);
}

// Listing all blobs is for who copies something; what is left of that very step goes, too.
TEST_F(AdoptTest, LeftOversGoBeforeACopyAndOnlyThen) {
  const auto found = Scan(*PlaceOf(Path()), sources_);
  auto model = IngestStep(found->front(), {});
  ASSERT_TRUE(model);
  const std::string step = found->front().candidate.Path();
  const auto own = [&] { return Own(store_->directory(), step, *model, Ownership::kCopy); };
  std::string copy;
  {
    const auto owned = own();
    ASSERT_TRUE(owned);
    copy = owned->model.roots[0];
  }
  const std::string others = store_->directory() + "/blobs/" + std::string(32, 'a') + ".partial-b";
  std::filesystem::create_directories(others + "/inner");
  ASSERT_TRUE(own());
  EXPECT_TRUE(std::filesystem::exists(others)) << "nothing was to be copied";
  std::filesystem::rename(copy, copy + ".partial-old");  // as if its copier had been killed
  ASSERT_TRUE(own());
  EXPECT_FALSE(std::filesystem::exists(others));
  EXPECT_FALSE(std::filesystem::exists(copy + ".partial-old"));
  EXPECT_TRUE(std::filesystem::exists(copy));
}

}  // namespace
}  // namespace ckptfs
