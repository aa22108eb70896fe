// SPDX-License-Identifier: Apache-2.0
//
// Steps whose ranks hold rows, as FSDP2 cuts them: the manifest grows with the model, not with
// ranks x tensors, and every element is found where its rank wrote it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "core/base/strings.h"
#include "core/io/memory_root.h"
#include "core/manifest/manifest.h"
#include "core/manifest/manifest_format.h"
#include "formats/families/shipped.h"
#include "formats/rank_file/rank_files.h"
#include "snapshot/trainer/capture.h"

namespace ckptfs {
namespace {

// One rank's box of a state; elements are their index in the state.
struct HeldBox {
  std::vector<uint64_t> begin;
  std::vector<uint64_t> end;
};

struct RankState {
  std::string name;
  Shape shape;
  std::vector<HeldBox> boxes;  // one below the other in the tensor
};

// The float32 weights that a world of ranks writes; memory of the tensors.
struct World {
  std::vector<Capture> ranks;
  std::vector<std::unique_ptr<std::vector<float>>> memory;
  std::map<std::string, Shape> shapes;
};

World MakeWorld(size_t ranks) {
  World world;
  world.ranks.resize(ranks);
  return world;
}

void AppendBox(const RankState& state, const HeldBox& box, std::vector<float>& out) {
  const std::vector<uint64_t> strides = RowMajorStrides(state.shape);
  std::vector<uint64_t> at = box.begin;
  for (size_t d = 0; d < at.size(); ++d) {
    if (box.begin[d] >= box.end[d]) return;
  }
  for (;;) {
    uint64_t element = 0;
    for (size_t d = 0; d < at.size(); ++d) element += at[d] * strides[d];
    out.push_back(static_cast<float>(element));
    size_t d = at.size();
    while (d > 0 && ++at[d - 1] == box.end[d - 1]) at[d - 1] = box.begin[d - 1], --d;
    if (d == 0) return;
  }
}

void Hold(World& world, size_t rank, const RankState& state) {
  auto& values = *world.memory.emplace_back(std::make_unique<std::vector<float>>());
  CapturedTensor tensor;
  tensor.parameter = state.name;
  tensor.kind = "weight";
  tensor.part = StatePart{state.shape, {}, {}, {}};
  uint64_t row = 0;
  for (const HeldBox& box : state.boxes) {
    AppendBox(state, box, values);
    std::vector<uint64_t> at(state.shape.size(), 0);
    at[0] = row;
    tensor.part->pieces.push_back({box.begin, box.end, at});
    row += box.end[0] - box.begin[0];
  }
  tensor.shape = {row};
  for (size_t d = 1; d < state.shape.size(); ++d) {
    tensor.shape.push_back(state.boxes[0].end[d] - state.boxes[0].begin[d]);
  }
  tensor.from = reinterpret_cast<const std::byte*>(values.data());
  world.ranks[rank].tensors.push_back(std::move(tensor));
  if (world.shapes.emplace(state.name, state.shape).second) {
    for (Capture& one : world.ranks) one.parameters.push_back({state.name, "trainable"});
  }
}

// Rows as torch.chunk gives them, of the columns [from, to).
void HoldRows(World& world, const std::string& name, Shape shape, std::vector<size_t> ranks,
              uint64_t from, uint64_t to) {
  const uint64_t step = (shape[0] + ranks.size() - 1) / ranks.size();
  for (size_t i = 0; i < ranks.size(); ++i) {
    const uint64_t begin = std::min(step * i, shape[0]);
    const uint64_t end = std::min(step * (i + 1), shape[0]);
    Hold(world, ranks[i], {name, shape, {{{begin, from}, {end, to}}}});
  }
}

std::vector<size_t> RanksOf(size_t first, size_t count, size_t step = 1) {
  std::vector<size_t> ranks;
  for (size_t i = 0; i < count; ++i) ranks.push_back(first + i * step);
  return ranks;
}

struct ReadStep {
  Result<StepModel> model = StepModel();
  std::vector<std::string> files;
};

ReadStep Read(World world) {
  ReadStep step;
  auto root = std::make_shared<MemoryRoot>("memory");
  std::vector<std::string> paths;
  for (uint32_t rank = 0; rank < world.ranks.size(); ++rank) {
    world.ranks[rank].step = 7;
    auto file = CaptureFile::Make(std::move(world.ranks[rank]), rank,
                                  static_cast<uint32_t>(world.ranks.size()));
    EXPECT_TRUE(file) << file.error().message;
    auto bytes = std::make_shared<std::string>(file->bytes(), '\0');
    for (const CopyRun& run : file->Runs(0, file->bytes(), false)) {
      std::memcpy(bytes->data() + run.at, run.from, run.bytes);
    }
    paths.push_back(StrCat("d/rank-", rank, ".safetensors"));
    step.files.push_back(*bytes);
    EXPECT_TRUE(root->Add(paths.back(), {std::as_bytes(std::span(*bytes))}, bytes, {}));
  }
  const FamilySet families = *ShippedFamilies();
  SourceOptions options;
  options.families = &families;
  step.model = ReadRankFiles(root, paths, options);
  return step;
}

// Maps each element of a local tensor to its element of the atom.
std::map<uint64_t, uint64_t> ElementsOf(const LocalTensor& local, const Shape& atom) {
  std::map<uint64_t, uint64_t> elements;
  const std::vector<uint64_t> strides = RowMajorStrides(atom);
  for (const Piece& piece : local.pieces) {
    const uint64_t count = *ElementCount(piece.shape);
    const std::vector<uint64_t> inside = RowMajorStrides(piece.shape);
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t at = piece.local_offset;
      uint64_t element = 0;
      for (size_t d = 0; d < atom.size(); ++d) {
        const uint64_t index = i / inside[d] % piece.shape[d];
        at += index * piece.local_strides[d];
        element += (piece.atom_begin[d] + index) * strides[d];
      }
      elements[at] = element;
    }
  }
  return elements;
}

// Elements of the gather that are not in their place, or not there.
uint64_t WrongOf(const ReadStep& step, const Atom& atom) {
  const Gather& gather = atom.source.gathers.at(0);
  uint64_t right = 0;
  for (const FragmentSeries& series : gather.series) {
    const auto elements = ElementsOf(gather.locals[series.local], atom.shape);
    for (uint32_t k = 0; k < series.count; ++k) {
      const Fragment fragment = series.At(k);
      const std::string& file = step.files[static_cast<uint32_t>(fragment.blob)];
      for (uint64_t i = fragment.flat_begin; i < fragment.flat_end; ++i) {
        float value = 0;
        std::memcpy(&value, file.data() + fragment.offset + 4 * (i - fragment.flat_begin), 4);
        right += value == static_cast<float>(elements.at(i));
      }
    }
  }
  return *ElementCount(atom.shape) - right;
}

void ExpectRight(const ReadStep& step) {
  ASSERT_TRUE(step.model) << step.model.error().message;
  for (const Atom& atom : step.model->atoms) {
    EXPECT_EQ(WrongOf(step, atom), 0u) << step.model->parameter(atom.parameter).name;
  }
}

size_t SeriesOf(const StepModel& model) {
  size_t series = 0;
  for (const Atom& atom : model.atoms) series += atom.source.gathers.at(0).series.size();
  return series;
}

World Sharded(size_t ranks, size_t tensors) {
  World world = MakeWorld(ranks);
  for (size_t i = 0; i < tensors; ++i) {
    HoldRows(world, StrCat("layers.", i, ".weight"), {128, 3}, RanksOf(0, ranks), 0, 3);
  }
  return world;
}

// Bytes of the manifest but for its blobs, of which each rank has one.
size_t ManifestBytes(StepModel model) {
  const auto with = RenderManifest(model, "/store/blobs");
  EXPECT_TRUE(with);
  return with->size();
}

TEST(FsdpManifestTest, ItGrowsWithTheModelAndNotWithTheRanks) {
  const ReadStep few = Read(Sharded(8, 200));
  const ReadStep many = Read(Sharded(64, 200));
  ExpectRight(few);
  ExpectRight(many);
  EXPECT_EQ(SeriesOf(*many.model), SeriesOf(*few.model));
  StepModel less = *many.model;
  const size_t before = ManifestBytes(*few.model);
  // A blob is some 150 bytes, whatever the model.
  EXPECT_LE(ManifestBytes(less), before + before / 10 + (64 - 8) * 200);
}

TEST(FsdpManifestTest, RanksOfUnequalRowsAndOfNone) {
  World world = MakeWorld(8);
  HoldRows(world, "a.weight", {10, 4}, RanksOf(0, 8), 0, 4);  // 2 rows on 5 ranks
  HoldRows(world, "b.weight", {3, 4}, RanksOf(0, 8), 0, 4);   // a row on 3 ranks
  HoldRows(world, "c.weight", {67, 4}, RanksOf(0, 8), 0, 4);  // 9 rows, and 4
  HoldRows(world, "d.weight", {64, 4}, RanksOf(0, 8), 0, 4);
  const ReadStep step = Read(std::move(world));
  ExpectRight(step);
  for (const Atom& atom : step.model->atoms) {
    EXPECT_EQ(atom.source.gathers[0].locals, std::vector{WholeTensor(atom.shape)});
  }
}

TEST(FsdpManifestTest, TensorParallelRanksHaveALocalTensorEach) {
  const auto world = [](size_t shards) {
    World made = MakeWorld(2 * shards);  // tp varies fastest
    HoldRows(made, "q.weight", {64, 8}, RanksOf(0, shards, 2), 0, 4);
    HoldRows(made, "q.weight", {64, 8}, RanksOf(1, shards, 2), 4, 8);
    // tp cut the rows, FSDP2 each part again (_StridedShard).
    for (uint64_t tp = 0; tp < 2; ++tp) {
      for (uint64_t dp = 0; dp < shards; ++dp) {
        const uint64_t rows = 32 / shards;
        const uint64_t begin = tp * 32 + dp * rows;
        Hold(made, 2 * dp + tp, {"r.weight", {64, 8}, {{{begin, 0}, {begin + rows, 8}}}});
      }
    }
    return made;
  };
  const ReadStep few = Read(world(4));
  const ReadStep many = Read(world(32));
  ExpectRight(few);
  ExpectRight(many);
  EXPECT_EQ(many.model->atoms[0].source.gathers[0].locals.size(), 2u);
  EXPECT_EQ(many.model->atoms[1].source.gathers[0].locals.size(), 1u);
  EXPECT_EQ(SeriesOf(*many.model), SeriesOf(*few.model));
}

TEST(FsdpManifestTest, RowsThatLieApartOnARankAndReplicasThatShareTheWriting) {
  World world = MakeWorld(4);
  for (uint64_t rank = 0; rank < 2; ++rank) {  // every rank every second run of 3 rows
    RankState state{"apart.weight", {12, 2}, {}};
    for (uint64_t run = rank; run < 4; run += 2)
      state.boxes.push_back({{3 * run, 0}, {3 * run + 3, 2}});
    Hold(world, rank, state);
  }
  HoldRows(world, "first.weight", {6, 2}, {0, 1}, 0, 2);   // HSDP: ranks 0 and 1
  HoldRows(world, "second.weight", {6, 2}, {2, 3}, 0, 2);  // write one, 2 and 3 the other
  const ReadStep step = Read(std::move(world));
  ExpectRight(step);
  for (const Atom& atom : step.model->atoms) {
    EXPECT_EQ(atom.source.gathers[0].locals.size(), 1u);
  }
}

TEST(FsdpManifestTest, BoxesThatDoNotContinueEachOtherKeepTheirPlace) {
  World world = MakeWorld(3);
  Hold(world, 0, {"w", {4, 4}, {{{0, 0}, {2, 4}}}});
  Hold(world, 1, {"w", {4, 4}, {{{2, 0}, {4, 1}}}});
  Hold(world, 2, {"w", {4, 4}, {{{2, 1}, {4, 4}}}});
  const ReadStep step = Read(std::move(world));
  ExpectRight(step);
  EXPECT_EQ(step.model->atoms[0].source.gathers[0].locals.size(), 3u);
}

TEST(FsdpManifestTest, HeadersThatDifferInNumbersAloneAreEquallyLong) {
  const auto length = [](size_t rank) {
    World world = Sharded(128, 100);
    const auto file =
        CaptureFile::Make(std::move(world.ranks[rank]), static_cast<uint32_t>(rank), 128);
    return file->Runs(0, file->bytes(), false)[0].bytes;
  };
  EXPECT_EQ(length(1), length(127));
}

}  // namespace
}  // namespace ckptfs
