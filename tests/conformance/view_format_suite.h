// SPDX-License-Identifier: Apache-2.0
//
// The contract of every ViewFormat and its views: exact sizes without rendering,
// reads that may be split in any way, look-ups that agree with listings,
// refusals of names it does not have, the same bytes every time, a step that
// lives as long as its views.  A format passes by
// instantiating ViewFormatSuite with its cases.
//
// Thread safety: none; one test at a time.

#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/view/view_format.h"
#include "tests/conformance/tiny_step.h"

namespace ckptfs {

struct ViewFormatCase {
  std::string name;
  std::function<std::unique_ptr<ViewFormat>()> format;
  TinyStepOptions step;
  std::string layout;
};

inline void PrintTo(const ViewFormatCase& value, std::ostream* out) { *out << value.name; }

class ViewFormatSuite : public testing::TestWithParam<ViewFormatCase> {
 protected:
  void SetUp() override;

  // Every file of the view, by path, with its size.
  std::vector<std::pair<std::string, uint64_t>> Files();
  // The whole file by one read.
  std::string Render(const std::string& path);

  std::unique_ptr<TinyStep> step_;
  std::unique_ptr<ViewFormat> format_;
  Layout layout_;
  std::shared_ptr<const View> view_;

 private:
  void Walk(const std::string& directory, std::vector<std::pair<std::string, uint64_t>>& out);
};

}  // namespace ckptfs
