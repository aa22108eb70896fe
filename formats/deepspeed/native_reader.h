// SPDX-License-Identifier: Apache-2.0
//
// NativeReader indexes one tag directory of a native DeepSpeed checkpoint, in
// this order: register every file, parse model states and optimizer states in
// parallel (keeping only what is needed of each), check that they are of one
// run, name the parameters and decide how each is sharded, then put weights
// and optimizer states under their atoms.  Its steps are spread over
// native_reader.cc (files), native_parameters.cc (names, weights),
// native_optimizer.cc (ZeRO) and native_unsharded.cc (stage 0).
//
// Thread safety: one reader per step; Read parses on TBB's threads.
// Lifetime: candidate and options must outlive the reader.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/base/result.h"
#include "core/ingest/assembler.h"
#include "core/ingest/source.h"
#include "formats/deepspeed/expert_names.h"
#include "formats/deepspeed/model_states.h"
#include "formats/deepspeed/names.h"
#include "formats/deepspeed/optimizer_states.h"
#include "formats/sharding/sharding.h"
#include "formats/deepspeed/state_dict_names.h"

namespace ckptfs::deepspeed {

class NativeReader {
 public:
  NativeReader(const StepCandidate& candidate, const SourceOptions& options, StepFiles files);

  Result<StepModel> Read() &&;

 private:
  // A parameter as the files have it.
  struct Known {
    Role role = Role::kTrainable;
    std::map<uint32_t, std::vector<std::optional<Shape>>> shapes;  // by stage: per tp rank
    std::optional<ExpertNumber> expert;
    ParameterIndex index{};
    Sharding sharding;
    std::map<uint32_t, uint32_t> slots;    // pipeline stage -> which copy it is
    std::map<uint32_t, uint32_t> weights;  // tp rank -> stored weights so far
    std::optional<AtomIndex> master;
    std::vector<std::string> states;       // StateNames of the first file that has its optimizer
    std::string states_file;               // which file that is
  };
  // A stored weight: of a module, layer or expert file.
  struct Weight {
    std::string name;
    FileTensor tensor;
    uint32_t tp = 0;
  };
  struct Place {
    AtomIndex atom{};
    uint32_t copy = 0;
    uint32_t local = 0;
  };
  // Ranks of one ZeRO group, in partition order.
  using RankFiles = std::vector<const OptimizerStates*>;
  struct FlatGroup {
    uint32_t stage = 0;  // pipeline
    uint32_t tp = 0;
    size_t index = 0;    // of the partition in each file
    RankFiles ranks;
    std::vector<std::string> names;  // in flattening order
    std::vector<uint64_t> members;   // elements of each
    std::vector<uint64_t> paddings;
  };

  // native_reader.cc
  Status RegisterFiles();
  Status ReadModels();
  Status ReadOptimizers();
  Status ReadTensorFiles();
  Status SetDegrees();
  Status CountExpertRanks();
  Status CheckOneRun() const;
  Status CheckModelsAgree(const ModelStates& first, const ModelStates& other) const;
  std::vector<uint32_t> SplitOfStages();
  void FillHeader();
  Status KeepDocuments();
  std::string PathOf(const std::string& name) const;
  Result<TorchFile> OpenFile(const std::string& name);
  BlobIndex BlobOf(const std::string& name) const;
  const ModelStates& ModelOf(uint32_t mp) const;  // of dp rank 0

  // native_parameters.cc
  Status NameParameters();
  Status NameTrainable();
  Status NameExpertGroup(uint32_t mp, const std::vector<NamedShape>& group, uint32_t expert_ranks);
  Status NameModule(uint32_t mp);
  void NoteLeftOut();
  Status NameLayers();
  Status NameExpertFiles();
  Status NameFrozenFragments();
  std::map<uint32_t, std::string> MatchTiedLayers();
  Status AddKnown(const std::string& name, Role role, uint32_t stage, uint32_t tp,
                  const Shape& shape);
  Status AddWeight(const std::string& name, const FileTensor& tensor, uint32_t stage, uint32_t tp,
                   bool buffer);
  std::set<std::string> BufferNames(uint32_t mp) const;

  // native_weights.cc
  Status ResolveSharding();
  Result<std::vector<Shape>> LocalShapes(const std::string& name, const Known& known) const;
  Status DeclareParameter(const std::string& name, Known& known, bool layers_by_name);
  Status PlaceWeights();
  Status PlaceFrozenFragments();
  Status DeriveWeights();
  void SetModelDType();
  Result<Place> PlaceIn(const std::string& name, std::string_view kind, DType dtype, uint32_t slot,
                        uint32_t tp);
  Status PlaceTensor(const std::string& name, std::string_view kind, const FileTensor& tensor,
                     uint32_t slot, uint32_t tp);
  Status SetScalar(const std::string& name, const NamedScalar& scalar);

  // native_optimizer.cc
  Status PlaceOptimizer();
  bool IsExpertGroup(uint32_t mp, size_t group) const;
  uint32_t ExpertRanks(uint32_t mp, size_t group) const;
  Result<FlatGroup> DescribeGroup(uint32_t mp, size_t index, RankFiles ranks,
                                  std::optional<uint32_t> expert_rank) const;
  Status PlaceDense(uint32_t mp, size_t index);
  Status PlaceExperts(uint32_t mp, size_t index);
  Status PlaceFlatGroup(const FlatGroup& group);
  Status CheckSameStates(const FlatGroup& group);
  Status CheckStates(const std::string& name, const std::string& file,
                     const std::vector<std::string>& states);
  Status PlaceScalars(const FlatGroup& group);
  Result<uint64_t> PartitionSize(const FlatGroup& group) const;
  Status AddToGroup(uint32_t mp, size_t partition, std::span<const std::string> names);

  void MergeGroup(size_t index, const std::string& hyper_parameters,
                  std::span<const std::string> names);

  // native_unsharded.cc
  Status NameUnsharded();
  Result<std::vector<std::vector<std::string>>> NamesOfGroups(
      uint32_t mp, const UnshardedOptimizer& optimizer) const;
  std::vector<NamedShape> Candidates(uint32_t mp) const;
  Status PlaceUnsharded();
  Status PlaceWhole(uint32_t mp, const UnshardedOptimizer& optimizer);
  Status PlaceWholeState(const std::string& name, uint32_t mp, const PartitionStates& state);
  Status PlaceFused(uint32_t mp, const UnshardedOptimizer& optimizer);

  const StepCandidate& candidate_;
  const SourceOptions& options_;
  StepFiles files_;
  Assembler assembler_;
  std::string prefix_;  // of the tag directory below the root, with '/'
  std::map<std::string, BlobIndex> blobs_;
  std::map<RankKey, ModelStates> models_;  // stages 0-2: dp 0 only
  std::map<RankKey, OptimizerStates> optimizers_;
  std::map<LayerKey, TensorDict> layers_;
  std::map<ExpertKey, TensorDict> experts_;
  std::map<uint32_t, LocalExperts> local_experts_;  // by mp
  uint32_t tp_ = 1;
  uint32_t pp_ = 1;
  uint32_t dp_ = 1;
  uint32_t ep_ = 1;
  int stage_ = 0;

  // Everything goes by the engine's spelling of a name.
  std::vector<std::string> order_;      // in model order
  std::map<std::string, Known> known_;
  StateDictNames spellings_;
  std::vector<Weight> weights_;
  std::map<std::string, std::string> aliases_;  // alias -> stored name
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, uint32_t> locals_;  // atom, copy, tp
  std::map<uint32_t, std::vector<std::vector<std::string>>> unsharded_;  // mp -> group -> names
  std::vector<Group> groups_;
  std::vector<std::set<std::string>> grouped_;  // names in each of groups_
};

}  // namespace ckptfs::deepspeed
