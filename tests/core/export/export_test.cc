// SPDX-License-Identifier: Apache-2.0

#include "core/export/export.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <map>

#include "core/base/strings.h"
#include "tests/support/stamp_of_file.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

namespace stdfs = std::filesystem;
constexpr uint64_t kChunk = 64 << 20;

// Files whose bytes are zeros, a blob, or literals.
class FakeView final : public View {
 public:
  FakeView(std::shared_ptr<const StepModel> step, uint64_t blob_size)
      : View(std::move(step)), blob_size_(blob_size) {}

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override {
    using Type = ViewEntry::Type;
    if (directory.empty()) return std::vector<ViewEntry>{{"fake", Type::kDirectory, 0, ""}};
    if (directory == "fake") {
      std::vector<ViewEntry> entries = {{"blob", Type::kFile, blob_size_, ""},
                                        {"deep", Type::kDirectory, 0, ""},
                                        {"latest", Type::kSymlink, 4, "deep"}};
      if (hostile_name) entries.push_back({"../escaped", Type::kFile, 5, ""});
      return entries;
    }
    if (directory == "fake/deep") {
      return std::vector<ViewEntry>{{"big", Type::kFile, kBig, ""}, {"none", Type::kFile, 0, ""}};
    }
    return Fail(ErrorCode::kNotFound, "no such directory");
  }
  Result<ViewEntry> Find(std::string_view path) const override {
    const size_t slash = path.rfind('/');
    const auto entries = List(slash == path.npos ? "" : path.substr(0, slash)).value();
    for (const ViewEntry& entry : entries) {
      if (entry.name == path.substr(slash == path.npos ? 0 : slash + 1)) return entry;
    }
    return Fail(ErrorCode::kNotFound, "no such file");
  }
  // In the third chunk of "big" are the last bytes of blob 1, or bytes past its
  // end when `invalid`.
  Result<Plan> MakePlan(std::string_view file) const override {
    PlanBuilder builder;
    if (file == "fake/blob") builder.BlobRange(BlobIndex{0}, 0, blob_size_);
    if (file == "fake/deep/big") {
      ++plans_of_big;
      builder.Literal(std::string("first"));
      builder.Zeros(2 * kChunk);
      builder.BlobRange(BlobIndex{1}, invalid ? 3 : 2, 4);
      builder.Zeros(kBig - builder.size() - 4);
      builder.Literal(std::string("last"));
    }
    return std::move(builder).Finish();
  }
  uint64_t MemoryBytes() const override { return sizeof(*this); }

  static constexpr uint64_t kBig = 3 * kChunk + 1000;
  bool hostile_name = false;
  bool invalid = false;
  mutable std::atomic<int> plans_of_big{0};

 private:
  uint64_t blob_size_;
};

class FakeFormat final : public ViewFormat {
 public:
  explicit FakeFormat(std::shared_ptr<const FakeView> view) : view_(std::move(view)) {}
  std::string_view name() const override { return "fake"; }
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState>) const override {
    return view_;
  }

 private:
  const std::shared_ptr<const FakeView> view_;
};

class ExportTest : public testing::Test {
 protected:
  ExportTest() {
    model_.roots = {source_.path()};
    Blob blob;
    blob.path = std::string("blob");
    blob.stamp = *StampOfFile(source_.Write("blob", "bytes of the blob"));
    model_.blobs = {blob};
    const uint64_t size = blob.stamp.size;
    blob.root = 1;
    blob.stamp = *StampOfFile(second_.Write("blob", "second"));
    model_.roots.push_back(second_.path());
    model_.blobs.push_back(blob);
    view_ = std::make_shared<FakeView>(std::make_shared<const StepModel>(model_), size);
  }
  // The second source is not there when `away`.
  Result<ExportReport> Run(std::string_view part, std::string_view identity = "run/1 tp1",
                           bool away = false) {
    BlobReader::Options reading;
    if (away) reading.roots[second_.path()] = second_.path() + "/away";
    const auto blobs = BlobReader::Create(model_, std::move(reading));
    std::vector<std::unique_ptr<ViewFormat>> formats;
    formats.push_back(std::make_unique<FakeFormat>(view_));
    const auto views = ViewSet::Open(std::make_shared<const StepModel>(model_), Layout{}, formats);
    JobOptions options;
    options.threads = 1;
    return ExportView(*views, part, Target(), identity, *blobs, {044, 0}, options);
  }
  Result<ExportReport> RunUntilTheThirdChunk() { return Run("fake", "run/1 tp1", true); }
  std::string Target() const { return target_.path() + "/out"; }
  std::string Read(const std::string& name) const {
    std::string bytes(stdfs::file_size(Target() + "/" + name), '\0');
    std::ifstream(Target() + "/" + name, std::ios::binary)
        .read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return bytes;
  }

  TemporaryDirectory source_, second_, target_;
  StepModel model_;
  std::shared_ptr<FakeView> view_;
};

TEST_F(ExportTest, WritesFilesDirectoriesAndLinks) {
  const auto report = Run("fake");
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->files, 3u);
  EXPECT_EQ(report->bytes_resumed, 0u);
  EXPECT_EQ(Read("blob"), "bytes of the blob");
  EXPECT_EQ(stdfs::read_symlink(Target() + "/latest"), "deep");
  EXPECT_EQ(stdfs::file_size(Target() + "/deep/none"), 0u);
  const std::string big = Read("deep/big");
  ASSERT_EQ(big.size(), FakeView::kBig);
  EXPECT_TRUE(big.starts_with("first"));
  EXPECT_TRUE(big.ends_with("last"));
  size_t names = 0;
  for (const auto& entry : stdfs::recursive_directory_iterator(Target())) names += entry.exists();
  EXPECT_EQ(names, 5u);  // no journal, no partial files
}

TEST_F(ExportTest, ResumesAfterAFailureWithoutWritingAgain) {
  EXPECT_FALSE(RunUntilTheThirdChunk());
  EXPECT_TRUE(stdfs::exists(Target() + "/.ckptfs-export"));
  EXPECT_FALSE(stdfs::exists(Target() + "/deep/big"));
  EXPECT_TRUE(stdfs::exists(Target() + "/deep/big.ckptfs-partial"));
  const auto report = Run("fake");
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_GE(report->bytes_resumed, 2 * kChunk);
  EXPECT_LT(report->bytes_resumed, 3 * kChunk);  // two of its four chunks were durable
  EXPECT_TRUE(Read("deep/big").ends_with("last"));
  EXPECT_EQ(Read("blob"), "bytes of the blob");
}

TEST_F(ExportTest, MakesAPlanOncePerFile) {
  ASSERT_TRUE(Run("fake"));
  EXPECT_EQ(view_->plans_of_big, 1);  // of four chunks
}

TEST_F(ExportTest, RefusesAPlanThatIsNotValid) {
  view_->invalid = true;
  const auto report = Run("fake/deep");
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code, ErrorCode::kInvalid) << report.error().message;
  EXPECT_FALSE(stdfs::exists(Target() + "/big"));
}

// Numbers in a journal mean nothing for another list of files.
TEST_F(ExportTest, AJournalOfAnotherExportIsRefused) {
  EXPECT_FALSE(RunUntilTheThirdChunk());
  for (const auto& other : {Run("fake", "run/2 tp1"), Run("fake/deep")}) {
    ASSERT_FALSE(other);
    EXPECT_EQ(other.error().code, ErrorCode::kExists);
  }
}

TEST_F(ExportTest, ADirectoryWithOtherThingsIsLeftAlone) {
  target_.Write("out/mine", "precious");
  EXPECT_EQ(Run("fake").error().code, ErrorCode::kExists);
  EXPECT_EQ(Read("mine"), "precious");
}

TEST_F(ExportTest, AFinishedOneThatIsRunAgainHasNothingLeftToDo) {
  ASSERT_TRUE(Run("fake"));
  const auto again = Run("fake", "whatever it was called");
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->files, 3u);
  EXPECT_EQ(again->bytes_resumed, again->bytes);
  {
    std::fstream file(Target() + "/deep/big", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(2 * kChunk));
    file << "x";
  }
  EXPECT_EQ(Run("fake").error().code, ErrorCode::kExists);
  EXPECT_EQ(Read("deep/big")[2 * kChunk], 'x');  // it is left alone
}

TEST_F(ExportTest, OneFileOrAPartNobodyHas) {
  ASSERT_TRUE(Run("fake/blob"));
  EXPECT_EQ(Read("blob"), "bytes of the blob");
  EXPECT_EQ(Run("nothing").error().code, ErrorCode::kNotFound);
}

TEST_F(ExportTest, NamesDoNotLeaveTheDestination) {
  view_->hostile_name = true;
  EXPECT_EQ(Run("fake").error().code, ErrorCode::kInvalid);
  EXPECT_FALSE(stdfs::exists(target_.path() + "/escaped"));
}

TEST_F(ExportTest, ASourceThatChangedIsAnError) {
  source_.Write("blob", "other of the blob");
  const auto report = Run("fake");
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code, ErrorCode::kStale);
  EXPECT_FALSE(stdfs::exists(Target() + "/blob"));
}

}  // namespace
}  // namespace ckptfs
