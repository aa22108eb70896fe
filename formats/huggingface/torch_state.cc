// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/torch_state.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "core/base/strings.h"
#include "core/model/name_normaliser.h"

namespace ckptfs::huggingface {
namespace {

constexpr int kMaxDictDepth = 8;
constexpr size_t kMaxItems = 64;  // of a list that is looked into
constexpr size_t kMaxCandidates = 256;
constexpr size_t kMaxContainers = 65536;  // searched at most; a hostile file may have millions
constexpr size_t kMaxPath = 1024;
constexpr size_t kShownKeys = 6;
constexpr std::string_view kExtraState = "_extra_state";
constexpr std::string_view kOddKeyText = "(an entry whose key is not a text)";

bool IsTensor(PickleRef value) { return value.Tensor() != nullptr || value.IsOtherTensor(); }

bool IsOptimizer(PickleRef dict) {
  return dict["state"] && dict["state"].IsDict() && dict["param_groups"] &&
         dict["param_groups"].IsSequence();
}

// torch pickles a module as an object whose attributes have these.
bool IsModule(PickleRef value) {
  return !value.IsDict() && value.State() && value["_modules"] && value["_parameters"];
}

bool IsPlain(PickleRef value) {
  return value.Number() || value.Bool() || value.String() || value.IsNone();
}

bool IsArray(const PickleNode& node) {
  return IsGlobal(node, "numpy._core.multiarray", "_reconstruct") ||
         IsGlobal(node, "numpy.core.multiarray", "_reconstruct");
}

// True if weights may stand in the value, in whatever form.
bool MayHoldWeights(PickleRef value) {
  using Kind = PickleNode::Kind;
  return AnyNode(value, [](const PickleNode& node) {
    const bool bytes = node.kind == Kind::kBytes || node.kind == Kind::kByteArray;
    return node.kind == Kind::kTensor || IsArray(node) || (bytes && !node.text.empty());
  });
}

// A state_dict whose tensors somebody made arrays.
bool IsStateOfArrays(PickleRef value) {
  if (!value.IsDict()) return false;
  size_t dotted = 0;
  size_t arrays = 0;
  for (const auto& [key, inner] : value.Items()) {
    const auto name = key.String();
    dotted += name && name->find('.') != name->npos;
    arrays += AnyNode(inner, IsArray);
  }
  return dotted > 0 && 2 * dotted > value.size() && 2 * arrays > value.size();
}

std::string Joined(const std::string& path, std::string_view key) {
  return path.empty() ? std::string(key) : StrCat(path, ".", key);
}

ModelCandidate::Tensor TensorOf(std::string_view name, PickleRef value) {
  ModelCandidate::Tensor out;
  out.name = name;
  if (const TensorNode* tensor = value.Tensor()) {
    out.dtype = tensor->dtype;
    out.shape = tensor->shape;
  } else {
    out.shape = {1};  // sparse or quantised: of a shape that is not looked at
  }
  return out;
}

// Adds the names that an optimizer's groups or its states' keys say, without those of wrappers:
// the module may have been saved with another wrapper (DDP, torch.compile) than the optimizer saw.
// A pickle may mention a group, a list or a text often: `seen` holds those that were looked at.
void AddNames(PickleRef optimizer, std::set<NodeId>& seen, std::set<std::string>& names) {
  const auto first = [&](PickleRef value) { return value && seen.insert(value.id()).second; };
  const auto add = [&](PickleRef value) {
    const auto name = value.String();
    if (name && first(value)) names.insert(NormaliseName(*name));
  };
  const PickleRef groups = optimizer["param_groups"];
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!groups.at(g).IsDict() || !first(groups.at(g))) continue;
    for (const std::string_view key : {"params", "param_names"}) {
      const PickleRef members = groups.at(g)[key];
      if (!members || !members.IsSequence() || !first(members)) continue;
      for (size_t i = 0; i < members.size(); ++i) add(members.at(i));
    }
  }
  if (!first(optimizer["state"])) return;
  for (const auto& [key, value] : optimizer["state"].Items()) add(key);
}

std::vector<std::pair<std::string, Shape>> Sorted(const ModelCandidate& candidate) {
  std::vector<std::pair<std::string, Shape>> out;
  for (const auto& tensor : candidate.tensors) out.emplace_back(tensor.name, tensor.shape);
  std::ranges::sort(out);
  return out;
}

}  // namespace

// The keys of a state that its script flattened which are an optimizer's.  A module may have a
// part that is called "optimizer", so that the word alone tells nothing:
//
//   "optim.state.0.exp_avg"      states or groups follow (OptimizerPrefixOf)
//   "optim.exp_avg.a.weight"     a name of the model's stands in it, with a kind around it
//   "optim.0.exp_avg"            under each number stand several tensors, all of one shape
class TorchState::OptimizerKeys {
 public:
  explicit OptimizerKeys(std::span<const ModelCandidate::Tensor> tensors) {
    std::map<std::string_view, std::vector<Inside>> words;
    for (const auto& [name, dtype, shape] : tensors) {
      const std::string_view first = FirstWord(name);
      if (!OptimizerPrefixOf(name).empty()) {
        prefixes_ = true;
      } else if (IsWord(first)) {
        words[first].push_back({std::string_view(name).substr(first.size() + 1), &shape});
      }
    }
    if (words.empty()) return;
    for (const auto& [name, dtype, shape] : tensors) {
      const std::string_view first = FirstWord(name);
      if (!IsWord(first)) AddName(name, first);
    }
    for (const auto& [word, inside] : words) {
      const bool named = std::ranges::any_of(inside, [&](auto& one) { return HoldsName(one.key); });
      if (named || AreNumbered(inside)) words_.insert(word);
    }
  }

  bool any() const { return prefixes_ || !words_.empty(); }
  bool Has(std::string_view key) const {
    return words_.contains(FirstWord(key)) || !OptimizerPrefixOf(key).empty();
  }

 private:
  struct Inside {
    std::string_view key;  // behind the word
    const Shape* shape;
  };

  static std::string_view FirstWord(std::string_view key) {
    const size_t dot = key.find('.');
    return dot == key.npos ? std::string_view() : key.substr(0, dot);
  }

  static bool IsWord(std::string_view word) {
    constexpr auto kWords =
        std::to_array<std::string_view>({"optim", "optimizer", "optimizers", "optimizer_state_dict",
                                         "optimizer_state", "optim_state"});
    return std::ranges::find(kWords, word) != kWords.end();
  }

  void AddName(std::string_view name, std::string_view first) {
    names_.insert(name);
    if (IsModelKey(first)) names_.insert(name.substr(first.size() + 1));
  }

  bool HoldsName(std::string_view key) const {
    for (size_t dot = key.find('.'); dot != key.npos; dot = key.find('.', dot + 1)) {
      if (names_.contains(key.substr(0, dot)) || names_.contains(key.substr(dot + 1))) return true;
    }
    return false;
  }

  static bool AreNumbered(const std::vector<Inside>& all) {
    std::map<std::string_view, std::vector<const Shape*>> numbers;
    for (const auto& [key, shape] : all) {
      const std::string_view number = FirstWord(key);
      if (number.empty() || !std::ranges::all_of(number, IsDigit)) return false;
      if (!shape->empty()) numbers[number].push_back(shape);
    }
    return !numbers.empty() && std::ranges::all_of(numbers, [](const auto& number) {
      const auto& shapes = number.second;
      return shapes.size() > 1 && std::ranges::all_of(shapes, [&](const Shape* shape) {
               return *shape == *shapes.front();
             });
    });
  }

  std::set<std::string_view> names_;  // of tensors outside of it
  std::set<std::string_view> words_;
  bool prefixes_ = false;
};

TorchState::TorchState(PickleRef root) : root_(root) {
  Walk(root, "", 0);
  AddUnions();
  CountTrained();
}

void TorchState::Walk(PickleRef value, const std::string& path, int depth) {
  if (depth > kMaxDictDepth || !value || path.size() > kMaxPath || seen_.size() >= kMaxContainers)
    return;
  const bool container = value.IsDict() || value.IsSequence() || IsModule(value);
  if (!container) return;
  const auto [at, first] = seen_.try_emplace(value.id(), path);
  if (!first) {
    if (second_.size() < kMaxContainers) second_.emplace(path, at->second);
    return;
  }
  if (value.IsDict()) {
    if (IsOptimizer(value)) {
      optimizers_.push_back({path, value, Kind::kOptimizer});
    } else {
      WalkDict(value, path, depth);
    }
  } else if (IsModule(value)) {
    modules_.push_back({path, value, Kind::kModule});
  } else if (value.size() <= kMaxItems) {
    for (size_t i = 0; i < value.size(); ++i)
      Walk(value.at(i), Joined(path, std::to_string(i)), depth + 1);
  }
}

void TorchState::WalkDict(PickleRef dict, const std::string& path, int depth) {
  ModelCandidate candidate;
  Found found;
  candidate.key = path;
  const PickleRef state = dict.State();
  candidate.marked = state && state.IsDict() && state["_metadata"];
  std::vector<std::pair<std::string, PickleRef>> inner;
  for (const auto& [key, value] : dict.Items()) {
    const auto name = key.String();
    if (name && IsTensor(value)) {
      candidate.tensors.push_back(TensorOf(*name, value));
      found.tensors.emplace_back(*name, value);
      continue;
    }
    const auto number = key.Int();
    const std::string word = name ? std::string(*name) : number ? std::to_string(*number) : "";
    found.left_out.push_back(name || number ? word : std::string(kOddKeyText));
    if (word.ends_with(kExtraState)) continue;
    ++candidate.others;
    if (!word.empty()) inner.emplace_back(word, value);
  }
  AddCandidate(std::move(candidate), std::move(found));
  for (const auto& [word, value] : inner) Walk(value, Joined(path, word), depth + 1);
}

void TorchState::AddCandidate(ModelCandidate candidate, Found found) {
  if (candidate.tensors.empty() || candidates_.size() >= kMaxCandidates) return;
  if (!candidate.marked) {
    const OptimizerKeys optimizers(candidate.tensors);
    if (optimizers.any()) return AddFlat(candidate.key, found, optimizers);
  }
  candidates_.push_back(std::move(candidate));
  found_.push_back(std::move(found));
}

// A state that its script flattened: the first words of the keys are its parts.
void TorchState::AddFlat(const std::string& path, const Found& all,
                         const OptimizerKeys& optimizers) {
  std::vector<ModelCandidate::Tensor> tensors;
  std::vector<PickleRef> values;
  for (const auto& [name, value] : all.tensors) {
    if (optimizers.Has(name)) continue;
    tensors.push_back(TensorOf(name, value));
    values.push_back(value);
  }
  // Other entries are beside the model.
  SplitState split = SplitByFirstWord(tensors, kMaxCandidates - candidates_.size());
  for (size_t i = 0; i < split.parts.size(); ++i) {
    ModelCandidate& part = split.parts[i];
    if (part.key.empty()) part.others = all.tensors.size();
    part.key = part.key.empty() ? path : Joined(path, part.key);
    Found& found = found_.emplace_back();
    for (size_t k = 0; k < part.tensors.size(); ++k) {
      found.tensors.emplace_back(part.tensors[k].name, values[split.tensors[i][k]]);
    }
    candidates_.push_back(std::move(part));
  }
}

// Dicts of dicts ({"model": {"encoder": ..., "decoder": ...}}): all that is below one, for
// users who ask for it, and for files whose optimizer has such names.
void TorchState::AddUnions() {
  std::map<std::string, std::vector<size_t>> below;
  for (size_t i = 0; i < candidates_.size(); ++i) {
    const std::string& key = candidates_[i].key;
    if (key.empty()) continue;
    for (size_t dot = key.rfind('.'); dot != std::string::npos && dot > 0;
         dot = key.rfind('.', dot - 1)) {
      below[key.substr(0, dot)].push_back(i);
    }
    below[""].push_back(i);
  }
  for (const auto& [key, members] : below) {
    const bool known =
        std::ranges::any_of(candidates_, [&](const auto& one) { return one.key == key; });
    if (known || members.size() < 2 || candidates_.size() >= 2 * kMaxCandidates) continue;
    ModelCandidate whole;
    Found found;
    whole.key = key;
    whole.made = ModelCandidate::Made::kDerived;
    for (const size_t i : members) {
      const std::string prefix =
          StrCat(candidates_[i].key.substr(key.empty() ? 0 : key.size() + 1), ".");
      for (size_t k = 0; k < found_[i].tensors.size(); ++k) {
        whole.tensors.push_back(candidates_[i].tensors[k]);
        whole.tensors.back().name.insert(0, prefix);
        found.tensors.emplace_back(prefix + found_[i].tensors[k].first,
                                   found_[i].tensors[k].second);
      }
    }
    candidates_.push_back(std::move(whole));
    found_.push_back(std::move(found));
  }
}

void TorchState::CountTrained() {
  std::set<std::string> names;
  std::set<NodeId> seen;
  for (const Part& optimizer : optimizers_) AddNames(optimizer.value, seen, names);
  ckptfs::CountTrained(candidates_, names);
}

// Says what a file holds in which no dict is a model's.
Error TorchState::NoModel(const Error& why) const {
  if (!modules_.empty()) {
    const Part& module = modules_.front();
    return Error{
        ErrorCode::kUnsupported,
        StrCat(module.key.empty() ? "it" : ModelKeyText(module.key), " is a pickled module (",
               module.value.ClassName(), "), which only its own code can load")}
        .Needing("save its state_dict()");
  }
  if (IsTensor(root_))
    return Error{why.code,
                 "it is a tensor by itself, not a dict of named "
                 "tensors"};
  if (!optimizers_.empty() && candidates_.empty()) {
    return Error{why.code, StrCat(why.message, "; ", ModelKeyText(optimizers_.front().key),
                                  " is an optimizer's")};
  }
  std::string keys;
  const auto items = root_.Items();
  for (size_t i = 0; i < items.size() && i < kShownKeys; ++i) {
    const auto key = items[i].first.String();
    if (key) keys += StrCat(keys.empty() ? "" : ", ", "'", *key, "'");
  }
  if (items.size() > kShownKeys) keys += ", ...";
  return Error{why.code, keys.empty() ? why.message : StrCat(why.message, "; it holds ", keys)};
}

// The parts that FindBeside tells apart, by key.
struct TorchState::Search {
  std::string model;
  std::map<std::string, Kind, std::less<>> parts;
  std::set<std::string> twins;     // of the very dict
  std::set<std::string> of_model;  // entries of the top that are the module's own

  bool Below(const std::string& key) const {
    const std::string prefix = key + ".";
    const auto at = parts.lower_bound(prefix);
    return model.starts_with(prefix) || (at != parts.end() && at->first.starts_with(prefix));
  }
};

void TorchState::FindBeside(PickleRef value, const std::string& path, const Search& search,
                            std::vector<Part>& out) const {
  const auto visit = [&](const std::string& word, PickleRef inner) {
    const std::string key = Joined(path, word);
    const bool own =
        !search.model.empty() && (key == search.model || key.starts_with(search.model + "."));
    if (search.of_model.contains(key)) return;
    if (own || search.twins.contains(key)) return;  // with the prefix: keys of a flattened state
    const auto part = search.parts.find(key);
    const bool open = part == search.parts.end() && (inner.IsDict() || inner.IsSequence());
    if (open && search.Below(key)) {
      FindBeside(inner, key, search, out);
    } else {
      out.push_back({key, inner, part == search.parts.end() ? Kind::kValue : part->second});
    }
  };
  if (value.IsSequence()) {
    for (size_t i = 0; i < value.size(); ++i) visit(std::to_string(i), value.at(i));
    return;
  }
  for (const auto& [key, inner] : value.Items()) {
    const auto number = key.Int();
    const bool top = path.empty() && search.model.empty();  // the top's tensors are the model
    if (const auto name = key.String();
        name && !(top && (IsTensor(inner) || name->ends_with(kExtraState)))) {
      visit(std::string(*name), inner);
    }
    if (number) visit(std::to_string(*number), inner);
    if (!number && !key.String()) out.push_back({path, inner, Kind::kOddKey});
  }
}

std::vector<TrainableModule> TorchState::Modules() const {
  std::vector<TrainableModule> modules;
  for (const ModelCandidate& candidate : candidates_) {
    if (LooksLikeModel(candidate)) modules.push_back(TrainableModuleOf(candidate));
  }
  return modules;
}

// Something that is called the model and is not understood is not a reason to take another.
Status TorchState::CheckNoOther(const Model& taken) const {
  for (const Part& part : taken.beside) {
    const bool value = part.kind == Kind::kValue && !IsPlain(part.value);
    if (!value || !IsModelKey(part.key) || !MayHoldWeights(part.value)) continue;
    return Fail(Error{ErrorCode::kUnsupported,
                      StrCat(ModelKeyText(part.key),
                             " has a model's name, but is not a dict of tensors by their names")}
                    .Needing(StrCat("save it as a state_dict; `--model ",
                                    taken.key.empty() ? "." : taken.key, "` takes the tensors of ",
                                    ModelKeyText(taken.key))));
  }
  return {};
}

Result<TorchState::Model> TorchState::Choose(std::string_view asked) const {
  const auto same = second_.find(std::string(asked));
  auto choice =
      ChooseModel(candidates_, same == second_.end() ? asked : std::string_view(same->second));
  if (!choice) {
    const bool none = asked.empty() && choice.error().code == ErrorCode::kInvalid;
    return Fail(none ? NoModel(choice.error()) : Error(choice.error()));
  }
  const ModelCandidate& chosen = candidates_[choice->index];
  if (!choice->strong && !modules_.empty()) return Fail(NoModel(Error{ErrorCode::kInvalid, ""}));
  Model out;
  out.key = chosen.key;
  out.tensors = found_[choice->index].tensors;
  out.why = choice->why;
  Search search{chosen.key, {}, {}, {}};
  const auto own = Sorted(chosen);
  for (const size_t other : choice->others) {
    search.parts.emplace(candidates_[other].key, Kind::kModel);
    if (Sorted(candidates_[other]) == own) {
      out.twins.push_back(candidates_[other].key);
    } else {
      out.modules.push_back(TrainableModuleOf(candidates_[other]));
    }
  }
  for (const auto& [key, first] : second_) {
    const auto part = search.parts.find(first);
    if (part != search.parts.end()) search.parts.emplace(key, part->second);
    if (first == chosen.key) search.twins.insert(key);
  }
  for (const Part& part : optimizers_) search.parts.emplace(part.key, Kind::kOptimizer);
  for (const Part& part : modules_) search.parts.emplace(part.key, Kind::kModule);
  for (const std::string& entry : found_[choice->index].left_out) {
    if (!chosen.key.empty() || entry.ends_with(kExtraState)) out.left_out.push_back(entry);
  }
  if (chosen.key.empty()) {
    for (const auto& [key, value] : root_.Items()) {
      const auto name = key.String();
      const bool odd_tensor = !name && IsTensor(value);
      // torch's mark is on what a module returned: what a script put there is a number or a text.
      const bool modules = chosen.marked && name && !IsTensor(value) && !IsPlain(value) &&
                           !name->ends_with(kExtraState);
      if (!odd_tensor && !modules) continue;
      const std::string word = name ? std::string(*name) : std::to_string(key.Int().value_or(-1));
      search.of_model.insert(word);
      out.left_out.push_back(word);
    }
  }
  FindBeside(root_, "", search, out.beside);
  if (asked.empty() && !IsModelKey(chosen.key)) CKPT_RETURN_IF_ERROR(CheckNoOther(out));
  for (Part& part : out.beside) {
    if (part.kind == Kind::kValue && IsStateOfArrays(part.value)) part.kind = Kind::kArrays;
  }
  return out;
}

}  // namespace ckptfs::huggingface
