// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/pack.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "core/blob/safetensors_header.h"
#include "tests/core/adopt/pieces.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing_support::Pieces;

std::vector<std::string> Keys(const Packing& packing) {
  if (packing.bytes.empty()) return {};
  const auto header = ParseSafetensorsHeader(packing.bytes, packing.bytes.size());
  EXPECT_TRUE(header) << header.error().message;
  std::vector<std::string> keys;
  for (const SafetensorsEntry& entry : header->entries) keys.push_back(entry.name);
  return keys;
}

Packing Packed(const StepModel& model, uint64_t limit = 0) {
  PackOptions options;
  options.limit = limit;
  auto packing = PackSmallPieces(model, *BlobReader::Create(model, {}), options);
  EXPECT_TRUE(packing) << packing.error().message;
  return packing ? *std::move(packing) : Packing{};
}

ErrorCode CodeOf(const StepModel& model, std::string_view names) {
  const auto packing = PackSmallPieces(model, *BlobReader::Create(model, {}), {});
  if (packing) return ErrorCode::kInternal;
  EXPECT_THAT(packing.error().message, HasSubstr(names));
  return packing.error().code;
}

TEST(PackTest, ASafetensorsFileOfTheAtomsInSmallPieces) {
  Pieces pieces;
  const AtomIndex norm = pieces.Add("layers.1.norm", "master", 256);
  const AtomIndex bias = pieces.Add("bias", "weight", 70, DType::kBF16);  // padded
  pieces.Add("layers.1.norm", "exp_avg", 256);
  pieces.Add("big", "master", 32 * 1025);  // 4,100 bytes a piece
  pieces.Write();
  const Packing packing = Packed(pieces.model());
  EXPECT_THAT(Keys(packing),
              ElementsAre("exp_avg/layers.1.norm", "master/layers.1.norm", "weight/bias"));
  const auto header = ParseSafetensorsHeader(packing.bytes, packing.bytes.size());
  for (const SideAtom& side : packing.atoms) {
    const std::string truth = Pieces::Truth(pieces.model(), side.atom);
    EXPECT_EQ(packing.bytes.substr(side.offset, truth.size()), truth);
  }
  ASSERT_EQ(packing.atoms.size(), 3u);
  EXPECT_EQ(packing.atoms[1].atom, norm);
  EXPECT_EQ(packing.atoms[2].atom, bias);
  EXPECT_EQ(packing.atoms[2].offset, header->data_offset + header->entries[2].begin);
  EXPECT_EQ(packing.access, (OwnerAndMode{0640, 1000, 100}));
}

TEST(PackTest, NeighboursAreReadTogether) {
  Pieces pieces;
  pieces.Add("a", "master", 256);
  pieces.Add("b", "master", 256, DType::kF32, 100);  // close behind a
  pieces.Add("c", "master", 256);
  pieces.Write();
  const Packing packing = Packed(pieces.model());
  EXPECT_EQ(packing.pieces, 3 * Pieces::kRanks);
  EXPECT_EQ(packing.reads, 2 * Pieces::kRanks);
  for (const SideAtom& side : packing.atoms) {
    const std::string truth = Pieces::Truth(pieces.model(), side.atom);
    EXPECT_TRUE(packing.bytes.substr(side.offset, truth.size()) == truth);
  }
}

TEST(PackTest, BeyondTheBoundTheSmallestFragmentsComeFirst) {
  Pieces pieces;
  pieces.Add("wide", "master", 3200);
  pieces.Add("narrow", "master", 64);
  pieces.Add("middle", "master", 640);
  pieces.Write();
  EXPECT_THAT(Keys(Packed(pieces.model(), 64 * 4)), ElementsAre("master/narrow"));
  EXPECT_THAT(Keys(Packed(pieces.model(), 704 * 4)), ElementsAre("master/narrow", "master/middle"));
  EXPECT_THAT(Keys(Packed(pieces.model(), 64 * 4 - 1)), IsEmpty());
  EXPECT_EQ(Packed(pieces.model()).atoms.size(), 3u);
}

// An atom that is not a plain gather of small pieces stays where it is.
TEST(PackTest, OnlyPlainGathersOfManySmallPieces) {
  const std::vector<std::function<void(Atom&)>> spoilers = {
      [](Atom& atom) { atom.dtype = DType::kBF16; },  // stored in another type
      [](Atom& atom) { atom.source.gathers[0].locals[0].pieces[0].scale = 2; },
      [](Atom& atom) { atom.source.kind = SourceKind::kAverage; },
      [](Atom& atom) { atom.source.kind = SourceKind::kReplicas; },  // of one copy
      [](Atom& atom) { atom.source.kind = SourceKind::kInline; },
      [](Atom& atom) { atom.source.gathers[0].series[0].count = 15; },
      [](Atom& atom) { atom.dtype = atom.source.gathers[0].series[0].dtype = DType::kC128; },
  };
  for (size_t i = 0; i < spoilers.size(); ++i) {
    Pieces pieces;
    pieces.Add("norm", "master", 256);
    pieces.Write();
    EXPECT_EQ(Packed(pieces.model()).atoms.size(), 1u);
    spoilers[i](pieces.model().atoms[0]);
    EXPECT_THAT(Packed(pieces.model()).atoms, IsEmpty()) << i;
  }
}

TEST(PackTest, TheFirstOfReplicasIsPacked) {
  Pieces pieces;
  const AtomIndex norm = pieces.Add("norm", "master", 256);
  pieces.Add("again", "master", 256);
  pieces.Write();
  Atom& atom = pieces.model().atoms[static_cast<uint32_t>(norm)];
  atom.source.kind = SourceKind::kReplicas;
  atom.source.gathers.push_back(pieces.model().atoms[1].source.gathers[0]);
  const Packing packing = Packed(pieces.model());
  ASSERT_EQ(packing.atoms.size(), 2u);
  const std::string truth = Pieces::Truth(pieces.model(), norm);
  EXPECT_EQ(packing.bytes.substr(packing.atoms[0].offset, truth.size()), truth);
}

TEST(PackTest, ASourceThatIsNotWhatWasIndexedIsNamed) {
  Pieces pieces;
  pieces.Add("norm", "master", 256);
  pieces.Write();
  const std::string path = pieces.PathOf(7);
  namespace fs = std::filesystem;
  const auto time = fs::last_write_time(path);
  fs::last_write_time(path, time + std::chrono::seconds(1));
  EXPECT_EQ(CodeOf(pieces.model(), path), ErrorCode::kStale);
  fs::resize_file(path, 10);
  EXPECT_EQ(CodeOf(pieces.model(), path), ErrorCode::kStale);
  fs::remove(path);
  EXPECT_EQ(CodeOf(pieces.model(), path), ErrorCode::kNotFound);
  fs::create_directory(path);
  EXPECT_EQ(CodeOf(pieces.model(), path), ErrorCode::kInvalid);
}

// Two atoms of one key cannot both be in the file.
TEST(PackTest, AKeyIsTakenOnce) {
  Pieces pieces;
  pieces.Add("norm", "a/b", 256);
  pieces.Add("norm", "b", 256);
  pieces.Write();
  pieces.model().atoms[1].optimizer = "a";
  EXPECT_THAT(Keys(Packed(pieces.model())), ElementsAre("a/b/norm"));
}

}  // namespace
}  // namespace ckptfs
