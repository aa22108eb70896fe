// SPDX-License-Identifier: Apache-2.0

#include "core/peer/parity.h"

#include <isa-l/erasure_code.h>

#include <algorithm>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"

namespace ckptfs {
namespace {

constexpr size_t kTableBytes = 32;  // that ISA-L makes of one coefficient

// ISA-L does not write what it reads, and does not say so.
unsigned char* Input(std::span<const std::byte> bytes) {
  return const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(bytes.data()));
}

// out += coefficient * bytes.
void AddScaled(unsigned char coefficient, std::span<const std::byte> bytes,
               std::span<std::byte> out) {
  if (bytes.empty() || coefficient == 0) return;
  CKPT_CHECK(bytes.size() <= out.size());
  std::array<unsigned char, kTableBytes> table;
  ec_init_tables(1, 1, &coefficient, table.data());
  auto* to = reinterpret_cast<unsigned char*>(out.data());
  ec_encode_data_update(static_cast<int>(bytes.size()), 1, 1, 0, table.data(), Input(bytes), &to);
}

}  // namespace

uint64_t StripeShape::RowsOf(uint64_t file_bytes) const {
  return (ChunkCount(file_bytes, kChunkBytes) + data - 1) / data;
}

uint64_t StripeShape::ChunkBytesOf(uint32_t unit, uint64_t row, uint64_t file_bytes) const {
  const uint64_t chunk = row * data + (unit < data ? unit : 0);
  const uint64_t begin = std::min(chunk * kChunkBytes, file_bytes);
  return std::min(file_bytes - begin, kChunkBytes);
}

uint64_t StripeShape::UnitBytes(uint32_t unit, uint64_t file_bytes) const {
  const uint64_t rows = RowsOf(file_bytes);
  if (rows == 0) return 0;
  return (rows - 1) * kChunkBytes + ChunkBytesOf(unit, rows - 1, file_bytes);
}

// Cauchy's matrix has 1 / (x_j + y_i) with all x and y different, and sums that are XOR.  Every
// square part of it can be inverted; scaling rows and columns does not change that.
StripeCode::StripeCode(StripeShape shape) : shape_(shape) {
  CKPT_CHECK(shape.data > 0 && shape.data <= kMostUnits && shape.parity <= kMostUnits - shape.data);
  const auto cauchy = [&](uint32_t j, uint32_t i) {
    return gf_inv(static_cast<unsigned char>((shape.data + j) ^ i));
  };
  for (uint32_t j = 0; j < shape.parity; ++j) {
    Row row(shape.data);
    // The first row's entries divide their columns, then the first column's its rows.
    for (uint32_t i = 0; i < shape.data; ++i) row[i] = gf_mul(cauchy(j, i), gf_inv(cauchy(0, i)));
    const unsigned char first = gf_inv(row[0]);
    for (unsigned char& entry : row) entry = gf_mul(entry, first);
    parity_.push_back(std::move(row));
  }
}

StripeCode::Row StripeCode::RowOf(uint32_t unit) const {
  if (unit >= shape_.data) return parity_.at(unit - shape_.data);
  Row row(shape_.data);
  row[unit] = 1;
  return row;
}

void StripeCode::Fold(uint32_t unit, std::span<const std::byte> bytes, uint32_t j,
                      std::span<std::byte> parity) const {
  AddScaled(parity_.at(j).at(unit), bytes, parity);
}

Status StripeCode::Restore(const std::map<uint32_t, std::span<const std::byte>>& known,
                           uint32_t unit, std::span<std::byte> out) const {
  const size_t size = shape_.data;
  if (known.size() < size)
    return Refuse(known.size(), " of ", shape_.units(), " units are known; ", size, " are needed");
  // known = A * data, so data = A^-1 * known, and the unit is its own row times that.
  Row a, inverse(size * size);
  auto one = known.begin();
  for (size_t k = 0; k < size; ++k, ++one) {
    CKPT_CHECK(one->first < shape_.units());
    const Row row = RowOf(one->first);
    a.insert(a.end(), row.begin(), row.end());
  }
  CKPT_CHECK(gf_invert_matrix(a.data(), inverse.data(), static_cast<int>(size)) == 0);
  const Row wanted = RowOf(unit);
  std::fill(out.begin(), out.end(), std::byte{0});
  one = known.begin();
  for (size_t k = 0; k < size; ++k, ++one) {
    unsigned char coefficient = 0;
    for (size_t i = 0; i < size; ++i) coefficient ^= gf_mul(wanted[i], inverse[i * size + k]);
    AddScaled(coefficient, one->second, out);
  }
  return {};
}

}  // namespace ckptfs
