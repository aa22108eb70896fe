// SPDX-License-Identifier: Apache-2.0
//
// The contract of every Source: it detects cheaply and says no to what is not
// its own, says what an incomplete step lacks, yields the same step every time,
// proves its coverage, keeps inside its files, reads no tensor bytes, changes
// nothing, and makes every failure of the system an error that names the file.
// A source passes by instantiating SourceSuite with its cases.
//
// Thread safety: none; one test at a time.

#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/state/source.h"
#include "tests/conformance/source_samples.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/watched_root.h"

namespace ckptfs {

struct SourceCase {
  std::string name;
  std::function<std::unique_ptr<Source>()> source;
  std::function<SourceSample(const std::string& directory)> write;
};

inline void PrintTo(const SourceCase& value, std::ostream* out) { *out << value.name; }

// All of them: each source must say no to the samples of the others.
const std::vector<SourceCase>& SourceCases();

class SourceSuite : public testing::TestWithParam<SourceCase> {
 protected:
  void SetUp() override;

  // The one step below `path`, found, complete and read.
  Result<StepModel> ReadAll(const std::string& path) const;
  Result<StepModel> ReadFrom(const std::shared_ptr<const Root>& root,
                             const std::string& path) const;
  // A path of the sample's below root_.
  std::string Below(const std::string& path) const;
  // The candidate of the sample's save directory.
  StepCandidate Candidate() const;
  // The step as the bytes of its manifest.
  std::string Manifest() const;

  TemporaryDirectory directory_;
  std::shared_ptr<WatchedRoot> root_;
  SourceSample sample_;
  std::unique_ptr<Source> source_;
  FamilySet families_;
  SourceOptions options_;
};

}  // namespace ckptfs
