// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/state_keys.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs::dcp {
namespace {

constexpr std::string_view kState = "state.";
constexpr std::string_view kGroups = "param_groups.";
constexpr size_t kMaxPrefixes = 64;  // that a model may have

// Parts of the words for an optimizer.
constexpr std::array<std::string_view, 3> kOptimizerParts = {"optim", "optimizer", "optimizers"};
constexpr std::array<std::string_view, 8> kModelWords = {
    "model", "state_dict", "model_state_dict", "model_state", "module", "net", "network",
    "weights"};
// First words of what is beside a model whose weights stand at the top.
constexpr std::array<std::string_view, 10> kOtherWords = {
    "train_state", "dataloader",  "data_loader", "rng",   "rng_state",
    "lr_scheduler", "scheduler", "trainer",     "extra", "ema"};

// Words for copies of weights that no optimizer trains, as a part of a name ("model_ema").
constexpr std::array<std::string_view, 10> kAveragedWords = {
    "ema", "averaged", "average", "avg", "swa", "teacher", "shadow", "polyak", "slow", "target"};

bool Contains(std::span<const std::string_view> words, std::string_view word) {
  return std::ranges::find(words, word) != words.end();
}

// Visits the parts of a text between separators; true once one is of the words.
bool HasPart(std::string_view text, char separator, const auto& is_one) {
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    if (is_one(text.substr(0, end))) return true;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return false;
}

// "opt", "optim", "optimizer_0", "optimizer1", "optim_muon", "optimizer_state".
bool IsOptimizerWord(std::string_view word) {
  while (!word.empty() && IsDigit(word.back())) word.remove_suffix(1);
  if (word.ends_with('_')) word.remove_suffix(1);
  return word == "opt" || HasPart(word, '_', [](std::string_view part) {
    return Contains(kOptimizerParts, part);
  });
}

// A key's or prefix's components name an average.
bool IsAveraged(std::string_view prefix) {
  return HasPart(prefix, '.', [](std::string_view word) {
    return HasPart(word, '_', [](std::string_view part) { return Contains(kAveragedWords, part); });
  });
}

bool IsModelWord(std::string_view word) { return Contains(kModelWords, word); }

// The part of a key up to and with an optimizer's word, at most one more (of a list or a dict of
// optimizers) and a dot, if states or groups come behind it.
std::optional<std::string_view> OptimizerPrefix(std::string_view key) {
  size_t begin = 0;
  bool before = false;  // the word before was an optimizer's
  for (int depth = 0; depth < 4; ++depth) {
    const size_t dot = key.find('.', begin);
    if (dot == std::string_view::npos) return std::nullopt;
    const std::string_view rest = key.substr(dot + 1);
    const bool among = std::exchange(before, IsOptimizerWord(key.substr(begin, dot - begin)));
    if ((before || among) && (rest.starts_with(kState) || rest.starts_with(kGroups))) {
      return key.substr(0, dot + 1);
    }
    begin = dot + 1;
  }
  return std::nullopt;
}

std::string_view FirstWord(std::string_view key) { return key.substr(0, key.find('.')); }

std::string_view LastWord(std::string_view key) { return key.substr(key.rfind('.') + 1); }

// Of what a model's weights may stand behind, to be compared: one that is not an average of others
// comes before one that is, a word for a model before any other.
struct Likeliness {
  bool own = false;
  bool word = false;
  auto operator<=>(const Likeliness&) const = default;
};

Likeliness LikelinessOf(std::string_view prefix) {
  const bool top = prefix.empty();
  return {!IsAveraged(prefix), top || IsModelWord(LastWord(prefix.substr(0, prefix.size() - 1)))};
}

// All elements of a path but the last, as a prefix of a key.
std::string Container(const std::vector<PathElement>& path) {
  std::string out;
  for (size_t i = 0; i + 1 < path.size(); ++i) out += StrCat(path[i].text, ".");
  return out;
}

std::optional<uint32_t> Number(std::string_view text) {
  uint32_t number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool all = code == std::errc() && end == text.data() + text.size() && !text.empty();
  return all ? std::optional(number) : std::nullopt;
}

class KeyReader {
 public:
  KeyReader(const DcpMetadata& metadata, bool optimizers, const std::vector<std::string>& order)
      : metadata_(metadata), with_optimizers_(optimizers), order_(order) {}

  Result<StateKeys> Run() {
    FindOptimizers();
    Split();
    CKPT_RETURN_IF_ERROR(ChooseModel());
    AddWeights();
    out_.optimizers.assign(optimizers_.begin(), optimizers_.end());
    if (with_optimizers_) {
      for (const KeyedEntry entry : out_.others) {
        if (!entry.object && LooksLikeState(NameOf(entry))) {
          return Fail(Error{ErrorCode::kUnsupported,
                            StrCat("'", NameOf(entry), "' looks like a state of an optimizer, and no word "
                                   "before it names one")}
                          .Needing("--weights-only takes the weights"));
        }
      }
      for (const Inside& key : inside_) CKPT_RETURN_IF_ERROR(AddOfOptimizer(key));
    }
    return std::move(out_);
  }

 private:
  // A key of an optimizer, without its prefix.
  struct Inside {
    std::string_view prefix;
    std::string_view rest;
    KeyedEntry entry;
  };

  std::string_view NameOf(KeyedEntry entry) const {
    return entry.object ? std::string_view(metadata_.objects[entry.index].name)
                        : std::string_view(metadata_.tensors[entry.index].name);
  }
  const std::vector<PathElement>& PathOf(KeyedEntry entry) const {
    return entry.object ? metadata_.object_paths[entry.index]
                        : metadata_.tensor_paths[entry.index];
  }
  template <class Visit>
  void ForEach(Visit visit) const {
    for (size_t i = 0; i < metadata_.tensors.size(); ++i) visit(KeyedEntry{false, i});
    for (size_t i = 0; i < metadata_.objects.size(); ++i) visit(KeyedEntry{true, i});
  }

  void FindOptimizers();
  void Split();
  Status ChooseModel();
  std::set<std::string> Prefixes() const;
  size_t Named(const std::string& prefix) const;
  std::map<std::string, size_t> PrefixesByWord() const;
  bool LooksLikeState(std::string_view key) const;
  bool IsWeight(size_t tensor) const;
  void AddWeights();
  std::string OptimizerName(std::string_view prefix) const;
  std::optional<std::pair<std::string, std::string>> NameAndRest(std::string_view text) const;
  Status AddOfOptimizer(const Inside& key);
  Status AddHyperParameter(const Inside& key, std::string_view rest);

  const DcpMetadata& metadata_;
  const bool with_optimizers_;
  const std::vector<std::string>& order_;
  StateKeys out_;
  std::set<std::string, std::less<>> optimizers_;  // prefixes
  std::vector<Inside> inside_;
  std::vector<KeyedEntry> outside_;
  std::set<std::string_view> names_;  // of weights
};

// A state dict may be an optimizer's and nothing else.
void KeyReader::FindOptimizers() {
  bool state = false;
  bool groups = false;
  ForEach([&](KeyedEntry entry) {
    const std::string_view key = NameOf(entry);
    if (const auto prefix = OptimizerPrefix(key)) optimizers_.emplace(*prefix);
    state |= key.starts_with(kState);
    groups |= key.starts_with(kGroups);
  });
  if (optimizers_.empty() && state && groups) optimizers_.emplace("");
}

void KeyReader::Split() {
  ForEach([&](KeyedEntry entry) {
    const std::string_view key = NameOf(entry);
    std::optional<std::string_view> prefix = OptimizerPrefix(key);
    const bool bare = optimizers_.contains("") &&
                      (key.starts_with(kState) || key.starts_with(kGroups));
    if (bare) prefix = "";
    if (prefix) {
      inside_.push_back({key.substr(0, prefix->size()), key.substr(prefix->size()), entry});
    } else {
      outside_.push_back(entry);
    }
  });
}

// What may stand before the weights' names.
std::set<std::string> KeyReader::Prefixes() const {
  std::set<std::string> prefixes;
  for (const KeyedEntry entry : outside_) {
    if (entry.object || prefixes.size() >= kMaxPrefixes) continue;
    const auto& path = PathOf(entry);
    if (path.size() > 1) {
      prefixes.insert(Container(path));
      continue;
    }
    const std::string_view key = NameOf(entry);
    prefixes.insert("");
    size_t dot = key.find('.');
    for (int depth = 0; depth < 2 && dot != std::string_view::npos; ++depth) {
      if (IsModelWord(LastWord(key.substr(0, dot)))) {
        prefixes.insert(std::string(key.substr(0, dot + 1)));
      }
      dot = key.find('.', dot + 1);
    }
  }
  return prefixes;
}

// How many states are of weights, if these stand behind the prefix.
size_t KeyReader::Named(const std::string& prefix) const {
  std::set<std::string_view> names;
  for (const KeyedEntry entry : outside_) {
    const std::string_view key = NameOf(entry);
    if (!entry.object && key.starts_with(prefix)) names.insert(key.substr(prefix.size()));
  }
  size_t named = 0;
  for (const Inside& key : inside_) {
    if (!key.rest.starts_with(kState)) continue;
    const std::string_view rest = key.rest.substr(kState.size());
    for (size_t dot = rest.rfind('.'); dot != std::string_view::npos && dot > 0;
         dot = rest.rfind('.', dot - 1)) {
      if (!names.contains(rest.substr(0, dot))) continue;
      ++named;
      break;
    }
  }
  return named;
}

// Of a checkpoint without an optimizer: prefix -> tensors.
std::map<std::string, size_t> KeyReader::PrefixesByWord() const {
  std::map<std::string, size_t> containers;
  for (const KeyedEntry entry : outside_) {
    const auto& path = PathOf(entry);
    if (entry.object || path.empty()) continue;
    if (path.size() == 1) {
      ++containers[""];
    } else if (IsModelWord(path[path.size() - 2].text)) {
      ++containers[Container(path)];
    }
  }
  return containers;
}

// What stands behind several prefixes alike is the weights of none of them by chance: an average
// has the names of what it is of.
Status KeyReader::ChooseModel() {
  std::vector<std::tuple<size_t, Likeliness, std::string>> found;
  for (const std::string& prefix : Prefixes()) {
    if (const size_t named = Named(prefix)) found.emplace_back(named, LikelinessOf(prefix), prefix);
  }
  if (found.empty()) {
    for (const auto& [prefix, count] : PrefixesByWord()) {
      // Whose average has more tensors than itself is still the model.
      const Likeliness likely = LikelinessOf(prefix);
      found.emplace_back(likely.own ? count : 0, likely, prefix);
    }
  }
  if (found.empty()) return {};
  std::ranges::sort(found, std::greater<>());
  const auto& [named, likely, prefix] = found.front();
  if (found.size() > 1 && std::get<0>(found[1]) == named && std::get<1>(found[1]) == likely) {
    const auto said = [](const std::string& one) { return one.empty() ? "no prefix" : StrCat("'", one, "'"); };
    return Fail(ErrorCode::kUnsupported,
                StrCat("as many weights stand behind ", said(prefix), " as behind ",
                       said(std::get<2>(found[1])), ", and nothing tells which of them are the model's"));
  }
  out_.model = prefix;
  return {};
}

// "...state.<weight>.<kind>" outside of every optimizer.
bool KeyReader::LooksLikeState(std::string_view key) const {
  size_t at = key.find(kState);
  while (at != key.npos && at > 0 && key[at - 1] != '.') at = key.find(kState, at + 1);
  return at != key.npos && NameAndRest(key.substr(at + kState.size())).has_value();
}

bool KeyReader::IsWeight(size_t tensor) const {
  const std::string& key = metadata_.tensors[tensor].name;
  if (!key.starts_with(out_.model)) return false;
  if (!out_.model.empty()) return true;
  const auto& path = metadata_.tensor_paths[tensor];
  if (!path.empty()) return path.size() == 1 && !Contains(kOtherWords, key);
  return !Contains(kOtherWords, FirstWord(key));
}

void KeyReader::AddWeights() {
  for (const KeyedEntry entry : outside_) {
    const std::string_view key = NameOf(entry);
    if (!entry.object && IsWeight(entry.index)) {
      const std::string_view name = key.substr(out_.model.size());
      out_.weights.push_back({std::string(name), entry.index});
      names_.insert(name);
    } else if (entry.object && !out_.model.empty() && key.starts_with(out_.model)) {
      out_.left_out.emplace_back(key);
    } else {
      out_.others.push_back(entry);
    }
  }
}

std::string KeyReader::OptimizerName(std::string_view prefix) const {
  if (optimizers_.size() == 1) return "";
  return std::string(prefix.substr(0, prefix.size() - 1));
}

// A weight's name, the longest that fits, and what stands behind its dot.
std::optional<std::pair<std::string, std::string>> KeyReader::NameAndRest(
    std::string_view text) const {
  for (size_t dot = text.rfind('.'); dot != std::string_view::npos && dot > 0;
       dot = text.rfind('.', dot - 1)) {
    if (names_.contains(text.substr(0, dot))) {
      return std::pair(std::string(text.substr(0, dot)), std::string(text.substr(dot + 1)));
    }
  }
  return std::nullopt;
}

Status KeyReader::AddOfOptimizer(const Inside& key) {
  if (key.rest.starts_with(kGroups)) return AddHyperParameter(key, key.rest.substr(kGroups.size()));
  const std::string_view rest = key.rest.substr(kState.size());
  const auto found = NameAndRest(rest);
  if (found) {
    out_.states.push_back({OptimizerName(key.prefix), found->first, found->second, key.entry});
    return {};
  }
  const auto number = Number(FirstWord(rest));
  if (number && *number < order_.size() && rest.find('.') != rest.npos) {
    if (!names_.contains(order_[*number])) {
      return Refuse("--parameter-order: '", order_[*number], "' is not a weight");
    }
    const std::string kind(rest.substr(rest.find('.') + 1));
    out_.states.push_back({OptimizerName(key.prefix), order_[*number], kind, key.entry});
    return {};
  }
  if (number) {
    return Fail(Error{ErrorCode::kUnsupported,
                      StrCat("'", NameOf(key.entry), "': the optimizer numbers its parameters "
                             "(optimizer.state_dict(), not get_optimizer_state_dict), and nothing tells "
                             "which parameter has which number")}
                    .Needing("--parameter-order says it, --weights-only takes the weights"));
  }
  return Refuse("'", NameOf(key.entry), "' is a state of no weight",
                out_.model.empty() ? "" : StrCat(" below '", out_.model, "'"));
}

Status KeyReader::AddHyperParameter(const Inside& key, std::string_view rest) {
  StateKeys::HyperParameter out;
  out.optimizer = OptimizerName(key.prefix);
  out.entry = key.entry;
  if (const auto found = NameAndRest(rest)) {
    out.parameter = found->first;
    out.key = found->second;
    out_.flat_optimizer = true;
  } else if (const auto group = Number(FirstWord(rest)); group && rest.find('.') != rest.npos) {
    out.group = *group;
    out.key = rest.substr(rest.find('.') + 1);
  } else {
    return Refuse("'", NameOf(key.entry), "' is a hyper-parameter of neither a group nor a weight");
  }
  out_.hyper_parameters.push_back(std::move(out));
  return {};
}

}  // namespace

Result<StateKeys> ReadStateKeys(const DcpMetadata& metadata, bool optimizers,
                                const std::vector<std::string>& order) {
  return KeyReader(metadata, optimizers, order).Run();
}

}  // namespace ckptfs::dcp
