// SPDX-License-Identifier: Apache-2.0
//
// A LayoutMap says which rank of a layout holds what of a step: a row per parameter (or per
// layer, where there are too many), a column per rank (or per ranks that hold the same, where
// there are too many), and in each cell which part.  With ZeRO there are second rows: which slice
// of that part's optimizer states (at stage 3 of its weights, too) the rank has.
//
// Thread safety: pure functions over immutable values.
// Units: elements.

#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"
#include "mount/commands/picture.h"

namespace ckptfs {

struct LayoutMap {
  struct Cell {
    uint64_t elements = 0;  // held of the row's
    // The position along the dim that is cut, as shares of it, for the row's first parameter that
    // is cut; empty if nothing is held, or all.  For a slice: along the rank's part.
    std::vector<std::pair<double, double>> runs;
    // For a slice: [begin, end) of the rank's row-major local tensor, of the row's first parameter.
    std::pair<uint64_t, uint64_t> slice{};
  };
  struct Row {
    std::string name;
    uint64_t parameters = 1;
    uint64_t elements = 0;
    std::vector<Cell> cells;  // one per column
  };
  Layout layout;
  std::vector<uint64_t> ranks;  // a column each
  uint64_t alike = 1;           // ranks that hold the same as one that is shown
  uint64_t slices_shown = 0;    // of the data-parallel ranks' slices, where not all are
  std::vector<Row> rows;
  std::vector<Row> slices;  // empty without ZeRO, or where nothing of the step is sliced
  size_t rows_left_out = 0;
};

// kUnsupported, or the rule, where the step cannot be cut so.
Result<LayoutMap> MapLayout(const StepModel& step, const Layout& layout);

std::string MapText(const LayoutMap& map);
nlohmann::json MapJson(const LayoutMap& map);
Picture DrawMap(const LayoutMap& map, const std::string& title);

}  // namespace ckptfs
