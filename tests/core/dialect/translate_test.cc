// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/translate.h"

#include <gtest/gtest.h>

#include <set>

#include "core/base/strings.h"
#include "core/state/assembler.h"
#include "formats/dialects/shipped.h"
#include "formats/families/shipped.h"

namespace ckptfs {
namespace {

constexpr uint64_t kExperts = 4;

// Builds steps of one blob, in which everything lies behind each other.
class Builder {
 public:
  Builder() { step_.blobs.emplace_back(); }

  // Weight, master, moments and count of steps.
  void Add(const std::string& name, Shape shape, bool states = true) {
    Parameter parameter;
    parameter.name = name;
    parameter.shape = shape;
    parameter.stage = StageRule::kLayer;
    const ParameterIndex p{static_cast<uint32_t>(step_.parameters.size())};
    step_.parameters.push_back(parameter);
    group_.parameters.push_back(p);
    if (!states) {
      AddAtom(p, "weight", shape);
      return;
    }
    const uint32_t weight = AddAtom(p, "weight", shape);
    const uint32_t master = AddAtom(p, "master", shape);
    step_.atoms[weight].source = CastSource(AtomIndex{master});
    step_.atoms[weight].derived = true;
    AddAtom(p, "exp_avg", shape);
    Atom& step = step_.atoms[AddAtom(p, "step", {})];
    step.relation = Relation::kScalar;
    step.source = InlineSource("1234", false);
  }

  // Mixtral of two layers, as modules or as files.
  static Builder Modules(bool states = true) {
    Builder out;
    for (int layer = 0; layer < 2; ++layer) {
      const std::string at = StrCat("model.layers.", layer, ".");
      out.Add(at + "self_attn.q_proj.weight", {4, 4}, states);
      out.Add(at + "mlp.gate.weight", {kExperts, 4}, states);
      out.Add(at + "mlp.experts.gate_up_proj", {kExperts, 6, 4}, states);
      out.Add(at + "mlp.experts.down_proj", {kExperts, 4, 3}, states);
    }
    return out;
  }

  StepModel Finish() {
    group_.hyper_parameters = "h";
    step_.groups = {group_};
    step_.BuildIndex();
    return step_;
  }
  StepModel& step() { return step_; }

 private:
  uint32_t AddAtom(ParameterIndex parameter, const std::string& kind, const Shape& shape) {
    Atom atom;
    atom.parameter = parameter;
    atom.kind = kind;
    atom.shape = shape;
    const uint64_t count = ElementCount(shape).value();
    atom.source.gathers = {
        {{WholeTensor(shape)}, {{0, 1, 0, 0, count, 0, 0, at_, 0, DType::kF32}}, {}}};
    at_ += 4 * count;
    step_.atoms.push_back(std::move(atom));
    return static_cast<uint32_t>(step_.atoms.size() - 1);
  }

  StepModel step_;
  Group group_;
  uint64_t at_ = 0;
};

const DialectTable& Table() {
  static const DialectTable table = ShippedDialect(Dialect::kHf5).value();
  return table;
}

Result<std::shared_ptr<const StepModel>> To(const StepModel& step, Dialect to,
                                            const ModelKind& kind = {"mixtral", kExperts}) {
  static const FamilySet families = ShippedFamilies().value();
  const DialectEvidence found = FindDialect(step, Table(), Dialect::kHf5, kind);
  if (found.same || found.dialect == to) return std::make_shared<const StepModel>(step);
  return Translate(step, found, kind.sizes, families);
}

// Where each element of the atom lies in the blob.
std::vector<uint64_t> Places(const StepModel& step, const std::string& name,
                             const std::string& kind) {
  const auto parameter = step.FindParameter(name);
  if (!parameter) return {};
  auto atom = step.FindAtom(*parameter, kind);
  if (!atom) return {};
  while (const auto of = DerivedFrom(step.atom(*atom).source)) atom = *of;
  const Atom& found = step.atom(*atom);
  const auto strides = RowMajorStrides(found.shape);
  std::vector<uint64_t> places(ElementCount(found.shape).value());
  const Gather& gather = found.source.gathers.front();
  for (const FragmentSeries& series : gather.series) {
    for (const Piece& piece : gather.locals[series.local].pieces) {
      const auto count = ElementCount(piece.shape).value();
      for (uint64_t i = 0; i < count; ++i) {
        uint64_t rest = i, at = 0, flat = piece.local_offset;
        for (size_t d = piece.shape.size(); d-- > 0;) {
          const uint64_t index = rest % piece.shape[d];
          rest /= piece.shape[d];
          at += (piece.atom_begin[d] + index) * strides[d];
          flat += index * piece.local_strides[d];
        }
        if (flat < series.flat_begin || flat >= series.flat_begin + series.elements) continue;
        places[at] = series.offset + 4 * (flat - series.flat_begin);
      }
    }
  }
  return places;
}

TEST(TranslateTest, ExpertsOfModulesAreTensorsOfFiles) {
  const StepModel step = Builder::Modules().Finish();
  const auto files = To(step, Dialect::kHf);
  ASSERT_TRUE(files.has_value()) << files.error().message;
  const StepModel& shown = **files;
  EXPECT_EQ(shown.parameters.size(), 2 * (2 + 3 * kExperts));
  const std::string one = "model.layers.1.block_sparse_moe.experts.2.w3.weight";
  ASSERT_TRUE(shown.FindParameter(one).has_value());
  EXPECT_FALSE(shown.FindParameter("model.layers.1.mlp.experts.gate_up_proj").has_value());
  EXPECT_TRUE(shown.FindParameter("model.layers.0.block_sparse_moe.gate.weight").has_value());
  const Parameter& parameter = shown.parameter(*shown.FindParameter(one));
  EXPECT_EQ(parameter.shape, (Shape{3, 4}));
  EXPECT_EQ(parameter.expert, 2u);
  EXPECT_TRUE(NamesItsExpert(parameter));
  EXPECT_EQ(parameter.pattern, Pattern::Shard(0));
  EXPECT_EQ(shown.ExpertsOf(parameter), kExperts);
  for (const char* kind : {"weight", "master", "exp_avg"}) {
    const auto whole = Places(step, "model.layers.1.mlp.experts.gate_up_proj", kind);
    const auto part = Places(shown, one, kind);
    ASSERT_EQ(part.size(), 12u);
    // Rows 3 to 5 of expert 2.
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 2 * 24 + 12)) << kind;
  }
  EXPECT_EQ(shown.atom(*shown.FindAtom(*shown.FindParameter(one), "step")).source.inline_bytes,
            "1234");
  EXPECT_TRUE(shown.left_out.empty());
}

TEST(TranslateTest, ThereAndBackIsTheStep) {
  const StepModel step = Builder::Modules().Finish();
  const auto files = To(step, Dialect::kHf);
  ASSERT_TRUE(files.has_value());
  const auto modules = To(**files, Dialect::kHf5);
  ASSERT_TRUE(modules.has_value()) << modules.error().message;
  const StepModel& back = **modules;
  ASSERT_EQ(back.parameters.size(), step.parameters.size());
  for (size_t i = 0; i < step.parameters.size(); ++i) {
    const std::string& name = step.parameters[i].name;
    EXPECT_EQ(back.parameters[i].name, name);
    EXPECT_EQ(back.parameters[i].shape, step.parameters[i].shape);
    for (const char* kind : {"weight", "master", "exp_avg"}) {
      EXPECT_EQ(Places(back, name, kind), Places(step, name, kind)) << name;
    }
  }
  EXPECT_EQ(back.groups.front().parameters, step.groups.front().parameters);
  const Parameter& stacked =
      back.parameter(*back.FindParameter("model.layers.0.mlp.experts.gate_up_proj"));
  EXPECT_EQ(stacked.stacked_experts, kExperts);
  EXPECT_FALSE(stacked.expert.has_value());
  // A step that is in the dialect already is itself.
  EXPECT_EQ(To(back, Dialect::kHf5).value()->parameters.size(), back.parameters.size());
}

TEST(TranslateTest, ADialectIsRecognisedByConfigNamesAndShapesTogether) {
  const StepModel step = Builder::Modules().Finish();
  const auto said = [&](const StepModel& of, const ModelKind& kind) {
    return FindDialect(of, Table(), Dialect::kHf5, kind);
  };
  EXPECT_EQ(said(step, {"mixtral", kExperts}).dialect, Dialect::kHf5);
  EXPECT_EQ(said(step, {"mixtral", 0}).dialect, Dialect::kHf5);
  const auto nothing = [&](const StepModel& of, const ModelKind& kind, std::string_view why) {
    const FoundDialect one = said(of, kind);
    EXPECT_EQ(one.dialect, Dialect::kAsSource);
    EXPECT_FALSE(one.same);
    EXPECT_NE(one.why.find(why), std::string::npos) << one.why;
    EXPECT_FALSE(To(of, Dialect::kHf, kind).has_value());
  };
  nothing(step, {"", 0}, "no config.json");
  nothing(step, {"own", 0}, "in no table");
  nothing(step, {"mixtral", 8}, "it has 4 experts, but config.json 8");
  nothing(step, {"jamba", 0}, "no name is one that tells");
  EXPECT_TRUE(said(step, {"llama", 0}).same);
  Builder odd = Builder::Modules();
  odd.Add("model.layers.2.mlp.experts.gate_up_proj", {kExperts, 5, 4});
  nothing(odd.Finish(), {"mixtral", 0}, "5 does not divide by its 2 parts");
  Builder mixed = Builder::Modules();
  mixed.Add("model.layers.2.block_sparse_moe.experts.0.w2.weight", {4, 3});
  nothing(mixed.Finish(), {"mixtral", 0}, "is a name of files");
}

TEST(TranslateTest, AStackOfMoreExpertsThanAnyModelHasIsRefused) {
  for (const uint64_t experts : {uint64_t{1} << 20, uint64_t{1} << 62}) {
    Builder builder;
    builder.Add("model.layers.0.mlp.experts.gate_up_proj", {experts, 2, 0}, false);
    const auto made = To(builder.Finish(), Dialect::kHf, {"mixtral", 0});
    ASSERT_FALSE(made.has_value());
    EXPECT_NE(made.error().message.find("more than 1048576 tensors"), std::string::npos)
        << made.error().message;
  }
}

TEST(TranslateTest, AnExpertThatIsMissingIsRefusedByName) {
  Builder files;
  for (const int expert : {0, 1, 3}) {
    files.Add(StrCat("model.layers.0.block_sparse_moe.experts.", expert, ".w2.weight"), {4, 3});
  }
  const auto made = To(files.Finish(), Dialect::kHf5, {"mixtral", 0});
  ASSERT_FALSE(made.has_value());
  EXPECT_NE(made.error().message.find("3 of its 4 parts are there, up to expert 3"),
            std::string::npos)
      << made.error().message;
  EXPECT_NE(made.error().message.find("model.layers.0.mlp.experts.down_proj"), std::string::npos);
}

// Four experts as files.
Builder Down() {
  Builder files;
  for (uint64_t expert = 0; expert < kExperts; ++expert) {
    files.Add(StrCat("model.layers.0.block_sparse_moe.experts.", expert, ".w2.weight"), {4, 3});
  }
  return files;
}

TEST(TranslateTest, StatesThatCannotFollowAreRefusedByNameUnlessWeightsAreAskedForAlone) {
  StepModel step = Down().Finish();
  const auto of = step.FindAtom(ParameterIndex{2}, "step");
  step.atoms[static_cast<uint32_t>(*of)].source.inline_bytes = "1235";
  const auto made = To(step, Dialect::kHf5);
  ASSERT_FALSE(made.has_value());
  EXPECT_NE(made.error().message.find("step: its parts are different values"), std::string::npos)
      << made.error().message;
  const ModelKind kind{"mixtral", kExperts};
  const auto weights = Translate(step, FindDialect(step, Table(), Dialect::kHf5, kind), kind.sizes,
                                 ShippedFamilies().value(), Carried::kWeights);
  ASSERT_TRUE(weights.has_value()) << weights.error().message;
  EXPECT_EQ((*weights)->atoms.size(), 2u);  // weight and master
  EXPECT_TRUE((*weights)->groups.empty());
}

TEST(TranslateTest, PartsInGroupsOfOtherHyperParametersAreRefused) {
  StepModel step = Down().Finish();
  const auto split = [&](const std::string& hyper_parameters) {
    StepModel changed = step;
    Group second = step.groups.front();
    changed.groups.front().parameters.pop_back();
    second.parameters = {step.groups.front().parameters.back()};
    second.hyper_parameters = hyper_parameters;
    changed.groups.push_back(second);
    return To(changed, Dialect::kHf5);
  };
  EXPECT_TRUE(split("h").has_value());
  const auto made = split("other");
  ASSERT_FALSE(made.has_value());
  EXPECT_NE(made.error().message.find("other hyper-parameters"), std::string::npos);
  step.groups.front().parameters.pop_back();
  const auto some = To(step, Dialect::kHf5);
  ASSERT_FALSE(some.has_value());
  EXPECT_NE(some.error().message.find("3 of its 4 parts"), std::string::npos);
}

TEST(TranslateTest, PartsOfDifferentDtypesRolesOrShapesAreRefused) {
  StepModel step = Down().Finish();
  step.atoms[0].dtype = DType::kBF16;
  EXPECT_FALSE(To(step, Dialect::kHf5).has_value());
  step = Down().Finish();
  step.parameters[1].role = Role::kFrozen;
  EXPECT_FALSE(To(step, Dialect::kHf5).has_value());
  step = Down().Finish();
  step.parameters[3].shape = {3, 4};
  EXPECT_FALSE(To(step, Dialect::kHf5).has_value());
}

TEST(TranslateTest, SecondNamesAndTensorsBesideTheModelStay) {
  Builder files = Builder::Modules();
  files.Add("embed.weight", {2, 2});
  files.Add("beside", {2, 2}, false);
  StepModel step = files.Finish();
  step.aliases = {{"lm_head.weight", *step.FindParameter("embed.weight")}};
  step.parameters.back().role = Role::kBeside;
  const uint32_t last = static_cast<uint32_t>(step.atoms.size() - 1);
  Document document{"client/copy", "", "p", {}};
  document.tensors.push_back({DType::kF32, {2, 2}, {2, 1}, BlobIndex{}, 0, AtomIndex{last}});
  step.documents = {document};
  step.groups.front().parameters.pop_back();
  const auto made = To(step, Dialect::kHf);
  ASSERT_TRUE(made.has_value()) << made.error().message;
  const StepModel& shown = **made;
  EXPECT_EQ(shown.FindParameter("lm_head.weight"), shown.FindParameter("embed.weight"));
  const AtomIndex mentioned = *shown.documents.front().tensors.front().atom;
  EXPECT_EQ(shown.parameter(shown.atom(mentioned).parameter).name, "beside");
}

TEST(TranslateTest, NamesKeepWhatAWrapperPutBeforeThem) {
  Builder builder;
  builder.Add("module.model.layers.0.mlp.experts.down_proj", {kExperts, 4, 3});
  const auto made = To(builder.Finish(), Dialect::kHf);
  ASSERT_TRUE(made.has_value()) << made.error().message;
  const Parameter& last = (*made)->parameters.back();
  EXPECT_EQ(last.name, "module.model.layers.0.block_sparse_moe.experts.3.w2.weight");
  EXPECT_TRUE(NamesItsExpert(last));
}

}  // namespace
}  // namespace ckptfs
