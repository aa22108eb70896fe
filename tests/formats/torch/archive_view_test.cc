// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/archive_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "formats/torch/archive_builder.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"
#include "tests/support/open_torch_file.h"

namespace ckptfs {
namespace {

using ::testing::HasSubstr;

struct Made {
  PickleTree tree;
  std::vector<ArchiveStorage> storages;
  std::vector<uint64_t> lengths;
};

// A list of uint8 tensors of these lengths; bytes of storage i are i where
// short, zeros where long.
Made MakeTensors(const std::vector<uint64_t>& lengths) {
  PickleBuilder builder;
  std::vector<NodeId> items;
  std::vector<ArchiveStorage> storages;
  for (size_t i = 0; i < lengths.size(); ++i) {
    items.push_back(builder.Tensor({.dtype = DType::kU8,
                                    .storage_key = std::to_string(i),
                                    .storage_elements = lengths[i],
                                    .shape = {lengths[i]},
                                    .strides = {1}}));
    ArchiveStorage& storage = storages.emplace_back();
    storage.length = lengths[i];
    storage.body = ZeroSegment{lengths[i]};
    if (lengths[i] < 4096) {
      storage.body =
          LiteralSegment{std::make_shared<const std::string>(lengths[i], static_cast<char>(i))};
    }
  }
  NodeId root = builder.List(std::move(items));
  return {std::move(builder).Finish(root), std::move(storages), lengths};
}

// Writes literals into a sparse in-memory file and opens it.
Result<TorchFile> OpenPlan(const Plan& plan, std::string* path) {
  int fd = ::memfd_create("archive", MFD_CLOEXEC);  // lives as long as the test program
  EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(plan.size())), 0);
  for (const Segment& segment : plan.segments()) {
    const auto* literal = std::get_if<LiteralSegment>(&segment.body);
    if (literal == nullptr) continue;
    EXPECT_EQ(::pwrite(fd, literal->bytes->data(), literal->bytes->size(),
                       static_cast<off_t>(segment.begin)),
              static_cast<ssize_t>(literal->bytes->size()));
  }
  *path = "/proc/self/fd/" + std::to_string(fd);
  return OpenTorchFile(*path);
}

TEST(ArchiveViewTest, SizeIsThePlansAndOffsetsAreAligned) {
  constexpr uint64_t kBig = uint64_t{1} << 32;
  std::vector<std::vector<uint64_t>> cases{{},
                                           {0},
                                           {1},
                                           {64},
                                           std::vector<uint64_t>(9, 5),
                                           std::vector<uint64_t>(10, 5),
                                           std::vector<uint64_t>(11, 65),
                                           std::vector<uint64_t>(101, 3),
                                           std::vector<uint64_t>(1001, 0),
                                           {kBig - 2},
                                           {kBig - 1},
                                           {kBig},
                                           {kBig, 7},
                                           {kBig - 1000, 7, 8},
                                           {7, 3 * kBig, 0, kBig / 2, 9},
                                           {uint64_t{1} << 41, 5}};
  for (const auto& lengths : cases) {
    Made made = MakeTensors(lengths);
    uint64_t pickle = PrintPickle(made.tree).value().size();
    auto plan = ArchivePlan("some.folder", made.tree, std::move(made.storages));
    ASSERT_TRUE(plan.has_value()) << plan.error().message;
    EXPECT_EQ(plan->size(), ArchiveSize("some.folder", pickle, lengths));
    std::string path;
    auto file = OpenPlan(*plan, &path);
    ASSERT_TRUE(file.has_value()) << file.error().message;
    ASSERT_EQ(file->storage_count(), lengths.size());
    for (size_t i = 0; i < lengths.size(); ++i) {
      auto at = file->Locate(*file->root().at(i).Tensor(), BlobIndex{});
      ASSERT_TRUE(at.has_value()) << at.error().message;
      const StorageRecord record = at->Bytes().value();
      EXPECT_EQ(record.length, lengths[i]);
      EXPECT_EQ(record.offset % 64, 0u);
      if (lengths[i] == 0) continue;
      const Segment& segment = plan->segments()[plan->FindSegment(record.offset)];
      EXPECT_EQ(segment.begin, record.offset);
      EXPECT_EQ(segment.end - segment.begin, lengths[i]);
    }
  }
}

// Two archives in one file, between other bytes: each is what it is alone.
TEST(ArchiveViewTest, AnArchiveIsWrittenAtAnOffset) {
  PlanBuilder builder;
  builder.Literal(std::string(1000, 'x'));
  std::vector<Extent> extents;
  for (const uint64_t length : {300u, 70u}) {
    Made made = MakeTensors({length, 5, length});
    const uint64_t begin = builder.size();
    ASSERT_TRUE((ArchiveContent{made.tree, made.storages}.AppendTo(builder, "part")));
    extents.push_back({begin, builder.size()});
    EXPECT_EQ(builder.size() - begin,
              ArchiveSize("part", PrintPickle(made.tree)->size(), made.lengths));
    builder.Literal("between");
    EXPECT_FALSE((ArchiveContent{made.tree, {}}.AppendTo(builder, "part")));
    EXPECT_EQ(builder.size(), extents.back().end + 7);  // nothing of what was refused
  }
  const Plan plan = std::move(builder).Finish();
  std::string path;
  EXPECT_FALSE(OpenPlan(plan, &path));  // the file itself is not an archive
  const auto file = *OpenLocalFile(path);
  for (const Extent& extent : extents) {
    const auto archive = TorchFile::Open(file, extent);
    ASSERT_TRUE(archive) << archive.error().message;
    for (size_t i = 0; i < 3; ++i) {
      const auto tensor = archive->Locate(*archive->root().at(i).Tensor(), BlobIndex{});
      const StorageRecord record = tensor->Bytes().value();
      EXPECT_EQ((record.offset - extent.begin) % 64, 0u);
      EXPECT_EQ(*archive->Read(*tensor), std::string(record.length, static_cast<char>(i)));
    }
  }
}

TEST(ArchiveViewTest, PartsMustAddUp) {
  Made made = MakeTensors({10});
  made.storages[0].parts.emplace_back(4, ZeroSegment{4});
  made.storages[0].parts.emplace_back(5, ZeroSegment{5});
  auto plan = ArchivePlan("a", made.tree, made.storages);
  ASSERT_FALSE(plan.has_value());
  made.storages[0].parts.emplace_back(1, ZeroSegment{1});
  EXPECT_TRUE(ArchivePlan("a", made.tree, made.storages).has_value());
}

TEST(ArchiveViewTest, TensorsNeedTheirStorages) {
  Made made = MakeTensors({10});
  made.storages[0].length = 9;
  EXPECT_FALSE(ArchivePlan("a", made.tree, made.storages).has_value());
  EXPECT_FALSE(ArchivePlan("a", made.tree, {}).has_value());
  made.tree.tensors[0].storage_key = "0x";
  EXPECT_FALSE(ArchivePlan("a", made.tree, MakeTensors({10}).storages).has_value());
}

TEST(ArchiveViewTest, FolderNamesAreChecked) {
  for (std::string folder : {std::string(), std::string("a/b"), std::string(300, 'x')}) {
    Made made = MakeTensors({1});
    EXPECT_FALSE(ArchivePlan(folder, made.tree, made.storages).has_value()) << folder;
  }
}

TEST(DocumentTest, TensorsBecomeIndexesAndComeBack) {
  Made made = MakeTensors({10, 3});
  made.tree.tensors[0].shape = {2, 3};
  made.tree.tensors[0].strides = {1, 3};
  made.tree.tensors[0].storage_offset = 1;
  made.tree.tensors[1].is_parameter = true;
  made.tree.tensors[1].requires_grad = true;
  auto plan = ArchivePlan("a", made.tree, made.storages);
  ASSERT_TRUE(plan.has_value());
  std::string path;
  auto file = OpenPlan(*plan, &path);
  ASSERT_TRUE(file.has_value()) << file.error().message;
  auto document = MakeDocument("rng", "dp0", file->root(), *file, BlobIndex{4});
  ASSERT_TRUE(document.has_value()) << document.error().message;
  ASSERT_EQ(document->tensors.size(), 2u);
  const Segment& segment = plan->segments()[plan->FindSegment(document->tensors[0].offset)];
  EXPECT_EQ(segment.end - segment.begin, 10u);
  EXPECT_EQ(document->tensors[0].offset, segment.begin + 1);
  EXPECT_EQ(document->tensors[0].strides, (std::vector<uint64_t>{1, 3}));
  EXPECT_EQ(document->tensors[0].blob, BlobIndex{4});
  auto tree = ParseDocument(*document);
  ASSERT_TRUE(tree.has_value()) << tree.error().message;
  const TensorNode* first = RootOf(*tree).at(0).Tensor();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->storage_key, "0");
  EXPECT_EQ(first->strides, (std::vector<uint64_t>{3, 1}));
  EXPECT_EQ(first->storage_elements, 6u);
  EXPECT_TRUE(RootOf(*tree).at(1).Tensor()->is_parameter);
  document->tensors.pop_back();
  EXPECT_THAT(ParseDocument(*document).error().message, HasSubstr("no tensor '1pg'"));
  document->pickle = "garbage";
  EXPECT_FALSE(ParseDocument(*document).has_value());
}

TEST(DocumentTest, TensorsOutsideTheirStorageAreRefused) {
  Made made = MakeTensors({10});
  made.tree.tensors.back().shape = {11};
  auto plan = ArchivePlan("a", made.tree, made.storages);
  std::string path;
  auto file = OpenPlan(*plan, &path);
  ASSERT_TRUE(file.has_value()) << file.error().message;
  EXPECT_FALSE(MakeDocument("d", "", file->root(), *file, BlobIndex{}).has_value());
  EXPECT_FALSE(MakeDocument("d", "", PickleRef(), *file, BlobIndex{}).has_value());
}

}  // namespace
}  // namespace ckptfs
