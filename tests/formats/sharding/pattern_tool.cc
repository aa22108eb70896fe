// SPDX-License-Identifier: Apache-2.0
//
// pattern_tool: reads a JSON array of [pattern, [names...]] on stdin and prints
// an array of the error, or of [[prefix, whole] of each name].

#include <iostream>
#include <nlohmann/json.hpp>

#include "formats/sharding/name_pattern.h"

int main() {
  nlohmann::json out = nlohmann::json::array();
  for (const auto& item : nlohmann::json::parse(std::cin)) {
    const auto pattern = ckptfs::NamePattern::Parse(item[0].get_ref<const std::string&>());
    if (!pattern) {
      out.push_back(pattern.error().message);
      continue;
    }
    nlohmann::json answers = nlohmann::json::array();
    for (const auto& name : item[1]) {
      const auto& text = name.get_ref<const std::string&>();
      answers.push_back({pattern->MatchesPrefix(text), pattern->MatchesWhole(text)});
    }
    out.push_back(std::move(answers));
  }
  std::cout << out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}
