// SPDX-License-Identifier: Apache-2.0
//
// Second stage: which parameters there are, and which tensors hold their weights.
// A parameter is what the engine calls it (param_shapes); where nothing has names
// (stage 0's optimizer) they are matched here.
//
// Thread safety: immutable; Name is pure.
// Lifetime: refers to the tensors of Parsed.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/deepspeed/expert_names.h"
#include "formats/deepspeed/native/parsed.h"
#include "formats/deepspeed/state_dict_names.h"

namespace ckptfs::deepspeed::native {

// A parameter as the files have it.
struct NamedParameter {
  std::string name;
  Role role = Role::kTrainable;
  std::map<uint32_t, std::vector<std::optional<Shape>>> shapes;  // by pipeline stage: per tp rank
  std::optional<ExpertNumber> expert;
  bool anywhere = false;  // nothing tells the stage: `shapes` has it under the first

  // Returns the number of `stage` among the stages that hold it, from 0.
  // REQUIRES: it holds it.
  uint32_t PlaceOf(uint32_t stage) const;
  // The tensor that a tensor-parallel rank of the stage holds, null if it does not hold it.
  const Shape* ShapeOn(uint32_t stage, uint32_t tp) const;
};

// A stored weight: of a module, layer or expert file.
struct NamedWeight {
  ParameterIndex parameter{};
  const FileTensor* tensor = nullptr;
  uint32_t tp = 0;
};

// Parameters whose optimizer states lie together: a flat group (stages 1, 2), a
// sub-group (3), a group of the optimizer (0).
struct NamedGroup {
  uint32_t mp = 0;
  size_t number = 0;                       // in the rank's file
  std::optional<uint32_t> expert_rank;     // of native experts: whose
  std::vector<ParameterIndex> parameters;  // in flattening order
  std::vector<size_t> members = {};        // of stage 0: their numbers in the optimizer's group
};

struct Named {
  std::vector<NamedParameter> parameters;  // in model order, by ParameterIndex
  std::map<std::string, ParameterIndex, std::less<>> by_name;
  std::vector<NamedWeight> weights;
  std::vector<NamedGroup> groups;              // in order of mp, number, expert rank
  std::map<std::string, std::string> aliases;  // second name -> name
  DType model_dtype = DType::kF32;             // of most weights
  std::vector<std::string> notes;
  std::vector<LeftOut> left_out;

  const NamedParameter& operator[](ParameterIndex i) const {
    return parameters[static_cast<uint32_t>(i)];
  }
  NamedParameter& operator[](ParameterIndex i) { return parameters[static_cast<uint32_t>(i)]; }
  std::optional<ParameterIndex> Find(std::string_view name) const;
};

// Errors: kInvalid names the file and the parameter whose shapes contradict, or that
// only one place mentions; kUnsupported where names cannot be told.
Result<Named> Name(const TagFiles& files, const Parsed& parsed);

// Names a stage 0 optimizer's parameters, which it knows by number only.  If something
// proves whose they are (core/state/ownership.h), adds the groups and freezes what no
// group has; else leaves the optimizer out.  `spellings`: the engine's, of module entries.
Status NameUnsharded(const TagFiles& files, const Parsed& parsed, const StateDictNames& spellings,
                     Named& out);

// The buffers of a rank's module, as the engine and as the state_dict spell them.
std::set<std::string> BufferNames(const ModelStates& model);

}  // namespace ckptfs::deepspeed::native
