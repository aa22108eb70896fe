// SPDX-License-Identifier: Apache-2.0

#include "core/model/layout_suggestion.h"

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "core/base/edit_distance.h"
#include "core/base/strings.h"
#include "core/model/layout.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxText = 256;

// The words of layouts, and what other tools call the same.
struct OtherWord {
  std::string_view written;
  std::string_view meant;
};
constexpr std::array kOtherWords = std::to_array<OtherWord>({
    {"tensor", "tp"},
    {"mp", "tp"},
    {"model", "tp"},
    {"pipeline", "pp"},
    {"data", "dp"},
    {"ddp", "dp"},
    {"expert", "ep"},
    {"experts", "ep"},
    {"context", "cp"},
    {"virtual", "vpp"},
    {"stage", "zero"},
    {"z", "zero"},
    {"bfloat", "bf"},
    {"float", "fp"},
    {"f", "fp"},
    {"half", "fp16"},
    {"single", "fp32"},
});
const std::array<std::string, 9> kNumbered = {"tp", "pp",  "dp",   "ep",   "etp",
                                              "cp", "vpp", "zero", "split"};
const std::array<std::string, 2> kDtypeWords = {"bf", "fp"};
const std::array<std::string, 2> kBare = {"plain", "pipe"};

bool IsLetter(char letter) { return letter >= 'a' && letter <= 'z'; }

// Runs of letters and runs of digits; a '-' between digits stays one ("3-5").
std::vector<std::string> Runs(std::string_view text) {
  std::vector<std::string> runs;
  char last = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    char letter = text[i];
    if (letter >= 'A' && letter <= 'Z') letter = static_cast<char>(letter - 'A' + 'a');
    const bool dash = letter == '-' && IsDigit(last) && i + 1 < text.size() && IsDigit(text[i + 1]);
    const bool digit = IsDigit(letter) || dash;
    const bool joins = digit ? IsDigit(last) || last == '-' : IsLetter(letter) && IsLetter(last);
    if (digit || IsLetter(letter)) {
      if (!joins || runs.empty()) runs.emplace_back();
      runs.back() += letter;
    }
    last = digit || IsLetter(letter) ? letter : ' ';
  }
  return runs;
}

// The word of layouts that was meant; nothing if none or several are as near.
std::optional<std::string> WordMeant(const std::string& word) {
  for (const OtherWord& spelling : kOtherWords) {
    if (word == spelling.written) return std::string(spelling.meant);
  }
  std::vector<std::string> known(kNumbered.begin(), kNumbered.end());
  known.insert(known.end(), kDtypeWords.begin(), kDtypeWords.end());
  known.insert(known.end(), kBare.begin(), kBare.end());
  const size_t most = word.size() > 3 ? 2 : 1;
  const std::vector<std::string> near = NearestWords(word, known, most);
  if (near.size() != 1) return std::nullopt;
  return near.front();
}

bool TakesNumber(const std::string& word) {
  return std::find(kBare.begin(), kBare.end(), word) == kBare.end() && !IsDigit(word.back());
}

// "tp" "2" "dp" "4" -> tp2_dp4; also with each number before its word.
std::string Joined(const std::vector<std::string>& runs, bool number_first) {
  std::string text;
  for (size_t i = 0; i < runs.size(); ++i) {
    std::string number;
    if (number_first && IsDigit(runs[i].front())) number = runs[i++];
    if (i == runs.size() || IsDigit(runs[i].front())) return "";
    const auto word = WordMeant(runs[i]);
    if (!word) return "";
    const bool follows = !number_first && i + 1 < runs.size() && IsDigit(runs[i + 1].front());
    if (TakesNumber(*word) && follows) number = runs[++i];
    if (TakesNumber(*word) == number.empty()) return "";
    text += StrCat(text.empty() ? "" : "_", *word, number);
  }
  return text;
}

}  // namespace

std::string SuggestLayout(std::string_view text) {
  if (text.size() > kMaxText) return "";
  const std::vector<std::string> runs = Runs(text);
  if (runs.empty()) return "";
  const auto layout = Layout::ParseExactly(Joined(runs, IsDigit(runs.front().front())));
  return layout ? layout->ToString() : "";
}

}  // namespace ckptfs
