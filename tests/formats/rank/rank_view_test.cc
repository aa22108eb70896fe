// SPDX-License-Identifier: Apache-2.0

#include "formats/rank/rank_view.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "core/view/plan_reader.h"
#include "tests/conformance/tiny_step.h"

namespace ckptfs {
namespace {

using nlohmann::json;

// One safetensors file of a rank, read whole.
struct SafeFile {
  SafetensorsHeader header;
  std::string data;
  json parts;

  const SafetensorsEntry* Find(const std::string& key) const {
    for (const auto& entry : header.entries) {
      if (entry.name == key) return &entry;
    }
    return nullptr;
  }
  float At(const SafetensorsEntry& entry, uint64_t index) const {
    uint32_t bits = 0;
    if (entry.dtype == DType::kBF16) {
      uint16_t half = 0;
      std::memcpy(&half, data.data() + entry.begin + 2 * index, 2);
      bits = uint32_t{half} << 16;
    } else {
      std::memcpy(&bits, data.data() + entry.begin + 4 * index, 4);
    }
    return std::bit_cast<float>(bits);
  }
};

float ToBf16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  bits += 0x7fff + ((bits >> 16) & 1);
  return std::bit_cast<float>(bits & 0xffff0000u);
}

class RankViewTest : public testing::Test {
 protected:
  void Make(const TinyStepOptions& options, const std::string& layout) {
    step_ = std::make_unique<TinyStep>(options);
    layout_ = Layout::Parse(layout).value();
  }

  std::string Render(const std::string& path) {
    const auto view = RankFormat().Open(ShownState::Of(step_->shared(), layout_));
    EXPECT_TRUE(view.has_value()) << (view ? "" : view.error().message);
    if (!view) return "";
    auto plan = (*view)->MakePlan(path);
    EXPECT_TRUE(plan.has_value()) << path << ": " << (plan ? "" : plan.error().message);
    if (!plan) return "";
    std::string out(plan->size(), '?');
    const PlanReader reader(*plan, step_->model(), step_->blobs());
    auto got = reader.Read(0, std::as_writable_bytes(std::span(out.data(), out.size())));
    EXPECT_TRUE(got.has_value()) << (got ? "" : got.error().message);
    return out;
  }

  SafeFile Open(const std::string& path) {
    SafeFile file;
    const std::string bytes = Render(path);
    file.header = ParseSafetensorsHeader(bytes, bytes.size()).value();
    file.data = bytes.substr(file.header.data_offset);
    file.parts = json::parse(file.header.metadata.at("ckptfs.parts"));
    return file;
  }

  // Every element a part claims is the one of the global tensor, and every other
  // one of the file is zero.  Counts the claimed ones in `covered`.
  void CheckTensor(const SafeFile& file, const SafetensorsEntry& entry,
                   std::map<uint64_t, int>& covered);
  AtomIndex AtomOf(const std::string& key, bool master_of_weight);

  std::unique_ptr<TinyStep> step_;
  Layout layout_;
};

AtomIndex RankViewTest::AtomOf(const std::string& key, bool master_of_weight) {
  const size_t slash = key.find('/');
  const std::string kind =
      slash == std::string::npos ? (master_of_weight ? "master" : "weight") : key.substr(0, slash);
  const auto parameter =
      step_->model().FindParameter(slash == std::string::npos ? key : key.substr(slash + 1));
  return step_->model().FindAtom(*parameter, kind).value();
}

void RankViewTest::CheckTensor(const SafeFile& file, const SafetensorsEntry& entry,
                               std::map<uint64_t, int>& covered) {
  const json part = file.parts.at(entry.name);
  const Shape global = part.at("global_shape");
  const AtomIndex atom = AtomOf(entry.name, part.contains("derived"));
  const bool exact = step_->model().atom(atom).dtype == DType::kF32 && entry.dtype == DType::kF32;
  const uint64_t shown = ElementCount(entry.shape).value();
  const uint64_t begin = part.contains("range") ? part["range"][0].get<uint64_t>() : 0;
  const uint64_t end = part.contains("range") ? part["range"][1].get<uint64_t>() : shown;
  std::map<uint64_t, uint64_t> expected;  // local flat index -> global flat index
  const Shape local = part.contains("local_shape") ? part["local_shape"].get<Shape>() : entry.shape;
  const auto local_strides = RowMajorStrides(local), global_strides = RowMajorStrides(global);
  for (const json& piece : part["pieces"]) {
    Shape box;
    for (const json& dim : piece["box"])
      box.push_back(dim[1].get<uint64_t>() - dim[0].get<uint64_t>());
    const auto box_strides = RowMajorStrides(box);
    for (uint64_t i = 0; i < ElementCount(box).value(); ++i) {
      uint64_t from = 0, to = 0;
      for (size_t d = 0; d < box.size(); ++d) {
        const uint64_t at = i / box_strides[d] % box[d];
        from += (at + piece["box"][d][0].get<uint64_t>()) * global_strides[d];
        to += (at + piece["at"][d].get<uint64_t>()) * local_strides[d];
      }
      expected[to] = from;
    }
  }
  for (uint64_t i = 0; i < shown; ++i) {
    const auto found = expected.find(begin + i);
    const bool inside = begin + i < end && found != expected.end();
    const float value = inside ? TinyStep::Value(atom, found->second) : 0;
    ASSERT_EQ(file.At(entry, i), exact ? value : ToBf16(value)) << entry.name << "[" << i << "]";
    if (inside) ++covered[found->second];
  }
}

TEST_F(RankViewTest, EveryElementIsTheOneItsPartNames) {
  for (const char* layout : {"tp1", "tp2", "tp4", "tp2_pp2_dp2", "tp2_dp3_zero1"}) {
    Make({}, layout);
    std::map<std::string, std::map<uint64_t, int>> covered;
    std::map<std::string, uint64_t> sizes;
    for (uint64_t rank = 0; rank < layout_.World(); ++rank) {
      for (const char* name : {"model", "optimizer"}) {
        const SafeFile file = Open(StrCat("rank", rank, "/", name, ".safetensors"));
        for (const auto& entry : file.header.entries) {
          if (entry.name.starts_with("step/")) continue;
          CheckTensor(file, entry, covered[entry.name]);
          sizes[entry.name] =
              ElementCount(file.parts[entry.name]["global_shape"].get<Shape>()).value();
        }
      }
    }
    for (const auto& [key, size] : sizes) EXPECT_EQ(covered[key].size(), size) << layout << key;
  }
}

TEST_F(RankViewTest, FusedProjectionIsCutPartByPart) {
  Make({}, "tp2");
  const SafeFile file = Open("rank1/model.safetensors");
  const auto* entry = file.Find("layers.0.qkv.weight");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->shape, (Shape{8, 8}));
  const AtomIndex atom = AtomOf("layers.0.qkv.weight", false);
  const uint64_t rows[] = {4, 5, 6, 7, 10, 11, 14, 15};
  for (uint64_t r = 0; r < 8; ++r) {
    EXPECT_EQ(file.At(*entry, r * 8), ToBf16(TinyStep::Value(atom, rows[r] * 8)));
  }
}

TEST_F(RankViewTest, VocabularyIsPaddedWithZeros) {
  Make({}, "tp2");
  const SafeFile file = Open("rank1/model.safetensors");
  const auto* entry = file.Find("embed.weight");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->shape, (Shape{8, 8}));  // 13 rows -> 16
  EXPECT_NE(file.At(*entry, 4 * 8), 0);
  for (uint64_t i = 5 * 8; i < 64; ++i) EXPECT_EQ(file.At(*entry, i), 0);
}

TEST_F(RankViewTest, SlicesOfOneStateConcatenateToIt) {
  Make({}, "dp3_zero1");
  const std::string key = "exp_avg/layers.0.norm.weight";  // 8 elements: slices of 3
  std::vector<float> all;
  for (int rank = 0; rank < 3; ++rank) {
    const SafeFile file = Open(StrCat("rank", rank, "/optimizer.safetensors"));
    const auto* entry = file.Find(key);
    ASSERT_NE(entry, nullptr);
    ASSERT_EQ(entry->shape, (Shape{3}));
    for (int i = 0; i < 3; ++i) all.push_back(file.At(*entry, i));
  }
  const AtomIndex atom = AtomOf(key, false);
  for (uint64_t i = 0; i < 9; ++i) EXPECT_EQ(all[i], i < 8 ? TinyStep::Value(atom, i) : 0);
}

TEST_F(RankViewTest, WiderDtypeComesFromTheMaster) {
  Make({}, "tp1_fp32");
  const SafeFile file = Open("rank0/model.safetensors");
  const auto* entry = file.Find("layers.0.qkv.weight");
  ASSERT_EQ(entry->dtype, DType::kF32);
  const AtomIndex master = AtomOf("master/layers.0.qkv.weight", false);
  EXPECT_EQ(file.At(*entry, 77), TinyStep::Value(master, 77));
  const json info = json::parse(Render("rank0/info.json"));
  EXPECT_EQ(info["model"]["layers.0.qkv.weight"]["derived"], true);
  EXPECT_EQ(info["model"]["layers.0.qkv.weight"]["from"], "master");
  EXPECT_EQ(info["roles"]["layers.0.freq"], "buffer");
  EXPECT_EQ(info["roles"]["layers.0.out.bias"], "frozen");
}

TEST_F(RankViewTest, ExpertsGoToTheirRanksAndAreSlicedByTheExpertGrid) {
  TinyStepOptions options;
  options.experts = 4;
  Make(options, "tp2_dp4_ep4_zero1");  // 8 ranks, 4 expert ranks, 2 of each
  std::map<std::string, std::map<uint64_t, int>> covered;
  for (uint64_t rank = 0; rank < 8; ++rank) {
    const SafeFile model = Open(StrCat("rank", rank, "/model.safetensors"));
    for (uint32_t e = 0; e < 4; ++e) {
      const bool mine = model.Find(StrCat("layers.0.deepspeed_experts.", e, ".weight")) != nullptr;
      EXPECT_EQ(mine, rank % 4 == e) << rank;
    }
    const SafeFile file = Open(StrCat("rank", rank, "/optimizer.safetensors"));
    for (const auto& entry : file.header.entries) {
      if (entry.name.starts_with("step/")) continue;
      CheckTensor(file, entry, covered[entry.name]);
      if (entry.name.find("experts") == std::string::npos) continue;
      EXPECT_EQ(entry.shape, (Shape{20}));
    }
  }
  for (uint32_t e = 0; e < 4; ++e) {
    EXPECT_EQ(covered[StrCat("exp_avg/layers.1.deepspeed_experts.", e, ".weight")].size(), 40u);
  }
}

TEST_F(RankViewTest, AliasesAreNamedOnce) {
  Make({}, "tp1");
  const SafeFile file = Open("rank0/model.safetensors");
  EXPECT_EQ(file.header.metadata.at("head.weight"), "embed.weight");
  EXPECT_EQ(file.header.metadata.at("format"), "pt");
  EXPECT_EQ(file.Find("head.weight"), nullptr);
}

TEST_F(RankViewTest, TensorsAreOrderedByWidthThenName) {
  Make({}, "tp1");
  const SafeFile file = Open("rank0/model.safetensors");
  for (size_t i = 1; i < file.header.entries.size(); ++i) {
    const auto& a = file.header.entries[i - 1];
    const auto& b = file.header.entries[i];
    EXPECT_GE(ByteWidth(a.dtype), ByteWidth(b.dtype));
    EXPECT_TRUE(a.dtype != b.dtype || a.name < b.name);
    EXPECT_EQ(b.begin % ByteWidth(b.dtype), 0u);
  }
}

TEST_F(RankViewTest, RefusesWhatDoesNotDivide) {
  Make({}, "tp3");
  const auto view = RankFormat().Open(ShownState::Of(step_->shared(), layout_));
  ASSERT_FALSE(view);
  EXPECT_NE(view.error().message.find("qkv"), std::string::npos) << view.error().message;
}

TEST_F(RankViewTest, ReducedAndOpaqueStatesAreLeftOutByNameWhenCut) {
  Make({}, "tp2");
  StepModel& model = step_->model();
  for (Atom& atom : model.atoms) {
    if (atom.kind == "exp_avg_sq") atom.relation = Relation::kReduced;
  }
  const json info = json::parse(Render("rank0/info.json"));
  EXPECT_TRUE(info["optimizer"].contains("exp_avg_sq/layers.0.norm.weight"));  // not cut
  EXPECT_FALSE(info["optimizer"].contains("exp_avg_sq/layers.0.qkv.weight"));
  EXPECT_NE(info["left_out"].dump().find("exp_avg_sq/layers.0.qkv.weight"), std::string::npos);
  const std::vector<std::string> lines = RankFormat()
                                             .Open(ShownState::Of(step_->shared(), layout_))
                                             .value()
                                             ->LeftOut();  // as the layout's offer has them
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("'exp_avg_sq/"), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find(" more: a reduced state is not cut"), std::string::npos) << lines[0];
}

TEST_F(RankViewTest, NothingIsLeftOutWhereAllIsShown) {
  Make({}, "tp2");
  EXPECT_TRUE(
      RankFormat().Open(ShownState::Of(step_->shared(), layout_)).value()->LeftOut().empty());
}

}  // namespace
}  // namespace ckptfs
