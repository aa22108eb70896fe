// SPDX-License-Identifier: Apache-2.0
//
// ToolNames are the names that training tools, and programs that copy, give to what they write,
// as rows (formats/tools/save_order.cc has them): what core knows of tools by names alone.
//
// Thread safety: immutable.
// Lifetime: the rows are constants.

#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string_view>

namespace ckptfs {

struct ToolNames {
  // How programs that copy name a file until it is whole: NAME, a dot and so many random letters.
  struct Random {
    bool hidden = false;  // with a dot before it, too
    size_t letters = 0;
  };

  std::span<const std::string_view> saved_ends = {};        // of tensors and objects: ".pt"
  std::span<const std::string_view> temporary_starts = {};  // changed when it is whole: "tmp-"
  std::span<const std::string_view> temporary_ends = {};    // ".partial"
  std::span<const std::string_view> steps_folders = {};  // hold a run's steps, and do not name it
  std::span<const Random> random_ends = {};

  // True if tensors or objects are saved under the name; a log has another.
  bool IsSaved(std::string_view path) const { return EndsWithOne(path, saved_ends); }
  bool IsStepsFolder(std::string_view name) const {
    return std::ranges::find(steps_folders, name) != steps_folders.end();
  }
  // True if the file or directory gets another name when it is whole.
  bool IsTemporary(std::string_view name) const {
    return EndsWithOne(name, temporary_ends) ||
           std::ranges::any_of(temporary_starts,
                               [&](std::string_view one) { return name.starts_with(one); });
  }
  // True if it is a part of a file of another name, which somebody writes or has left.
  bool IsPart(std::string_view name) const {
    const auto fits = [&](const Random& random) {
      const size_t end = name.rfind('.');
      const bool hidden = name.starts_with('.');
      return end != std::string_view::npos && name.size() - end - 1 == random.letters &&
             hidden == random.hidden &&
             std::ranges::all_of(name.substr(end + 1), IsLetterOrDigit) &&
             IsSaved(name.substr(0, end));
    };
    return EndsWithOne(name, temporary_ends) || std::ranges::any_of(random_ends, fits);
  }

 private:
  static bool IsLetterOrDigit(char letter) {
    return (letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'z') ||
           (letter >= 'A' && letter <= 'Z');
  }
  static bool EndsWithOne(std::string_view name, std::span<const std::string_view> ends) {
    return std::ranges::any_of(ends, [&](std::string_view one) { return name.ends_with(one); });
  }
};

}  // namespace ckptfs
