// SPDX-License-Identifier: Apache-2.0
//
// StateDict is what a source holds of one step before anybody has decided what it means.  A reader
// makes one of its files' headers; Settle (formats/settle/settle.h) makes the step of it.
//
//   tensors   of the model, in its order: each whole, or as tensor-parallel ranks hold it
//   modules   other models of the same state, which an optimizer may train instead
//   states    of optimizers, each with the evidence of whose it is: a name, or the number that its
//             optimizer gives a parameter; a state that several ranks hold is there once for each
//   groups    of optimizers: hyper-parameters, and members by name, number or both
//
// Where every rank has an optimizer of its own, those of one label are parts of one: what they say
// of one parameter is one state, and their groups of one number are one group.
//
// Elements are not in it.  A value says its dtype and shape and how its atom is filled, so it
// takes as little memory in a million pieces as in one.
//
// Thread safety: values.
// Lifetime: the functions refer to the reader that made them.
// Units: shapes are elements.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/result.h"
#include "core/model/pattern.h"
#include "core/model/step_model.h"
#include "core/state/assembler.h"
#include "core/state/atom_parts.h"
#include "core/state/family_variables.h"
#include "core/state/ownership.h"
#include "core/state/trained_module.h"

namespace ckptfs {

struct ShardingInfo;

// A number or a tensor without dimensions: an atom's inline value.
struct ScalarValue {
  DType dtype = DType::kF32;
  Shape shape;
  std::string bytes;  // little-endian elements
  bool python_number = false;
  bool operator==(const ScalarValue&) const = default;
};

// Hyper-parameters that are numbers here, and tensors of one element in the source
// (lr=torch.tensor(..)), by their keys.
using NumbersOfTensors = std::map<std::string, std::pair<DType, Shape>>;

// Gives an atom the local tensors and fragments that hold its elements.
using PlaceParts = std::function<Status(Assembler&, AtomParts&)>;
// Reads one element; nothing if the value is not a number.  BLOCKS: on reading.
using ReadScalar = std::function<Result<std::optional<ScalarValue>>()>;

// The expert number of a name and the byte offset at which it stands.
struct ExpertNumber {
  uint32_t number = 0;
  uint32_t at = 0;
};

struct StateDict {
  struct Tensor {
    std::string name;
    DType dtype = DType::kF32;
    Shape shape;                    // of all of it, or of a rank's part
    PlaceParts place;               // null: it is not stored; it is its master, cast
    std::optional<Role> role = {};  // as the format says it
    bool packed = false;            // rules speak of numbers: they do not cut it
    // The shape of each tensor-parallel rank's part.
    std::vector<Shape> ranks = {};
    std::vector<uint32_t> stages = {};  // of a pipeline, which held it; empty: all, or nobody knows
    // As the format says it, where no rule does.
    std::optional<Pattern> pattern = {};
    std::optional<uint32_t> layer = {};  // of the source's pipeline
    bool tied = false;                   // the stages that hold it keep it equal
    std::optional<ExpertNumber> expert = {};
    uint32_t stacked_experts = 0;
  };

  // Kinds of states are an optimizer's words, or ours ("master"), as a reader has made sure.
  enum class Kinds : uint8_t { kOptimizers, kOurs };

  // A parameter by its name, or by the optimizer's number.
  using Owner = std::variant<std::string, int64_t>;
  struct State {
    size_t optimizer = 0;
    Owner owner;
    std::string kind;
    DType dtype = DType::kF32;
    std::optional<Shape> shape = {};  // nothing: only reading tells it
    PlaceParts place = {};            // null: it does not lie in files as elements
    ReadScalar scalar = {};           // null: it is not one element
    Kinds kinds = Kinds::kOptimizers;
    uint32_t rank = 0;                      // of Tensor::ranks, whose the shape is
    std::optional<Relation> relation = {};  // as the format says it
    bool none = false;                      // it is None, which nobody misses
  };

  struct Member {
    std::string name;               // "" where the source does not say it
    std::optional<int64_t> number;  // by which states mean it
    std::optional<Shape> master = {};
  };
  struct Group {
    size_t optimizer = 0;
    std::string hyper_parameters;  // "": it tells the order of its members alone
    std::vector<Member> members;
    std::optional<size_t> number = {};  // as the optimizers of all ranks count their groups
    NumbersOfTensors tensors = {};      // of a group without `number`
  };

  struct Optimizer {
    std::string label;        // Atom::optimizer
    std::string what;         // for messages: "the optimizer in optimizer.pt"
    std::string shown;        // for messages: where it is seen though it is left out
    bool on_weights = false;  // the weights are its masters
    // The writing tool's rule (core/state/ownership.h), if the groups' hyper-parameters fit it.
    std::function<std::optional<ToolRule>(std::span<const std::string> hyper_parameters,
                                          std::span<const OwnableParameter>)>
        rule = {};
    std::function<Result<MasterPrints>()> masters = {};  // where it has some of its own
    std::vector<LeftOut> left_out = {};                  // of its parts, told if it is taken
    std::string key = {};                                // where it stood in the state
    std::set<std::string> strangers = {};                // members that the model does not have
  };

  std::string model;  // where the tensors stood in the state
  std::vector<Tensor> tensors;
  std::vector<TrainableModule> modules;
  std::vector<std::pair<std::string, std::string>> second_names;  // second name, name
  std::vector<Optimizer> optimizers;
  std::vector<State> states;
  std::vector<Group> groups;
  bool other_optimizers = false;  // nobody knows what these train
  ModelSizes sizes;
  const ShardingInfo* cuts = nullptr;     // the source's own lists of how it was cut
  std::optional<DType> model_dtype = {};  // as the source says it: that of weights not stored

  // A state whose shape does not follow from its parameter's is left out, or only dcp/ shows it.
  enum class Unfit : uint8_t { kLeftOut, kOpaque } unfit = Unfit::kOpaque;

  // Why a state does not become an atom.
  enum class Unplaced : uint8_t { kOpaque, kTwice, kNameOfOurs, kUnfit, kOfPart };
  // The reader's answer.
  struct Fate {
    bool kept = false;     // a document shows it all the same
    bool said = true;      // it is worth a message
    std::string why = {};  // in that, where the reader knows better
  };
  // Is told of each such state; null: none is kept.
  std::function<Fate(const State&, const std::string& parameter, Unplaced)> keep = {};
};

}  // namespace ckptfs
