// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/box_index.h"

#include <gtest/gtest.h>

#include <map>

#include "core/base/strings.h"
#include "formats/dcp/metadata_writer.h"

namespace ckptfs::dcp {
namespace {

BoxEntry Stack(std::string key, uint64_t places, std::vector<BoxEntry::Part> parts) {
  BoxEntry entry;
  entry.path = {{key, {}}};
  entry.key = std::move(key);
  entry.tensor = true;
  entry.stacked = true;
  entry.shape = {places, 6, 4};
  for (uint32_t i = 0; i < places; ++i) entry.atoms.push_back(AtomIndex{i});
  entry.parts = std::move(parts);
  return entry;
}

// Two layers in two files, an object, and the first tensor under another key.
std::vector<BoxEntry> Few() {
  std::vector<BoxEntry> entries;
  entries.push_back(Stack("a", 2, {{{0, 0}, {1, 4}, 0}, {{1, 0}, {2, 4}, 1}, {{3, 0}, {3, 4}, 0}}));
  BoxEntry object;
  object.key = "o/shard_0_1";
  object.path = {{object.key, {}}};
  object.object = std::make_shared<const std::string>(40, 'x');
  entries.push_back(object);
  entries.push_back(entries[0]);
  entries.back().key = "other";
  entries.back().bytes_of = 0;
  entries.push_back(Stack("b", 3, {{{0, 0}, {6, 4}, 1}}));
  return entries;
}

TEST(BoxIndexTest, BoxesLieBehindEachOtherInTheirFiles) {
  const auto index = BoxIndex::Build(Few(), 2).value();
  EXPECT_EQ(index.BoxCount(0), 6u);
  EXPECT_EQ(index.BoxAt(0, 4).begin, (Shape{1, 1, 0}));
  EXPECT_EQ(index.BoxAt(0, 4).shape, (Shape{1, 2, 4}));
  std::map<uint64_t, uint64_t> ends;
  // File by file: what is laid in one order is found in it.
  for (const size_t e : {0u, 1u, 3u}) {
    for (uint64_t i = 0; i < index.BoxCount(e); ++i) {
      const BoxIndex::Place place = index.PlaceOf(e, i);
      EXPECT_EQ(place.offset, ends[place.rank]) << e << " " << i;
      ends[place.rank] += place.length;
    }
  }
  for (uint64_t file = 0; file < 2; ++file) {
    EXPECT_EQ(index.FileSize(file), ends[file]);
    PlanBuilder plan;
    ASSERT_TRUE(index.AppendFile(file, plan));
    EXPECT_EQ(plan.size(), ends[file]);
  }
}

TEST(BoxIndexTest, AnotherKeyHasTheSameBytes) {
  const auto index = BoxIndex::Build(Few(), 2).value();
  for (uint64_t i = 0; i < index.BoxCount(0); ++i) {
    const auto one = index.PlaceOf(0, i);
    const auto other = index.PlaceOf(2, i);
    EXPECT_EQ(std::tie(one.rank, one.offset, one.length),
              std::tie(other.rank, other.offset, other.length));
    EXPECT_EQ(index.BoxAt(0, i).begin, index.BoxAt(2, i).begin);
  }
}

// DeepSeek-V3's experts with their masters and moments, cut for eight ranks.
TEST(BoxIndexTest, AnIndexOfManyBoxesIsSmallAndIsNotRenderedToBeListed) {
  std::vector<BoxEntry> entries;
  for (const char* kind : {"", "param.", "exp_avg.", "exp_avg_sq."}) {
    std::vector<BoxEntry::Part> parts;
    for (uint64_t expert = 0; expert < 256; ++expert) {
      for (uint32_t rank = 0; rank < 8; ++rank) {
        parts.push_back({{expert, rank * 256, 0}, {1, 256, 7168}, rank});
      }
    }
    for (const char* name : {"fc1", "fc2"}) {
      BoxEntry entry = Stack(StrCat(kind, name), 58, parts);
      entry.shape = {58, 256, 2048, 7168};
      entries.push_back(std::move(entry));
    }
  }
  auto built = BoxIndex::Build(std::move(entries), 8);
  ASSERT_TRUE(built) << built.error().message;
  const auto index = std::make_shared<const BoxIndex>(*std::move(built));
  EXPECT_LT(index->MemoryBytes(), 8u << 20);
  const Plan plan = MetadataPlan(index);
  EXPECT_EQ(plan.size(), MetadataSize(*index));
  EXPECT_GT(plan.size(), uint64_t{100} << 20);
  EXPECT_LT(plan.MemoryBytes(), 4u << 20);
  const auto& segments = plan.segments();
  for (size_t i = 0; i < segments.size(); i += 97) {
    const auto& rendered = std::get<RenderedSegment>(segments[i].body);
    ASSERT_EQ((*rendered.renderer)(rendered.piece)->size(), segments[i].length());
  }
}

TEST(BoxIndexTest, MoreBoxesThanReadersHoldAreRefused) {
  std::vector<BoxEntry> entries = {
      Stack("a", 1 << 13, std::vector<BoxEntry::Part>(1 << 13, {{0, 0}, {6, 4}, 0}))};
  const auto index = BoxIndex::Build(std::move(entries), 1);
  ASSERT_FALSE(index);
  EXPECT_EQ(index.error().code, ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace ckptfs::dcp
