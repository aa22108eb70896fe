// SPDX-License-Identifier: Apache-2.0
//
// Elements of a step's fp32 atoms as its files have them, for tests.
//
// Thread safety: pure but for reading files.

#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "core/model/step_model.h"
#include "core/view/source_runs.h"

namespace ckptfs {

// All elements of an atom's first copy, by its fragments; -1 where nothing lies.
inline std::vector<float> StoredElements(const StepModel& step, std::string_view name,
                                         std::string_view kind) {
  const Atom& atom = step.atom(*step.FindAtom(*step.FindParameter(name), kind));
  std::vector<float> out(ElementCount(atom.shape).value(), -1);
  const RunsEnd end = ForEachSourceRun(
      atom.source.gathers.at(0), WholeTensor(atom.shape), 0, out.size(), [&](const SourceRun& run) {
        std::ifstream file(step.PathOf(step.blob(run.blob)), std::ios::binary);
        const std::string bytes{std::istreambuf_iterator<char>(file), {}};
        for (uint64_t i = 0; i < run.count; ++i) {
          std::memcpy(&out[run.target + i * run.target_stride],
                      bytes.data() + run.offset + i * run.source_stride * sizeof(float),
                      sizeof(float));
        }
        return true;
      });
  EXPECT_EQ(end, RunsEnd::kDone);
  return out;
}

}  // namespace ckptfs
