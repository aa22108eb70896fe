// SPDX-License-Identifier: Apache-2.0
//
// StateKeys says what each key of a DCP checkpoint stands for.  A state dict is saved
// flat, its keys joined by dots, and training code names its parts as it likes:
//
//   model.<name>                            weights; the prefix is "model.", "app.model.",
//                                           "" (torchtitan) ... (torch get_model_state_dict)
//   <optim>.state.<name>.<kind>             an optimizer's states, nested or flattened
//   <optim>.param_groups.<N>.<key>          hyper-parameters of a group, and its `params`
//   <optim>.param_groups.<name>.<key>       the same, flattened: of one parameter
//   anything else                           documents: train_state, dataloader, rng ...
//
// <optim> is a word for an optimizer (optim, optimizer, optimizer_0 ...) below at most two
// others.  The planner's paths, where they were saved, tell a key of a dict with dots from
// nested dicts.
//
// Thread safety: pure.
// Lifetime: refers to the metadata by index.

#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/state/state_dict.h"
#include "core/state/trained_module.h"
#include "formats/dcp/metadata.h"

namespace ckptfs::dcp {

// Why a part of an optimizer is unknown that is told of as a whole.
inline constexpr std::string_view kNumbersParameters = "the optimizer numbers its parameters";

// A tensor or an object of the metadata.
struct KeyedEntry {
  bool object = false;
  size_t index = 0;  // in tensors or objects
  bool operator==(const KeyedEntry&) const = default;
};

struct StateKeys {
  struct Weight {
    std::string name;
    size_t tensor = 0;
  };
  struct State {
    std::string optimizer;  // "" of the only one
    StateDict::Owner owner;
    std::string kind;
    KeyedEntry entry;
    // Where it stood below its parameter, if that was in a dict or a list.
    std::vector<PathElement> path;
  };
  // An entry of an optimizer that is not understood; nothing else is left out with it.
  struct Unknown {
    KeyedEntry entry;
    std::string why;
    std::string remedy;
  };
  struct HyperParameter {
    std::string optimizer;
    std::optional<uint32_t> group;
    std::string parameter;  // without a group
    std::string key;
    KeyedEntry entry;
    // Where it stood in its group, if that was in a dict or a list.
    std::vector<PathElement> path = {};
  };

  std::string model;                          // prefix of the weights' keys
  std::vector<TrainableModule> other_models;  // what looks like one, too
  std::string why_model;                      // it is none of those
  std::vector<std::string> optimizers;        // prefixes of their keys
  bool flat_optimizer = false;
  std::vector<Weight> weights;  // in the file's order
  std::vector<State> states;
  std::vector<HyperParameter> hyper_parameters;
  // Weights that the optimizers' keys call otherwise (core/state/joined_names.h).
  std::map<std::string, std::string, std::less<>> state_names;
  // Weights by their names without what wrappers put into them (module., _orig_mod.), as torch's
  // get_optimizer_state_dict calls them; those that have such a name alone.
  std::map<std::string, std::string, std::less<>> bare;
  std::string adapter;  // the part that those have more, an adapter's name; "" of none or several
  // By the optimizer (State::optimizer), what stands before all of its names: "body." of
  // get_optimizer_state_dict(body).
  std::map<std::string, std::string> before;
  std::vector<KeyedEntry> others;
  std::vector<KeyedEntry> in_model;  // objects among the weights (_extra_state)
  std::vector<Unknown> unknown;
  // Parameters that an optimizer has and the model has not, by the optimizer.
  std::map<std::string, std::set<std::string>> strangers;
};

// Without `optimizers` their keys are passed over.  `model`: --model, or "".
Result<StateKeys> ReadStateKeys(const DcpMetadata& metadata, bool optimizers,
                                std::string_view model = "");

}  // namespace ckptfs::dcp
