// SPDX-License-Identifier: Apache-2.0

#include "core/model/box_index.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <utility>

namespace ckptfs {
namespace {

using Places = std::set<std::pair<uint32_t, uint32_t>>;

LocalTensor Box(Shape begin, Shape shape) {
  return {shape, {Piece{shape, std::move(begin), 0, RowMajorStrides(shape), 1.0}}};
}

// By looking at all of them: those that have elements in the box.
Places Scan(const std::vector<LocalTensor>& locals, const Shape& begin, const Shape& end) {
  Places out;
  for (uint32_t i = 0; i < locals.size(); ++i) {
    for (uint32_t p = 0; p < locals[i].pieces.size(); ++p) {
      const Piece& piece = locals[i].pieces[p];
      bool meets = true;
      for (size_t d = 0; d < begin.size(); ++d) {
        const uint64_t from = std::max(begin[d], piece.atom_begin[d]);
        meets &= from < std::min(end[d], piece.atom_begin[d] + piece.shape[d]);
      }
      if (meets) out.insert({i, p});
    }
  }
  return out;
}

// Fails if a piece is missing or told twice; how many more than wanted there were.
size_t Compare(const BoxIndex& index, const std::vector<LocalTensor>& locals, const Shape& begin,
               const Shape& end) {
  Places found;
  EXPECT_TRUE(index.ForEach(begin, end, [&](BoxIndex::Entry entry) {
    EXPECT_TRUE(found.insert({entry.local, entry.piece}).second);
    return true;
  }));
  const Places wanted = Scan(locals, begin, end);
  for (const auto& place : wanted) EXPECT_TRUE(found.contains(place));
  return found.size() - wanted.size();
}

TEST(BoxIndexTest, FewPiecesNeedNone) {
  std::vector<LocalTensor> locals;
  EXPECT_EQ(BoxIndex::Of(locals), nullptr);
  for (uint64_t i = 0; i + 1 < BoxIndex::kMinPieces; ++i) locals.push_back(Box({i}, {1}));
  EXPECT_EQ(BoxIndex::Of(locals), nullptr);
  for (int i = 0; i < 100; ++i) locals.push_back(Box({7}, {0}));  // nothing in them
  EXPECT_EQ(BoxIndex::Of(locals), nullptr);
  locals.push_back(Box({99}, {1}));
  const auto index = BoxIndex::Of(locals);
  ASSERT_NE(index, nullptr);
  EXPECT_EQ(index->locals(), locals.size());
  Compare(*index, locals, {0}, {100});
}

TEST(BoxIndexTest, NumbersAreNotPlaces) {
  const std::vector<LocalTensor> scalars(200, LocalTensor{{}, {Piece{}}});
  EXPECT_EQ(BoxIndex::Of(scalars), nullptr);
  std::vector<LocalTensor> mixed(100, Box({0, 0}, {1, 1}));
  mixed.push_back(Box({0}, {1}));
  EXPECT_EQ(BoxIndex::Of(mixed), nullptr);
}

TEST(BoxIndexTest, EqualsAScanOfRandomBoxes) {
  std::mt19937_64 random(7);
  const auto pick = [&](uint64_t below) { return random() % below; };
  for (int round = 0; round < 200; ++round) {
    const size_t rank = 1 + pick(4);
    const uint64_t size = 1 + pick(40);
    std::vector<LocalTensor> locals(1 + pick(200));
    for (LocalTensor& local : locals) {
      for (uint64_t pieces = pick(6); pieces > 0; --pieces) {
        Piece piece{Shape(rank), Shape(rank), 0, Shape(rank), 1.0};
        for (size_t d = 0; d < rank; ++d) {
          piece.atom_begin[d] = pick(size);
          piece.shape[d] = pick(size - piece.atom_begin[d] + 1);  // some without elements
        }
        local.pieces.push_back(std::move(piece));
      }
    }
    const auto index = BoxIndex::Of(locals);
    if (!index) continue;
    for (int box = 0; box < 20; ++box) {
      Shape begin(rank);
      Shape end(rank);
      for (size_t d = 0; d < rank; ++d) {
        begin[d] = pick(size + 1);
        end[d] = begin[d] + pick(size - begin[d] + 1);
      }
      Compare(*index, locals, begin, end);
    }
    Compare(*index, locals, Shape(rank, 0), Shape(rank, size));
    EXPECT_TRUE(index->ForEach(Shape(rank, size), Shape(rank, size + 1),
                               [](BoxIndex::Entry) { return false; }));
  }
}

TEST(BoxIndexTest, OfAGridOnlyNeighboursAreLookedAt) {
  constexpr uint64_t kSide = 100;
  for (const bool columns : {false, true}) {  // whatever the order of the ranks is
    std::vector<LocalTensor> locals;
    for (uint64_t i = 0; i < kSide * kSide; ++i) {
      const uint64_t row = columns ? i % kSide : i / kSide;
      const uint64_t column = columns ? i / kSide : i % kSide;
      locals.push_back(Box({row * 4, column * 8}, {4, 8}));
    }
    const auto index = BoxIndex::Of(locals);
    ASSERT_NE(index, nullptr);
    EXPECT_LE(index->MemoryBytes(), 17 * locals.size());
    const size_t more_than_a_row = Compare(*index, locals, {42, 0}, {43, kSide * 8});
    EXPECT_LE(more_than_a_row, 7 * kSide);
    const size_t more_than_a_column = Compare(*index, locals, {0, 31}, {kSide * 4, 32});
    EXPECT_LE(more_than_a_column, 7 * kSide);
    EXPECT_LE(Compare(*index, locals, {42, 31}, {43, 32}), 3 * BoxIndex::kLeaf);
  }
}

TEST(BoxIndexTest, EndsWhenItIsTold) {
  const std::vector<LocalTensor> same(1000, Box({3, 3}, {2, 2}));  // no dim tells them apart
  const auto index = BoxIndex::Of(same);
  ASSERT_NE(index, nullptr);
  EXPECT_EQ(Compare(*index, same, {0, 0}, {9, 9}), 0u);
  EXPECT_EQ(Compare(*index, same, {4, 4}, {5, 5}), 0u);
  int seen = 0;
  EXPECT_FALSE(
      index->ForEach(Shape{0, 0}, Shape{9, 9}, [&](BoxIndex::Entry) { return ++seen < 10; }));
  EXPECT_EQ(seen, 10);
}

}  // namespace
}  // namespace ckptfs
