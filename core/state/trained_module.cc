// SPDX-License-Identifier: Apache-2.0

#include "core/state/trained_module.h"

#include <algorithm>
#include <array>
#include <set>

#include "core/state/model_choice.h"

namespace ckptfs {
namespace {

// Words of keys that say what a part is, and not whose it is.
constexpr auto kCommonWords = std::to_array<std::string_view>(
    {"optim",  "optims",     "optimizer", "optimizers", "opt",    "opts",    "state",  "states",
     "dict",   "dicts",      "model",     "models",     "module", "modules", "net",    "nets",
     "network", "weights",   "params",    "app",        "ckpt",   "checkpoint", "trainer", "train",
     "sd",     "adam",       "adamw",     "sgd",        "lion",   "muon",    "adafactor",
     "torch",  "pytorch",    "main"});
// Words of copies of a model, which no optimizer trains.
constexpr auto kCopyWords = std::to_array<std::string_view>(
    {"best", "old", "prev", "previous", "last", "init", "initial", "copy", "ref", "reference",
     "backup", "frozen", "snapshot", "base", "pretrained"});
constexpr size_t kShortest = 3;  // of a word that may be cut: "disc", "discriminator"

// The words of a key that say whose a part is: {"critic"} of "critic_optim".
std::set<std::string> WordsOf(std::string_view key) {
  std::set<std::string> words;
  std::string word;
  const auto end = [&] {
    const bool number =
        std::ranges::all_of(word, [](char c) { return c >= '0' && c <= '9'; });
    if (!number && std::ranges::find(kCommonWords, word) == kCommonWords.end()) words.insert(word);
    word.clear();
  };
  for (size_t i = 0; i < key.size(); ++i) {
    const char c = key[i];
    const bool upper = c >= 'A' && c <= 'Z';
    const bool letter = upper || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    const bool begins = upper && i > 0 && key[i - 1] >= 'a' && key[i - 1] <= 'z';  // "optimD"
    if ((!letter || begins) && !word.empty()) end();
    if (letter) word += upper ? static_cast<char>(c - 'A' + 'a') : c;
  }
  if (!word.empty()) end();
  return words;
}

// "g" and "generator", "disc" and "discriminator".
bool IsSameWord(std::string_view a, std::string_view b) {
  if (a.size() > b.size()) std::swap(a, b);
  return a == b || ((a.size() == 1 || a.size() >= kShortest) && b.starts_with(a));
}

// The words of one key that another has, too.
std::set<std::string> Shared(const std::set<std::string>& words, const std::set<std::string>& in) {
  std::set<std::string> shared;
  for (const std::string& word : words) {
    const bool has = std::ranges::any_of(in, [&](auto& one) { return IsSameWord(word, one); });
    if (has) shared.insert(word);
  }
  return shared;
}

// Members that fit a module: those of a name by that, others by a shape that is left.
struct Fit {
  size_t members = 0;
  bool exact = false;  // each of its tensors has a member
  bool operator==(const Fit&) const = default;
  auto operator<=>(const Fit&) const = default;
};

Fit FitOf(std::span<const ToldMember> members, const TrainableModule& module) {
  std::map<std::string_view, const Shape*> named;
  std::map<Shape, size_t> left;
  for (const ModuleTensor& tensor : module.tensors) {
    named.emplace(tensor.name, tensor.shape);
    ++left[*tensor.shape];
  }
  Fit fit;
  for (const ToldMember& member : members) {
    if (member.name.empty()) continue;
    const auto tensor = named.find(member.name);
    if (tensor == named.end() || (member.shape != nullptr && *member.shape != *tensor->second))
      continue;
    ++fit.members;
    --left[*tensor->second];
    named.erase(tensor);
  }
  for (const ToldMember& member : members) {
    if (!member.name.empty() || member.shape == nullptr) continue;
    const auto shape = left.find(*member.shape);
    if (shape == left.end() || shape->second == 0) continue;
    ++fit.members;
    --shape->second;
  }
  fit.exact = fit.members == members.size() && fit.members == module.tensors.size();
  return fit;
}

std::vector<Shape> ShapesOf(const TrainableModule& module) {
  std::vector<Shape> shapes;
  for (const ModuleTensor& tensor : module.tensors) {
    if (!tensor.shape->empty()) shapes.push_back(*tensor.shape);
  }
  std::ranges::sort(shapes);
  return shapes;
}

// Of two modules of the same shapes, this is not the one that the optimizer of `words` trains.
bool IsCopy(std::string_view key, const std::set<std::string>& words, std::string_view model) {
  const auto own = WordsOf(key);
  const bool said = std::ranges::any_of(own, [](const std::string& word) {
    return std::ranges::find(kCopyWords, word) != kCopyWords.end();
  });
  return said || (words.empty() && WordsOf(model).empty());
}

std::string Quoted(std::string_view key) {
  return key.empty() ? "another module" : StrCat("'", key, "'");
}

}  // namespace

bool MayTrain(std::string_view optimizer, const TrainableModule& model,
              const TrainableModule& other) {
  if (IsAverageKey(other.key)) return false;
  return ShapesOf(model) != ShapesOf(other) || !IsCopy(other.key, WordsOf(optimizer), model.key);
}

std::string TrainsAnother(std::string_view optimizer, std::span<const ToldMember> members,
                          const TrainableModule& model, std::span<const TrainableModule> others) {
  const Fit own = FitOf(members, model);
  const auto words = WordsOf(optimizer);
  const auto of_model = Shared(words, WordsOf(model.key));
  for (const TrainableModule& other : others) {
    if (IsAverageKey(other.key)) continue;
    const Fit fit = FitOf(members, other);
    if (fit.members == 0 || fit < own) continue;
    const std::string its = StrCat("it is the optimizer of ", Quoted(other.key));
    if (fit > own) return its;
    const auto of_other = Shared(words, WordsOf(other.key));
    if (of_model.size() != of_other.size()) {
      if (of_model.size() < of_other.size()) return its;
      continue;
    }
    if (ShapesOf(model) == ShapesOf(other) && IsCopy(other.key, words, model.key)) continue;
    return StrCat("it may as well be the optimizer of ", Quoted(other.key));
  }
  return "";
}

}  // namespace ckptfs
