// SPDX-License-Identifier: Apache-2.0

#include "core/view/scaled_atom.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <random>

#include "core/dialect/box_map.h"
#include "core/view/atom_reader.h"
#include "core/view/segment.h"
#include "tests/support/stamp_of_file.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

// The formats as their specifications say them, without a table.
double SpecifiedE4M3(int bits) {
  const int sign = bits & 128, exponent = bits >> 3 & 15, fraction = bits & 7;
  const double size = exponent == 0 ? fraction / 8.0 * std::pow(2.0, -6)
                                    : (1 + fraction / 8.0) * std::pow(2.0, exponent - 7);
  return sign != 0 ? -size : size;
}
double SpecifiedE2M1(int bits) {
  const int exponent = bits >> 1 & 3, fraction = bits & 1;
  const double size =
      exponent == 0 ? fraction / 2.0 : (1 + fraction / 2.0) * std::pow(2.0, exponent - 1);
  return (bits & 8) != 0 ? -size : size;
}

TEST(ScaledAtomTest, EveryStoredNumberIsWhatTheSpecificationsSay) {
  for (int i = 0; i < 256; ++i) {
    const auto bits = static_cast<uint8_t>(i);
    if ((i & 127) == 127) {
      EXPECT_TRUE(std::isnan(DecodeFp8E4M3(bits)));
    } else {
      EXPECT_EQ(double{DecodeFp8E4M3(bits)}, SpecifiedE4M3(i)) << i;
      EXPECT_EQ(std::signbit(DecodeFp8E4M3(bits)), i >= 128);
    }
    if (i == 255) {
      EXPECT_TRUE(std::isnan(DecodeFp8E8M0(bits)));
    } else {
      EXPECT_EQ(double{DecodeFp8E8M0(bits)}, std::pow(2.0, i - 127)) << i;
    }
    EXPECT_EQ(double{DecodeFp4(bits)}, SpecifiedE2M1(i & 15)) << i;
  }
}

using Index = std::vector<uint64_t>;

// A random tensor in blocks, whose decoded values are known element by element.
class ScaledCase {
 public:
  explicit ScaledCase(uint64_t seed) : random_(seed) {
    fp4_ = Pick(2) == 1;
    block_ =
        fp4_ ? ScaleBlock{1 + Pick(2), 2 * (1 + Pick(4))} : ScaleBlock{1 + Pick(5), 1 + Pick(5)};
    const size_t rank = 2 + Pick(2);
    for (size_t d = 0; d < rank; ++d) stored_.push_back(1 + Pick(d + 1 == rank ? 40 : 9));
    if (fp4_) stored_.back() = 2 * CeilDivide(stored_.back(), 2);
    blocks_ = stored_;
    blocks_[rank - 2] = CeilDivide(stored_[rank - 2], block_.rows);
    blocks_[rank - 1] = CeilDivide(stored_[rank - 1], block_.columns);
    for (size_t d = 0; d < rank; ++d) order_.push_back(d);
    std::shuffle(order_.begin(), order_.end(), random_);
    WriteBlobs();
    MakeModel();
  }

  uint64_t Pick(uint64_t n) { return random_() % n; }
  const StepModel& model() const { return model_; }
  const Shape& shape() const { return model_.atoms[0].shape; }

  // The decoded value at an index of the atom.
  float At(const Index& index) const {
    Index stored(index.size());
    for (size_t d = 0; d < index.size(); ++d) stored[order_[d]] = index[d];
    uint64_t flat = 0, block = 0;
    for (size_t d = 0; d < stored.size(); ++d) {
      const uint64_t size = d + 2 == stored.size()   ? block_.rows
                            : d + 1 == stored.size() ? block_.columns
                                                     : 1;
      flat = flat * stored_[d] + stored[d];
      block = block * blocks_[d] + stored[d] / size;
    }
    const double value = fp4_ ? SpecifiedE2M1(static_cast<uint8_t>(values_[kBefore + flat / 2]) >>
                                                  (flat % 2 == 0 ? 0 : 4) &
                                              15)
                              : SpecifiedE4M3(static_cast<uint8_t>(values_[kBefore + flat]));
    float scale;
    if (exponents_) {
      scale = static_cast<float>(std::pow(2.0, static_cast<uint8_t>(scales_[block]) - 127));
    } else {
      std::memcpy(&scale, scales_.data() + 4 * block, 4);
    }
    return static_cast<float>(value) * scale;
  }

 private:
  static constexpr uint64_t kBefore = 3;  // bytes before the values
  static uint64_t CeilDivide(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

  void WriteBlobs() {
    const uint64_t elements = *ElementCount(stored_), blocks = *ElementCount(blocks_);
    values_.resize(kBefore + (fp4_ ? elements / 2 : elements));
    for (char& c : values_) {
      c = static_cast<char>(random_());
      if ((c & 127) == 127) c = 0;  // NaN equals nothing
    }
    exponents_ = fp4_ || Pick(2) == 0;
    scales_.resize(blocks * (exponents_ ? 1 : 4));
    for (uint64_t i = 0; i < blocks; ++i) {
      const auto scale =
          std::ldexp(1.0F + static_cast<float>(Pick(1000)) / 1000, static_cast<int>(Pick(20)) - 10);
      if (exponents_) scales_[i] = static_cast<char>(100 + Pick(60));
      if (!exponents_) std::memcpy(scales_.data() + 4 * i, &scale, 4);
    }
    model_.roots = {directory_.path()};
    for (const auto& [name, bytes] :
         {std::pair("values", &values_), std::pair("scales", &scales_)}) {
      const std::string path = directory_.path() + "/" + name;
      std::ofstream(path, std::ios::binary) << *bytes;
      Blob blob;
      blob.path = name;
      blob.stamp = *StampOfFile(path);
      model_.blobs.push_back(blob);
    }
  }

  void MakeModel() {
    Atom atom;
    atom.kind = "weight";
    Piece piece{{}, Index(order_.size(), 0), 0, {}, 1.0};
    const auto strides = RowMajorStrides(stored_);
    for (const size_t d : order_) {
      atom.shape.push_back(stored_[d]);
      piece.local_strides.push_back(strides[d]);
    }
    piece.shape = atom.shape;
    const uint64_t elements = *ElementCount(stored_);
    const DType dtype = fp4_ ? DType::kF4 : DType::kF8E4M3;
    atom.source = ScaledSource(
        Gather{{{stored_, {piece}}}, {{0, 1, 0, 0, elements, 0, 0, kBefore, 0, dtype}}},
        Gather{{{blocks_, {}}},
               {{0, 1, 0, 0, *ElementCount(blocks_), 1, 0, 0, 0,
                 exponents_ ? DType::kF8E8M0 : DType::kF32}}},
        block_);
    Parameter parameter;
    parameter.name = "w";
    parameter.shape = atom.shape;
    model_.parameters.push_back(std::move(parameter));
    model_.atoms.push_back(std::move(atom));
    const Status sound = CheckSource(model_, model_.atoms[0]);
    EXPECT_TRUE(sound) << sound.error().message;
  }

  std::mt19937_64 random_;
  TemporaryDirectory directory_;
  bool fp4_ = false, exponents_ = false;
  ScaleBlock block_;
  Shape stored_, blocks_;
  std::vector<size_t> order_;  // the atom's dimensions as those that are stored
  std::string values_, scales_;
  StepModel model_;
};

// visit(index) for each index of a box, in row-major order.
template <class Visit>
void ForEachIndex(const Shape& shape, const Visit& visit) {
  for (uint64_t i = 0; i < *ElementCount(shape); ++i) {
    Index index(shape.size());
    uint64_t rest = i;
    for (size_t d = shape.size(); d-- > 0;) {
      index[d] = rest % shape[d];
      rest /= shape[d];
    }
    visit(index);
  }
}

std::vector<float> ReadAll(const StepModel& model, const LocalTensor& local, uint64_t begin,
                           uint64_t end) {
  const auto blobs = BlobReader::Create(model, {});
  std::vector<float> out(end - begin);
  const AtomSegment segment{AtomIndex{static_cast<uint32_t>(model.atoms.size() - 1)},
                            std::make_shared<const LocalTensor>(local), begin, end, DType::kF32};
  const Status read =
      ReadAtom(model, *blobs, segment, begin, end, reinterpret_cast<std::byte*>(out.data()));
  EXPECT_TRUE(read) << read.error().message;
  return out;
}

bool SameBits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

TEST(ScaledAtomTest, AnyBoxOfAnyOrderIsValueTimesScale) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    ScaledCase scaled(seed);
    // A box of the atom, in a local tensor of some other order with a hole at the end.
    const Shape& shape = scaled.shape();
    Piece piece{{}, {}, scaled.Pick(3), Index(shape.size()), 1.0};
    for (const uint64_t size : shape) {
      piece.atom_begin.push_back(scaled.Pick(size));
      piece.shape.push_back(1 + scaled.Pick(size - piece.atom_begin.back()));
    }
    uint64_t stride = 1;
    for (size_t d = 0; d < shape.size(); ++d) {  // the first dimension is the fastest
      piece.local_strides[d] = stride;
      stride *= piece.shape[d];
    }
    const uint64_t elements = piece.local_offset + stride + 2;
    std::vector<float> want(elements, 0.0F);
    ForEachIndex(piece.shape, [&](Index index) {
      uint64_t flat = piece.local_offset;
      for (size_t d = 0; d < index.size(); ++d) {
        flat += index[d] * piece.local_strides[d];
        index[d] += piece.atom_begin[d];
      }
      want[flat] = scaled.At(index);
    });
    const LocalTensor local{{elements}, {piece}};
    const uint64_t begin = scaled.Pick(elements), end = begin + 1 + scaled.Pick(elements - begin);
    const auto got = ReadAll(scaled.model(), local, begin, end);
    for (uint64_t i = begin; i < end; ++i) ASSERT_TRUE(SameBits(got[i - begin], want[i])) << i;
  }
}

// Boxes of several decoded tensors put together keep their scales.
TEST(ScaledAtomTest, PartsOfDecodedTensorsAreComposed) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    ScaledCase scaled(seed);
    StepModel model = scaled.model();
    const Shape& shape = scaled.shape();
    // [x; x] along a dimension of its own, the second half with two dimensions exchanged back.
    Shape to = shape;
    to.insert(to.begin(), 2);
    std::vector<BoxMap> maps;
    const Atom* sources[] = {&model.atoms[0], &model.atoms[0]};
    for (uint32_t k = 0; k < 2; ++k) {
      BoxMap map{k, Index(shape.size(), 0), shape, Index(to.size(), 0), {-1}};
      map.to_begin[0] = k;
      for (size_t d = 0; d < shape.size(); ++d) map.axis.push_back(static_cast<int8_t>(d));
      maps.push_back(map);
    }
    const auto composed = ComposeSource(sources, maps, to);
    ASSERT_TRUE(composed) << composed.error().message;
    Atom atom = model.atoms[0];
    atom.shape = to;
    atom.source = *composed;
    ASSERT_TRUE(CheckSource(model, atom));
    model.atoms.push_back(atom);
    const auto got = ReadAll(model, WholeTensor(to), 0, *ElementCount(to));
    size_t i = 0;
    ForEachIndex(to, [&](const Index& index) {
      EXPECT_TRUE(SameBits(got[i++], scaled.At({index.begin() + 1, index.end()})));
    });
  }
}

TEST(ScaledAtomTest, ScalesThatDoNotFitAreRefused) {
  ScaledCase scaled(1);
  const StepModel& model = scaled.model();
  const auto refused = [&](const auto& change) {
    Atom atom = model.atoms[0];
    change(atom.source);
    return !CheckSource(model, atom).has_value();
  };
  EXPECT_FALSE(refused([](AtomSource&) {}));
  EXPECT_TRUE(refused([](AtomSource& s) { s.gathers.pop_back(); }));
  EXPECT_TRUE(refused([](AtomSource& s) { s.gathers[1].locals[0].shape.back() += 1; }));
  EXPECT_TRUE(refused([](AtomSource& s) { s.gathers[1].locals.clear(); }));
  EXPECT_TRUE(refused([](AtomSource& s) { s.gathers[0].series[0].elements -= 1; }));
  EXPECT_TRUE(refused([](AtomSource& s) { s.block.columns = 0; }));
  Atom plain = model.atoms[0];
  plain.source = ReplicaSource({model.atoms[0].source.gathers[0]});
  const Atom* mixed[] = {&model.atoms[0], &plain};
  const auto composed = ComposeSource(mixed, {}, scaled.shape());
  ASSERT_FALSE(composed);
  EXPECT_EQ(composed.error().message, "some of its parts are decoded and some gathered");
}

}  // namespace
}  // namespace ckptfs
