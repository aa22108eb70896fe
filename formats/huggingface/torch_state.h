// SPDX-License-Identifier: Apache-2.0
//
// TorchState is a torch file as its script wrote it: a tree of dicts and lists in which
// state_dicts, optimizers and values of the script stand side by side.  It finds
//
//   candidates   every dict with tensors in it, which core/state chooses the model among
//   optimizers   every dict with `state` and `param_groups`, as torch's optimizers return
//   modules      pickled nn.Modules, whose parameters are not read
//
// and what stands beside the model that was chosen.  A flat dict whose keys are an
// optimizer's, too ("optimizer.state.0.exp_avg" beside "model.weight"), is one candidate per
// first word.
//
// Thread safety: immutable once made.
// Lifetime: borrows the file's tree.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/state/model_choice.h"
#include "core/state/trained_module.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs::huggingface {

class TorchState {
 public:
  // kOddKey: an entry whose key is neither a text nor a whole number.
  enum class Kind : uint8_t { kValue, kOptimizer, kModel, kModule, kArrays, kOddKey };
  // A value and its path, keys and indexes joined by dots.
  struct Part {
    std::string key;
    PickleRef value;
    Kind kind = Kind::kValue;
  };
  using Tensors = std::vector<std::pair<std::string, PickleRef>>;  // by name, in order

  // BLOCKS: no; looks at each node once.
  explicit TorchState(PickleRef root);

  const std::vector<Part>& optimizers() const { return optimizers_; }
  // Every dict that looks like a model.
  std::vector<TrainableModule> Modules() const;

  struct Model {
    std::string key;
    Tensors tensors;
    std::vector<std::string> left_out;  // entries of its dict that are not tensors
    // The other parts of the tree: each optimizer, each dict that looks like a model, too, and
    // around these the largest that hold none of them.
    std::vector<Part> beside;
    std::vector<std::string> twins;  // models of the same names and shapes
    // Models of others, whose tensors an optimizer may train, too.
    std::vector<TrainableModule> modules;
    std::string why;  // it is none of the others
  };
  // `asked`: --model.  kUnsupported, kInvalid as ChooseModel; a file whose model is a pickled
  // module names its class.
  Result<Model> Choose(std::string_view asked) const;

 private:
  struct Found {
    Tensors tensors;
    std::vector<std::string> left_out;
  };
  void Walk(PickleRef value, const std::string& path, int depth);
  void WalkDict(PickleRef dict, const std::string& path, int depth);
  void AddCandidate(ModelCandidate candidate, Found found);
  class OptimizerKeys;
  void AddFlat(const std::string& path, const Found& all, const OptimizerKeys& optimizers);
  void AddUnions();
  Status CheckNoOther(const Model& taken) const;
  void CountTrained();
  struct Search;
  void FindBeside(PickleRef value, const std::string& path, const Search& search,
                  std::vector<Part>& out) const;
  Error NoModel(const Error& why) const;

  PickleRef root_;
  std::map<NodeId, std::string> seen_;         // by their first path
  std::map<std::string, std::string> second_;  // path of what was seen -> its first
  std::vector<ModelCandidate> candidates_;
  std::vector<Found> found_;  // of the candidates
  std::vector<Part> optimizers_;
  std::vector<Part> modules_;
};

}  // namespace ckptfs::huggingface
