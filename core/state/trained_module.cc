// SPDX-License-Identifier: Apache-2.0

#include "core/state/trained_module.h"

#include <algorithm>
#include <array>
#include <compare>
#include <map>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "core/state/roles.h"

namespace ckptfs {
namespace {

// Words of keys that say what a part is, and not whose it is.
constexpr auto kCommonWords = std::to_array<std::string_view>(
    {"optim",      "optims",  "optimizer", "optimizers", "opt",     "opts",   "state",
     "states",     "dict",    "dicts",     "model",      "models",  "module", "modules",
     "net",        "nets",    "network",   "weights",    "params",  "app",    "ckpt",
     "checkpoint", "trainer", "train",     "sd",         "adam",    "adamw",  "sgd",
     "lion",       "muon",    "adafactor", "torch",      "pytorch", "main"});
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
    const bool number = std::ranges::all_of(word, [](char c) { return c >= '0' && c <= '9'; });
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

// The number of words of one key that another has, too.
size_t SharedWords(std::string_view key, std::string_view other) {
  const std::set<std::string> in = WordsOf(other);
  return static_cast<size_t>(std::ranges::count_if(WordsOf(key), [&](const std::string& word) {
    return std::ranges::any_of(in, [&](auto& one) { return IsSameWord(word, one); });
  }));
}

// Members that fit a module: those of a name by that, others by a shape that is left.
struct Fit {
  size_t members = 0;
  bool exact = false;  // each of its tensors has a member
  auto operator<=>(const Fit&) const = default;
};

Fit FitOf(std::span<const ToldMember> members, const TrainableModule& module) {
  std::map<std::string_view, const Shape*> named;
  std::map<Shape, size_t> left;
  for (const OwnableParameter& parameter : module.parameters) {
    named.emplace(parameter.name, &parameter.shape);
    ++left[parameter.shape];
  }
  Fit fit;
  for (const ToldMember& member : members) {
    if (member.name.empty()) continue;
    const auto found = named.find(member.name);
    if (found == named.end() || (member.shape != nullptr && *member.shape != *found->second))
      continue;
    ++fit.members;
    --left[*found->second];
    named.erase(found);
  }
  for (const ToldMember& member : members) {
    if (!member.name.empty() || member.shape == nullptr) continue;
    const auto shape = left.find(*member.shape);
    if (shape == left.end() || shape->second == 0) continue;
    ++fit.members;
    --shape->second;
  }
  fit.exact = fit.members == members.size() && fit.members == module.parameters.size();
  return fit;
}

std::vector<Shape> ShapesOf(const TrainableModule& module) {
  std::vector<Shape> shapes;
  for (const OwnableParameter& parameter : module.parameters) {
    if (!parameter.shape.empty()) shapes.push_back(parameter.shape);
  }
  std::ranges::sort(shapes);
  return shapes;
}

std::string Quoted(std::string_view key) {
  return key.empty() ? "another module" : StrCat("'", key, "'");
}

}  // namespace

TrainableModule TrainableModuleOf(const ModelCandidate& candidate) {
  std::set<std::string_view> names;
  for (const auto& tensor : candidate.tensors) names.insert(tensor.name);
  const auto has = [&](std::string_view name) { return names.contains(name); };
  TrainableModule module{candidate.key, {}, IsAverageState(candidate.tensors)};
  for (const auto& [name, dtype, shape] : candidate.tensors) {
    if (!LooksLikeBuffer(name, dtype, shape, has)) module.parameters.push_back({name, shape});
  }
  return module;
}

bool IsCopyKey(std::string_view key) {
  return std::ranges::any_of(WordsOf(key), [](const std::string& word) {
    return std::ranges::find(kCopyWords, word) != kCopyWords.end();
  });
}

bool AreTwins(const TrainableModule& a, const TrainableModule& b) {
  return ShapesOf(a) == ShapesOf(b);
}

bool MayBeTrained(const TrainableModule& model, const TrainableModule& other) {
  const bool average = other.average || IsAverageKey(other.key);
  return !average && !(IsCopyKey(other.key) && AreTwins(model, other));
}

bool IsCalledAs(std::string_view optimizer, std::string_view other, std::string_view model) {
  return SharedWords(optimizer, other) > SharedWords(optimizer, model);
}

OptimizerOwner OwnerOf(const OptimizerOfState& optimizer, const TrainableModule& model,
                       std::span<const TrainableModule> others) {
  const Fit own = FitOf(optimizer.members, model);
  for (const TrainableModule& other : others) {
    const bool called = IsCalledAs(optimizer.key, other.key, model.key);
    if (!called && !MayBeTrained(model, other)) continue;
    const Fit fit = FitOf(optimizer.members, other);
    // A few names that other modules have, too ("conv1.weight"), tell nothing.
    const bool few = 2 * fit.members < optimizer.members.size();
    if (fit.members == 0 || few || fit < own) continue;
    if (fit > own || called) {
      return {TrainedModule::kAnother, StrCat("it is the optimizer of ", Quoted(other.key))};
    }
    const bool served = std::ranges::any_of(optimizer.beside, [&](std::string_view key) {
      return IsCalledAs(key, other.key, model.key);
    });
    const bool plain = WordsOf(optimizer.key).empty();
    if (!IsCalledAs(optimizer.key, model.key, other.key) && !(served && plain)) {
      return {TrainedModule::kUnknown,
              StrCat("it may as well be the optimizer of ", Quoted(other.key))};
    }
  }
  return {};
}

}  // namespace ckptfs
