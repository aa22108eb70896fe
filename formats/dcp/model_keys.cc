// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/model_keys.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "core/base/strings.h"
#include "core/model/name_normaliser.h"
#include "core/state/model_choice.h"

namespace ckptfs::dcp {
namespace {

using Made = ModelCandidate::Made;

constexpr size_t kMaxDerived = 64;
// First words of what is beside a model whose weights stand at the top.
constexpr auto kOtherWords =
    std::to_array<std::string_view>({"train_state", "dataloader", "data_loader", "rng", "rng_state",
                                     "lr_scheduler", "scheduler", "trainer", "extra", "ema"});

bool IsOther(std::string_view word) {
  return std::ranges::find(kOtherWords, word) != kOtherWords.end();
}

// All elements of a path but the last, as a key.
std::string Container(const std::vector<PathElement>& path) {
  std::string out;
  for (size_t i = 0; i + 1 < path.size(); ++i) out += StrCat(i == 0 ? "" : ".", path[i].text);
  return out;
}

// The candidates and the tensors of each.
class Candidates {
 public:
  Candidates(const DcpMetadata& metadata, const KeysBeside& keys)
      : metadata_(metadata), keys_(keys) {
    AddDicts();
    AddOthers();
    AddBehindWords();
    if (!keys.flattened) AddUnions();
    CountTrained();
  }

  const std::vector<ModelCandidate>& all() const { return all_; }
  std::vector<size_t> TensorsOf(size_t candidate) const {
    std::vector<size_t> out = tensors_[candidate];
    std::ranges::sort(out);
    return out;
  }

 private:
  void Add(const std::string& key, Made made, size_t tensor) {
    const auto [at, added] = by_key_.try_emplace(key, all_.size());
    if (added) {
      all_.emplace_back();
      all_.back().key = key;
      all_.back().made = made;
      tensors_.emplace_back();
    } else if (made == Made::kDerived && all_[at->second].made != Made::kDerived) {
      return;  // the dict itself is there
    }
    const TensorEntry& entry = metadata_.tensors[tensor];
    const size_t cut = key.empty() ? 0 : key.size() + 1;
    all_[at->second].tensors.push_back({entry.name.substr(cut), entry.dtype, entry.shape});
    tensors_[at->second].push_back(tensor);
  }

  // The path of a tensor; none where its key was not made of it.
  const std::vector<PathElement>& PathOf(size_t tensor) const {
    static const std::vector<PathElement> none;
    const auto& path = metadata_.tensor_paths[tensor];
    const bool made =
        path.size() < 2 || metadata_.tensors[tensor].name.starts_with(StrCat(Container(path), "."));
    return made ? path : none;
  }

  void AddDicts() {
    for (const size_t tensor : keys_.tensors) {
      const auto& path = PathOf(tensor);
      const std::string& key = metadata_.tensors[tensor].name;
      if (path.size() > 1) {
        Add(Container(path), Made::kDict, tensor);
      } else if (keys_.flattened && key.find('.') != std::string::npos) {
        Add(std::string(FirstWord(key)), Made::kSplit, tensor);
        if (!IsOther(FirstWord(key))) Add("", Made::kDerived, tensor);
      } else if (!IsOther(path.empty() ? FirstWord(key) : std::string_view(key))) {
        Add("", keys_.flattened ? Made::kDerived : Made::kDict, tensor);
      }
    }
  }

  // Entries of the dicts that are not tensors.
  void AddOthers() {
    std::map<size_t, std::set<std::string_view>> entries;  // by candidate
    const auto add = [&](std::string_view above, std::string_view entry) {
      const auto known = by_key_.find(above);
      if (known != by_key_.end()) entries[known->second].insert(entry);
    };
    const auto add_path = [&](const std::vector<PathElement>& path, std::string_view key) {
      if (path.empty()) add("", FirstWord(key));
      std::string above;
      for (const PathElement& element : path) {
        if (!element.text.ends_with("_extra_state")) add(above, element.text);
        if (!above.empty()) above += '.';
        above += element.text;
      }
    };
    for (const size_t i : keys_.objects) {
      add_path(metadata_.object_paths[i], metadata_.objects[i].name);
    }
    for (const size_t i : keys_.tensors) {
      if (const auto& path = PathOf(i); path.size() > 1) add_path(path, metadata_.tensors[i].name);
    }
    for (const auto& [candidate, others] : entries) {
      std::set<std::string_view> own;
      for (const auto& tensor : all_[candidate].tensors) own.insert(tensor.name);
      all_[candidate].others = static_cast<size_t>(std::ranges::count_if(
          others, [&](std::string_view entry) { return !own.contains(entry); }));
    }
  }

  // "model." of keys with dots, which may be a module's.
  void AddBehindWords() {
    std::set<std::string> made;
    for (const size_t tensor : keys_.tensors) {
      const std::string& key = metadata_.tensors[tensor].name;
      if (PathOf(tensor).size() > 1) continue;
      size_t dot = key.find('.');
      for (int depth = 0; depth < 2 && dot != std::string::npos; ++depth) {
        const std::string before = key.substr(0, dot);
        const bool split = by_key_.contains(before) && !made.contains(before);
        if (!split && IsModelKey(before.substr(before.rfind('.') + 1)) &&
            (made.contains(before) || made.size() < kMaxDerived)) {
          made.insert(before);
          Add(before, Made::kDerived, tensor);
        }
        dot = key.find('.', dot + 1);
      }
    }
  }

  // Dicts of dicts, all that is below one.  No more are made than kMaxDerived, so that the
  // first kMaxDerived above a dict are enough.
  void AddUnions() {
    std::vector<std::string> keys;  // those of all_ move while unions are added
    for (const ModelCandidate& candidate : all_) keys.push_back(candidate.key);
    std::map<std::string_view, std::vector<size_t>> below;
    for (size_t i = 0; i < keys.size(); ++i) {
      const std::string_view key = keys[i];
      if (all_[i].made != Made::kDict || key.empty()) continue;
      below[""].push_back(i);
      size_t dot = key.find('.', 1);
      for (size_t n = 0; n < kMaxDerived && dot != key.npos; ++n) {
        below[key.substr(0, dot)].push_back(i);
        dot = key.find('.', dot + 1);
      }
    }
    size_t made = 0;
    for (const auto& [key, members] : below) {
      if (by_key_.contains(key) || ++made > kMaxDerived) continue;
      for (const size_t i : members) {
        const std::vector<size_t> tensors = tensors_[i];
        for (const size_t tensor : tensors) Add(std::string(key), Made::kDerived, tensor);
      }
    }
  }

  // By names without those of wrappers: a module may be saved with another wrapper (DDP,
  // torch.compile) than its optimizer saw.
  void CountTrained() {
    std::set<std::string> names;
    for (const auto& owner : keys_.owners) names.insert(NormaliseName(owner));
    ckptfs::CountTrained(all_, names);
  }

  const DcpMetadata& metadata_;
  const KeysBeside& keys_;
  std::vector<ModelCandidate> all_;
  std::vector<std::vector<size_t>> tensors_;
  std::map<std::string, size_t, std::less<>> by_key_;
};

}  // namespace

Result<FoundModel> FindModel(const DcpMetadata& metadata, const KeysBeside& keys,
                             std::string_view asked) {
  const Candidates candidates(metadata, keys);
  const auto choice = ChooseModel(candidates.all(), asked);
  if (!choice) {
    const bool none = asked.empty() && choice.error().code == ErrorCode::kInvalid;
    return none ? Result<FoundModel>(FoundModel{}) : Fail(Error(choice.error()));
  }
  FoundModel out;
  const std::string& key = candidates.all()[choice->index].key;
  out.prefix = key.empty() ? "" : key + ".";
  out.tensors = candidates.TensorsOf(choice->index);
  for (const size_t other : choice->others) {
    out.others.push_back(TrainableModuleOf(candidates.all()[other]));
  }
  out.why = choice->why;
  return out;
}

}  // namespace ckptfs::dcp
