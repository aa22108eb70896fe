// SPDX-License-Identifier: Apache-2.0
#include "core/state/state_fit.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ckptfs {
namespace {

TEST(StateFitTest, AStateFitsItsParameterOrNot) {
  using enum Relation;
  const struct {
    const char* kind;
    Shape state, parameter;
    std::optional<Relation> fit;
  } cases[] = {
      {"exp_avg", {4, 6}, {4, 6}, kSame},
      {"anything", {4, 6}, {4, 6}, kSame},
      {"exp_avg", {}, {}, kSame},
      {"step", {}, {4, 6}, kScalar},
      {"exp_avg", {}, {4, 6}, kScalar},
      {"exp_avg", {2, 6}, {4, 6}, std::nullopt},  // a projection
      {"exp_avg_sq", {4}, {4, 6}, std::nullopt},
      {"exp_avg_sq_row", {4}, {4, 6}, kReduced},
      {"exp_avg_sq_col", {6}, {4, 6}, kReduced},
      {"exp_avg_sq_col", {5}, {4, 6}, std::nullopt},
      {"exp_avg_sq_row", {2, 4}, {2, 4, 6}, kReduced},
      {"exp_avg_sq_col", {2, 6}, {2, 4, 6}, kReduced},
      {"row_var", {4, 1}, {4, 6}, kReduced},
      {"second_momentum_buffer", {1, 6}, {4, 6}, kReduced},
      {"precond", {4, 4}, {4, 6}, std::nullopt},
      {"history", {3, 4, 6}, {4, 6}, std::nullopt},
      {"sum", {}, {4, 6}, kScalar},
      {"sum", {3}, {4, 6}, std::nullopt},
  };
  for (const auto& one : cases) {
    EXPECT_EQ(FitOf(one.kind, one.state, one.parameter), one.fit)
        << one.kind << " " << ShapeToString(one.state) << " " << ShapeToString(one.parameter);
  }
}

TEST(StateFitTest, AStateRunsAlongDimensionsOfItsParameter) {
  using Dims = std::vector<uint32_t>;
  const struct {
    const char* kind;
    Shape state, parameter;
    std::optional<Dims> dims;
  } cases[] = {
      {"exp_avg_sq_row", {4}, {4, 6}, Dims{0}},
      {"exp_avg_sq_col", {6}, {4, 6}, Dims{1}},
      {"exp_avg_sq_row", {6}, {6, 6}, Dims{0}},  // by its name
      {"exp_avg_sq_col", {6}, {6, 6}, Dims{1}},
      {"second_moment", {6}, {6, 6}, std::nullopt},
      {"exp_avg_sq_col", {4}, {4, 6}, std::nullopt},
      {"exp_avg_sq_row", {2, 4}, {2, 4, 6}, Dims{0, 1}},
      {"exp_avg_sq_col", {2, 6}, {2, 4, 6}, Dims{0, 2}},
      {"row_var", {4, 1}, {4, 6}, Dims{0, 1}},
      {"mean", {1}, {4, 6}, Dims{}},
      {"precond", {4, 4}, {4, 6}, std::nullopt},
  };
  for (const auto& one : cases) {
    EXPECT_EQ(DimensionsOf(one.kind, one.state, one.parameter), one.dims)
        << one.kind << " " << ShapeToString(one.state) << " " << ShapeToString(one.parameter);
  }
}

TEST(StateFitTest, StatesTellAShapeOrNothing) {
  using States = std::vector<std::pair<std::string_view, Shape>>;
  const std::pair<States, std::optional<Shape>> cases[] = {
      {{{"step", {}}, {"exp_avg", {4, 6}}}, Shape{4, 6}},
      {{{"exp_avg", {4, 6}}, {"exp_avg_sq", {4, 3}}}, std::nullopt},
      {{{"exp_avg_sq_row", {4}}, {"exp_avg_sq_col", {6}}}, Shape{4, 6}},
      {{{"exp_avg_sq_row", {2, 4}}, {"exp_avg_sq_col", {2, 6}}}, Shape{2, 4, 6}},
      {{{"exp_avg_sq_row", {2, 4}}, {"exp_avg_sq_col", {3, 6}}}, std::nullopt},
      {{{"exp_avg_sq_row", {4}}, {"exp_avg_sq_col", {6}}, {"exp_avg", {6, 4}}}, std::nullopt},
      {{{"exp_avg_sq_row", {4}}}, std::nullopt},
      {{{"precond", {4, 4}}, {"step", {}}}, std::nullopt},
      {{{"exp_avg", {}}}, std::nullopt},
      {{}, std::nullopt},
  };
  for (const auto& [states, told] : cases) {
    std::vector<std::pair<std::string_view, const Shape*>> given;
    for (const auto& [kind, shape] : states) given.emplace_back(kind, &shape);
    EXPECT_EQ(WholeShapeOf(given), told) << states.size();
  }
}

}  // namespace
}  // namespace ckptfs
