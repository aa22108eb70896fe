// SPDX-License-Identifier: Apache-2.0
#include "formats/dcp/model_keys.h"

#include <gtest/gtest.h>

#include <utility>

namespace ckptfs::dcp {
namespace {

// Tensors of these names, each with the path that planner_data says.
struct Tree {
  DcpMetadata metadata;
  KeysBeside keys;

  void Add(std::string name, std::vector<PathElement> path) {
    keys.tensors.push_back(metadata.tensors.size());
    metadata.tensors.push_back({std::move(name), DType::kF32, {2}, 0, 0, 0});
    metadata.tensor_paths.push_back(std::move(path));
  }
  void AddObject(std::string name, std::vector<PathElement> path) {
    keys.objects.push_back(metadata.objects.size());
    metadata.objects.push_back({std::move(name), {}});
    metadata.object_paths.push_back(std::move(path));
  }
};

TEST(ModelKeysTest, TheDictOfTheModelIsFound) {
  Tree tree;
  tree.Add("app.model.a.weight", {{"app"}, {"model"}, {"a.weight"}});
  tree.Add("app.model.b.weight", {{"app"}, {"model"}, {"b.weight"}});
  tree.AddObject("app.step", {{"app"}, {"step"}});
  const auto found = FindModel(tree.metadata, tree.keys, "");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(found->prefix, "app.model.");
  EXPECT_EQ(found->tensors, (std::vector<size_t>{0, 1}));
}

// A key is cut behind its dict's, so that a path which it was not made of tells nothing.
TEST(ModelKeysTest, APathOfAnotherKeyIsNotBelieved) {
  Tree tree;
  tree.Add("a.weight", {{"something.that.is.longer"}, {"weight"}});
  tree.Add("b.weight", {{"something.that.is.longer"}, {"weight"}});
  const auto found = FindModel(tree.metadata, tree.keys, "");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(found->prefix, "");
  EXPECT_EQ(found->tensors, (std::vector<size_t>{0, 1}));
}

// The text of all prefixes would be 20 GB.
TEST(ModelKeysTest, APathCostsItsOwnText) {
  Tree tree;
  tree.Add("model.a.weight", {{"model"}, {"a.weight"}});
  tree.AddObject("deep", std::vector<PathElement>(100'000, PathElement{"aaa"}));
  const auto found = FindModel(tree.metadata, tree.keys, "");
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_EQ(found->prefix, "model.");
}

}  // namespace
}  // namespace ckptfs::dcp
