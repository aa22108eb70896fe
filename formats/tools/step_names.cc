// SPDX-License-Identifier: Apache-2.0

#include "formats/tools/step_names.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr std::string_view kTrainer = "checkpoint-";
constexpr std::string_view kLightning = ".ckpt";

// A word of a name, and what a number behind it counts; the greatest decides.
enum class Counts : uint8_t { kNothing, kEpochs, kSaves, kSteps, kBatches };
struct Word {
  std::string_view text;
  Counts counts = Counts::kNothing;
};
constexpr std::array kWords = {
    Word{"checkpoint", Counts::kSaves}, Word{"ckpt", Counts::kSaves},
    Word{"global", Counts::kNothing},   Word{"step", Counts::kSteps},
    Word{"iter", Counts::kSteps},       Word{"iteration", Counts::kSteps},
    Word{"ba", Counts::kBatches},  // Composer's, through all epochs
    Word{"batch", Counts::kSteps},      Word{"epoch", Counts::kEpochs},
    Word{"ep", Counts::kEpochs},        Word{"unsharded", Counts::kNothing},
    Word{"sharded", Counts::kNothing},  Word{"hf", Counts::kNothing}};
// The same before the number of a file.
constexpr std::array kFileWords = {Word{"model", Counts::kSaves}, Word{"weights", Counts::kSaves},
                                   Word{"snapshot", Counts::kSaves}, Word{"state", Counts::kSaves},
                                   Word{"net", Counts::kSaves}};
constexpr std::string_view kSeparators = "-_=";
// Words before a number that tells files of one step, or of other trainings, apart.
constexpr std::array<std::string_view, 11> kRanks = {"rank", "part", "shard", "worker", "tp", "pp",
                                                     "mp",   "dp",   "fold",  "seed",   "v"};

// All of `text` as a number.
std::optional<uint64_t> Number(std::string_view text) {
  uint64_t number = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  return parsed.ec == std::errc() && parsed.ptr == end ? std::optional(number) : std::nullopt;
}

// The whole number behind the first "<word>=" of a name such as "epoch=1-step=500-v1"; that of a
// metric of the name ("train_loss_epoch=1.25") has a point.
std::optional<uint64_t> NumberBehind(std::string_view name, std::string_view word) {
  for (size_t at = name.find(word); at != name.npos; at = name.find(word, at + 1)) {
    if (at > 0 && kSeparators.find(name[at - 1]) == std::string_view::npos) continue;
    const std::string_view rest = name.substr(at + word.size());
    const size_t digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
    const bool point = digits + 1 < rest.size() && rest[digits] == '.' && IsDigit(rest[digits + 1]);
    if (point || digits == 0) continue;
    return Number(rest.substr(0, digits));
  }
  return std::nullopt;
}

// The leading letters of a text, or its leading digits.
std::string_view FirstToken(std::string_view text) {
  size_t end = 0;
  while (end < text.size() && IsDigit(text[end]) == IsDigit(text[0]) &&
         kSeparators.find(text[end]) == std::string_view::npos)
    ++end;
  return text.substr(0, end);
}

// A number of a name, and what it counts.
struct NameNumber {
  uint64_t number = 0;
  Counts counts = Counts::kNothing;
};

// The number of a name of known words and numbers, with or without a separator between two; a
// name that is one number counts, too.  `more`: other words that are known.
std::optional<NameNumber> NumberOf(std::string_view name, std::span<const Word> more) {
  if (const auto alone = Number(name)) return NameNumber{*alone};
  std::optional<uint64_t> out;
  Counts said = Counts::kNothing;  // of `out`
  Counts before = Counts::kNothing;
  bool epochs = false;
  while (!name.empty()) {
    const std::string_view token = FirstToken(name);
    if (token.empty()) return std::nullopt;  // two separators, or one at the beginning
    name.remove_prefix(token.size());
    if (!name.empty() && kSeparators.find(name[0]) != std::string_view::npos) {
      name.remove_prefix(1);
      if (name.empty()) return std::nullopt;
    }
    if (IsDigit(token[0])) {
      const auto number = Number(token);
      if (!number || before == Counts::kNothing) return std::nullopt;
      epochs = epochs || before == Counts::kEpochs;
      if (before >= said) {
        out = number;
        said = before;
      }
      before = Counts::kNothing;
      continue;
    }
    const auto known = std::ranges::find(kWords, token, &Word::text);
    const auto other = std::ranges::find(more, token, &Word::text);
    if (known == kWords.end() && other == more.end()) return std::nullopt;
    before = known != kWords.end() ? known->counts : other->counts;
  }
  // Such steps may begin anew in each epoch: it is a step's name, and its time decides.
  if (epochs && said == Counts::kSteps) return NameNumber{0, said};
  return out ? std::optional(NameNumber{*out, said}) : std::nullopt;
}

std::optional<uint64_t> OnlyNumber(const std::optional<NameNumber>& found) {
  return found ? std::optional(found->number) : std::nullopt;
}

// A part of a name: a number, or what stands between numbers.
struct Field {
  std::string_view text;
  bool number = false;
  std::optional<uint64_t> whole;  // nothing of a decimal
};

std::vector<Field> FieldsOf(std::string_view name) {
  std::vector<Field> out;
  while (!name.empty()) {
    const bool number = IsDigit(name[0]);
    size_t end = 0;
    const auto decimal = [&] {
      return number && name[end] == '.' && end + 1 < name.size() && IsDigit(name[end + 1]);
    };
    while (end < name.size() && (IsDigit(name[end]) == number || decimal())) ++end;
    const std::string_view text = name.substr(0, end);
    out.push_back({text, number, number ? Number(text) : std::nullopt});
    name.remove_prefix(end);
  }
  return out;
}

bool AreAlike(const std::vector<Field>& a, const std::vector<Field>& b) {
  return std::ranges::equal(a, b, [](const Field& one, const Field& other) {
    return one.number == other.number && (one.number || one.text == other.text);
  });
}

// True if the field tells the names apart and no other whole number falls in its order.
bool Orders(std::span<const std::vector<Field>> names, size_t field) {
  std::vector<size_t> order(names.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::sort(order, {}, [&](size_t i) { return names[i][field].whole; });
  for (size_t k = 1; k < order.size(); ++k) {
    const auto &before = names[order[k - 1]], &after = names[order[k]];
    if (before[field].whole == after[field].whole) return false;
    for (size_t f = 0; f < after.size(); ++f) {
      if (before[f].whole && after[f].whole && *after[f].whole < *before[f].whole) return false;
    }
  }
  return true;
}

// "a.b" of "a.b.pth.tar": suffixes are of letters.
std::string_view WithoutSuffixes(std::string_view name) {
  for (size_t dot = name.rfind('.'); dot != std::string_view::npos && dot > 0;
       dot = name.rfind('.')) {
    if (std::ranges::any_of(name.substr(dot), IsDigit)) break;
    name = name.substr(0, dot);
  }
  return name;
}

}  // namespace

std::optional<uint64_t> StepNumber(std::string_view name) {
  if (IsLightningName(name)) name.remove_suffix(kLightning.size());
  // A metric may stand behind them ("epoch=1-step=500-loss=0.25").
  if (const auto step = NumberBehind(name, "step=")) return step;
  if (const auto epoch = NumberBehind(name, "epoch=")) return epoch;
  return OnlyNumber(NumberOf(name, {}));
}

std::optional<uint64_t> FileNumber(std::string_view name) {
  const std::string_view stem = WithoutSuffixes(name);
  const auto number = StepNumber(stem);
  return number ? number : OnlyNumber(NumberOf(stem, kFileWords));
}

std::optional<uint64_t> SiblingNumber(std::string_view name, std::span<const std::string> names) {
  const std::vector<Field> own = FieldsOf(name);
  std::vector<std::vector<Field>> alike = {own};
  for (const std::string& other : names) {
    std::vector<Field> fields = FieldsOf(other);
    if (other != name && AreAlike(own, fields)) alike.push_back(std::move(fields));
  }
  if (alike.size() < 2) return std::nullopt;
  for (size_t f = 0; f < own.size(); ++f) {
    const bool whole = std::ranges::all_of(
        alike, [&](const std::vector<Field>& fields) { return fields[f].whole.has_value(); });
    const bool rank = f > 0 && EndsInRank(own[f - 1].text);
    const bool size = f + 1 < own.size() && own[f + 1].text.starts_with('b');  // "llama-7b"
    if (whole && !rank && !size && Orders(alike, f)) return own[f].whole;
  }
  return std::nullopt;
}

bool CountsEpochs(std::string_view name) {
  const std::string_view stem = WithoutSuffixes(name);
  if (NumberBehind(stem, "step=")) return false;
  if (NumberBehind(stem, "epoch=")) return true;
  const auto found = NumberOf(stem, kFileWords);
  return found && found->counts == Counts::kEpochs;
}

bool EndsInRank(std::string_view text) {
  text = text.substr(0, text.find_last_not_of("-_.=") + 1);
  return std::ranges::any_of(kRanks, [&](std::string_view word) {
    if (!text.ends_with(word)) return false;
    const std::string_view before = text.substr(0, text.size() - word.size());
    return before.empty() || std::string_view("-_.=").find(before.back()) != before.npos;
  });
}

bool IsTrainerName(std::string_view name) {
  return name.starts_with(kTrainer) && Number(name.substr(kTrainer.size()));
}

std::optional<VersionedName> VersionOf(std::string_view name) {
  if (!IsLightningName(name)) return std::nullopt;
  const std::string_view stem = name.substr(0, name.size() - kLightning.size());
  const size_t mark = stem.rfind("-v");
  if (mark == std::string_view::npos || mark == 0) return std::nullopt;
  const auto version = Number(stem.substr(mark + 2));
  if (!version || *version == 0 || *version > std::numeric_limits<uint32_t>::max())
    return std::nullopt;
  return VersionedName{StrCat(stem.substr(0, mark), kLightning), static_cast<uint32_t>(*version)};
}

bool IsLightningName(std::string_view name) {
  return name.size() > kLightning.size() && name.ends_with(kLightning) && name.front() != '.';
}

}  // namespace ckptfs
