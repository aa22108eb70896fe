// SPDX-License-Identifier: Apache-2.0
//
// FsdpReader makes a step of a directory of --ckpt-format fsdp_dtensor (form.h): weights under the
// names that dist_checkpointing gives them, so that the step is what the same job would have saved
// as torch_dist, masters, moments, and groups, which this form alone says by parameter.
//
// Megatron-FSDP's optimizer trains fp32 masters, which are all that `model` has of them.  The
// weights that a 16-bit job computes with are these, cast (param_and_grad_buffer.py:
// copy_main_weights_to_model_weights).
//
// Thread safety: one reader per step.
// Lifetime: candidate, options, state and assembler must outlive it; the assembler is consumed.

#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "core/state/state_dict.h"
#include "formats/dcp/objects.h"
#include "formats/dcp/stored_state.h"
#include "formats/megatron/common_state.h"
#include "formats/megatron/fsdp/tensors.h"

namespace ckptfs::megatron {

// The job's arguments; nothing where there are none.  kInvalid if they are something else.
// BLOCKS: on reading them.
Result<std::optional<CommonState>> ArgumentsOf(dcp::StoredState& state);

class FsdpReader {
 public:
  FsdpReader(const StepCandidate& candidate, const SourceOptions& options, dcp::StoredState& state,
             Assembler& assembler)
      : candidate_(candidate), options_(options), state_(state), assembler_(assembler) {}

  Result<StepModel> Read() &&;

 private:
  // A part of a tensor, by its numbers.
  struct PartPlace {
    size_t tensor = 0;
    size_t part = 0;
  };
  using Parts = std::vector<std::optional<dcp::KeyedEntry>>;

  void FindParts();
  Status AddWeights();
  void AddStates(dcp::ObjectReader& objects);
  std::string AddState(size_t tensor, const std::string& kind, const Parts& parts,
                       dcp::ObjectReader& objects);
  Status AddGroups(dcp::ObjectReader& objects);
  Result<std::optional<std::string>> HyperParametersOf(size_t tensor, dcp::ObjectReader& objects);
  Status AddGroup(std::string hyper_parameters, const std::vector<size_t>& members);
  Status AddDocuments(dcp::ObjectReader& objects);
  void LeaveOutRest(const dcp::ObjectReader& objects);
  void LeaveOutOfOptimizer(std::string what, std::string why);
  void FillHeader(const dcp::ObjectReader& objects, std::optional<uint64_t> steps);
  Status CarryFiles();

  const StepCandidate& candidate_;
  const SourceOptions& options_;
  dcp::StoredState& state_;
  Assembler& assembler_;
  std::optional<CommonState> common_;
  std::vector<FsdpTensor> tensors_;
  std::map<std::string, PartPlace, std::less<>> places_;  // by Part::stored
  // Hyper-parameters by Part::parameter.
  std::map<std::string, dcp::ObjectReader::Items, std::less<>> hyper_parameters_;
  StateDict dict_;
  std::set<size_t> masters_;       // tensors that are not stored but as these
  std::optional<DType> computed_;  // the job's dtype, where it is not fp32
  dcp::ParametersByName parameters_;
};

}  // namespace ckptfs::megatron
