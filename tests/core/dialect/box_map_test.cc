// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/box_map.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>

#include "core/model/box_index.h"
#include "core/state/assembler.h"

namespace ckptfs {
namespace {

using Index = std::vector<uint64_t>;
// Where the bytes of an element lie, which names it.
using Place = std::pair<uint32_t, uint64_t>;
using Dense = std::map<Index, Place>;

// visit(index) for each index of the box [0, shape), in row-major order.
template <class Visit>
void ForEachIndex(const Shape& shape, const Visit& visit) {
  const auto count = ElementCount(shape).value();
  for (uint64_t i = 0; i < count; ++i) {
    Index index(shape.size());
    uint64_t rest = i;
    for (size_t d = shape.size(); d-- > 0;) {
      index[d] = rest % shape[d];
      rest /= shape[d];
    }
    visit(index);
  }
}

// Element by element, as slowly as it can be said.  An element that is there twice is a failure.
Dense Expand(const Gather& gather) {
  Dense out;
  for (uint32_t l = 0; l < gather.locals.size(); ++l) {
    for (const Piece& piece : gather.locals[l].pieces) {
      ForEachIndex(piece.shape, [&](Index index) {
        uint64_t flat = piece.local_offset;
        for (size_t d = 0; d < index.size(); ++d) {
          flat += index[d] * piece.local_strides[d];
          index[d] += piece.atom_begin[d];
        }
        for (const FragmentSeries& series : gather.series) {
          for (uint32_t k = 0; k < series.count; ++k) {
            const Fragment f = series.At(k);
            if (series.local != l || flat < f.flat_begin || flat >= f.flat_end) continue;
            const bool fresh = out.emplace(index, Place(static_cast<uint32_t>(f.blob),
                                                        f.offset + 4 * (flat - f.flat_begin)))
                                   .second;
            EXPECT_TRUE(fresh);
          }
        }
      });
    }
  }
  return out;
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  uint64_t Below(uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(engine_); }
  template <class Items>
  void Shuffle(Items& items) {
    std::shuffle(items.begin(), items.end(), engine_);
  }

 private:
  std::mt19937 engine_;
};

struct Box {
  Index begin;
  Shape extent;
};

// The shape as random boxes.
std::vector<Box> Tile(const Shape& shape, Random& random, int cuts) {
  std::vector<Box> boxes = {{Index(shape.size(), 0), shape}};
  for (int i = 0; i < cuts && !shape.empty(); ++i) {
    Box& box = boxes[random.Below(boxes.size())];
    const size_t d = random.Below(shape.size());
    if (box.extent[d] < 2) continue;
    const uint64_t at = 1 + random.Below(box.extent[d] - 1);
    Box rest = box;
    rest.begin[d] += at;
    rest.extent[d] -= at;
    box.extent[d] = at;
    boxes.push_back(rest);
  }
  return boxes;
}

// A gather of random local tensors: padded, in any order of dimensions, in several fragments, some
// of which are a series.
Gather RandomGather(const Shape& shape, Random& random, uint32_t& blob) {
  Gather gather;
  for (const Box& box : Tile(shape, random, static_cast<int>(random.Below(5)))) {
    const auto local = static_cast<uint32_t>(gather.locals.size());
    std::vector<size_t> order(shape.size());
    std::iota(order.begin(), order.end(), 0);
    random.Shuffle(order);
    Index strides(shape.size());
    uint64_t elements = 1 + random.Below(2);
    for (const size_t d : order) {
      strides[d] = elements;
      elements *= box.extent[d] + random.Below(2);
    }
    const uint64_t offset = random.Below(4);
    elements += offset;
    gather.locals.push_back({{elements}, {{box.extent, box.begin, offset, strides, 1.0}}});
    const uint64_t step = 1 + random.Below(elements);
    for (uint64_t at = 0; at < elements; at += step) {
      const uint64_t count = std::min(step, elements - at);
      const bool whole = at == 0 && elements / step > 1 && random.Below(2) == 0;
      const uint64_t many = whole ? elements / step : 1;
      gather.series.push_back({local, static_cast<uint32_t>(many), at, many > 1 ? step : 0, count,
                               blob, many > 1 ? 1 : 0, 4 * random.Below(9), many > 1 ? 4 : 0,
                               DType::kF32});
      blob += static_cast<uint32_t>(many);
      at += (many - 1) * step;
    }
  }
  if (random.Below(2) == 0) gather.index = BoxIndex::Of(gather.locals);
  EXPECT_TRUE(ProveCoverage(gather, shape).has_value());
  return gather;
}

Atom AtomOf(Shape shape, Gather gather) {
  Atom atom;
  atom.kind = "weight";
  atom.shape = std::move(shape);
  atom.source.gathers = {std::move(gather)};
  return atom;
}

struct Case {
  std::vector<Atom> atoms;
  std::vector<BoxMap> maps;
  Shape to;

  std::vector<const Atom*> Sources() const {
    std::vector<const Atom*> sources;
    for (const Atom& atom : atoms) sources.push_back(&atom);
    return sources;
  }
};

// A target of random boxes, each a box of a source of its own: turned, with dimensions of one
// dropped and added, inside a larger tensor, and with `steps` of every so many-th index of it.
Case RandomCase(Random& random, bool steps) {
  Case out;
  uint32_t blob = 0;
  for (uint64_t d = 1 + random.Below(3); d-- > 0;) out.to.push_back(1 + random.Below(5));
  for (const Box& box : Tile(out.to, random, static_cast<int>(random.Below(5)))) {
    BoxMap map;
    map.from = static_cast<uint32_t>(out.atoms.size());
    map.to_begin = box.begin;
    map.axis.assign(out.to.size(), -1);
    std::vector<size_t> order(out.to.size());
    std::iota(order.begin(), order.end(), 0);
    random.Shuffle(order);
    Shape shape;
    const bool stepped = steps && random.Below(2) == 0;
    const auto add = [&](uint64_t extent) {
      const uint64_t begin = random.Below(3);
      const uint64_t step = stepped ? 1 + random.Below(3) : 1;
      map.from_begin.push_back(begin);
      map.from_extent.push_back(extent);
      shape.push_back(begin + (extent - 1) * step + 1 + random.Below(2));
      if (stepped) map.from_step.push_back(std::min(step, shape.back()));
    };
    for (const size_t d : order) {
      if (random.Below(4) == 0) add(1);
      if (box.extent[d] == 1 && random.Below(2) == 0) continue;
      map.axis[d] = static_cast<int8_t>(shape.size());
      add(box.extent[d]);
    }
    if (shape.empty()) add(1);
    out.atoms.push_back(AtomOf(shape, RandomGather(shape, random, blob)));
    out.maps.push_back(std::move(map));
  }
  return out;
}

// Element by element again: the map's own words.
Dense Oracle(const Case& given) {
  Dense out;
  for (const BoxMap& map : given.maps) {
    const Dense source = Expand(given.atoms[map.from].source.gathers.front());
    ForEachIndex(map.from_extent, [&](const Index& at) {
      Index from = at;
      for (size_t d = 0; d < at.size(); ++d) {
        from[d] = map.from_begin[d] + at[d] * map.StepOf(d);
      }
      Index to = map.to_begin;
      for (size_t d = 0; d < to.size(); ++d) {
        if (map.axis[d] >= 0) to[d] += at[static_cast<size_t>(map.axis[d])];
      }
      out.emplace(to, source.at(from));
    });
  }
  return out;
}

TEST(BoxMapTest, RandomGathersThroughRandomMapsAreWhatTheirElementsAre) {
  for (uint32_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const Case given = RandomCase(random, seed % 2 == 1);
    const auto made = ComposeSource(given.Sources(), given.maps, given.to);
    ASSERT_TRUE(made.has_value()) << made.error().message;
    ASSERT_EQ(made->kind, SourceKind::kGather);
    EXPECT_EQ(Expand(made->gathers.front()), Oracle(given));
  }
}

TEST(BoxMapTest, ThereAndBackIsTheSameBox) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const Case given = RandomCase(random, false);
    for (const BoxMap& map : given.maps) {
      const Shape& from = given.atoms[map.from].shape;
      const BoxMap back = Inverse(map, 7);
      EXPECT_TRUE(CheckBoxMap(back, given.to, from).has_value());
      EXPECT_EQ(Inverse(back, map.from), map);
    }
  }
}

TEST(BoxMapTest, AHoleAnOverlapAndATensorTooLargeAreRefused) {
  Random random(1);
  uint32_t blob = 0;
  const Atom atom = AtomOf({2, 3}, RandomGather({2, 3}, random, blob));
  const Atom* sources[] = {&atom};
  const BoxMap map{0, {0, 0}, {2, 3}, {0, 0}, {0, 1}};
  EXPECT_TRUE(ComposeSource(sources, {{map}}, {2, 3}).has_value());
  EXPECT_FALSE(ComposeSource(sources, {{map}}, {3, 3}).has_value());
  EXPECT_FALSE(ComposeSource(sources, {{map, map}}, {2, 3}).has_value());
  EXPECT_FALSE(ComposeSource(sources, {}, {2, 3}).has_value());
  EXPECT_FALSE(ComposeSource({}, {{map}}, {2, 3}).has_value());
  EXPECT_FALSE(ComposeSource(sources, {{map}}, {UINT64_MAX, 2}).has_value());
}

TEST(BoxMapTest, HostileMapsAreRefused) {
  const Shape shape = {4, 4};
  const BoxMap good{0, {0, 0}, {2, 2}, {2, 2}, {1, 0}};
  EXPECT_TRUE(CheckBoxMap(good, shape, shape).has_value());
  const auto refused = [&](auto change) {
    BoxMap map = good;
    change(map);
    return !CheckBoxMap(map, shape, shape).has_value();
  };
  EXPECT_TRUE(refused([](BoxMap& m) { m.from_begin[0] = UINT64_MAX; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.from_extent[1] = UINT64_MAX; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.to_begin[1] = 3; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.to_begin[1] = UINT64_MAX; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.axis = {0, 0}; }));
  EXPECT_FALSE(refused([](BoxMap& m) { m.from_step = {3, 1}; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.from_step = {4, 1}; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.from_step = {0, 1}; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.from_step = {UINT64_MAX, 1}; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.from_step = {1}; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.axis = {0, 2}; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.axis = {0, -1}; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.axis = {0}; }));
  EXPECT_TRUE(refused([](BoxMap& m) { m.from_begin = {0}; }));
  Atom atom;
  atom.shape = shape;
  atom.source = InlineSource(std::string(64, 'x'), false);
  const Atom* sources[] = {&atom};
  BoxMap elsewhere = good;
  elsewhere.from = 1;
  EXPECT_FALSE(ComposeSource(sources, {{elsewhere}}, shape).has_value());
}

// Two rows, each an atom of `copies` copies.
std::vector<Atom> Rows(SourceKind kind, std::vector<size_t> copies) {
  std::vector<Atom> atoms;
  uint32_t blob = 0;
  for (const size_t count : copies) {
    Atom atom = AtomOf({3}, {});
    atom.source.kind = kind;
    atom.source.gathers.clear();
    for (size_t k = 0; k < count; ++k) {
      Gather gather{{WholeTensor({3})}, {{0, 1, 0, 0, 3, blob++, 0, 0, 0, DType::kF32}}, {}};
      atom.source.gathers.push_back(std::move(gather));
    }
    atoms.push_back(std::move(atom));
  }
  return atoms;
}

Result<AtomSource> Stacked(const std::vector<Atom>& atoms, std::optional<AtomIndex> master = {}) {
  std::vector<const Atom*> sources;
  std::vector<BoxMap> maps;
  for (const Atom& atom : atoms) {
    const uint64_t i = sources.size();
    maps.push_back({static_cast<uint32_t>(i), {0}, {3}, {i, 0}, {-1, 0}});
    sources.push_back(&atom);
  }
  return ComposeSource(sources, maps, {atoms.size(), 3}, master);
}

TEST(BoxMapTest, CopiesMakeCopiesAndAveragesAverages) {
  auto made = Stacked(Rows(SourceKind::kReplicas, {3, 3}));
  ASSERT_TRUE(made.has_value());
  EXPECT_EQ(made->kind, SourceKind::kReplicas);
  ASSERT_EQ(made->gathers.size(), 3u);
  EXPECT_EQ(Expand(made->gathers[2]).at({1, 0}), Place(5, 0));
  made = Stacked(Rows(SourceKind::kReplicas, {2, 3}));
  ASSERT_TRUE(made.has_value());
  EXPECT_EQ(made->kind, SourceKind::kGather);
  made = Stacked(Rows(SourceKind::kAverage, {2, 2}));
  ASSERT_TRUE(made.has_value());
  EXPECT_EQ(made->kind, SourceKind::kAverage);
  EXPECT_EQ(made->gathers.size(), 2u);
  made = Stacked(Rows(SourceKind::kAverage, {2, 3}));
  ASSERT_FALSE(made.has_value());
  EXPECT_NE(made.error().message.find("averages of 2 and of 3"), std::string::npos);
}

TEST(BoxMapTest, PartsOfDifferentKindsAreRefusedByName) {
  std::vector<Atom> atoms = Rows(SourceKind::kReplicas, {2, 2});
  atoms[1].source.kind = SourceKind::kAverage;
  auto made = Stacked(atoms);
  ASSERT_FALSE(made.has_value());
  EXPECT_NE(made.error().message.find("gathered and some averaged"), std::string::npos);
  atoms[0].source = atoms[1].source = CastSource(AtomIndex{4});
  EXPECT_FALSE(Stacked(atoms).has_value());
  made = Stacked(atoms, AtomIndex{9});
  ASSERT_TRUE(made.has_value());
  EXPECT_EQ(DerivedFrom(*made), AtomIndex{9});
}

TEST(BoxMapTest, ValuesComposeIfTheyAreEqual) {
  std::vector<Atom> atoms(2);
  for (Atom& atom : atoms) atom.source = InlineSource("abcd", false);
  const Atom* sources[] = {&atoms[0], &atoms[1]};
  EXPECT_TRUE(ComposeSource(sources, {}, {}).has_value());
  atoms[1].source.inline_bytes = "abce";
  const auto made = ComposeSource(sources, {}, {});
  ASSERT_FALSE(made.has_value());
  EXPECT_NE(made.error().message.find("different values"), std::string::npos);
}

}  // namespace
}  // namespace ckptfs
