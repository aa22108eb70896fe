// SPDX-License-Identifier: Apache-2.0
#include "core/base/json_text.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace ckptfs {
namespace {

TEST(StrictJsonTest, WhatHasNoJsonIsPutRight) {
  const std::pair<std::string, std::string> cases[] = {
      {"[NaN, Infinity, -Infinity]", "[0  , 0       , 0        ]"},
      {"[1e999,-1e999,1e5,-0,12]", "[0    ,0     ,1e5,-0,12]"},
      {"{\"NaN\": \"-Infinity 1e999\"}", "{\"NaN\": \"-Infinity 1e999\"}"},
      {R"(["\ud800", "\udc00x", "\ud83d\ude00", "\\ud800", "\ud800\ud83d\ude00"])",
       R"(["\ufffd", "\ufffdx", "\ud83d\ude00", "\\ud800", "\ufffd\ud83d\ude00"])"},
      {R"(["a\"NaN", NaN])", R"(["a\"NaN", 0  ])"},
  };
  for (const auto& [text, right] : cases) {
    EXPECT_EQ(StrictJson(text), right);
    EXPECT_TRUE(nlohmann::json::accept(right)) << right;
  }
  EXPECT_TRUE(nlohmann::json::accept(StrictJson("[" + std::string(400, '9') + "]")));
}

TEST(StrictJsonTest, WhatIsNotJsonForPythonStaysSo) {
  for (const std::string text :
       {"[nan]", "[Inf]", "[+Infinity]", "[--Infinity]", "[1e999x]", "[01]", "\"\\ud8", "\"\\",
        "[-]", "[1.]", "{NaN: 1}", "\"\\ud80g\"", "[NaNNaN]"}) {
    EXPECT_FALSE(nlohmann::json::accept(StrictJson(text))) << text;
    EXPECT_EQ(StrictJson(text).size(), text.size());
  }
}

}  // namespace
}  // namespace ckptfs
