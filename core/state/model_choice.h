// SPDX-License-Identifier: Apache-2.0
//
// ChooseModel decides which tensors of a saved state are the model.  A state is a tree of
// dicts, named as its script likes; a reader yields every dict that has tensors (a torch
// file's dicts, the paths of a DCP directory), and what is known of each.  The evidence,
// strongest first:
//
//   the user's word                  --model KEY
//   names in an optimizer's states   that are parameters of the dict
//   structure                        made by nn.Module.state_dict(), or dotted names of
//                                    tensors; never a stray tensor among other values
//   words                            break ties alone: an average (ema, swa, teacher ...)
//                                    comes last, "model", "state_dict", "net" ... first
//
// Several that are equally good are refused with their keys.
//
// Thread safety: pure functions.

#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/dtype.h"
#include "core/tensor/shape.h"

namespace ckptfs {

// A dict with tensors in it.
struct ModelCandidate {
  struct Tensor {
    std::string name;  // its key
    DType dtype = DType::kF32;
    Shape shape;
  };
  std::string key;  // where it stands: "model", "app.model"; "" is the top of the state
  std::vector<Tensor> tensors;
  size_t others = 0;    // entries that are not tensors
  size_t trained = 0;   // tensors that an optimizer of the state names
  bool marked = false;  // nn.Module.state_dict() made it (torch's `_metadata`)
  enum class Made : uint8_t {
    kDict,    // a dict of the state
    kSplit,   // keys of a flattened state that begin alike: words break no tie
    kDerived  // a union of these: only an optimizer's names or the user's word take it
  };
  Made made = Made::kDict;
};

// The parts of a state that its script flattened ("model.a.weight" beside "step"): a candidate for
// each first word of its keys, "" for keys of one word, in the order of their first tensors.
struct SplitState {
  std::vector<ModelCandidate> parts;         // kSplit; their tensors' names are without the word
  std::vector<std::vector<size_t>> tensors;  // of each part, among those that were given
};
// Tensors beyond the first `most` parts are in none.
SplitState SplitByFirstWord(std::span<const ModelCandidate::Tensor> tensors, size_t most);

// Counts the tensors of each candidate that an optimizer of the state names.  `names` are without
// those of wrappers (NormaliseName), as tensors' are compared: the module may have been saved with
// another wrapper (DDP, torch.compile) than the optimizer saw.
void CountTrained(std::span<ModelCandidate> candidates, const std::set<std::string>& names);

struct ModelChoice {
  size_t index = 0;            // the model, among the candidates
  bool strong = false;         // it looks like a model by itself, or is said to be one
  std::string why;             // what told it from the others; "" without others
  std::vector<size_t> others;  // candidates that look like a model, too
};

// `asked`: the user's key, "" without one, "." for the top of the state.  kInvalid if it is
// not a candidate's, or none is good enough; kUnsupported if several are equally good.
Result<ModelChoice> ChooseModel(std::span<const ModelCandidate> candidates, std::string_view asked);

// True if the dict looks like what nn.Module.state_dict() returns.
bool LooksLikeModel(const ModelCandidate& candidate);

// A key as messages and --model spell it.
std::string ModelKeyText(std::string_view key);

// The last word is one for a model, and every word before it may stand around one: "net",
// "app.model".
bool IsModelKey(std::string_view key);

// A part of the key is a word for an average of weights or a copy that no optimizer trains.
bool IsAverageKey(std::string_view key);

// True for the names that an average of a module's weights has: torch's AveragedModel keeps
// `n_averaged` beside "module.", mmengine's `steps`.
bool IsAverageState(std::span<const ModelCandidate::Tensor> tensors);

// "optim", "optimizer_0", "optim_muon", "opt": a word for an optimizer.
bool IsOptimizerWord(std::string_view word);

// The part of a flattened key up to an optimizer's word and its dot, where states or groups
// follow ("optim.", "optimizers.0."); "" where the key is not an optimizer's.
std::string_view OptimizerPrefixOf(std::string_view key);

}  // namespace ckptfs
