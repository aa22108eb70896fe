// SPDX-License-Identifier: Apache-2.0
#include "core/manifest/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/blob/chunk_list.h"
#include "core/manifest/manifest_check.h"
#include "core/manifest/manifest_format.h"
#include "core/model/side_blob.h"
#include "core/store/store.h"
#include "tests/core/store/sample_model.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;
using testing_support::LargeModel;
using testing_support::OwnedModel;
using testing_support::SampleModel;

constexpr std::string_view kBlobs = "/this/store/blobs";

std::string Rendered(const StepModel& model) {
  auto bytes = RenderManifest(model, kBlobs);
  EXPECT_TRUE(bytes) << bytes.error().message;
  return bytes ? *bytes : std::string();
}

std::string Refusal(std::string_view bytes) {
  auto model = ParseManifest(bytes);
  return model ? "accepted" : model.error().message;
}

// The refusal of the sample after an edit.
std::string RefusalOf(const std::function<void(StepModel&)>& edit) {
  StepModel model = SampleModel();
  edit(model);
  return Refusal(Rendered(model));
}

TEST(ManifestTest, EveryFieldSurvives) {
  StepModel before = SampleModel();
  before.left_out = {{LeftOutPart::kOptimizer, "'a'", "nobody knows whose", "give more", 3},
                     {LeftOutPart::kModel, "'b'", "it is a list", "", 0}};
  const std::string bytes = Rendered(before);
  auto after = ParseManifest(bytes);
  ASSERT_TRUE(after) << after.error().message;
  EXPECT_EQ(Rendered(*after), bytes);
  EXPECT_EQ(after->roots, before.roots);
  EXPECT_EQ(after->layout, before.layout);
  EXPECT_EQ(after->model_dtype, before.model_dtype);
  EXPECT_EQ(after->iteration, before.iteration);
  EXPECT_EQ(after->mtime_ns, before.mtime_ns);
  EXPECT_EQ(after->notes, before.notes);
  EXPECT_EQ(after->left_out, before.left_out);
  ASSERT_EQ(after->atoms.size(), before.atoms.size());
  for (size_t i = 0; i < before.atoms.size(); ++i) {
    EXPECT_EQ(after->atoms[i].source.gathers, before.atoms[i].source.gathers) << i;
    EXPECT_EQ(after->atoms[i].source.inline_bytes, before.atoms[i].source.inline_bytes) << i;
    EXPECT_EQ(after->atoms[i].kind, before.atoms[i].kind) << i;
  }
  ASSERT_EQ(after->parameters.size(), before.parameters.size());
  for (size_t i = 0; i < before.parameters.size(); ++i) {
    EXPECT_EQ(after->parameters[i].name, before.parameters[i].name);
    EXPECT_EQ(after->parameters[i].pattern, before.parameters[i].pattern);
    EXPECT_EQ(after->parameters[i].expert, before.parameters[i].expert);
    EXPECT_EQ(after->parameters[i].expert_at, before.parameters[i].expert_at);
    EXPECT_EQ(after->parameters[i].stacked_experts, before.parameters[i].stacked_experts);
  }
  EXPECT_EQ(after->blobs[1].stamp, before.blobs[1].stamp);
  EXPECT_EQ(after->blobs[1].content, before.blobs[1].content);
  EXPECT_EQ(after->blobs[1].path, before.blobs[1].path);
  EXPECT_TRUE(after->blobs[1].store_owned);
  EXPECT_EQ(after->documents[0].pickle, before.documents[0].pickle);
  EXPECT_EQ(after->documents[0].tensors[0].strides, before.documents[0].tensors[0].strides);
  EXPECT_EQ(after->groups[0].parameters, before.groups[0].parameters);
  EXPECT_EQ(after->FindParameter("lm_head.weight"), ParameterIndex{0});
}

TEST(ManifestTest, HowTheSourceWasCutSurvives) {
  StepModel before = SampleModel();
  Pattern held = Pattern::Shard(0, {4, 4});
  held.cuts[0].widths = {3, 1, 1, 3};
  before.parameters[1].source_pattern = held;
  before.parameters[1].source_stages = {0, 1};
  before.layout.pp = 2;
  auto after = ParseManifest(Rendered(before));
  ASSERT_TRUE(after) << after.error().message;
  EXPECT_EQ(after->parameters[1].source_pattern, held);
  EXPECT_EQ(after->parameters[1].source_stages, (std::vector<uint32_t>{0, 1}));
  EXPECT_FALSE(after->parameters[0].source_pattern);
  EXPECT_THAT(after->parameters[0].source_stages, testing::IsEmpty());
}

TEST(ManifestTest, ASourcesStagesAreThose) {
  for (const std::vector<uint32_t>& stages :
       {std::vector<uint32_t>{2}, std::vector<uint32_t>{1, 0}, std::vector<uint32_t>{0, 0}}) {
    EXPECT_THAT(RefusalOf([&](StepModel& model) {
                  model.layout.pp = 2;
                  model.parameters[2].source_stages = stages;
                }),
                HasSubstr("must rise and stay below 2"));
  }
}

TEST(ManifestTest, AnExpertIdIsInItsName) {
  EXPECT_THAT(RefusalOf([](StepModel& model) { model.parameters[2].expert_at = 3; }),
              HasSubstr("does not name its expert"));
}

TEST(ManifestTest, TheFamilysRulesTravelWithTheStep) {
  StepModel before = SampleModel();
  before.family = "mine";
  before.family_rules = "name = \"mine\"\n";
  before.family_sizes = {{"head_dim", 16}, {"layers", -1}};
  const auto after = ParseManifest(Rendered(before));
  ASSERT_TRUE(after) << after.error().message;
  EXPECT_EQ(after->family_rules, before.family_rules);
  EXPECT_EQ(after->family_sizes, before.family_sizes);
}

TEST(ManifestTest, AnEmptyStepSurvives) {
  StepModel model;
  auto after = ParseManifest(Rendered(model));
  ASSERT_TRUE(after) << after.error().message;
  EXPECT_EQ(Rendered(*after), Rendered(model));
}

TEST(ManifestTest, EqualModelsGiveEqualBytesAtAnyAlignment) {
  const std::string bytes = Rendered(SampleModel());
  EXPECT_EQ(bytes, Rendered(SampleModel()));
  const std::string shifted = StrCat("x", bytes);
  EXPECT_EQ(Refusal(std::string_view(shifted).substr(1)), "accepted");
}

// The sample with two of its atoms in a side blob.
StepModel PackedModel() {
  StepModel model = SampleModel();
  Blob blob;
  blob.content = DigestOf("side blob");
  blob.path = StrCat("side/", blob.content.Hex(), ".safetensors");
  blob.stamp = BlobStamp{8192, 1700000000000000001, 0, 77};
  blob.fingerprint = DigestOf("its ends");
  const SideAtom atoms[] = {{AtomIndex{0}, 4096}, {AtomIndex{2}, 4096 + 96}};
  return WithSideBlob(std::move(model), blob, "/store/blobs", atoms);
}

// The owned sample, whose own file has a list of digests.
StepModel ListedModel() {
  StepModel model = OwnedModel(std::string(kBlobs));
  Blob& blob = model.blobs[0];
  blob.stamp.size = 3 * kChunkBytes;
  blob.chunks = {DigestOf("a"), DigestOf("b"), DigestOf("c")};
  blob.chunk_list = DigestOfChunks(blob.chunks);
  return model;
}

std::string GoldenPath(const std::string& name) {
  return StrCat(CKPTFS_TEST_DATA, "/golden/", name);
}

std::string ReadGolden(const std::string& name) {
  std::ifstream file(GoldenPath(name), std::ios::binary);
  std::stringstream stream;
  stream << file.rdbuf();
  return stream.str();
}

// tests/golden/<name> holds `model` and says `version`: it was written by a build
// that knew no newer one.  Only those of this build's version can be written.
void ExpectGolden(const std::string& name, uint32_t version, const StepModel& model) {
  if (std::getenv("CKPTFS_WRITE_GOLDEN") != nullptr && version == kManifestVersion) {
    std::ofstream(GoldenPath(name), std::ios::binary) << Rendered(model);
  }
  const std::string bytes = ReadGolden(name);
  ASSERT_GT(bytes.size(), kManifestHeaderSize);
  EXPECT_EQ(bytes[8], static_cast<char>(version));
  auto golden = ParseManifest(bytes, kBlobs);
  ASSERT_TRUE(golden) << golden.error().message;
  EXPECT_EQ(Rendered(*golden), Rendered(model));
  // Payloads of before hold less: the same source adopted again is another step.
  if (version == kManifestVersion) {
    EXPECT_EQ(ManifestDigest(bytes), ManifestDigest(Rendered(model)));
  }
}

TEST(ManifestTest, GoldenFileOfVersion1StillReads) {
  ExpectGolden("manifest_v1.bin", 1, SampleModel());
}

TEST(ManifestTest, GoldenFileWithASideBlobStillReads) {
  ExpectGolden("manifest_v1_packed.bin", 1, PackedModel());
  EXPECT_EQ(Rendered(WithoutSideBlob(PackedModel())), Rendered(SampleModel()));
}

// No release had a format that makes such an atom; the test of version 1 did.
TEST(ManifestTest, ValuesWithScalesAreRefusedByName) {
  const auto golden = ParseManifest(ReadGolden("manifest_v1_scaled.bin"), kBlobs);
  ASSERT_FALSE(golden);
  EXPECT_EQ(golden.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(golden.error().message,
              HasSubstr("a source of kind 4 (values with scales per block)"));
}

TEST(ManifestTest, GoldenFileWhoseWeightsAreNotTheirMastersStillReads) {
  StepModel model = OwnedModel(std::string(kBlobs));
  model.weights_apart = true;
  ExpectGolden("manifest_v2_apart.bin", 2, model);
  EXPECT_TRUE(ParseManifest(ReadGolden("manifest_v2_apart.bin"), kBlobs)->weights_apart);
}

TEST(ManifestTest, GoldenFileOfVersion2StillReads) {
  ExpectGolden("manifest_v2.bin", 2, OwnedModel(std::string(kBlobs)));
}

TEST(ManifestTest, GoldenFileOfVersion3StillReads) {
  ExpectGolden("manifest_v3.bin", 3, ListedModel());
}

// ---- whose bytes they are -------------------------------------------------------

TEST(ManifestTest, AStoresOwnRootIsWhereverTheStoreIs) {
  const std::string bytes = Rendered(OwnedModel(std::string(kBlobs)));
  EXPECT_EQ(bytes.find(kBlobs), std::string::npos);
  EXPECT_EQ(bytes, *RenderManifest(OwnedModel("/another/place"), "/another/place"));
  const auto moved = ParseManifest(bytes, "/moved");
  ASSERT_TRUE(moved) << moved.error().message;
  EXPECT_EQ(moved->PathOf(moved->blobs[0]), "/moved/0123/global_step5/a/model.pt");
  EXPECT_EQ(moved->roots[1], SampleModel().roots[1]);
  EXPECT_TRUE(moved->blobs[0].owned());
  EXPECT_FALSE(moved->blobs[1].owned());
  EXPECT_EQ(moved->blobs[0].chunks, OwnedModel("").blobs[0].chunks);
  EXPECT_EQ(moved->blobs[0].chunk_bytes, kChunkBytes);
}

TEST(ManifestTest, RefusesBlobsThatNothingTells) {
  const auto refusal = [](const std::function<void(Blob&)>& edit) {
    StepModel model = OwnedModel(std::string(kBlobs));
    edit(model.blobs[0]);
    return Refusal(Rendered(model));
  };
  EXPECT_EQ(refusal([](Blob&) {}), "accepted");
  EXPECT_THAT(refusal([](Blob& blob) { blob.root = 1; }), HasSubstr("no stamp"));
  for (const char* root : {"/..", "/../x", "/a//b", "/a/"}) {
    StepModel model = OwnedModel(std::string(kBlobs));
    model.roots[0] = StrCat(kBlobs, root);
    EXPECT_THAT(Refusal(Rendered(model)), HasSubstr("path")) << root;
  }
  EXPECT_THAT(refusal([](Blob& blob) { blob.store_owned = false; }), HasSubstr("no stamp"));
  EXPECT_THAT(refusal([](Blob& blob) { blob.chunk_bytes = 0, blob.chunks.clear(); }),
              HasSubstr("neither"));
  EXPECT_THAT(refusal([](Blob& blob) { blob.chunks.pop_back(); }), HasSubstr("0 digests"));
  EXPECT_THAT(refusal([](Blob& blob) { blob.stamp.size += kChunkBytes; }), HasSubstr("1 digests"));
  EXPECT_THAT(refusal([](Blob& blob) { blob.chunk_bytes = 1; }), HasSubstr("chunks of 1 bytes"));
  EXPECT_THAT(refusal([](Blob& blob) { blob.chunk_bytes = 0; }), HasSubstr("chunks of 0 bytes"));
  EXPECT_THAT(RefusalOf([](StepModel& m) {
                m.blobs[0].stamp = BlobStamp{256, 0, 0, 0};
              }),
              HasSubstr("no stamp"));
}

// ---- digests beside the files ----------------------------------------------------

TEST(ManifestTest, AListOfDigestsIsOneDigest) {
  StepModel model = ListedModel();
  Blob& blob = model.blobs[0];
  blob.chunk_list = {};
  const Digest before = *IdentityDigest(model, kBlobs);
  blob.chunk_list = DigestOfChunks(blob.chunks);
  const std::string bytes = Rendered(model);
  const auto read = ParseManifest(bytes, kBlobs);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->blobs[0].chunk_list, blob.chunk_list);
  EXPECT_TRUE(read->blobs[0].chunks.empty());
  EXPECT_EQ(read->blobs[0].chunk_bytes, kChunkBytes);
  EXPECT_EQ(Rendered(*read), bytes);
  // A manifest of before says the same step.
  EXPECT_EQ(*IdentityDigest(*read, kBlobs), before);
  StepModel other = *read;
  other.blobs[0].chunk_list.low ^= 1;
  EXPECT_NE(*IdentityDigest(other, kBlobs), before);
}

TEST(ManifestTest, RefusesListsThatMakeNoSense) {
  const auto refusal = [](const std::function<void(Blob&)>& edit) {
    StepModel model = OwnedModel(std::string(kBlobs));
    model.blobs[0].chunks.clear();
    model.blobs[0].chunk_list = DigestOf("a list");
    edit(model.blobs[0]);
    return Refusal(Rendered(model));
  };
  EXPECT_EQ(refusal([](Blob&) {}), "accepted");
  EXPECT_THAT(refusal([](Blob& blob) { blob.chunk_bytes = 0; }), HasSubstr("chunks of 0 bytes"));
  EXPECT_THAT(refusal([](Blob& blob) { blob.store_owned = false; }), HasSubstr("not the store's"));
  EXPECT_THAT(refusal([](Blob& blob) { blob.root = 1; }), HasSubstr("not the store's"));
  EXPECT_THAT(refusal([](Blob& blob) { blob.chunk_list = {}; }), HasSubstr("0 digests"));
}

// 256 ranks of 256 MiB each.
TEST(ManifestTest, ItDoesNotGrowWithTheBytesOfItsFiles) {
  constexpr size_t kRanks = 256, kChunks = 1024;
  const auto bytes_of = [](size_t chunks, bool listed) {
    StepModel model = OwnedModel(std::string(kBlobs));
    Blob rank = model.blobs[0];
    model.blobs.clear();
    model.atoms.clear();
    model.documents.clear();
    model.facts = {};
    for (size_t i = 0; i < kRanks; ++i) {
      rank.path = StrCat("snapshots/0123456789abcdef0123456789abcdef/rank-", 10000 + i);
      rank.stamp.size = chunks * kChunkBytes;
      rank.chunks.assign(chunks, DigestOf(rank.path));
      rank.chunk_list = listed ? DigestOfChunks(rank.chunks) : Digest{};
      model.blobs.push_back(rank);
    }
    return Rendered(model).size();
  };
  const size_t small = bytes_of(kInlineChunks, false), before = bytes_of(kChunks, false);
  const size_t listed = bytes_of(kInlineChunks + 1, true), large = bytes_of(kChunks, true);
  EXPECT_EQ(listed, large);
  EXPECT_LE(listed, small + kRanks * 16) << "no more than what the smallest files need";
  EXPECT_GT((before - large) / kRanks, 16 * (kChunks - kInlineChunks));
  RecordProperty("bytes_a_rank_before", static_cast<int>(before / kRanks));
  RecordProperty("bytes_a_rank", static_cast<int>(large / kRanks));
  EXPECT_LT(large / kRanks, 300u);
}

TEST(ManifestTest, RefusesEveryTruncationAndEveryFlippedBit) {
  const std::string bytes = Rendered(SampleModel());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_NE(Refusal(std::string_view(bytes).substr(0, size)), "accepted") << size;
  }
  EXPECT_NE(Refusal(StrCat(bytes, "x")), "accepted");
  for (size_t at = 0; at < bytes.size(); ++at) {
    std::string flipped = bytes;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << (at % 8)));
    if (at == 8) flipped[at] = 4;  // of an older version the same bytes mean the same
    EXPECT_NE(Refusal(flipped), "accepted") << at;
  }
}

// An attacker who damages a manifest may also compute its digest: nothing may crash,
// and a manifest that is accepted renders again.
TEST(ManifestTest, DamageUnderAValidDigestNeverCrashes) {
  const std::string payload = Rendered(SampleModel()).substr(kManifestHeaderSize);
  std::mt19937_64 random(7);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = payload;
    for (uint64_t edits = 1 + random() % 3; edits > 0; --edits) {
      damaged[random() % damaged.size()] = static_cast<char>(random());
    }
    auto model = ParseManifest(WrapManifest(damaged));
    if (!model) continue;
    ++accepted;
    EXPECT_TRUE(ParseManifest(Rendered(*model)));
  }
  EXPECT_GT(accepted, 0);  // texts and stamps may hold anything
}

TEST(ManifestTest, RefusesPathsThatLeaveTheirRoot) {
  for (const char* path : {"", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "."}) {
    EXPECT_THAT(RefusalOf([&](StepModel& m) { m.blobs[0].path = std::string(path); }),
                HasSubstr("path"))
        << path;
  }
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.blobs[0].path = std::string("a\0b", 3); }),
              HasSubstr("path"));
}

TEST(ManifestTest, RefusesIndicesOutOfRange) {
  using M = StepModel;
  EXPECT_THAT(RefusalOf([](M& m) { m.blobs[0].root = 2; }), HasSubstr("root index"));
  EXPECT_THAT(RefusalOf([](M& m) { m.aliases[0].parameter = ParameterIndex{4}; }),
              HasSubstr("alias 0"));
  EXPECT_THAT(RefusalOf([](M& m) { m.groups[0].parameters[1] = ParameterIndex{9}; }),
              HasSubstr("group 0"));
  EXPECT_THAT(RefusalOf([](M& m) { m.atoms[4].parameter = ParameterIndex{9}; }),
              HasSubstr("atom 4"));
  EXPECT_THAT(RefusalOf([](M& m) { m.atoms[1].source.of = AtomIndex{99}; }), HasSubstr("atom 1"));
  EXPECT_THAT(RefusalOf([](M& m) { m.documents[0].tensors[0].blob = BlobIndex{3}; }),
              HasSubstr("document 0: tensor 0"));
  EXPECT_THAT(RefusalOf([](M& m) { m.atoms[0].source.gathers[0].series[0].local = 2; }),
              HasSubstr("atom 0"));
  EXPECT_THAT(RefusalOf([](M& m) { m.atoms[0].source.gathers[0].series[1].blob = 2; }),
              HasSubstr("no blob"));
}

// The sample with a copy of a weight beside the model, of which a document says where it stood.
StepModel WithOneBeside() {
  StepModel model = SampleModel();
  Parameter parameter = model.parameters[3];
  parameter.name = "ema.stacked";
  parameter.role = Role::kBeside;
  Atom atom = model.atoms[6];
  atom.parameter = ParameterIndex{static_cast<uint32_t>(model.parameters.size())};
  atom.kind = kBesideKind;
  StoredTensor tensor{atom.dtype, atom.shape, RowMajorStrides(atom.shape), BlobIndex{}, 0};
  tensor.atom = AtomIndex{static_cast<uint32_t>(model.atoms.size())};
  model.parameters.push_back(std::move(parameter));
  model.atoms.push_back(std::move(atom));
  model.documents[0].tensors.push_back(std::move(tensor));
  return model;
}

TEST(ManifestTest, ATensorBesideTheModelIsAnAtom) {
  const StepModel before = WithOneBeside();
  const auto after = ParseManifest(Rendered(before));
  ASSERT_TRUE(after) << after.error().message;
  EXPECT_EQ(after->parameters.back().role, Role::kBeside);
  EXPECT_EQ(after->documents[0].tensors[1].atom, before.documents[0].tensors[1].atom);
  EXPECT_FALSE(after->documents[0].tensors[0].atom);
  EXPECT_FALSE(after->IsOfModel(after->atoms.back()));
}

TEST(ManifestTest, RefusesADocumentsTensorThatIsNotItsAtom) {
  const auto refusal = [](const std::function<void(StepModel&)>& edit) {
    StepModel model = WithOneBeside();
    edit(model);
    return Refusal(Rendered(model));
  };
  const auto tensor = [](StepModel& m) -> StoredTensor& { return m.documents[0].tensors[1]; };
  EXPECT_EQ(refusal([](StepModel&) {}), "accepted");
  EXPECT_THAT(refusal([&](StepModel& m) { tensor(m).atom = AtomIndex{9}; }),
              HasSubstr("atom index 9"));
  EXPECT_THAT(refusal([&](StepModel& m) { tensor(m).atom = AtomIndex{6}; }),
              HasSubstr("of the model"));
  EXPECT_THAT(refusal([&](StepModel& m) { tensor(m).dtype = DType::kU8; }),
              HasSubstr("another dtype"));
  EXPECT_THAT(refusal([&](StepModel& m) { tensor(m).shape = {2, 4}; }), HasSubstr("shape"));
  EXPECT_THAT(refusal([&](StepModel& m) { tensor(m).strides = {1, 4}; }), HasSubstr("strides"));
  EXPECT_THAT(refusal([](StepModel& m) { m.aliases[0].parameter = ParameterIndex{4}; }),
              HasSubstr("beside the model"));
  EXPECT_THAT(refusal([](StepModel& m) { m.groups[0].parameters[0] = ParameterIndex{4}; }),
              HasSubstr("beside the model"));
}

TEST(ManifestTest, RefusesExtentsOutsideTheirBlob) {
  const auto series = [](StepModel& m) -> FragmentSeries& {
    return m.atoms[0].source.gathers[0].series[0];
  };
  EXPECT_THAT(RefusalOf([&](StepModel& m) { series(m).offset = 256; }), HasSubstr("outside"));
  EXPECT_THAT(RefusalOf([&](StepModel& m) { series(m).offset = ~uint64_t{0} - 8; }),
              HasSubstr("outside"));
  EXPECT_THAT(RefusalOf([&](StepModel& m) { series(m).offset_step = -65; }), HasSubstr("outside"));
  EXPECT_THAT(RefusalOf([&](StepModel& m) { series(m).blob_step = -1; }), HasSubstr("no blob"));
  EXPECT_THAT(RefusalOf([&](StepModel& m) { series(m).count = 0; }), HasSubstr("have any "
                                                                               "fragments"));
  EXPECT_THAT(RefusalOf([&](StepModel& m) { series(m).flat_step = 7; }), HasSubstr("overlap"));
  EXPECT_THAT(RefusalOf([&](StepModel& m) { series(m).elements = 1 << 30; }), HasSubstr("atom 0"));
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.documents[0].tensors[0].offset = 240; }),
              HasSubstr("outside"));
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.documents[0].tensors[0].strides[0] = 1ull << 62; }),
              HasSubstr("document 0"));
}

TEST(ManifestTest, RefusesAtomsThatAreNotCoveredOnce) {
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.atoms[0].source.gathers[0].series.pop_back(); }),
              HasSubstr("atom 0"));
  EXPECT_THAT(RefusalOf([](StepModel& m) {
                auto& locals = m.atoms[0].source.gathers[0].locals;
                locals[1] = locals[0];
              }),
              HasSubstr("atom 0"));
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.atoms[2].source.gathers.clear(); }),
              HasSubstr("no copies"));
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.atoms[0].source.gathers.clear(); }),
              HasSubstr("0 gathers"));
}

TEST(ManifestTest, RefusesContradictions) {
  for (const int reserved : {4, 5, 7}) {
    EXPECT_THAT(RefusalOf([&](StepModel& m) {
                  m.atoms[0].source.kind = static_cast<SourceKind>(reserved);
                }),
                HasSubstr(StrCat("a source of kind ", reserved)));
  }
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.atoms[1].source.of = AtomIndex{1}; }),
              HasSubstr("circle"));
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.atoms[4].source.inline_bytes = std::string(1, 'x'); }),
              HasSubstr("inline"));
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.atoms[1].shape = {4, 6}; }), HasSubstr("shape"));
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.atoms[0].dtype = static_cast<DType>(99); }),
              HasSubstr("dtype 99"));
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.parameters[0].role = static_cast<Role>(4); }),
              HasSubstr("role 4"));
  EXPECT_THAT(RefusalOf([](StepModel& m) {
                m.parameters[0].shape = {~uint64_t{0}, 8};
              }),
              HasSubstr("parameter 0"));
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.parameters[0].name.clear(); }), HasSubstr("name"));
  EXPECT_THAT(RefusalOf([](StepModel& m) { m.layout.tp = 0; }), HasSubstr("layout"));
}

TEST(ManifestTest, NamesNewerVersions) {
  std::string bytes = Rendered(SampleModel());
  bytes[8] = kManifestVersion + 1;
  auto model = ParseManifest(bytes);
  ASSERT_FALSE(model);
  EXPECT_EQ(model.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(model.error().message, HasSubstr(StrCat("version ", kManifestVersion + 1)));
  bytes[8] = 0;
  EXPECT_THAT(Refusal(bytes), HasSubstr("version 0"));
}

// The index of 1T parameters over 1,024 ranks.
TEST(ManifestTest, ALargeStepIsSmall) {
  const std::string bytes = Rendered(LargeModel(3600, 1024));
  EXPECT_LT(bytes.size(), 16u << 20);
  struct rusage before;
  getrusage(RUSAGE_SELF, &before);
  auto model = ParseManifest(bytes);
  struct rusage after;
  getrusage(RUSAGE_SELF, &after);
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(model->atoms.size(), 10800u);
  const double seconds =
      static_cast<double>(after.ru_utime.tv_sec - before.ru_utime.tv_sec) +
      static_cast<double>(after.ru_utime.tv_usec - before.ru_utime.tv_usec) / 1e6;
  RecordProperty("manifest_bytes", std::to_string(bytes.size()));
  RecordProperty("parse_user_milliseconds", static_cast<int>(seconds * 1000));
  std::printf("manifest %zu bytes, parsed in %.3f s user\n", bytes.size(), seconds);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(after.ru_maxrss, 200 * 1024);  // KiB, the renderer's memory included
#endif
}

}  // namespace
}  // namespace ckptfs
