// SPDX-License-Identifier: Apache-2.0

#include "core/model/side_blob.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "core/manifest/manifest.h"
#include "core/store/store.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

// A parameter whose weight is a gather, and whose master has two replicas.
StepModel TwoAtoms() {
  StepModel model;
  model.roots = {"/source"};
  for (const char* path : {"a", "b", "c"}) {
    model.blobs.emplace_back();
    model.blobs.back().path = std::string(path);
    model.blobs.back().stamp = BlobStamp{64, 1, 1, 1};
  }
  model.parameters.resize(1);
  model.parameters[0].name = std::string("norm");
  model.parameters[0].shape = {16};
  for (uint32_t copies : {1u, 2u}) {
    Atom atom;
    atom.shape = {16};
    atom.source.kind = copies == 1 ? SourceKind::kGather : SourceKind::kReplicas;
    for (uint32_t copy = 0; copy < copies; ++copy) {
      FragmentSeries series;
      series.elements = series.flat_step = 16;
      series.blob = copies + copy - 1;
      atom.source.gathers.push_back(Gather{{WholeTensor(atom.shape)}, {series}});
    }
    model.atoms.push_back(atom);
  }
  return model;
}

StepModel Attached() {
  Blob blob;
  blob.path = "side/x";
  blob.stamp.size = 1000;
  blob.chunk_bytes = 4096;
  blob.chunks = {DigestOf("its only chunk")};
  const SideAtom atoms[] = {{AtomIndex{0}, 100}, {AtomIndex{1}, 200}};
  return WithSideBlob(TwoAtoms(), blob, "/store/blobs", atoms);
}

TEST(SideBlobTest, AttachedItIsTheFirstCopyAndDetachedItLeavesNoTrace) {
  StepModel model = Attached();
  ASSERT_TRUE(CheckSideBlob(model));
  EXPECT_EQ(FindSideBlob(model), BlobIndex{3});
  EXPECT_EQ(model.roots[model.blobs[3].root], "/store/blobs");
  for (uint32_t i : {0u, 1u}) {
    const AtomSource& source = model.atoms[i].source;
    EXPECT_TRUE(IsPacked(model, model.atoms[i]));
    EXPECT_EQ(source.kind, SourceKind::kReplicas);
    EXPECT_EQ(source.gathers.size(), i + 2);
    EXPECT_EQ(source.gathers[0].series[0].At(0),
              (Fragment{0, 16, BlobIndex{3}, 100 + i * 100, DType::kF32}));
  }
  model = WithoutSideBlob(std::move(model));
  const StepModel before = TwoAtoms();
  EXPECT_FALSE(FindSideBlob(model));
  EXPECT_EQ(model.roots, before.roots);
  EXPECT_EQ(model.blobs.size(), before.blobs.size());
  for (uint32_t i : {0u, 1u}) {
    EXPECT_FALSE(IsPacked(model, model.atoms[i]));
    EXPECT_EQ(model.atoms[i].source.kind, before.atoms[i].source.kind);
    EXPECT_EQ(model.atoms[i].source.gathers, before.atoms[i].source.gathers);
  }
  model = WithoutSideBlob(std::move(model));  // nothing to do
  EXPECT_EQ(model.roots, before.roots);
}

TEST(SideBlobTest, AManifestKeepsIt) {
  const auto bytes = RenderManifest(Attached(), "/store/blobs");
  ASSERT_TRUE(bytes);
  auto model = ParseManifest(*bytes, "/moved/blobs");
  ASSERT_TRUE(model) << model.error().message;
  EXPECT_EQ(FindSideBlob(*model), BlobIndex{3});
  EXPECT_EQ(model->roots.back(), "/moved/blobs");
  EXPECT_EQ(*RenderManifest(*model, "/moved/blobs"), *bytes);
  EXPECT_EQ(*RenderManifest(WithoutSideBlob(*model)), *RenderManifest(TwoAtoms()));
  StepModel broken = Attached();
  broken.atoms[0].source.gathers.pop_back();
  EXPECT_FALSE(ParseManifest(*RenderManifest(broken, "/store/blobs")));
}

TEST(SideBlobTest, WhatAttachDoesNotMakeIsRefused) {
  const auto refusal = [](const std::function<void(StepModel&)>& spoil) {
    StepModel model = Attached();
    spoil(model);
    const Status valid = CheckSideBlob(model);
    return valid ? std::string("accepted") : valid.error().message;
  };
  EXPECT_EQ(refusal([](StepModel&) {}), "accepted");
  EXPECT_THAT(refusal([](StepModel& m) { m.blobs[1].side = true; }), HasSubstr("last blob"));
  EXPECT_THAT(refusal([](StepModel& m) { m.roots.push_back("/more"); }), HasSubstr("last root"));
  EXPECT_THAT(refusal([](StepModel& m) { m.blobs[3].store_owned = false; }), HasSubstr("store's"));
  EXPECT_THAT(refusal([](StepModel& m) { m.blobs[0].root = 1; }), HasSubstr("not share its root"));
  // As the only source of an atom, as a later copy, as a slice of an average.
  EXPECT_THAT(refusal([](StepModel& m) { m.atoms[0].source.gathers.pop_back(); }),
              HasSubstr("atom 0: only the first of several replicas"));
  EXPECT_THAT(refusal([](StepModel& m) {
                std::swap(m.atoms[1].source.gathers[0], m.atoms[1].source.gathers[2]);
              }),
              HasSubstr("atom 1"));
  EXPECT_THAT(refusal([](StepModel& m) { m.atoms[0].source.kind = SourceKind::kAverage; }),
              HasSubstr("atom 0"));
  // In the middle of a series over blobs.
  EXPECT_THAT(refusal([](StepModel& m) {
                FragmentSeries& series = m.atoms[1].source.gathers[1].series[0];
                series.count = 3;
                series.blob_step = 1;
              }),
              HasSubstr("atom 1"));
  EXPECT_THAT(refusal([](StepModel& m) {
                m.documents.emplace_back();
                m.documents[0].tensors.emplace_back();
                m.documents[0].tensors[0].blob = BlobIndex{3};
              }),
              HasSubstr("document"));
}

}  // namespace
}  // namespace ckptfs
