// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/model_states.h"

#include <gmock/gmock.h>

#include "formats/torch/pickle_writer.h"

namespace ckptfs::deepspeed {
namespace {

// Model states whose groups are all one dict of shapes.
Result<ModelStates> ReadGroups(size_t parameters, size_t mentions) {
  PickleBuilder pickle;
  std::vector<std::pair<NodeId, NodeId>> shapes;
  for (size_t i = 0; i < parameters; ++i) {
    shapes.emplace_back(pickle.String("layers." + std::to_string(i)), pickle.Size({4}));
  }
  const NodeId group = pickle.OrderedDict(shapes);
  const NodeId root = pickle.Dict(
      {{pickle.String("dp_world_size"), pickle.Int(1)},
       {pickle.String("param_shapes"), pickle.List(std::vector<NodeId>(mentions, group))}});
  const auto file = TorchFile::Make(std::move(pickle).Finish(root), {});
  return ReadModelStates(*file, BlobIndex{}, {.names = true, .documents = false});
}

TEST(ModelStatesTest, ShapesMentionedOftenAreRefused) {
  const auto read = ReadGroups(5000, 3);
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->groups.size(), 3u);
  const auto often = ReadGroups(5000, 1000);
  ASSERT_FALSE(often);
  EXPECT_THAT(often.error().message, testing::HasSubstr("mentioned often"));
}

}  // namespace
}  // namespace ckptfs::deepspeed
