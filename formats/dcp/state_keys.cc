// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/state_keys.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/model/name_normaliser.h"
#include "core/state/joined_names.h"
#include "core/state/model_choice.h"
#include "core/state/ownership.h"
#include "formats/dcp/model_keys.h"

namespace ckptfs::dcp {
namespace {

constexpr std::string_view kState = "state.";
constexpr std::string_view kGroups = "param_groups.";

std::optional<uint32_t> Number(std::string_view text) {
  uint32_t number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool all = code == std::errc() && end == text.data() + text.size() && !text.empty();
  return all ? std::optional(number) : std::nullopt;
}

// Returns the part before the first component of that name ("state."), with its dot.
std::optional<std::string_view> Before(std::string_view key, std::string_view component) {
  for (size_t at = key.find(component); at != key.npos; at = key.find(component, at + 1)) {
    if (at == 0 || key[at - 1] == '.') return key.substr(0, at);
  }
  return std::nullopt;
}

// True if the path says that an optimizer's state is of a number: a parameter may be "0", too.
bool IsCounted(const std::vector<PathElement>& path) {
  for (size_t i = 0; i + 1 < path.size(); ++i) {
    if (path[i].text == "state" && path[i + 1].index) return true;
  }
  return false;
}

// True if the path says that a hyper-parameter is of a group, which a list has.
bool IsOfGroup(const std::vector<PathElement>& path) {
  for (size_t i = 0; i + 1 < path.size(); ++i) {
    if (path[i].text == "param_groups" && path[i + 1].index) return true;
  }
  return false;
}

class KeyReader {
 public:
  KeyReader(const DcpMetadata& metadata, bool optimizers, std::string_view model)
      : metadata_(metadata), with_optimizers_(optimizers), asked_(model) {}

  Result<StateKeys> Run() {
    FindOptimizers();
    Split();
    CKPT_RETURN_IF_ERROR(ChooseModel());
    AddWeights();
    out_.optimizers.assign(optimizers_.begin(), optimizers_.end());
    if (with_optimizers_) {
      SetNamelessApart();
      CollectBare();
      CollectExact();
      CollectNamed();
      CollectAdapter();
      CollectBefore();
      for (const Inside& key : inside_) AddOfOptimizer(key);
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
    return entry.object ? metadata_.object_paths[entry.index] : metadata_.tensor_paths[entry.index];
  }
  bool IsNamedState(const Inside& key) const {
    return key.rest.starts_with(kState) && !IsCounted(PathOf(key.entry));
  }
  template <class Visit>
  void ForEach(Visit visit) const {
    for (size_t i = 0; i < metadata_.tensors.size(); ++i) visit(KeyedEntry{false, i});
    for (size_t i = 0; i < metadata_.objects.size(); ++i) visit(KeyedEntry{true, i});
  }

  void FindOptimizers();
  void Split();
  Status ChooseModel();
  std::optional<std::string_view> PrefixOfState(std::string_view key) const;
  void SetNamelessApart();
  void AddWeights();
  void CollectBare();
  void CollectExact();
  void CollectNamed();
  void CollectAdapter();
  void CollectBefore();
  std::string BeforeNames(std::span<const Inside* const> states) const;
  bool AreWeightsBehind(std::string_view before, std::span<const Inside* const> states) const;
  std::string OptimizerName(std::string_view prefix) const;
  std::optional<std::pair<std::string, std::string>> NameAndRest(std::string_view text) const;
  std::optional<JoinedName> JoinLive(std::string_view text, std::string_view& rest) const;
  std::optional<std::pair<std::string, std::string>> OwnerAndRest(const Inside& key,
                                                                  std::string_view text);
  std::optional<std::pair<std::string, std::string>> LiveNameAndRest(std::string_view text);
  void AddOfOptimizer(const Inside& key);
  void AddState(const Inside& key, StateDict::Owner owner, std::string kind);
  void AddHyperParameter(const Inside& key, std::string_view rest);

  const DcpMetadata& metadata_;
  const bool with_optimizers_;
  const std::string_view asked_;
  StateKeys out_;
  std::set<std::string, std::less<>> optimizers_;  // prefixes
  std::vector<Inside> inside_;
  std::vector<KeyedEntry> outside_;
  std::vector<size_t> weights_;               // tensors of the model, rising
  std::map<std::string_view, size_t> names_;  // of weights: into metadata_.tensors
  std::set<std::string> exact_;       // weights that optimizers' keys name as the model does
  std::set<std::string_view> named_;  // prefixes: keys of hyper-parameters name parameters
};

// Told by a word, or by states and groups that stand beside each other.  A state dict may be
// an optimizer's and nothing else.
void KeyReader::FindOptimizers() {
  std::set<std::string_view> states;
  std::set<std::string_view> groups;
  ForEach([&](KeyedEntry entry) {
    const std::string_view key = NameOf(entry);
    if (const auto prefix = OptimizerPrefixOf(key); !prefix.empty()) optimizers_.emplace(prefix);
    if (const auto before = Before(key, kState)) states.insert(*before);
    if (const auto before = Before(key, kGroups)) groups.insert(*before);
  });
  for (const std::string_view prefix : states) {
    if (groups.contains(prefix) && (!prefix.empty() || optimizers_.empty()))
      optimizers_.emplace(prefix);
  }
}

void KeyReader::Split() {
  ForEach([&](KeyedEntry entry) {
    const std::string_view key = NameOf(entry);
    std::optional<std::string_view> prefix;
    for (const std::string_view word : {kState, kGroups}) {
      const auto before = Before(key, word);
      if (before && optimizers_.contains(*before)) prefix = before;
    }
    if (const auto known = OptimizerPrefixOf(key); !known.empty()) prefix = known;
    if (prefix) {
      inside_.push_back({key.substr(0, prefix->size()), key.substr(prefix->size()), entry});
    } else {
      outside_.push_back(entry);
    }
  });
}

// Chooses the tensors that are the model.
Status KeyReader::ChooseModel() {
  KeysBeside keys;
  for (const KeyedEntry entry : outside_)
    (entry.object ? keys.objects : keys.tensors).push_back(entry.index);
  for (const Inside& key : inside_) {
    keys.flattened = keys.flattened || (!key.prefix.empty() && PathOf(key.entry).size() <= 1);
    const bool state = key.rest.starts_with(kState);
    std::string_view name = key.rest.substr(state ? kState.size() : kGroups.size());
    // Behind the name stands a state's kind or a hyper-parameter, which may have a dot.
    for (int depth = 0; depth < 2 && name.find('.') != name.npos; ++depth) {
      name = name.substr(0, name.rfind('.'));
      keys.owners.insert(name);
    }
  }
  CKPT_ASSIGN_OR_RETURN(FoundModel found, FindModel(metadata_, keys, asked_));
  out_.model = std::move(found.prefix);
  out_.other_models = std::move(found.others);
  out_.why_model = std::move(found.why);
  weights_ = std::move(found.tensors);
  return {};
}

// Returns what stands before "state.<weight>.<kind>" outside of every optimizer.
std::optional<std::string_view> KeyReader::PrefixOfState(std::string_view key) const {
  size_t at = key.find(kState);
  while (at != key.npos && at > 0 && key[at - 1] != '.') at = key.find(kState, at + 1);
  if (at == key.npos || !NameAndRest(key.substr(at + kState.size()))) return std::nullopt;
  return key.substr(0, at);
}

// Optimizers that no word names, with all that stands beside their states.
void KeyReader::SetNamelessApart() {
  std::set<std::string_view> prefixes;
  for (const KeyedEntry entry : out_.others) {
    const auto prefix = entry.object ? std::nullopt : PrefixOfState(NameOf(entry));
    if (prefix) prefixes.insert(*prefix);
  }
  if (prefixes.empty()) return;
  std::vector<KeyedEntry> others;
  for (const KeyedEntry entry : out_.others) {
    const std::string_view key = NameOf(entry);
    bool apart = prefixes.contains("") && key.starts_with(kState);
    for (size_t dot = key.find('.'); !apart && dot != key.npos; dot = key.find('.', dot + 1)) {
      apart = prefixes.contains(key.substr(0, dot + 1));
    }
    if (!apart) {
      others.push_back(entry);
      continue;
    }
    out_.unknown.push_back({entry,
                            "it looks like an optimizer's key, but nothing before it names "
                            "an optimizer",
                            "save it as 'optim' or 'optimizer'"});
  }
  out_.others = std::move(others);
}

void KeyReader::AddWeights() {
  for (const KeyedEntry entry : outside_) {
    const std::string_view key = NameOf(entry);
    if (!entry.object && std::ranges::binary_search(weights_, entry.index)) {
      const std::string_view name = key.substr(out_.model.size());
      out_.weights.push_back({std::string(name), entry.index});
      names_.emplace(name, entry.index);
    } else if (entry.object && !out_.model.empty() && key.starts_with(out_.model)) {
      out_.in_model.push_back(entry);
    } else {
      out_.others.push_back(entry);
    }
  }
}

void KeyReader::CollectBare() {
  std::set<std::string> several;
  for (const auto& [name, tensor] : names_) {
    std::string bare = NormaliseName(name);
    if (bare == name || names_.contains(bare)) continue;
    if (!out_.bare.emplace(bare, name).second) several.insert(std::move(bare));
  }
  for (const std::string& name : several) out_.bare.erase(name);
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

void KeyReader::CollectExact() {
  for (const Inside& key : inside_) {
    const bool state = key.rest.starts_with(kState);
    if (state && IsCounted(PathOf(key.entry))) continue;
    auto found = NameAndRest(key.rest.substr(state ? kState.size() : kGroups.size()));
    // Behind more parts may be an adapter's: "emb.lora_embedding_A.own.exp_avg".
    const bool plain = found && found->second.find('.') == std::string::npos;
    if (plain) exact_.insert(std::move(found->first));
  }
}

// "param_groups.0.lr" is of the parameter "0" in torch's flattened state, and of the first group in
// one that a script flattened.  It is of a parameter where others of its optimizer are not numbers.
void KeyReader::CollectNamed() {
  for (const Inside& key : inside_) {
    if (!key.rest.starts_with(kGroups)) continue;
    const std::string_view rest = key.rest.substr(kGroups.size());
    const auto found = NameAndRest(rest);
    if (!MemberNumber(found ? found->first : FirstWord(rest))) named_.insert(key.prefix);
  }
}

// The weight of the longest name with a part more than the weight's, where no other key has the
// weight's own.
std::optional<JoinedName> KeyReader::JoinLive(std::string_view text, std::string_view& rest) const {
  auto parts = static_cast<size_t>(std::ranges::count(text, '.'));  // of the name
  for (size_t dot = text.rfind('.'); dot != text.npos && dot > 0;
       dot = text.rfind('.', dot - 1), --parts) {
    if (parts > kMaxNameParts) continue;
    auto found =
        JoinName(text.substr(0, dot), [&](std::string_view name) { return names_.contains(name); });
    if (!found || exact_.contains(found->name)) continue;
    rest = text.substr(dot + 1);
    return found;
  }
  return std::nullopt;
}

// Sets the part that all of the optimizers' other names have more than weights'.  Of several
// adapters nothing tells whose the file's weights are.
void KeyReader::CollectAdapter() {
  std::set<std::string> parts;
  std::string_view rest;
  for (const Inside& key : inside_) {
    if (!IsNamedState(key)) continue;
    const std::string_view text = key.rest.substr(kState.size());
    const auto exact = NameAndRest(text);
    if (exact && exact->second.find('.') == std::string::npos) continue;
    if (auto found = JoinLive(text, rest)) parts.insert(std::move(found->part));
  }
  if (parts.size() == 1) out_.adapter = *parts.begin();
}

// An optimizer of a part of the model (get_optimizer_state_dict(net.body)) has the part's own
// names: the only text before all of them with which they are weights, of the states' shapes, is
// the part's.
void KeyReader::CollectBefore() {
  constexpr size_t kMostOptimizers = 64;
  std::map<std::string_view, std::vector<const Inside*>> states;  // by the optimizer's prefix
  for (const Inside& key : inside_) {
    if (!IsNamedState(key)) continue;
    states[key.prefix].push_back(&key);
  }
  if (states.size() > kMostOptimizers) return;
  for (const auto& [prefix, of] : states) {
    std::string before = BeforeNames(of);
    if (!before.empty()) out_.before.emplace(OptimizerName(prefix), std::move(before));
  }
}

std::string KeyReader::BeforeNames(std::span<const Inside* const> states) const {
  constexpr size_t kMostTried = 64;
  std::string_view stranger;  // that tells most: of the most parts
  const auto parts = [](std::string_view text) { return std::ranges::count(text, '.'); };
  for (const Inside* state : states) {
    const std::string_view rest = state->rest.substr(kState.size());
    std::string_view behind;
    if (parts(rest) <= parts(stranger) || MemberNumber(FirstWord(rest)) || NameAndRest(rest) ||
        JoinLive(rest, behind))
      continue;
    stranger = rest;
  }
  if (stranger.empty()) return "";
  std::set<std::string_view> candidates;
  for (const auto& [name, tensor] : names_) {
    for (size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) {
      const std::string_view own = name.substr(dot + 1);
      const bool is =
          stranger.size() > own.size() && stranger.starts_with(own) && stranger[own.size()] == '.';
      if (is) candidates.insert(name.substr(0, dot + 1));
    }
    if (candidates.size() > kMostTried) return "";
  }
  std::string only;
  for (const std::string_view before : candidates) {
    if (!AreWeightsBehind(before, states)) continue;
    if (!only.empty()) return "";
    only = before;
  }
  return only;
}

// True if all states are of weights behind the text, of at least two, and of their shapes.
bool KeyReader::AreWeightsBehind(std::string_view before,
                                 std::span<const Inside* const> states) const {
  std::set<std::string> owners;
  for (const Inside* state : states) {
    auto found = NameAndRest(StrCat(before, state->rest.substr(kState.size())));
    if (!found) return false;
    if (!state->entry.object) {
      const Shape& shape = metadata_.tensors[state->entry.index].shape;
      const Shape& weight = metadata_.tensors[names_.find(found->first)->second].shape;
      if (shape.size() == weight.size() && shape != weight) return false;
    }
    owners.insert(std::move(found->first));
  }
  return owners.size() > 1;
}

// A weight and what stands behind its name, as the key's optimizer calls it.
std::optional<std::pair<std::string, std::string>> KeyReader::OwnerAndRest(const Inside& key,
                                                                           std::string_view text) {
  const auto before = out_.before.find(OptimizerName(key.prefix));
  if (before == out_.before.end()) return LiveNameAndRest(text);
  auto found = NameAndRest(StrCat(before->second, text));
  if (found) out_.state_names.emplace(found->first, found->first.substr(before->second.size()));
  return found;
}

// The same, also by the name that a live module has for a weight, unless other keys have the
// weight's own; the longest name of either.
std::optional<std::pair<std::string, std::string>> KeyReader::LiveNameAndRest(
    std::string_view text) {
  std::string_view behind;
  const auto joined = out_.adapter.empty() ? std::nullopt : JoinLive(text, behind);
  for (size_t dot = text.rfind('.'); dot != text.npos && dot > 0; dot = text.rfind('.', dot - 1)) {
    const std::string_view live = text.substr(0, dot);
    const std::string_view rest = text.substr(dot + 1);
    if (names_.contains(live)) return std::pair(std::string(live), std::string(rest));
    if (const auto weight = out_.bare.find(live); weight != out_.bare.end()) {
      out_.state_names.emplace(weight->second, live);
      return std::pair(weight->second, std::string(rest));
    }
    if (!joined || behind != rest) continue;
    const auto [known, added] = out_.state_names.emplace(joined->name, live);
    if (!added && known->second != live) continue;
    return std::pair(joined->name, std::string(rest));
  }
  return std::nullopt;
}

// Returns where a value stood below its parameter or group, of which `rest` is the key: "al.5" may
// be the sixth of a list `al`.  Empty if it was in neither a dict nor a list.
std::vector<PathElement> PathBelow(const std::vector<PathElement>& path, std::string_view rest) {
  std::vector<PathElement> out;
  for (size_t i = path.size(); i-- > 0;) {
    const std::string_view last = path[i].text;
    const bool below = rest.size() > last.size() + 1 && rest.ends_with(last) &&
                       rest[rest.size() - last.size() - 1] == '.';
    if (!below) break;
    rest.remove_suffix(last.size() + 1);
    out.push_back(path[i]);
  }
  if (out.empty()) return out;
  out.push_back({std::string(rest), false});
  std::ranges::reverse(out);
  return out;
}

void KeyReader::AddState(const Inside& key, StateDict::Owner owner, std::string kind) {
  std::vector<PathElement> path = PathBelow(PathOf(key.entry), kind);
  out_.states.push_back(
      {OptimizerName(key.prefix), std::move(owner), std::move(kind), key.entry, std::move(path)});
}

void KeyReader::AddOfOptimizer(const Inside& key) {
  if (key.rest.starts_with(kGroups)) return AddHyperParameter(key, key.rest.substr(kGroups.size()));
  const std::string_view rest = key.rest.substr(kState.size());
  const bool counted = IsCounted(PathOf(key.entry));
  if (auto found = counted ? std::nullopt : OwnerAndRest(key, rest)) {
    return AddState(key, std::move(found->first), std::move(found->second));
  }
  const auto number = Number(FirstWord(rest));
  if (number && rest.find('.') != rest.npos) {
    AddState(key, int64_t{*number}, std::string(rest.substr(rest.find('.') + 1)));
  } else if (number) {
    out_.unknown.push_back({key.entry, std::string(kNumbersParameters), ""});
  } else {
    out_.strangers[OptimizerName(key.prefix)].emplace(rest.substr(0, rest.rfind('.')));
    out_.unknown.push_back({key.entry,
                            "it is the state of a parameter that the model does not "
                            "have",
                            ""});
  }
}

void KeyReader::AddHyperParameter(const Inside& key, std::string_view rest) {
  StateKeys::HyperParameter out;
  out.optimizer = OptimizerName(key.prefix);
  out.entry = key.entry;
  const auto group = Number(FirstWord(rest));
  auto found = IsOfGroup(PathOf(key.entry)) ? std::nullopt : OwnerAndRest(key, rest);
  if (found && MemberNumber(found->first) && !named_.contains(key.prefix)) found.reset();
  if (found) {
    out.parameter = found->first;
    out.key = found->second;
    out_.flat_optimizer = true;
  } else if (group && rest.find('.') != rest.npos) {
    out.group = *group;
    out.key = rest.substr(rest.find('.') + 1);
    out.path = PathBelow(PathOf(key.entry), out.key);
  } else {
    out_.unknown.push_back(
        {key.entry, "it is a hyper-parameter, but neither of a group nor of a weight", ""});
    return;
  }
  out_.hyper_parameters.push_back(std::move(out));
}

}  // namespace

Result<StateKeys> ReadStateKeys(const DcpMetadata& metadata, bool optimizers,
                                std::string_view model) {
  return KeyReader(metadata, optimizers, model).Run();
}

}  // namespace ckptfs::dcp
