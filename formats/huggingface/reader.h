// SPDX-License-Identifier: Apache-2.0
//
// Reader indexes one Hugging Face directory, or one file of weights: whole
// parameters, ties as transformers makes them, and the model files beside them.
// The weights are the masters of an optimizer that lies there, too (optimizer_file.h).
//
// Thread safety: one reader per step; Read parses files on TBB's threads.
// Lifetime: candidate and options must outlive the reader.

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "core/state/state_dict.h"
#include "formats/deepspeed/torch_optimizer.h"
#include "formats/huggingface/names.h"
#include "formats/huggingface/optimizer_file.h"
#include "formats/huggingface/shard_index.h"
#include "formats/huggingface/weights_file.h"
#include "formats/tools/config_text.h"
#include "formats/tools/model_files.h"

namespace ckptfs::huggingface {

// The files of a step, by names in its directory.
struct StepFiles {
  std::string directory;             // below the candidate's root
  std::string prefix;                // of it below the save directory: "" or with '/'
  std::vector<std::string> weights;  // the files that tensors are read from
  std::string index;                 // "" without one
  WeightMap map;                     // the index: tensors to files
  std::string optimizer;             // its file, which may be that of the weights; or ""
  std::vector<std::string> others;   // not read: shown as they are
  std::vector<std::string> folders;
  bool adapter = false;  // PEFT's: additions to another model's weights

  // The name that the weights have for a loader.
  const std::string& Taken() const { return index.empty() ? weights.front() : index; }
};

// The file of weights or the index that a directory's config.json names (transformers_weights),
// which from_pretrained takes before any other; "" where it names none.  BLOCKS: on reading it.
Result<std::string> ConfiguredWeights(const Root& root, const std::string& directory);

// kInvalid names the file and the rule (an index, several variants), kUnsupported
// an adapter.  Files that the index names need not be there.
Result<StepFiles> ListStep(const StepCandidate& candidate);

class Reader {
 public:
  Reader(const StepCandidate& candidate, const SourceOptions& options, StepFiles files);

  Result<StepModel> Read() &&;

 private:
  std::shared_ptr<const Root> StepRoot() const;
  Status RegisterFiles();
  Status ReadWeights();
  Status CheckIndex() const;
  void TieByStorage();
  void TieByConfig();
  // True if what a safetensors file says of a second name is believed.
  bool IsTie(const std::string& alias, const std::string& name) const;
  Status CountBy(std::string_view key, const TorchFile& file);
  Status ReadOptimizer();
  void AddTensors(StateDict& dict) const;
  void AddOptimizer(StateDict& dict) const;
  Status AddModules(StateDict& dict) const;
  Status CheckOneFile() const;
  Status SettleAll();
  Status CountByTrainer();
  Status CarryFiles();
  Status LeaveOutNewerWeights();
  void NoteFolders(const ModelFiles& carried);
  void FillHeader();
  void KeepFiles();
  bool Quantised() const;

  const StepCandidate& candidate_;
  const SourceOptions& options_;
  StepFiles files_;
  Assembler assembler_;
  ConfigFacts config_;
  bool has_config_ = false;
  std::vector<BlobIndex> blobs_;                     // of files_.weights
  std::vector<WeightsFile> contents_;                // the same
  std::map<std::string, std::string> aliases_;       // second name -> name
  std::set<std::string, std::less<>> names_;         // of tensors that are read
  std::unique_ptr<const TorchFile> optimizer_file_;  // of `optimizer_`
  std::optional<deepspeed::TorchOptimizer> optimizer_;
  std::string optimizer_path_;         // for messages
  std::string optimizer_key_;          // where it stands in its file
  std::optional<uint64_t> iteration_;  // as the file says
};

}  // namespace ckptfs::huggingface
