// SPDX-License-Identifier: Apache-2.0

#include "core/state/model_choice.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "core/base/strings.h"
#include "core/model/name_normaliser.h"

namespace ckptfs {
namespace {

using Made = ModelCandidate::Made;

constexpr size_t kShownKeys = 8;  // in a message
constexpr int kMaxOptimizerDepth = 4;

constexpr auto kModelWords = std::to_array<std::string_view>(
    {"model", "state_dict", "model_state_dict", "model_state", "module", "net", "network",
     "weights", "params", "model_weights"});
// Words that may stand before one of these: "app.model", "state.model".
constexpr auto kAroundWords = std::to_array<std::string_view>(
    {"app", "state", "states", "checkpoint", "ckpt", "train_state", "trainer"});
// Copies of weights that no optimizer trains, as a part of a word ("model_ema").
constexpr auto kAverageWords = std::to_array<std::string_view>(
    {"ema", "averaged", "average", "avg", "swa", "teacher", "shadow", "polyak", "slow", "target"});
// The words for the measure of a training: its module may have buffers ("dino_loss").
constexpr auto kLossWords =
    std::to_array<std::string_view>({"loss", "criterion", "metric", "metrics"});
constexpr auto kOptimizerParts =
    std::to_array<std::string_view>({"optim", "optimizer", "optimizers"});

template <size_t kCount>
bool Contains(const std::array<std::string_view, kCount>& words, std::string_view word) {
  return std::ranges::find(words, word) != words.end();
}

// Visits the parts of a text between separators; true once one is as asked.
bool HasPart(std::string_view text, char separator, const auto& is_one) {
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (is_one(text.substr(0, end))) return true;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return false;
}

std::string Lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

// True if one of a key's words has one of these parts.
template <size_t kCount>
bool HasWordPart(std::string_view key, const std::array<std::string_view, kCount>& parts) {
  const std::string lower = Lower(key);
  return HasPart(lower, '.', [&](std::string_view word) {
    return HasPart(word, '_', [&](std::string_view part) { return Contains(parts, part); });
  });
}

// How much a dict looks like a state_dict, the weakest first.
enum class Grade : uint8_t {
  kNone,   // numbers or integers beside other values: a loss, a counter, a generator's state
  kStray,  // tensors among more other values, or vectors by themselves (means, deviations)
  kModel,  // nothing but named tensors, as nn.Module.state_dict() returns them
};

struct Score {
  bool trained = false;
  Grade grade = Grade::kNone;
  bool own = false;   // not an average or a loss, nor in an optimizer's part of the state
  bool word = false;  // its key is one for a model
  auto operator<=>(const Score&) const = default;
};

bool IsNumeric(DType dtype) {
  return IsFloat(dtype) || dtype == DType::kC64 || dtype == DType::kC128 || dtype == DType::kI8 ||
         BitWidth(dtype) < 8 || (dtype >= DType::kF8E4M3 && dtype <= DType::kF8E8M0);
}

Grade GradeOf(const ModelCandidate& candidate) {
  const auto& tensors = candidate.tensors;
  if (tensors.empty()) return Grade::kNone;
  if (candidate.marked) return Grade::kModel;
  size_t dotted = 0;
  bool numbers = false;
  bool matrix = false;
  for (const auto& one : tensors) {
    dotted += one.name.find('.') != std::string::npos;
    numbers = numbers || (!one.shape.empty() && IsNumeric(one.dtype));
    matrix = matrix || (one.shape.size() > 1 && IsNumeric(one.dtype));
  }
  const bool pure = candidate.others == 0;
  const bool named = candidate.key.empty() || IsModelKey(candidate.key);
  if (!numbers) return pure && named ? Grade::kStray : Grade::kNone;
  if (2 * dotted > tensors.size()) {
    const bool most = tensors.size() > candidate.others || (matrix && tensors.size() > 1);
    return most ? Grade::kModel : Grade::kStray;
  }
  return pure && matrix ? Grade::kModel : Grade::kStray;
}

Score ScoreOf(const ModelCandidate& candidate) {
  Score out;
  const bool average = IsAverageKey(candidate.key) || IsAverageState(candidate.tensors);
  // How many says nothing: a critic may be the larger one.  Nobody trains an average.
  out.trained = candidate.trained > 0 && !average;
  if (candidate.made == Made::kDerived && candidate.trained == 0) return out;
  out.grade = GradeOf(candidate);
  out.own = !average && !HasWordPart(candidate.key, kLossWords) &&
            !HasPart(candidate.key, '.',
                     [](std::string_view word) { return word != "opt" && IsOptimizerWord(word); });
  out.word = candidate.made == Made::kDict && IsModelKey(candidate.key);
  return out;
}

bool IsDerived(const ModelCandidate& candidate) { return candidate.made == Made::kDerived; }

bool IsGood(const Score& score) { return score.trained || score.grade != Grade::kNone; }

std::string Keys(std::span<const ModelCandidate> candidates, const std::vector<size_t>& which) {
  std::string out;
  for (size_t i = 0; i < which.size() && i < kShownKeys; ++i) {
    out += StrCat(i == 0 ? "" : ", ", ModelKeyText(candidates[which[i]].key));
  }
  return which.size() > kShownKeys ? StrCat(out, ", ... (", which.size(), " in all)") : out;
}

// Says why the best comes before the second.
std::string Difference(const ModelCandidate& best, const Score& a, const ModelCandidate& second,
                       const Score& b) {
  const std::string first = ModelKeyText(best.key);
  const std::string other = ModelKeyText(second.key);
  if (a.trained != b.trained) return StrCat("the optimizer's states name parameters of ", first);
  if (a.grade != b.grade) return StrCat(other, " does not look like a state_dict");
  if (a.own != b.own && IsAverageState(second.tensors)) return StrCat(other, " is an average");
  if (a.own != b.own) return StrCat(other, " is by its name an average, a loss or an optimizer's");
  return StrCat(first, " has a model's name, ", other, " does not");
}

Result<ModelChoice> ChooseAsked(std::span<const ModelCandidate> candidates,
                                const std::vector<std::pair<Score, size_t>>& good,
                                std::string_view asked) {
  std::string_view key = asked;
  while (key.ends_with('.')) key.remove_suffix(1);
  ModelChoice out;
  std::vector<size_t> known;
  std::optional<size_t> found;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].key == key && !candidates[i].tensors.empty()) found = i;
  }
  const auto is_part = [&](const ModelCandidate& one) {  // of a union that is asked for
    return found && IsDerived(candidates[*found]) &&
           (key.empty() || one.key.starts_with(StrCat(key, ".")));
  };
  for (const auto& [score, i] : good) {
    if (IsDerived(candidates[i])) continue;
    known.push_back(i);
    if (i != found && score.grade == Grade::kModel && !is_part(candidates[i]))
      out.others.push_back(i);
  }
  if (!found) {
    return Fail(ErrorCode::kInvalid,
                StrCat("--model ", asked, ": this key does not lead to a dict of tensors; ",
                       known.empty() ? "no other key leads to a model" : "a model is at: ",
                       Keys(candidates, known)));
  }
  out.index = *found;
  out.strong = true;
  out.why = "--model says so";
  return out;
}

}  // namespace

bool LooksLikeModel(const ModelCandidate& candidate) {
  return !IsDerived(candidate) && GradeOf(candidate) == Grade::kModel;
}

std::string ModelKeyText(std::string_view key) {
  return key.empty() ? "'.' (the top)" : StrCat("'", key, "'");
}

bool IsModelKey(std::string_view key) {
  const size_t dot = key.rfind('.');
  const std::string_view last = dot == key.npos ? key : key.substr(dot + 1);
  if (!Contains(kModelWords, last)) return false;
  return dot == key.npos || !HasPart(key.substr(0, dot), '.', [](std::string_view word) {
           return !Contains(kAroundWords, word) && !Contains(kModelWords, word);
         });
}

bool IsAverageKey(std::string_view key) { return HasWordPart(key, kAverageWords); }

bool IsAverageState(std::span<const ModelCandidate::Tensor> tensors) {
  size_t inside = 0;
  size_t counters = 0;
  for (const auto& [name, dtype, shape] : tensors) {
    inside += name.starts_with("module.");
    counters += (name == "n_averaged" || name == "steps") && shape.empty() && dtype == DType::kI64;
  }
  return counters == 1 && inside > 0 && inside + 1 == tensors.size();
}

bool IsOptimizerWord(std::string_view word) {
  while (!word.empty() && IsDigit(word.back())) word.remove_suffix(1);
  if (word.ends_with('_')) word.remove_suffix(1);
  return word == "opt" ||
         HasPart(word, '_', [](std::string_view part) { return Contains(kOptimizerParts, part); });
}

std::string_view OptimizerPrefixOf(std::string_view key) {
  size_t begin = 0;
  bool before = false;  // the word before was an optimizer's
  for (int depth = 0; depth < kMaxOptimizerDepth; ++depth) {
    const size_t dot = key.find('.', begin);
    if (dot == std::string_view::npos) return {};
    const std::string_view rest = key.substr(dot + 1);
    const bool among = std::exchange(before, IsOptimizerWord(key.substr(begin, dot - begin)));
    if ((before || among) && (rest.starts_with("state.") || rest.starts_with("param_groups."))) {
      return key.substr(0, dot + 1);
    }
    begin = dot + 1;
  }
  return {};
}

SplitState SplitByFirstWord(std::span<const ModelCandidate::Tensor> tensors, size_t most) {
  SplitState out;
  std::map<std::string_view, size_t> by_word;  // parts
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string_view name = tensors[i].name;
    const size_t dot = name.find('.');
    const std::string_view word = dot == name.npos ? "" : name.substr(0, dot);
    if (!by_word.contains(word) && out.parts.size() >= most) continue;
    const auto [at, added] = by_word.try_emplace(word, out.parts.size());
    if (added) {
      out.parts.emplace_back().key = word;
      out.parts.back().made = ModelCandidate::Made::kSplit;
      out.tensors.emplace_back();
    }
    auto& part = out.parts[at->second].tensors;
    part.push_back(tensors[i]);
    if (dot != name.npos) part.back().name.erase(0, dot + 1);
    out.tensors[at->second].push_back(i);
  }
  return out;
}

void CountTrained(std::span<ModelCandidate> candidates, const std::set<std::string>& names) {
  for (ModelCandidate& candidate : candidates) {
    const auto named = [&](const auto& tensor) {
      return names.contains(NormaliseName(tensor.name));
    };
    candidate.trained =
        names.empty() ? 0 : static_cast<size_t>(std::ranges::count_if(candidate.tensors, named));
  }
}

Result<ModelChoice> ChooseModel(std::span<const ModelCandidate> candidates,
                                std::string_view asked) {
  std::vector<std::pair<Score, size_t>> good;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Score score = ScoreOf(candidates[i]);
    if (IsGood(score)) good.emplace_back(score, i);
  }
  // Equal ones stay in the file's order.
  std::ranges::stable_sort(good, std::greater<>(), &std::pair<Score, size_t>::first);
  if (!asked.empty()) return ChooseAsked(candidates, good, asked);
  if (good.empty()) {
    return Fail(ErrorCode::kInvalid,
                "it does not hold a dict of named tensors, as a model's state_dict is");
  }
  const auto [best, index] = good.front();
  ModelChoice out{index, best.trained || best.grade == Grade::kModel, "", {}};
  std::vector<size_t> alike;
  for (const auto& [score, i] : good) {
    if (score == best) alike.push_back(i);
    const bool part = IsDerived(candidates[i]) || IsDerived(candidates[index]);
    if (i != index && score.grade == Grade::kModel && !part) out.others.push_back(i);
  }
  if (alike.size() > 1) {
    return Fail(
        Error{ErrorCode::kUnsupported,
              StrCat("several dicts look like the model, and nothing tells which one it is: ",
                     Keys(candidates, alike))}
            .Needing("--model KEY names it"));
  }
  if (!out.others.empty()) {
    const size_t second = out.others.front();
    out.why = Difference(candidates[index], best, candidates[second], ScoreOf(candidates[second]));
  }
  return out;
}

}  // namespace ckptfs
