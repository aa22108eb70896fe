// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/file_tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "core/tensor/piece.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kAt = 4096;  // of the storage

TensorNode Node(Shape shape, std::vector<uint64_t> strides, uint64_t offset = 0) {
  TensorNode node;
  node.storage_key = "0";
  node.storage_elements = 1000;
  node.storage_offset = offset;
  node.shape = std::move(shape);
  node.strides = std::move(strides);
  return node;
}

Result<FileTensor> Locate(const TensorNode& node) {
  auto file = TorchFile::Make({}, {{"0", {kAt, 4000}}});
  return file->Locate(node, BlobIndex{3});
}

TEST(FileTensorTest, OnlyDenseTensorsHaveBytes) {
  const auto dense = Locate(Node({2, 3}, {3, 1}, 7));
  ASSERT_TRUE(dense.has_value());
  EXPECT_EQ(dense->Bytes()->offset, kAt + 28);
  EXPECT_EQ(dense->Bytes()->length, 24u);
  EXPECT_EQ(*dense->Slice(2, 10, 13), (Fragment{10, 13, BlobIndex{3}, kAt + 36, DType::kF32}));
  EXPECT_FALSE(dense->Slice(4, 0, 3).has_value());
  EXPECT_FALSE(dense->Slice(~uint64_t{0}, 0, 3).has_value());
  EXPECT_EQ(dense->Reshaped({6})->shape(), Shape{6});
  EXPECT_FALSE(dense->Reshaped({7}).has_value());
  // Every second, every one the same, transposed, expanded, overlapping.
  const std::vector<std::pair<Shape, std::vector<uint64_t>>> others{
      {{6}, {2}}, {{6}, {0}}, {{3, 2}, {1, 3}}, {{2, 3}, {0, 1}}, {{2, 3}, {2, 1}}};
  for (const auto& [shape, strides] : others) {
    const auto other = Locate(Node(shape, strides));
    ASSERT_TRUE(other.has_value());
    EXPECT_FALSE(other->dense());
    EXPECT_THAT(other->Bytes().error().message, HasSubstr("not contiguous"));
    EXPECT_FALSE(other->Slice(0, 0, 1).has_value());
    EXPECT_FALSE(other->Reshaped({6}).has_value());
    EXPECT_EQ(other->Stored().strides, strides);
    EXPECT_TRUE(other->As(WholeTensor(shape)).has_value());
  }
}

TEST(FileTensorTest, StridesMeanNothingWhereThereIsOneOrNone) {
  EXPECT_TRUE(Locate(Node({1, 4, 1}, {0, 1, 99}))->dense());
  EXPECT_TRUE(Locate(Node({0, 4}, {9, 9}))->dense());
  EXPECT_TRUE(Locate(Node({}, {}))->dense());
}

TEST(FileTensorTest, AnotherShapeIsRefused) {
  const auto tensor = Locate(Node({4, 6}, {6, 1}));
  EXPECT_TRUE(tensor->As(WholeTensor({4, 6})).has_value());
  EXPECT_THAT(tensor->As(WholeTensor({6, 4})).error().message, HasSubstr("[6, 4] is expected"));
  EXPECT_FALSE(tensor->As(WholeTensor({24})).has_value());
}

// Calls visit(index in the atom, element of the local tensor).
template <class Visit>
void ForEachElement(const LocalTensor& local, Visit visit) {
  for (const Piece& piece : local.pieces) {
    const uint64_t count = ElementCount(piece.shape).value();
    const std::vector<uint64_t> dense = RowMajorStrides(piece.shape);
    for (uint64_t i = 0; i < count; ++i) {
      Shape index;
      uint64_t at = piece.local_offset;
      for (size_t d = 0; d < piece.shape.size(); ++d) {
        const uint64_t step = i / dense[d] % piece.shape[d];
        index.push_back(piece.atom_begin[d] + step);
        at += step * piece.local_strides[d];
      }
      visit(index, at);
    }
  }
}

// Boxes, among them some that walk the local tensor's dims in another order or
// with gaps, against the definition of a strided tensor.
TEST(FileTensorTest, AsFollowsTheStrides) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const Shape shape{1 + random() % 4, 1 + random() % 4, 1 + random() % 4};
    const std::vector<uint64_t> strides{random() % 30, random() % 30, random() % 30};
    const auto tensor = Locate(Node(shape, strides, random() % 20));
    ASSERT_TRUE(tensor.has_value());
    const std::vector<uint64_t> dense = RowMajorStrides(shape);
    const size_t gap = 1 + random() % 2;  // every gap-th row, the first two dims exchanged
    const Piece piece{{shape[1], (shape[0] - 1) / gap + 1, shape[2]},
                      {0, 0, 0},
                      0,
                      {dense[1], gap * dense[0], dense[2]}};
    const LocalTensor local{shape, {piece}};
    const auto held = tensor->As(local);
    ASSERT_TRUE(held.has_value()) << held.error().message;
    std::map<Shape, uint64_t> got;
    ForEachElement(held->local, [&](const Shape& index, uint64_t at) {
      got[index] = held->fragment.offset + (at - held->fragment.flat_begin) * 4;
    });
    const uint64_t first = tensor->Stored().offset;
    ForEachElement(local, [&](const Shape& index, uint64_t flat) {
      uint64_t at = 0;
      for (size_t d = 0; d < 3; ++d) at += flat / dense[d] % shape[d] * strides[d];
      EXPECT_EQ(got.at(index), first + at * 4);
    });
  }
}

TEST(FileTensorTest, ABoxThatWrapsAroundRowsIsRefused) {
  const auto tensor = Locate(Node({4, 6}, {1, 4}));
  const Piece wrapping{{12}, {0}, 0, {2}};
  EXPECT_THAT(tensor->As({{4, 6}, {wrapping}}).error().message, HasSubstr("cut across its rows"));
}

TEST(TorchFileTest, AStorageHasOneType) {
  const auto make = [](std::string_view other, uint64_t elements) {
    TensorNode first = Node({1000}, {1});
    first.form = TensorNode::Form::kStorage;
    first.storage_class = "FloatStorage";
    TensorNode second = first;
    second.storage_class = other;
    second.storage_elements = elements;
    PickleBuilder builder;
    const NodeId a = builder.Tensor(first);
    const NodeId b = builder.Tensor(second);
    const NodeId list = builder.List({a, b});
    return TorchFile::Make(std::move(builder).Finish(list), {{"0", {kAt, 4000}}});
  };
  EXPECT_TRUE(make("FloatStorage", 1000).has_value());
  EXPECT_THAT(make("IntStorage", 1000).error().message, HasSubstr("IntStorage"));
  EXPECT_FALSE(make("FloatStorage", 999).has_value());
}

}  // namespace
}  // namespace ckptfs
