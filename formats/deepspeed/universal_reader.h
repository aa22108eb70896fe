// SPDX-License-Identifier: Apache-2.0
//
// UniversalReader indexes one universal directory: every zero/<parameter>/
// folder is a whole parameter, the model states files give what is no
// optimizer state (buffers, frozen parameters, documents).
//
// Thread safety: one reader per step; Read parses on TBB's threads.
// Lifetime: candidate and options must outlive the reader.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/ingest/assembler.h"
#include "core/ingest/source.h"
#include "formats/deepspeed/model_states.h"
#include "formats/deepspeed/names.h"
#include "formats/sharding/sharding.h"
#include "formats/deepspeed/state_dict_names.h"

namespace ckptfs::deepspeed {

class UniversalReader {
 public:
  UniversalReader(const StepCandidate& candidate, const SourceOptions& options, StepFiles files);

  Result<StepModel> Read() &&;

 private:
  // What the keys beside 'param' say of how the parameter was cut.
  struct Marks {
    std::optional<uint32_t> cat_dim;
    uint64_t parts = 0;                 // param_n_sub_params
    std::vector<uint64_t> part_sizes;   // sub_param_shape
    bool vocabulary = false;
    uint32_t experts = 0;               // ep_num_experts
    bool operator==(const Marks&) const = default;
  };
  struct State {
    std::string kind;
    std::optional<FileTensor> tensor;
    std::optional<ScalarValue> scalar;
    Marks marks;
    bool bare = false;
  };
  struct Folder {
    std::string name;                 // of the parameter, as the engine spells it
    std::vector<std::string> files;   // names in the folder
    std::vector<State> states;
    Shape shape;
  };

  Status ListFolders();
  Status RegisterFiles();
  Status ReadModels();
  Status ReadFolder(Folder& folder);
  Result<State> ReadState(const Folder& folder, const std::string& file);
  static Result<Marks> ReadMarks(PickleRef dict);
  Status GiveShapes();
  Status CheckShapes() const;
  Pattern PatternOf(const Folder& folder, const Pattern& by_rules) const;
  Status CheckExperts(const Folder& folder, const Parameter& parameter) const;
  void NoteMissingFrozen();
  Status DeclareParameters();
  Status DeclareOthers(const ShardingRules& rules);
  Status DeclareOther(const ShardingRules& rules, const std::string& name,
                      const std::vector<const FileTensor*>& tensors);
  Status PlaceTensor(AtomIndex atom, uint32_t copy, const LocalTensor& local,
                     const FileTensor& tensor);
  Status AddSteps(PickleRef states, const TorchFile& file);
  Status PlaceFolder(const Folder& folder, ParameterIndex index);
  Status ReadOptimizerState();
  Status AddGroups(const std::vector<HyperGroup>& groups, bool by_sub_group);
  void FillHeader();
  std::string PathOf(std::string_view name) const;
  Result<TorchFile> OpenFile(const std::string& name);

  const StepCandidate& candidate_;
  const SourceOptions& options_;
  StepFiles files_;
  Assembler assembler_;
  std::string prefix_;
  std::map<std::string, BlobIndex> blobs_;  // by path below the tag
  std::vector<Folder> folders_;
  std::map<std::string, std::string> links_;  // alias -> folder
  std::map<uint32_t, ModelStates> models_;    // by mp rank
  StateDictNames spellings_;
  std::map<std::string, ParameterIndex> parameters_;  // by name
};

}  // namespace ckptfs::deepspeed
