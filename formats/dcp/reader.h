// SPDX-License-Identifier: Apache-2.0
//
// Reader makes a step of a DCP checkpoint: weights under their names in the model, the
// optimizer's states and groups, and documents.  Every tensor is whole, whatever ranks
// held; a tie is nowhere declared, so two names are two parameters.
//
// Thread safety: one reader per step; archives are looked at in parallel.
// Lifetime: candidate, options and forms must outlive it.

#pragma once

#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "core/state/state_dict.h"
#include "formats/dcp/form.h"
#include "formats/dcp/objects.h"
#include "formats/dcp/state_keys.h"
#include "formats/dcp/step_files.h"
#include "formats/dcp/stored_state.h"
#include "formats/settle/settle.h"

namespace ckptfs::dcp {

class Reader {
 public:
  Reader(const StepCandidate& candidate, const SourceOptions& options, std::vector<PartFiles> parts,
         std::span<const Form> forms = {})
      : candidate_(candidate), options_(options), parts_(std::move(parts)), forms_(forms) {}

  Result<StepModel> Read() &&;

 private:
  Status AddTensors(const StoredState& state);
  void AddStates(const StoredState& state, ObjectReader& objects);
  size_t OptimizerOf(const std::string& label);
  Status ReadGroups(ObjectReader& objects);
  Status ReadGroupsOf(const std::string& label, ObjectReader& objects);
  std::string AddMembers(Members members, StateDict::Group& group);
  Status ReadGroupsByParameter(ObjectReader& objects);
  void OrderByNumber(size_t optimizer);
  void NameAsWeight(const std::string& optimizer, std::string& name);
  Status SettleAll(const StoredState& state, const ObjectReader& objects);
  void CarryUnowned(const ObjectReader& objects);
  void Carry(KeyedEntry entry, std::string_view why, std::string_view remedy,
             const ObjectReader& objects);
  Status AddDocuments(ObjectReader& objects);
  void KeepKeys(const DcpMetadata& metadata, const ObjectReader& objects);
  Status CarryOthers();
  Status NameNumbers(const ObjectReader::Items& items, StateDict::Group& group,
                     ObjectReader& objects);
  void NumberOwners();
  Status LeaveOutOtherModels();
  // REQUIRES: all that is read was added to the assembler, and nothing else.
  Status LeaveOutFilesBeside();
  void FillHeader(const ObjectReader& objects, uint64_t dropped);

  const StepCandidate& candidate_;
  const SourceOptions& options_;
  const std::vector<PartFiles> parts_;
  const std::span<const Form> forms_;
  Assembler assembler_;
  StateKeys keys_;
  StateDict dict_;
  Settled settled_;
  std::set<std::pair<size_t, std::string>> grouped_;  // optimizer, name
  std::vector<ObjectReader::Placed> other_states_;    // neither tensors nor numbers
  std::vector<KeyedEntry> rest_;                      // entries that no other view knows
  // Hyper-parameters that are not plain values, and their optimizers.
  std::vector<std::pair<size_t, KeyedEntry>> odd_hyper_parameters_;
  std::set<std::string_view> weights_;  // their names
  ParametersByName parameters_;
};

}  // namespace ckptfs::dcp
