// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/metadata.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/strings.h"
#include "core/io/memory_root.h"
#include "tests/formats/dcp/dcp_maker.h"

namespace ckptfs::dcp {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Result<DcpMetadata> Parse(const std::string& bytes) {
  MemoryRoot root("memory");
  CKPT_RETURN_IF_ERROR(root.PublishIfAbsent("m", std::as_bytes(std::span(bytes))));
  CKPT_ASSIGN_OR_RETURN(const auto file, root.Open("m"));
  return ReadMetadata(*file);
}

std::string Refusal(const std::string& bytes) {
  const auto parsed = Parse(bytes);
  return parsed ? "taken" : parsed.error().message;
}

DcpMaker Small() {
  DcpMaker made;
  made.AddTensor("model.a", {4, 2}, 0, {{{0, 0}, {2, 2}, "x"}, {{2, 0}, {2, 2}, "y"}},
                 {"model", "a"});
  made.AddObject("step", NumberArchive(1), "x", {"step"});
  return made;
}

TEST(DcpMetadataTest, SaysWhatLiesWhere) {
  const DcpMaker made = Small();
  const auto read = Parse(made.Metadata());
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_THAT(read->files, ElementsAre("x", "y"));
  ASSERT_EQ(read->tensors.size(), 1u);
  const TensorEntry& tensor = read->tensors[0];
  EXPECT_EQ(tensor.shape, (Shape{4, 2}));
  EXPECT_EQ(tensor.dtype, DType::kF32);
  EXPECT_THAT(read->OffsetsOf(tensor, 1), ElementsAre(2u, 0u));
  EXPECT_THAT(read->SizesOf(tensor, 1), ElementsAre(2u, 2u));
  EXPECT_EQ(read->chunks[1].file, 1u);
  EXPECT_EQ(read->chunks[1].length, made.entries[0].chunks[1].length);
  EXPECT_EQ(read->tensor_paths[0], (std::vector<PathElement>{{"model", false}, {"a", false}}));
  ASSERT_EQ(read->objects.size(), 1u);
  EXPECT_EQ(read->objects[0].extent.offset, made.entries[1].chunks[0].offset);
}

// A file is read by windows of a mebibyte.
TEST(DcpMetadataTest, AnEntryMayLieAcrossWindows) {
  DcpMaker made;
  for (int i = 0; i < 9000; ++i) {
    MadeEntry entry{StrCat("model.layers.", i, ".a_name_that_is_not_short.weight"),
                    {},
                    true,
                    "bfloat16",
                    {4},
                    {}};
    entry.chunks.push_back({{0}, {3}, "x", static_cast<uint64_t>(i), 1});
    entry.chunks.push_back({{3}, {1}, "y", static_cast<uint64_t>(i), 2});
    made.entries.push_back(std::move(entry));
  }
  const std::string bytes = made.Metadata();
  EXPECT_GT(bytes.size(), size_t{2} << 20);
  const auto read = Parse(bytes);
  ASSERT_TRUE(read) << read.error().message;
  ASSERT_EQ(read->tensors.size(), 9000u);
  EXPECT_EQ(read->chunks.at(2 * 8999 + 1).offset, 8999u);
  EXPECT_EQ(read->chunks.at(2 * 8999 + 1).length, 2u);
}

TEST(DcpMetadataTest, OtherClassesAreNothing) {
  EXPECT_THAT(Refusal("cos\nsystem\n(S'true'\ntR."), HasSubstr("not a Metadata"));
  EXPECT_THAT(Refusal("]."), HasSubstr("not a Metadata"));
  EXPECT_THAT(Refusal(""), HasSubstr("without a STOP"));
}

TEST(DcpMetadataTest, AStateIsUsedOnce) {
  const std::string chunk = "ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n)\x81";
  const std::string state =
      "}q\x01(\x8c\x07"
      "offsets)\x8c\x05"
      "sizes)u";
  EXPECT_THAT(Refusal("(" + chunk + state + "bl."), HasSubstr("not a Metadata"));
  EXPECT_THAT(Refusal("(" + chunk + state + "b" + chunk +
                      "h\x01"
                      "bl."),
              HasSubstr("neither a dict nor a tuple"));
  EXPECT_THAT(Refusal("(" + chunk + state +
                      "b0h\x01"
                      "\x8c\x01"
                      "aNs."),
              HasSubstr("the state of an object a second time"));
}

// 8 bytes a value: a list of a million numbers is not more than its pickle several times.
TEST(DcpMetadataTest, MemoryIsBounded) {
  std::string bytes = "\x80\x04](";
  for (int i = 0; i < 1000000; ++i) bytes += "K\x01";
  EXPECT_THAT(Refusal(bytes + "e."), HasSubstr("not a Metadata"));
  // A dict of a state of a class that is known takes its place again.
  const std::string chunk =
      "ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n)\x81}("
      "\x8c\x07"
      "offsets)\x8c\x05"
      "sizes)ub0";
  bytes = "\x80\x04";
  for (int i = 0; i < 100000; ++i) bytes += chunk;
  EXPECT_THAT(Refusal(bytes + "N."), HasSubstr("not a Metadata"));
}

// Each of a chunk's mentions would be a chunk of its own.
TEST(DcpMetadataTest, ChunksMentionedOftenAreRefused) {
  DcpMaker made = Small();
  made.entries[0].mentions = 1000;
  EXPECT_THAT(Refusal(made.Metadata()), HasSubstr("'model.a': with it the tensors have more than"));
}

// Ranks that have nothing of a tensor say so each, and share one place.
TEST(DcpMetadataTest, ChunksWithoutElementsNeedNoPlaceOfTheirOwn) {
  DcpMaker made;
  MadeEntry entry{"bias", {}, true, "float32", {2}, {}};
  entry.chunks.push_back({{0}, {2}, "y", 7, 1});
  for (int i = 0; i < 100; ++i) entry.chunks.push_back({{2}, {0}, "x", 0, 1});
  made.entries.push_back(entry);
  const auto read = Parse(made.Metadata());
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->tensors[0].chunk_count, 101u);
  EXPECT_EQ(read->chunks[0].offset, 7u);
}

TEST(DcpMetadataTest, PathsAreAStateDictsAndAboutAsLongAsTheNames) {
  const auto refusal = [](const std::vector<std::string>& path, int entries) {
    DcpMaker made;
    const std::string archive = NumberArchive(1);
    for (int i = 0; i < entries; ++i) made.AddObject(StrCat("k", i), archive, "x", path);
    return Refusal(made.Metadata());
  };
  const std::vector<std::string> longest(kMaxPathElements, "a");
  std::vector<std::string> longer = longest;
  longer.emplace_back("a");
  EXPECT_EQ(refusal(longest, 1), "taken");
  EXPECT_THAT(refusal(longer, 1), HasSubstr("planner_data of 'k0' has 1025 elements"));
  EXPECT_EQ(refusal({std::string(kMaxPathText, 'a')}, 1), "taken");
  EXPECT_THAT(refusal({std::string(kMaxPathText, 'a'), "b"}, 1), HasSubstr("bytes of text"));
  EXPECT_EQ(refusal(longest, 300), "taken");
  EXPECT_THAT(refusal(longest, 1000), HasSubstr("4 times as long as the names"));
}

TEST(DcpMetadataTest, EveryTruncationIsRefused) {
  const std::string whole = Small().Metadata();
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_NE(Refusal(whole.substr(0, i)), "taken") << i;
  }
}

TEST(DcpMetadataTest, PartsOfRanksMakeOne) {
  DcpMaker first = Small();
  DcpMaker second = Small();
  first.entries[0].chunks.pop_back();
  second.entries[0].chunks.erase(second.entries[0].chunks.begin());
  std::vector<DcpMetadata> parts;
  parts.push_back(Parse(first.Metadata()).value());
  parts.push_back(Parse(second.Metadata()).value());
  const auto merged = MergeMetadata(std::move(parts));
  ASSERT_TRUE(merged) << merged.error().message;
  ASSERT_EQ(merged->tensors.size(), 1u);
  EXPECT_EQ(merged->tensors[0].chunk_count, 2u);
  EXPECT_THAT(merged->OffsetsOf(merged->tensors[0], 1), ElementsAre(2u, 0u));
  EXPECT_EQ(merged->files[merged->chunks[1].file], "y");
  EXPECT_EQ(merged->objects.size(), 1u);
  second.entries[0].shape = {5, 2};
  parts.clear();
  parts.push_back(Parse(first.Metadata()).value());
  parts.push_back(Parse(second.Metadata()).value());
  EXPECT_THAT(MergeMetadata(std::move(parts)).error().message, HasSubstr("on another"));
}

}  // namespace
}  // namespace ckptfs::dcp
