// SPDX-License-Identifier: Apache-2.0
#include "formats/huggingface/whole_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "core/io/file_root.h"

namespace ckptfs::huggingface {
namespace {

constexpr uint64_t kData = 128;  // where the tensors of a file begin

struct Stored {
  std::string name;
  std::string file;
  uint64_t offset = 0;
  Shape shape = {4};
  DType stored = DType::kBF16;
  std::string shown_name = name;
  DType shown = DType::kBF16;
  std::vector<uint64_t> pieces = {0};  // where equal parts of it lie, behind `offset`
  double scale = 1.0;
};

// Two files of two tensors.
std::vector<Stored> Sound() {
  return {{"a", "1.safetensors", kData},
          {"b", "1.safetensors", kData + 8},
          {"c", "0.safetensors", kData + 8},
          {"d", "0.safetensors", kData}};
}

struct Case {
  StepModel step;
  std::vector<ShownTensor> tensors;
};

Case Make(const std::vector<Stored>& all, const std::set<std::string>& kept) {
  Assembler assembler;
  const uint32_t root = assembler.AddRoot(std::make_shared<FileRoot>("/nowhere"));
  std::map<std::string, BlobIndex> blobs;
  auto& files = assembler.header().facts.safetensors;
  for (const std::string name : {"0.safetensors", "1.safetensors"}) {
    Blob blob;
    blob.root = root;
    blob.path = name;
    blob.stamp.size = kData + 16;
    blobs[name] = assembler.AddBlob(blob);
    if (kept.contains(name)) files.emplace(blobs[name], kData);
  }
  std::vector<ShownTensor> tensors;
  for (const Stored& one : all) {
    Parameter parameter;
    parameter.name = one.name;
    parameter.shape = one.shape;
    const ParameterIndex index = assembler.AddParameter(parameter).value();
    const AtomIndex atom = assembler.AddAtom(index, "", "weight", one.stored, one.shape).value();
    const uint64_t elements = ElementCount(one.shape).value();
    LocalTensor held = WholeTensor(one.shape);
    for (Piece& piece : held.pieces) piece.scale = one.scale;
    const uint32_t local = assembler.AddLocal(atom, 0, std::move(held));
    const uint64_t each = elements / one.pieces.size();
    for (size_t k = 0; k < one.pieces.size() && elements > 0; ++k) {
      assembler.AddFragment(atom, 0, local,
                            Fragment{k * each, (k + 1) * each, blobs[one.file],
                                     one.offset + one.pieces[k], one.stored});
    }
    tensors.push_back({one.shown_name, atom, one.shown,
                       std::make_shared<const LocalTensor>(WholeTensor(one.shape)), elements,
                       ByteCount(one.shape, one.shown).value(), true});
  }
  return {std::move(assembler).Finish().value(), std::move(tensors)};
}

const std::set<std::string> kBoth = {"0.safetensors", "1.safetensors"};

size_t Wholes(const std::vector<Stored>& all, const std::set<std::string>& kept = kBoth) {
  const Case made = Make(all, kept);
  return WholeFilesOf(made.step, made.tensors).size();
}

TEST(WholeFilesTest, AreByPathWithTheirTensorsByOffset) {
  const Case made = Make(Sound(), kBoth);
  const auto files = WholeFilesOf(made.step, made.tensors);
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(made.step.blob(files[0].blob).path, "0.safetensors");
  EXPECT_THAT(files[0].tensors, testing::ElementsAre(3, 2));
  EXPECT_THAT(files[1].tensors, testing::ElementsAre(0, 1));
}

TEST(WholeFilesTest, NoneWhereOneTensorIsNotShownAsItLies) {
  using Change = std::function<void(std::vector<Stored>&)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"another name", [](auto& all) { all[1].shown_name = "b2"; }},
      {"a dtype of the same width", [](auto& all) { all[1].shown = DType::kF16; }},
      {"a wider dtype", [](auto& all) { all[1].shown = DType::kF32; }},
      {"scaled", [](auto& all) { all[1].scale = 0.5; }},
      {"in another order",
       [](auto& all) {
         all[1].pieces = {4, 0};
       }},
      {"begun there and ended elsewhere",
       [](auto& all) {
         all[0].pieces = {0, 12};
       }},
      {"no elements",
       [](auto& all) {
         all.push_back({"e", "0.safetensors", kData + 16, {0}});
       }},
      {"a hole before it", [](auto& all) { all[1].offset += 2, all[1].shape = {3}; }},
      {"half on another", [](auto& all) { all[1].offset -= 4; }},
      {"the first is not shown", [](auto& all) { all.erase(all.begin()); }},
      {"the last is not shown", [](auto& all) { all.erase(all.begin() + 1); }},
      {"two of one place",
       [](auto& all) {
         all.push_back({"e", "1.safetensors", kData + 8});
       }},
  };
  for (const auto& [what, change] : changes) {
    std::vector<Stored> all = Sound();
    change(all);
    EXPECT_EQ(Wholes(all), 0u) << what;
  }
}

TEST(WholeFilesTest, NoneWhereOneFileMayNotBeShown) {
  EXPECT_EQ(Wholes(Sound(), {}), 0u);
  EXPECT_EQ(Wholes(Sound(), {"0.safetensors"}), 0u);
  std::vector<Stored> one = Sound();
  one.resize(2);
  EXPECT_EQ(Wholes(one, {"1.safetensors"}), 1u) << "what is not shown at all does not count";
}

}  // namespace
}  // namespace ckptfs::huggingface
