// SPDX-License-Identifier: Apache-2.0

#include "fs/filesystem.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "tests/fs/tree_fixture.h"
#include "tests/support/faulty_storage.h"

namespace ckptfs {
namespace {

using ::ckptfs::testing::FakeFormat;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TreeFixture;

ErrorCode CodeOf(const Error& error) { return error.code; }

TEST(FilesystemTest, ShowsTheTree) {
  TreeFixture t;
  t.AddStep("llama", "global_step5", 5);
  t.Mount();
  EXPECT_THAT(t.List("/").value(), ElementsAre(".ckptfs", "ingest", "run", "view"));
  EXPECT_THAT(t.List("/run").value(), ElementsAre("llama"));
  EXPECT_THAT(t.List("/run/llama/step").value(), ElementsAre("global_step5"));
  const std::string step = "/run/llama/step/global_step5";
  EXPECT_THAT(t.List(step).value(), ElementsAre("info.json", "param", "source", "view"));
  EXPECT_THAT(t.List(step + "/view").value(), ElementsAre("README.txt", "layouts.json", "tp1"));
  EXPECT_THAT(t.List(step + "/view/tp2").value(),
              ElementsAre("extra", "info.json", "rank0", "rank1"));
  EXPECT_THAT(t.List(step + "/view").value(),
              ElementsAre("README.txt", "layouts.json", "tp1", "tp2"));
  EXPECT_THAT(t.List(step + "/view/tp2/rank1").value(),
              ElementsAre("link", "model.bin", "small.json", "whole.bin"));
  EXPECT_THAT(t.List(step + "/param").value(),
              ElementsAre("big.weight", "odd%2F..%2Fname", "tied.weight"));
  EXPECT_THAT(t.List(step + "/source").value(), ElementsAre("global_step5"));
  EXPECT_THAT(t.List("/ingest").value(), ElementsAre());
}

TEST(FilesystemTest, ReadsWhatRenderingEverythingGives) {
  TreeFixture t;
  t.AddStep("r", "s", 1, 3);
  t.Mount();
  for (const char* name : {"tp1", "tp2", "tp4_dp2"}) {
    const Layout layout = Layout::Parse(name).value();
    for (uint64_t rank = 0; rank < layout.World(); ++rank) {
      for (const char* file : {"model.bin", "small.json", "whole.bin"}) {
        const std::string path = "rank" + std::to_string(rank) + "/" + file;
        const auto bytes = t.ReadAll(std::string("/view/") + name + "/" + path);
        ASSERT_TRUE(bytes) << bytes.error().message;
        EXPECT_TRUE(*bytes == TreeFixture::Expected(3, layout, path)) << name << "/" << path;
      }
    }
  }
}

TEST(FilesystemTest, AttributesAreExact) {
  TreeFixture t;
  const StepRecord record = t.AddStep("r", "s", 1, 1, 0640);
  t.Mount();
  const Attributes file = t.Walk("/view/tp2/rank0/model.bin").value();
  EXPECT_EQ(file.size,
            TreeFixture::Expected(1, Layout::Parse("tp2").value(), "rank0/model.bin").size());
  EXPECT_EQ(file.blocks, (file.size + 511) / 512);
  EXPECT_EQ(file.mtime_ns, record.mtime_ns);
  EXPECT_EQ(file.mode, static_cast<uint32_t>(S_IFREG | 0440));
  EXPECT_TRUE(file.immutable);
  const Attributes directory = t.Walk("/view/tp2/rank0").value();
  EXPECT_EQ(directory.mode, static_cast<uint32_t>(S_IFDIR | 0550));
  EXPECT_EQ(directory.blocks, 0u);
  EXPECT_FALSE(t.Walk("/run/r/step/s").value().immutable);
}

TEST(FilesystemTest, LayoutsAreParsedAndCanonical) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.Mount();
  const InodeNumber views = t.Walk("/run/r/step/s/view").value().inode;
  const Attributes link = t.fs().Lookup(views, "dp2_tp4", {}).value();
  EXPECT_TRUE(S_ISLNK(link.mode));
  EXPECT_EQ(t.fs().ReadLink(link.inode, {}).value(), "tp4_dp2");
  EXPECT_TRUE(S_ISDIR(t.fs().Lookup(views, "tp4_dp2", {}).value().mode));
  EXPECT_EQ(t.fs().Lookup(views, "banana", {}).map_error(CodeOf).error(), ErrorCode::kNotFound);
  EXPECT_EQ(t.fs().Lookup(views, "banana", {}).map_error(CodeOf).error(), ErrorCode::kNotFound);
  EXPECT_EQ(t.fs().Lookup(views, "tp32", {}).map_error(CodeOf).error(), ErrorCode::kNotFound);
  size_t bananas = 0;
  size_t reasons = 0;
  for (const std::string& line : t.Log()) {
    bananas += line.find("banana") != std::string::npos;
    reasons += line.find("tp 32 does not fit") != std::string::npos;
  }
  EXPECT_EQ(bananas, 1u) << "said once";
  EXPECT_EQ(reasons, 1u);
}

TEST(FilesystemTest, DeclaredLayoutsAreListed) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  FilesystemOptions options;
  options.layouts = {Layout::Parse("tp4").value(), Layout::Parse("tp32").value()};
  t.Mount(std::move(options));
  EXPECT_THAT(t.List("/view").value(), ElementsAre("README.txt", "layouts.json", "tp1", "tp4"));
}

TEST(FilesystemTest, InodesAreStableUniqueAndAgreeWithReaddir) {
  TreeFixture t;
  t.AddStep("r", "a", 1, 1);
  t.AddStep("r", "b", 2, 2);
  std::set<uint64_t> seen;
  std::vector<uint64_t> first, second;
  for (std::vector<uint64_t>* inodes : {&first, &second}) {
    t.Mount();
    for (const char* path :
         {"/run", "/run/r/step/a", "/run/r/step/b", "/run/r/step/a/view/tp2/rank0/model.bin",
          "/run/r/step/b/view/tp2/rank0/model.bin", "/run/r/step/a/view/tp2/rank1/model.bin",
          "/run/r/step/a/param/big.weight", "/run/r/step/a/source/a/data.bin"}) {
      inodes->push_back(static_cast<uint64_t>(t.Walk(path).value().inode));
    }
    const Attributes rank = t.Walk("/run/r/step/a/view/tp2/rank0").value();
    const auto entries = t.fs().ReadDirectory(rank.inode, 2, 100, {}).value();
    for (const auto& entry : entries) {
      EXPECT_EQ(entry.attributes.inode, t.fs().Lookup(rank.inode, entry.name, {}).value().inode);
    }
    t.Unmount();
  }
  EXPECT_EQ(first, second);
  for (const uint64_t inode : first) EXPECT_TRUE(seen.insert(inode).second);
}

TEST(FilesystemTest, AnotherStepUnderTheSameNameIsAnotherInode) {
  TreeFixture t;
  const StepRecord old = t.AddStep("r", "s", 1, 1);
  t.Mount();
  const auto before = t.Walk("/run/r/step/s/view/tp2/rank0/model.bin").value().inode;
  ASSERT_TRUE(t.store().Remove(old));
  t.AddStep("r", "s", 1, 2);
  ASSERT_TRUE(t.fs().Refresh());
  const auto after = t.Walk("/run/r/step/s/view/tp2/rank0/model.bin").value().inode;
  EXPECT_NE(before, after);
  EXPECT_TRUE(*t.ReadAll("/run/r/step/s/view/tp2/rank0/model.bin") ==
              TreeFixture::Expected(2, Layout::Parse("tp2").value(), "rank0/model.bin"));
  EXPECT_EQ(t.fs().Open(before, 0, {}).map_error(CodeOf).error(), ErrorCode::kStale);
}

TEST(FilesystemTest, RemovedStepStaysReadableWhereItIsOpen) {
  TreeFixture t;
  const StepRecord record = t.AddStep("r", "s", 1, 4);
  t.Mount();
  const Attributes file = t.Walk("/run/r/step/s/view/tp2/rank1/model.bin").value();
  const OpenFile open = t.fs().Open(file.inode, 0, {}).value();
  ASSERT_TRUE(t.store().Remove(record));
  ASSERT_TRUE(t.fs().Refresh());
  EXPECT_FALSE(t.Walk("/run/r/step/s"));
  EXPECT_TRUE(t.fs().GetAttributes(file.inode, {}));
  EXPECT_TRUE(*testing::ReadHandle(t.fs(), open.handle) ==
              TreeFixture::Expected(4, Layout::Parse("tp2").value(), "rank1/model.bin"));
  t.fs().Release(open.handle);
  EXPECT_EQ(t.fs().Open(file.inode, 0, {}).map_error(CodeOf).error(), ErrorCode::kStale);
}

TEST(FilesystemTest, NamesThatAreGoneAreToldFromAnotherThread) {
  TreeFixture t;
  const StepRecord record = t.AddStep("r", "s", 1);
  t.AddStep("r", "t", 2);
  std::promise<std::pair<std::string, std::thread::id>> told;
  FilesystemOptions options;
  options.invalidate = [&](InodeNumber, const std::string& name) {
    if (name == "s") told.set_value({std::string(name), std::this_thread::get_id()});
  };
  t.Mount(std::move(options));
  ASSERT_TRUE(t.store().Remove(record));
  ASSERT_TRUE(t.fs().Refresh());
  EXPECT_NE(told.get_future().get().second, std::this_thread::get_id());
}

// As the kernel does: what it is asked to forget it forgets, if nothing uses it.
TEST(FilesystemTest, TheKernelIsAskedToForgetNames) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.format().max_tp = 1 << 20;
  Mutex mutex;
  std::map<std::pair<uint64_t, std::string>, InodeNumber> known;
  FilesystemOptions options;
  options.max_names = 640;
  std::atomic<Filesystem*> fs = nullptr;
  options.invalidate = [&](InodeNumber parent, const std::string& name) {
    InodeNumber inode{};
    {
      MutexLock lock(mutex);
      const auto found = known.find({static_cast<uint64_t>(parent), name});
      if (found == known.end()) return;
      inode = found->second;
      known.erase(found);
    }
    fs.load()->Forget(inode, 1);
  };
  fs = &t.Mount(std::move(options));
  const Attributes views = t.Walk("/run/r/step/s/view").value();
  for (int dp = 1; dp <= 4000; ++dp) {
    const std::string name = StrCat("dp", dp);
    // A name that is not told in time is asked for with a later one; a kernel does not keep all of
    // a processor, either.
    if (dp % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    MutexLock lock(mutex);  // the kernel knows a name before it can be asked to forget it
    const auto layout = fs.load()->Lookup(views.inode, name, {});
    if (!layout) continue;
    known[{static_cast<uint64_t>(views.inode), name}] = layout->inode;
  }
  const auto known_names = [&] {
    return nlohmann::json::parse(t.fs().StatusJson())["known_names"].get<int>();
  };
  for (int i = 0; i < 1000 && known_names() >= 2000; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_LT(known_names(), 2000);
  t.fs().EndInvalidation();
}

// A process's working directory keeps its name, so that `getcwd` goes on answering; here it is
// a directory of another place, whose path ends alike.
TEST(FilesystemTest, TheKernelIsNotAskedToForgetWhereAProcessIs) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.format().max_tp = 1 << 20;
  const std::string views = "/run/r/step/s/view";
  const std::string inside = t.directory() + views + "/dp7";
  std::filesystem::create_directories(inside);
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(inside);
  std::set<std::string> told;
  FilesystemOptions options;
  options.max_names = 640;
  options.invalidate = [&](InodeNumber, const std::string& name) { told.insert(name); };
  t.Mount(std::move(options));
  for (int dp = 1; dp <= 4000; ++dp) (void)t.Walk(StrCat(views, "/dp", dp));
  t.AddStep("r", "other", 2);
  ASSERT_TRUE(t.fs().Refresh());  // waits until all was told
  std::filesystem::current_path(before);
  EXPECT_TRUE(told.contains("dp6"));
  EXPECT_TRUE(told.contains("dp8"));
  EXPECT_FALSE(told.contains("dp7"));
}

// A refresh does not have a caller to throw to.
TEST(FilesystemTest, ARefreshThatThrowsIsAnErrorAndTheNextOneWorks) {
  const auto storage = std::make_shared<FaultyStorage>();
  const auto store = *Store::OpenOn(storage);
  StepCatalogue catalogue(*store);
  const auto fs = *Filesystem::Create(catalogue, {}, {});
  const uint64_t before = storage->calls();
  ASSERT_TRUE(fs->Refresh());
  const uint64_t calls = storage->calls() - before;
  ASSERT_GT(calls, 0u);
  for (uint64_t call = 1; call <= calls; ++call) {
    storage->ThrowAt(call);
    EXPECT_EQ(fs->Refresh().error().code, ErrorCode::kExhausted) << call;
    EXPECT_TRUE(fs->Refresh()) << call;
  }
  storage->ThrowAt(1);
  EXPECT_EQ(fs->RefreshStep("run", "id").error().code, ErrorCode::kExhausted);
  EXPECT_TRUE(fs->RefreshStep("run", "id"));
}

// One line for all look-ups: the other layouts of a run and its other steps have the same cause.
TEST(FilesystemTest, WhyAFormatIsNotThereIsLoggedOnceForARun) {
  std::vector<std::unique_ptr<ViewFormat>> formats;
  formats.push_back(std::make_unique<FakeFormat>());
  auto never = std::make_unique<FakeFormat>("never");
  never->max_tp = 0;
  formats.push_back(std::move(never));
  TreeFixture t(std::move(formats));
  t.AddStep("r", "one", 1);
  t.AddStep("r", "two", 2);
  t.AddStep("other", "one", 3);
  t.Mount();
  for (const std::string_view path : {"/run/r/step/one/view/dp2", "/run/r/step/one/view/dp3",
                                      "/run/r/step/two/view/dp2", "/run/other/step/one/view/dp2"}) {
    ASSERT_TRUE(t.Walk(path)) << path;
  }
  std::vector<std::string> said = t.Log();
  std::erase_if(said,
                [](const std::string& line) { return line.find("never") == std::string::npos; });
  EXPECT_THAT(said, ElementsAre(::testing::StartsWith("/run/r/step/one/view/dp2: never: "),
                                ::testing::StartsWith("/run/other/step/one/view/dp2: never: ")));
}

TEST(FilesystemTest, WritingIsRefused) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.Mount();
  const auto file = t.Walk("/view/tp1/rank0/small.json").value();
  EXPECT_EQ(t.fs().Open(file.inode, O_RDWR, {}).map_error(CodeOf).error(), ErrorCode::kPermission);
  EXPECT_EQ(t.fs().Open(t.Walk("/view/tp1").value().inode, O_RDONLY, {}).map_error(CodeOf).error(),
            ErrorCode::kInvalid);
}

TEST(FilesystemTest, ForgottenNodesAreKnownNoMore) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.Mount();
  const auto file = t.Walk("/view/tp1/rank0/small.json").value();
  t.Walk("/view/tp1/rank0/small.json").value();
  t.fs().Forget(file.inode, 1);
  EXPECT_TRUE(t.fs().GetAttributes(file.inode, {}));
  t.fs().Forget(file.inode, 1);
  EXPECT_FALSE(t.fs().GetAttributes(file.inode, {}));
  EXPECT_EQ(t.Walk("/view/tp1/rank0/small.json").value().inode, file.inode);
}

TEST(FilesystemTest, ListingAsksTheFormatOncePerDirectory) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.Mount();
  ASSERT_TRUE(t.List("/view/dp64/rank7"));
  const uint64_t finds = t.format().finds;
  const uint64_t lists = t.format().lists;
  const auto directory = t.Walk("/view/dp64/rank7").value();
  for (int i = 0; i < 3; ++i) {
    const auto entries = t.fs().ReadDirectory(directory.inode, 2, 100, {}).value();
    for (const auto& entry : entries) {
      ASSERT_TRUE(t.fs().Lookup(directory.inode, entry.name, {}));
    }
  }
  EXPECT_EQ(t.format().lists, lists);
  EXPECT_EQ(t.format().finds, finds);
}

// readdirplus: what was listed is remembered without a look-up.
TEST(FilesystemTest, ListedEntriesAreRememberedAsTheyAre) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.Mount();
  const auto directory = t.Walk("/view/tp2/rank1").value();
  const auto entries = t.fs().ReadDirectory(directory.inode, 0, 100, {}).value();
  EXPECT_FALSE(entries[0].node) << "'.'";
  const uint64_t finds = t.format().finds;
  const uint64_t lists = t.format().lists;
  for (size_t i = 2; i < entries.size(); ++i) {
    EXPECT_FALSE(t.fs().GetAttributes(entries[i].attributes.inode, {})) << entries[i].name;
    const Attributes kept = t.fs().Remember(entries[i]);
    EXPECT_EQ(kept.size, entries[i].attributes.size);
    EXPECT_TRUE(t.fs().GetAttributes(kept.inode, {})) << entries[i].name;
    t.fs().Forget(kept.inode, 1);
    EXPECT_FALSE(t.fs().GetAttributes(kept.inode, {})) << entries[i].name;
  }
  EXPECT_EQ(t.format().finds, finds);
  EXPECT_EQ(t.format().lists, lists);
}

TEST(FilesystemTest, ChangedSourceIsAnErrorAtOpen) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.Mount();
  const auto file = t.Walk("/view/tp1/rank0/model.bin").value();
  std::ofstream(t.SourcePath("r", "s"), std::ios::app) << "more";
  const auto open = t.fs().Open(file.inode, 0, {});
  ASSERT_FALSE(open);
  EXPECT_EQ(open.error().code, ErrorCode::kStale);
  EXPECT_THAT(open.error().message, HasSubstr("data.bin"));
  std::filesystem::remove(t.SourcePath("r", "s"));
  EXPECT_EQ(t.fs().Open(file.inode, 0, {}).map_error(CodeOf).error(), ErrorCode::kStale);
  // Files that do not need a source byte are still there.
  EXPECT_TRUE(t.ReadAll("/view/tp1/rank0/small.json"));
  EXPECT_THAT(t.fs().StatusJson(), HasSubstr("data.bin"));
}

TEST(FilesystemTest, AtomsAreSafetensorsAndInfoIsJson) {
  TreeFixture t;
  t.AddStep("r", "s", 1, 9);
  t.Mount();
  const std::string step = "/run/r/step/s";
  EXPECT_THAT(t.List(step + "/param/big.weight").value(), ElementsAre("weight.safetensors"));
  const std::string file = t.ReadAll(step + "/param/big.weight/weight.safetensors").value();
  EXPECT_EQ(t.Walk(step + "/param/big.weight/weight.safetensors")->size, file.size());
  uint64_t header = 0;
  std::memcpy(&header, file.data(), 8);
  const auto json = nlohmann::json::parse(file.substr(8, header));
  EXPECT_EQ(json["big.weight"]["dtype"], "F32");
  EXPECT_EQ(json["big.weight"]["shape"],
            (std::vector<uint64_t>{testing::kRows, testing::kColumns}));
  EXPECT_TRUE(TreeFixture::SourceBytes(9).starts_with(file.substr(8 + header)));
  EXPECT_EQ(t.Walk(step + "/param/tied.weight/weight.safetensors")->size, file.size());
  EXPECT_TRUE(*t.ReadAll(step + "/source/s/data.bin") == TreeFixture::SourceBytes(9));
  const auto info = nlohmann::json::parse(t.ReadAll(step + "/info.json").value());
  EXPECT_EQ(info["framework"], "fake");
  EXPECT_EQ(info["kinds"]["weight"]["bytes"], testing::kRows * testing::kColumns * 4);
  const auto layout = nlohmann::json::parse(t.ReadAll(step + "/view/tp2/info.json").value());
  EXPECT_EQ(layout["formats"]["rank"], "yes");
}

TEST(FilesystemTest, StatusIsJson) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.Mount();
  ASSERT_TRUE(t.ReadAll("/view/tp1/rank0/model.bin"));
  const auto status = nlohmann::json::parse(t.ReadAll("/.ckptfs/status").value());
  EXPECT_EQ(status["view"], "/run/r/step/s/view");
  EXPECT_GT(status["bytes_served"], 0);
  EXPECT_GT(status["bytes_read"], 0);
  EXPECT_EQ(status["opens"]["stream"], 1);
  EXPECT_EQ(status["recent_opens"][0]["reason"], "no passthrough");
  EXPECT_FALSE(t.ReadAll("/.ckptfs/status", Caller{12345, 12345, 0}));
}

// Another filesystem over the same store goes on with names and files that the kernel knows.
TEST(FilesystemTest, IsHandedOver) {
  TreeFixture t;
  t.AddStep("a", "1", 1);
  t.AddStep("b", "1", 1, 2);
  FilesystemOptions options;
  options.run = "a";
  Filesystem& before = t.Mount(options);
  ASSERT_TRUE(before.SwitchView("b", "1"));
  const std::string path = "/run/a/step/1/view/tp2/rank1/model.bin";
  const Attributes file = t.Walk(path).value();
  const FileHandle handle = before.Open(file.inode, O_RDONLY, Caller{})->handle;
  const std::string truth = TreeFixture::Expected(1, *Layout::Parse("tp2"), "rank1/model.bin");
  std::vector<std::byte> bytes(truth.size());
  ASSERT_EQ(*before.Read(handle, 0, std::span(bytes).first(1000)), 1000u);
  const Handover handover = before.HandOver();
  t.Unmount();

  Filesystem& after = t.Mount(options);
  const auto taken = after.TakeOver(handover);
  ASSERT_EQ(taken.size(), 1u);
  EXPECT_EQ(taken[0].inode, file.inode);
  EXPECT_EQ(taken[0].file.handle, handle);
  EXPECT_EQ(after.ViewShows()->run, "b");
  EXPECT_EQ(after.GetAttributes(file.inode, Caller{})->size, file.size);
  ASSERT_EQ(*after.Read(handle, 0, bytes), truth.size());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), truth);
  EXPECT_NE(after.Open(file.inode, O_RDONLY, Caller{})->handle, handle);
  after.Release(handle);
  EXPECT_EQ(after.Read(handle, 0, bytes).error().code, ErrorCode::kStale);
  // References count on: as many forgets as look-ups end it.
  for (const KnownName& name : handover.names) {
    if (name.inode == file.inode) after.Forget(name.inode, name.references);
  }
  EXPECT_EQ(after.GetAttributes(file.inode, Caller{}).error().code, ErrorCode::kStale);
}

// A step that is another one by then is stale, name and open file; nothing of it is guessed.
TEST(FilesystemTest, WhatIsNotTheSameIsNotHandedOver) {
  TreeFixture t;
  const StepRecord record = t.AddStep("a", "1", 1);
  Filesystem& before = t.Mount();
  const Attributes file = t.Walk("/run/a/step/1/view/tp2/rank1/model.bin").value();
  const FileHandle handle = before.Open(file.inode, O_RDONLY, Caller{})->handle;
  const Handover handover = before.HandOver();
  t.Unmount();
  ASSERT_TRUE(t.store().Remove(record));
  t.AddStep("a", "1", 1, 2, 0644, "other.bin");
  Filesystem& after = t.Mount();
  after.TakeOver(handover);
  std::vector<std::byte> bytes(100);
  EXPECT_EQ(after.Read(handle, 0, bytes).error().code, ErrorCode::kStale);
  EXPECT_EQ(after.GetAttributes(file.inode, Caller{}).error().code, ErrorCode::kStale);
  EXPECT_EQ(after.CheckKnown(InodeNumber{12345}).error().code, ErrorCode::kStale);
  after.Release(handle);
  EXPECT_TRUE(t.Walk("/run/a/step/1/view/tp2/rank1/model.bin"));
}

TEST(FilesystemTest, TellsWhyALayoutIsNotThere) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.Mount();
  const Caller root{};
  const auto inode = t.Walk("/run/r/step/s/view").value().inode;
  EXPECT_EQ(t.fs().Attribute(inode, Filesystem::kReasonAttribute, root).error().code,
            ErrorCode::kNotFound);
  EXPECT_THAT(t.fs().AttributeNames(inode, root), ElementsAre());
  EXPECT_FALSE(t.fs().Lookup(inode, "TP2", root));
  EXPECT_FALSE(t.fs().Lookup(inode, "tp32", root));
  const auto reason = t.fs().Attribute(inode, Filesystem::kReasonAttribute, root);
  ASSERT_TRUE(reason) << reason.error().message;
  EXPECT_THAT(*reason, ::testing::StartsWith("tp32: no format can show layout tp32"));
  EXPECT_THAT(*reason, ::testing::HasSubstr("\nTP2: layout token 'TP2'"));
  EXPECT_THAT(t.fs().AttributeNames(inode, root), ElementsAre("user.ckptfs.reason"));
  EXPECT_FALSE(t.fs().Attribute(inode, "user.other", root));
}

}  // namespace
}  // namespace ckptfs
