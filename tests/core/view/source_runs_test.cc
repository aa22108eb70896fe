// SPDX-License-Identifier: Apache-2.0

#include "core/view/source_runs.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>
#include <tuple>

namespace ckptfs {
namespace {

// An atom cut at random into boxes, each a local tensor in a random order of dims.
class RandomGather {
 public:
  explicit RandomGather(uint64_t seed) : random_(seed) {
    shape_.resize(1 + Pick(4));
    for (uint64_t& size : shape_) size = shape_.size() < 3 ? 20 + Pick(60) : 3 + Pick(10);
    std::vector<std::pair<Shape, Shape>> boxes = {{Shape(shape_.size(), 0), shape_}};
    for (uint64_t cuts = 100 + Pick(300); cuts > 0; --cuts) Cut(boxes);
    std::shuffle(boxes.begin(), boxes.end(), random_);
    for (auto& [begin, shape] : boxes) AddLocal(std::move(begin), std::move(shape));
  }

  uint64_t Pick(uint64_t below) { return random_() % below; }
  Gather& gather() { return gather_; }

  // A local tensor with a part of the atom, in a random order of dims, or two of it.
  LocalTensor RandomTarget() {
    LocalTensor target;
    uint64_t at = 0;
    for (uint64_t pieces = 1 + Pick(2); pieces > 0; --pieces) {
      Shape begin;
      Shape shape;
      for (const uint64_t size : shape_) {
        begin.push_back(Pick(size));
        shape.push_back(1 + Pick(size - begin.back()));
      }
      const uint64_t volume = *ElementCount(shape);
      target.pieces.push_back({shape, std::move(begin), at, StridesOf(shape), 1.0});
      at += volume + Pick(3);  // padding
    }
    target.shape = {at};
    return target;
  }

 private:
  void Cut(std::vector<std::pair<Shape, Shape>>& boxes) {
    const size_t i = Pick(boxes.size());
    const size_t d = Pick(shape_.size());
    auto& [begin, shape] = boxes[i];
    if (shape[d] < 2) return;
    auto other = boxes[i];
    const uint64_t at = 1 + Pick(shape[d] - 1);
    other.first[d] += at;
    other.second[d] -= at;
    shape[d] = at;
    boxes.push_back(std::move(other));
  }

  std::vector<uint64_t> StridesOf(const Shape& shape) {
    std::vector<size_t> order(shape.size());
    std::iota(order.begin(), order.end(), size_t{0});
    if (Pick(2) == 0) std::shuffle(order.begin(), order.end(), random_);
    std::vector<uint64_t> strides(shape.size());
    uint64_t stride = 1;
    for (size_t i = order.size(); i-- > 0;) {
      strides[order[i]] = stride;
      stride *= shape[order[i]];
    }
    return strides;
  }

  void AddLocal(Shape begin, Shape shape) {
    const uint64_t volume = *ElementCount(shape);
    FragmentSeries series;
    series.local = static_cast<uint32_t>(gather_.locals.size());
    series.elements = series.flat_step = volume;
    series.blob = series.local;
    series.offset = Pick(1000) * 4;
    gather_.series.push_back(series);
    auto strides = StridesOf(shape);
    gather_.locals.push_back({{volume}, {Piece{shape, std::move(begin), 0, strides, 1.0}}});
  }

  std::mt19937_64 random_;
  Shape shape_;
  Gather gather_;
};

// Element of the target -> where it lies.
using Placement = std::map<uint64_t, std::pair<uint32_t, uint64_t>>;

RunsEnd Expand(const Gather& gather, const LocalTensor& target, uint64_t begin, uint64_t end,
               Placement& out) {
  return ForEachSourceRun(gather, target, begin, end, [&](const SourceRun& run) {
    for (uint64_t i = 0; i < run.count; ++i) {
      const std::pair place(static_cast<uint32_t>(run.blob),
                            run.offset + 4 * i * run.source_stride);
      EXPECT_TRUE(out.emplace(run.target + i * run.target_stride, place).second);
    }
    return true;
  });
}

TEST(SourceRunsTest, AnIndexChangesNothing) {
  size_t indexed = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    RandomGather random(seed);
    Gather with = random.gather();
    with.index = BoxIndex::Of(with.locals);
    indexed += with.index != nullptr;
    for (int i = 0; i < 40; ++i) {
      const LocalTensor target = random.RandomTarget();
      const uint64_t size = target.shape[0];
      const uint64_t begin = i < 2 ? 0 : random.Pick(size);
      const uint64_t end = i < 2 ? size : begin + 1 + random.Pick(size - begin);
      Placement plain;
      Placement found;
      ASSERT_EQ(Expand(random.gather(), target, begin, end, plain), RunsEnd::kDone);
      ASSERT_EQ(Expand(with, target, begin, end, found), RunsEnd::kDone);
      ASSERT_EQ(found, plain) << "seed " << seed;
    }
  }
  EXPECT_GT(indexed, 40u);
}

TEST(SourceRunsTest, FewRunsAreVisitedForABoxOfAGrid) {
  Gather grid;
  for (uint64_t i = 0; i < 10000; ++i) {
    grid.locals.push_back({{2, 2}, {Piece{{2, 2}, {i / 100 * 2, i % 100 * 2}, 0, {2, 1}, 1.0}}});
    FragmentSeries series;
    series.local = series.blob = static_cast<uint32_t>(i);
    series.elements = series.flat_step = 4;
    grid.series.push_back(series);
  }
  grid.index = BoxIndex::Of(grid.locals);
  // Half a row of a target that has the whole rows 101 to 110.
  const LocalTensor target{{10, 200}, {Piece{{10, 200}, {101, 0}, 0, {200, 1}, 1.0}}};
  const AtomBox box = BoxWithin(target.pieces[0], 3 * 200 + 50, 3 * 200 + 150);
  EXPECT_EQ(std::tuple(box.begin[0], box.end[0]), std::tuple(104u, 105u));
  EXPECT_EQ(std::tuple(box.begin[1], box.end[1]), std::tuple(50u, 150u));
  Placement found;
  EXPECT_EQ(Expand(grid, target, 650, 750, found), RunsEnd::kDone);
  EXPECT_EQ(found.size(), 100u);
  EXPECT_EQ(found.begin()->second, std::pair(52u * 100 + 25, uint64_t{0}));
}

// Stopped where it is told, a hole where a piece is missing, and an index of other locals
// is not taken for theirs.
TEST(SourceRunsTest, HolesAndStopsAreToldWithAnIndexToo) {
  RandomGather random(3);
  Gather gather = random.gather();
  gather.index = BoxIndex::Of(gather.locals);
  ASSERT_NE(gather.index, nullptr);
  LocalTensor whole{{0}, {}};
  Shape shape(gather.locals[0].pieces[0].shape.size(), 0);
  for (const LocalTensor& local : gather.locals) {
    for (size_t d = 0; d < shape.size(); ++d) {
      const Piece& piece = local.pieces[0];
      shape[d] = std::max(shape[d], piece.atom_begin[d] + piece.shape[d]);
    }
  }
  whole = WholeTensor(shape);
  const uint64_t size = *ElementCount(shape);
  size_t runs = 0;
  EXPECT_EQ(ForEachSourceRun(gather, whole, 0, size, [&](const SourceRun&) { return ++runs < 5; }),
            RunsEnd::kStopped);
  EXPECT_EQ(runs, 5u);
  Placement found;
  Gather shorter = gather;
  shorter.locals.pop_back();
  EXPECT_EQ(Expand(shorter, whole, 0, size, found), RunsEnd::kHole);
  found.clear();
  Gather torn = gather;
  torn.series.erase(torn.series.begin() + 10);
  EXPECT_EQ(Expand(torn, whole, 0, size, found), RunsEnd::kHole);
  found.clear();
  Gather moved = gather;  // as many locals, of which one is another
  moved.locals[7].pieces.clear();
  EXPECT_EQ(Expand(moved, whole, 0, size, found), RunsEnd::kHole);
}

}  // namespace
}  // namespace ckptfs
