// SPDX-License-Identifier: Apache-2.0
//
// Placer puts what the ranks of a source hold into the step that is assembled:
// a parameter as its Sharding says, a rank's tensor or a flat range of it under an
// atom, scalars, weights that are casts of their masters.  All sources place
// through it, so that in one place is said which tensors are parts of one copy,
// which are replicas, and which are to be averaged.
//
// Thread safety: none; one thread builds one step.
// Lifetime: the assembler and the shardings that were declared must outlive it.
// Units: flat ranges are elements of a rank's tensor, row-major.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "formats/sharding/sharding.h"
#include "formats/torch/file_tensor.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs {

// The holder of a tensor: a tensor-parallel rank of one of the places (pipeline
// stages) that hold the parameter, counted from 0.
struct Holder {
  uint32_t place = 0;
  uint32_t tp = 0;
};

// The dtype that is counted most, `otherwise` if none is.
std::optional<DType> MostCommon(const std::map<DType, uint64_t>& counts,
                                std::optional<DType> otherwise);

// As its Sharding says, without the stages that held it.
Parameter ParameterOf(std::string name, Role role, const Sharding& sharding);

// The document of a step some of whose groups were kept apart: a list of the numbers that
// they had (Placer::AddToGroup).  A target that takes groups by number cannot take them.
inline constexpr std::string_view kGroupNumbers = "group_numbers";

class Placer {
 public:
  explicit Placer(Assembler& assembler) : assembler_(assembler) {}

  // kInvalid for a second parameter of the name.  `stages`: Parameter::source_stages.
  Result<ParameterIndex> Declare(std::string name, Role role, const Sharding& sharding,
                                 std::vector<uint32_t> stages = {});

  // The local tensor of one rank under an atom of the parameter's shape.
  struct Local {
    AtomIndex atom{};
    uint32_t copy = 0;
    uint32_t index = 0;
  };
  // kUnsupported for a parameter that is averaged and in several places.
  // REQUIRES: of this and all below: `parameter` was declared here.
  Result<Local> LocalOf(ParameterIndex parameter, std::string_view kind, DType dtype,
                        Holder holder);
  void AddFragment(const Local& local, const Fragment& fragment);

  // All of what a rank holds.  kInvalid names file, parameter and kind where the
  // tensor's shape is not that of the rank's part.
  Status AddTensor(ParameterIndex parameter, std::string_view kind, const FileTensor& tensor,
                   Holder holder = {});
  Status AddHeld(ParameterIndex parameter, std::string_view kind, FileTensor::Held held,
                 Holder holder = {});
  // A state with a shape of its own (Relation::kReduced), which one rank holds.
  Status AddReduced(ParameterIndex parameter, std::string_view kind, const FileTensor& tensor);
  // kInvalid if it was given another value.
  Status AddScalar(ParameterIndex parameter, std::string_view kind, const ScalarValue& value);
  // A weight that is not stored: the master, cast.  False if there is no master.
  Result<bool> DeriveWeight(ParameterIndex parameter, DType dtype);

  // True if a weight of the parameter was placed.
  bool HasWeight(ParameterIndex parameter) const { return Of(parameter).weight.has_value(); }
  const Sharding& sharding(ParameterIndex parameter) const { return *Of(parameter).sharding; }

  // Optimizer groups, by their number.  Each stage of a pipeline has an optimizer of its
  // own: groups of one number whose hyper-parameters differ are kept apart, behind all
  // others.  Empty ones are those of the first.  A parameter is in a group once; kInvalid
  // if ranks put it under different hyper-parameters of one number.
  Status AddToGroup(size_t number, const std::string& hyper_parameters,
                    std::span<const ParameterIndex> parameters);
  // Hands the groups to the assembler; where some were kept apart, the numbers of all are
  // a document (kGroupNumbers).
  Status FinishGroups();

 private:
  struct Declared {
    const Sharding* sharding = nullptr;
    std::optional<AtomIndex> weight;
    std::optional<AtomIndex> master;
  };
  const Declared& Of(ParameterIndex i) const { return declared_[static_cast<uint32_t>(i)]; }
  Declared& Of(ParameterIndex i) { return declared_[static_cast<uint32_t>(i)]; }

  Assembler& assembler_;
  std::vector<Declared> declared_;                                        // by ParameterIndex
  std::map<std::tuple<AtomIndex, uint32_t, uint32_t>, uint32_t> locals_;  // atom, copy, tp
  struct NumberedGroup {
    size_t number = 0;
    Group group;
    std::set<ParameterIndex> members;
  };
  Result<NumberedGroup*> GroupFor(size_t number, const std::string& hyper_parameters);

  std::vector<NumberedGroup> groups_;  // by number
  std::deque<NumberedGroup> apart_;
  std::string apart_by_;  // a hyper-parameter, if there are any
};

}  // namespace ckptfs
