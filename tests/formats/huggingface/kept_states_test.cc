// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/kept_states.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/io/memory_root.h"
#include "formats/torch/archive_builder.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::huggingface {
namespace {

// A file whose root is what `make` builds.
std::unique_ptr<const TorchFile> FileOf(const std::function<NodeId(ArchiveBuilder&)>& make) {
  ArchiveBuilder archive;
  const NodeId root = make(archive);
  const Plan plan = *std::move(archive).Finish(root).MakePlan("archive");
  auto bytes = std::make_shared<std::string>();
  for (const Segment& segment : plan.segments()) {
    const auto* literal = std::get_if<LiteralSegment>(&segment.body);
    const size_t length = segment.end - segment.begin;
    *bytes += literal != nullptr ? *literal->bytes : std::string(length, '\0');
  }
  const auto memory = std::make_shared<MemoryRoot>("/memory");
  EXPECT_TRUE(memory->Add("optimizer.pt", {std::as_bytes(std::span(*bytes))}, bytes, {0600, 1, 2}));
  return std::make_unique<const TorchFile>(
      TorchFile::Open(memory->Open("optimizer.pt").value()).value());
}

bool IsKept(const std::function<NodeId(PickleBuilder&)>& make) {
  const auto file = FileOf([](ArchiveBuilder& archive) { return archive.pickle().Int(0); });
  PickleBuilder builder;
  const NodeId state = builder.String("x");
  const NodeId root = builder.Dict({{state, make(builder)}});
  const PickleTree tree = std::move(builder).Finish(root);
  KeptStates kept(*file);
  return kept.Keep("w", "x", RootOf(tree));
}

TEST(KeptStatesTest, ListsOfNumbersNoneAndTensorsAreADocument) {
  const auto file = FileOf([](ArchiveBuilder& archive) {
    PickleBuilder& pickle = archive.pickle();
    const NodeId tensor = *archive.Tensor(DType::kF32, {2, 3}, {{24, ZeroSegment{24}}});
    const NodeId list = pickle.List({pickle.Int(1), pickle.None(), tensor});
    return pickle.Dict({{pickle.String("x"), list}});
  });
  KeptStates kept(*file);
  EXPECT_TRUE(kept.Keep("w", "x", file->root()));
  EXPECT_FALSE(kept.Keep("w", "y", file->root())) << "there is none";
  const auto document = std::move(kept).Finish(BlobIndex{});
  ASSERT_TRUE(document) << document.error().message;
  EXPECT_FALSE(document->pickle.empty());
  EXPECT_EQ(document->tensors.size(), 1U);
}

// A few hundred bytes of a pickle may stand for 16^15 values.
TEST(KeptStatesTest, ListsThatShareWhatTheyHoldAreLeftOutAtOnce) {
  EXPECT_FALSE(IsKept([](PickleBuilder& pickle) {
    NodeId shared = pickle.Int(0);
    for (int i = 0; i < 15; ++i) shared = pickle.List(std::vector<NodeId>(16, shared));
    return shared;
  }));
}

TEST(KeptStatesTest, WhatDcpWouldPassOverIsLeftOut) {
  EXPECT_TRUE(IsKept([](PickleBuilder& pickle) {
    return pickle.Dict({{pickle.String("a"), pickle.List({pickle.Int(1)})}});
  }));
  EXPECT_FALSE(IsKept([](PickleBuilder& pickle) { return pickle.Dict({}); })) << "no key";
  EXPECT_FALSE(IsKept([](PickleBuilder& pickle) {
    return pickle.Dict({{pickle.List({pickle.Int(1)}), pickle.Int(1)}});
  })) << "no name";
}

}  // namespace
}  // namespace ckptfs::huggingface
