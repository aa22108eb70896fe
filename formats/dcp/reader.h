// SPDX-License-Identifier: Apache-2.0
//
// Reader makes a step of a DCP checkpoint: weights under their names in the model, the
// optimizer's states and groups, and documents.  Every tensor is whole, whatever ranks
// held; a tie is nowhere declared, so two names are two parameters.
//
// Thread safety: one reader per step; archives are looked at in parallel.
// Lifetime: candidate and options must outlive it.

#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "formats/dcp/objects.h"
#include "formats/dcp/state_keys.h"
#include "formats/dcp/step_files.h"
#include "formats/dcp/stored_state.h"

namespace ckptfs::dcp {

class Reader {
 public:
  Reader(const StepCandidate& candidate, const SourceOptions& options, std::vector<PartFiles> parts)
      : candidate_(candidate), options_(options), parts_(std::move(parts)) {}

  Result<StepModel> Read() &&;

 private:
  Result<StateKeys> Keys(StoredState& state);
  Status DeclareParameters(StoredState& state);
  Status AddStates(StoredState& state, ObjectReader& objects);
  Status AddState(StoredState& state, ObjectReader& objects, const StateKeys::State& key);
  Status ReadGroups(ObjectReader& objects);
  Status ReadNumberedGroups(ObjectReader& objects);
  Status ReadGroupsOf(const std::string& optimizer, ObjectReader& objects);
  void CarryHyperParameters(const std::vector<KeyedEntry>& others, const ObjectReader& objects);
  std::string WhyNotNames(const std::string& optimizer, Members& members);
  Status ReadGroupsByParameter(ObjectReader& objects);
  void NameAsWeight(std::string& name);
  Role RoleOfWeight(const std::string& name, const TensorEntry& tensor) const;
  Status AddGroups();
  void Carry(KeyedEntry entry, std::string_view why, std::string_view remedy,
             const ObjectReader& objects);
  Status AddDocuments(ObjectReader& objects);
  Status KeepKeys(const DcpMetadata& metadata, const ObjectReader& objects);
  Status CarryOthers();
  void FillHeader(const ObjectReader& objects, uint64_t dropped);

  const StepCandidate& candidate_;
  const SourceOptions& options_;
  const std::vector<PartFiles> parts_;
  Assembler assembler_;
  StateKeys keys_;
  std::vector<std::string> order_;  // of numbered parameters their names
  struct NamedGroup {
    std::string optimizer;
    std::string hyper_parameters;
    std::vector<std::string> names;
  };
  std::vector<NamedGroup> groups_;
  // The numbers that optimizers give their parameters: by optimizer, then by name.
  std::map<std::string, std::map<std::string, uint64_t>> numbers_;
  std::set<std::pair<std::string, std::string>> grouped_;  // optimizer, name
  std::vector<const StateKeys::State*> other_states_;      // neither tensors nor numbers
  std::vector<KeyedEntry> rest_;                           // entries that no other view knows
  bool unknown_optimizer_ = false;                         // nobody knows what it trains
  std::set<std::string, std::less<>> weights_;             // their names
  std::set<std::string, std::less<>> trained_;             // names with states or in groups
  ParametersByName parameters_;
  std::map<DType, uint64_t> elements_;  // of float weights
  std::optional<uint64_t> steps_;       // the greatest `step` of a state
};

}  // namespace ckptfs::dcp
