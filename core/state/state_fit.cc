// SPDX-License-Identifier: Apache-2.0

#include "core/state/state_fit.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace ckptfs {
namespace {

constexpr std::array<std::string_view, 19> kWhole = {"master",
                                                     "exp_avg",
                                                     "exp_avg_sq",
                                                     "max_exp_avg_sq",
                                                     "momentum_buffer",
                                                     "square_avg",
                                                     "grad_avg",
                                                     "acc_delta",
                                                     "exp_inf",
                                                     "exp_avg_var",
                                                     "exp_avg_diff",
                                                     "exp_avg_nus",
                                                     "exp_avg_slow",
                                                     "exp_avg_res",
                                                     "exp_hessian",
                                                     "sum",
                                                     "prev",
                                                     "step_size",
                                                     "ax"};

constexpr std::string_view kRow = "exp_avg_sq_row";
constexpr std::string_view kColumn = "exp_avg_sq_col";

Shape Without(const Shape& shape, size_t dim) {
  Shape out = shape;
  out.erase(out.begin() + static_cast<std::ptrdiff_t>(dim));
  return out;
}

bool IsFactored(const Shape& state, const Shape& parameter) {
  const size_t rank = parameter.size();
  if (rank >= 2 &&
      (state == Without(parameter, rank - 1) || state == Without(parameter, rank - 2))) {
    return true;
  }
  if (state.size() != rank) return false;
  for (size_t d = 0; d < rank; ++d) {
    if (state[d] != parameter[d] && state[d] != 1) return false;
  }
  return true;
}

}  // namespace

bool IsWholeKind(std::string_view kind) { return std::ranges::find(kWhole, kind) != kWhole.end(); }

bool IsOurs(std::string_view kind) {
  return kind.empty() || kind == "weight" || kind == "master" || kind == "grad";
}

std::optional<Relation> FitOf(std::string_view kind, const Shape& state, const Shape& parameter) {
  if (state == parameter) return Relation::kSame;
  if (state.empty()) return Relation::kScalar;
  if (IsWholeKind(kind)) return std::nullopt;
  const bool fits = IsFactored(state, parameter) || state == Shape{1};
  return fits ? std::optional(Relation::kReduced) : std::nullopt;
}

std::optional<std::vector<uint32_t>> DimensionsOf(std::string_view kind, const Shape& state,
                                                  const Shape& parameter) {
  const size_t rank = parameter.size();
  std::vector<uint32_t> dims(rank);
  std::iota(dims.begin(), dims.end(), 0u);
  if (state == Shape{1} && rank != 1) return std::vector<uint32_t>{};
  if (!IsFactored(state, parameter)) return std::nullopt;
  if (state.size() == rank) return dims;
  const bool row = state == Without(parameter, rank - 1) && kind != kColumn;
  const bool column = state == Without(parameter, rank - 2) && kind != kRow;
  if (row == column) return std::nullopt;
  dims.erase(dims.end() - (row ? 1 : 2));
  return dims;
}

std::optional<Shape> WholeShapeOf(
    std::span<const std::pair<std::string_view, const Shape*>> states) {
  const Shape* whole = nullptr;
  const Shape* row = nullptr;
  const Shape* column = nullptr;
  for (const auto& [kind, shape] : states) {
    if (shape->empty()) continue;  // torch counts and sums in tensors without dimensions
    if (kind == kRow) row = shape;
    if (kind == kColumn) column = shape;
    if (!IsWholeKind(kind)) continue;
    if (whole != nullptr && *whole != *shape) return std::nullopt;
    whole = shape;
  }
  if (row != nullptr && column != nullptr && row->size() == column->size() && !column->empty()) {
    Shape told = *row;
    told.push_back(column->back());
    const bool agree = Without(told, told.size() - 2) == *column && (!whole || *whole == told);
    return agree ? std::optional(std::move(told)) : std::nullopt;
  }
  return whole != nullptr ? std::optional(*whole) : std::nullopt;
}

}  // namespace ckptfs
