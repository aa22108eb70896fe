// SPDX-License-Identifier: Apache-2.0
//
// First stage of reading a universal directory,
//
//   Listed -> Parsed -> StateDict -> StepModel
//    List     Parse      Place      Settle
//
// Every zero/<parameter>/ folder is a whole parameter; the model states files give
// what is not an optimizer state (buffers, frozen parameters, documents).  Each stage is
// a function of the values before it, which it does not change.
//
// Thread safety: immutable; Parse reads on TBB's threads.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "formats/deepspeed/model_states.h"
#include "formats/deepspeed/names.h"
#include "formats/deepspeed/optimizer_states.h"
#include "formats/deepspeed/tag_files.h"

namespace ckptfs::deepspeed::universal {

// A folder by the names in it; the folder's is its parameter's, as the engine spells it.
struct FolderFiles {
  std::string name;
  std::vector<std::string> files;  // *.pt

  std::string path() const { return "zero/" + name; }  // below the tag directory
};

struct Listed {
  TagFiles files;
  std::vector<FolderFiles> folders;          // sorted by name, at least one
  std::map<std::string, std::string> links;  // second name -> folder
};

// The cut of the parameter, as the keys beside 'param' say it.
struct Marks {
  std::optional<uint32_t> cat_dim;
  uint64_t parts = 0;                // param_n_sub_params
  std::vector<uint64_t> part_sizes;  // sub_param_shape
  bool vocabulary = false;
  uint32_t experts = 0;  // ep_num_experts
};

// One file of a folder: a tensor, or a number as "step" is.  A 0-d tensor with 'param' may be
// either: the state of a 0-d parameter is its tensor.
struct State {
  std::string kind;  // "master" of fp32.pt
  std::optional<FileTensor> tensor;
  std::optional<ScalarValue> scalar;
  Marks marks;
  bool bare = false;  // not a dict: stage 3's form, flat
};

struct Folder {
  std::string name;
  Shape shape;
  std::vector<State> states;  // one of them is the master; sorted by file
};

// zero/optimizer_state.pt.
struct OptimizerState {
  std::string file;
  std::vector<HyperGroup> groups;
  bool by_sub_group = false;  // stage 3: the groups' members are sub-groups
  std::vector<std::pair<size_t, NamedScalar>> scalars;  // of a sub-group's parameters
  std::vector<Document> documents;
};

struct Parsed {
  std::vector<Folder> folders;             // as Listed has them
  std::map<uint32_t, ModelStates> models;  // by mp rank, 0 among them
  OptimizerState optimizer;

  const ModelStates& model() const { return models.at(0); }
};

// Registers the files.  kInvalid if there is no folder of a parameter.
Result<Listed> List(const StepCandidate& step, const SourceOptions& options, StepFiles names,
                    Assembler& assembler);

// Errors: kInvalid names the file and the key, or the shapes that contradict each
// other.  BLOCKS: on reading every file's header.
Result<Parsed> Parse(const Listed& listed);

}  // namespace ckptfs::deepspeed::universal
