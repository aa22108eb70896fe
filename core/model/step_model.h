// SPDX-License-Identifier: Apache-2.0
//
// StepModel is one committed checkpoint of a run as the rest of ckptfs sees
// it: parameters, their atoms and where the bytes lie, aliases, optimizer
// groups, documents and provenance.  It holds no tensor bytes and nothing of
// any framework's file format.
//
// Thread safety: immutable once an Assembler has finished it.
// Lifetime: owns all it mentions; blobs are opened elsewhere (BlobReader).

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/io/blob.h"
#include "core/model/atom_source.h"
#include "core/model/layout.h"
#include "core/model/left_out.h"
#include "core/model/pattern.h"
#include "core/model/step_facts.h"
#include "core/tensor/shape.h"

namespace ckptfs {

enum class ParameterIndex : uint32_t {};  // into StepModel::parameters

// The numbers are stored in manifests.
//
// kBeside: a tensor that is not the model's: an averaged copy of the weights, a teacher, a
// replay buffer.  A document says where it stood, and its only atom is of kind "value".  Views
// of the model do not show it, and no rank holds it; dcp/ does.
enum class Role : uint8_t { kTrainable = 0, kFrozen = 1, kBuffer = 2, kBeside = 3 };

// The kind of an atom of Role::kBeside.
inline constexpr std::string_view kBesideKind = "value";

// Where a parameter lives in a pipeline.  The numbers are stored in manifests.
enum class StageRule : uint8_t {
  kEvery = 0,  // unknown, or needed on every stage
  kFirst = 1,
  kLast = 2,
  kLayer = 3,      // with the stage of Parameter::layer
  kFirstLast = 4,  // tied: on the first and the last stage
};

struct Parameter {
  std::string name;  // as the source's own engine spells it, wrappers included
  Shape shape;       // logical: unsharded, unpadded
  Role role = Role::kTrainable;
  // The cut over tp.  For an expert: over etp (kUnique: nothing is known of etp > 1).
  Pattern pattern;
  // How the source's own ranks held it, at its own tp degree, where `pattern`
  // would cut it otherwise: unevenly, with another padding, or not at all.
  std::optional<Pattern> source_pattern;
  // The source's own pipeline stages that held it, rising; empty where it had one
  // stage or nothing tells.  Its own pipeline is shown by them, others by `stage`.
  std::vector<uint32_t> source_stages;
  StageRule stage = StageRule::kEvery;
  uint32_t layer = 0;              // transformer layer, from 0, when stage is kLayer
  std::optional<uint32_t> expert;  // global expert id of a per-expert parameter
  // Where the id stands in `name`, as a byte offset of its first digit.  The
  // source says so: the same number may be a layer's or a submodule's.
  uint32_t expert_at = 0;
  uint32_t stacked_experts = 0;  // > 0: dim 0 is this many equal runs, one per expert, cut over ep
};

inline bool IsOfModel(const Parameter& parameter) { return parameter.role != Role::kBeside; }

// True if `name` has the decimal expert id at `expert_at`, and for parameters of no expert.
bool NamesItsExpert(const Parameter& parameter);

// `shown`, a name of the parameter that is spelled alike from the expert id on
// (naming changes what stands before it), with another id; empty if it is not.
// REQUIRES: parameter.expert and NamesItsExpert.
std::string WithExpert(const Parameter& parameter, std::string_view shown, uint64_t id);

// How an atom's shape relates to its parameter's.
enum class Relation : uint8_t { kSame = 0, kReduced = 1, kScalar = 2, kOpaque = 3 };

// kind: "weight" (as the model holds it), "master" (fp32), "exp_avg",
// "exp_avg_sq", "grad", "step", or any other optimizer state by its own name.
struct Atom {
  ParameterIndex parameter{};
  std::string optimizer;  // usually empty: the only optimizer
  std::string kind;
  DType dtype = DType::kF32;
  Shape shape;
  Relation relation = Relation::kSame;
  AtomSource source;
  bool derived = false;  // not stored by the source: a cast of another atom
};

// A second name of a parameter (tied weights).
struct Alias {
  std::string name;
  ParameterIndex parameter{};
};

// A tensor that a document mentions (rng states, data-loader tensors).  It lies in one blob, or it
// is an atom of Role::kBeside, whose dtype and shape it has: a tensor that is large, in several
// pieces, not contiguous or empty.
struct StoredTensor {
  DType dtype = DType::kU8;
  Shape shape;
  std::vector<uint64_t> strides;  // elements
  BlobIndex blob{};
  uint64_t offset = 0;                           // bytes, of the tensor's first element
  std::optional<AtomIndex> atom = std::nullopt;  // with it blob and offset mean nothing
};

// Everything of a step that is not an atom, as a protocol-2 pickle that our own
// writer printed; a tensor is the persistent id of its index (as a decimal
// string) in `tensors`.  Unknown classes are in it verbatim.
struct Document {
  std::string key;    // e.g. "client/args", "lr_scheduler", "ds_config"
  std::string scope;  // "" = global, else a coordinate such as "dp0_tp1_pp0"
  std::string pickle;
  std::vector<StoredTensor> tensors;
};

// One optimizer group: parameters in order, hyper-parameters as the pickle of
// a dict (without "params").
struct Group {
  std::string optimizer;
  std::vector<ParameterIndex> parameters;
  std::string hyper_parameters;
  // Its number in the optimizers of the source's ranks, where ranks had groups of one number with
  // other hyper-parameters.  A target that takes groups by number cannot take those.
  std::optional<uint32_t> number = std::nullopt;
};

// A small file beside the step that later saves write again, as it was: a script, a
// pointer.  It is not a blob, since those must not change.
struct SideText {
  std::string path;  // below the first root
  std::string text;
  uint32_t run_bits = 0;  // of its mode: subset of 0111
};

struct StepIndex;

// All of a step that is neither a parameter nor refers to one by its number.
struct StepHeader {
  std::string framework;  // the Source's name: "deepspeed", "deepspeed_universal"
  std::string framework_version;
  std::string id;  // the framework's own tag: "global_step5"
  uint64_t iteration = 0;
  int64_t mtime_ns = 0;              // newest source file
  Layout layout;                     // of the source
  std::optional<DType> model_dtype;  // of weights in training
  // The family whose rules applied, if any, as it was then: its name, its file's
  // text, and the sizes that its rules mention.
  std::string family;
  std::string family_rules;
  std::map<std::string, int64_t> family_sizes;
  uint32_t layers = 0;  // transformer layers, 0 if unknown
  // No step of the optimizer was taken, and what made it changed the masters only:
  // weights are not their casts.
  bool weights_apart = false;

  std::vector<std::string> roots;  // absolute directories when adopted
  std::vector<Blob> blobs;         // every file of the step, the unread ones too
  StepFacts facts;
  std::vector<SideText> texts;     // shown below source/, and nowhere read
  std::vector<std::string> notes;  // said to the user: what is derived, averaged, ignored
  std::vector<LeftOut> left_out;   // parts of the source that the step lacks
};

struct StepModel : StepHeader {
  std::vector<Parameter> parameters;  // in model order, then those beside the model
  std::vector<Atom> atoms;
  std::vector<Alias> aliases;
  std::vector<Group> groups;
  std::vector<Document> documents;

  const Parameter& parameter(ParameterIndex i) const {
    return parameters[static_cast<uint32_t>(i)];
  }
  const Atom& atom(AtomIndex i) const { return atoms[static_cast<uint32_t>(i)]; }
  const Blob& blob(BlobIndex i) const { return blobs[static_cast<uint32_t>(i)]; }
  // Where it lies.
  std::string PathOf(const Blob& blob) const { return roots[blob.root] + "/" + blob.path; }

  // The atom of a parameter by kind (of the only or first optimizer).
  std::optional<AtomIndex> FindAtom(ParameterIndex parameter, std::string_view kind) const;
  // By canonical name or alias.
  std::optional<ParameterIndex> FindParameter(std::string_view name) const;
  bool IsOfModel(const Atom& atom) const { return ckptfs::IsOfModel(parameter(atom.parameter)); }
  const Document* FindDocument(std::string_view key, std::string_view scope = "") const;
  // True if the parameter has a second name (tied weights).
  bool IsTied(ParameterIndex parameter) const;
  // Experts of the parameter's group (the same name but for the expert number),
  // or stacked_experts; 0 if it is not an expert's.
  uint32_t ExpertsOf(const Parameter& parameter) const;
  // `layers`, or if that is 0 one more than the greatest layer number; 0 if no
  // parameter has one.
  uint32_t LayerCount() const;

  // Makes the look-ups above constant time; without it they search.  Call it last when a model
  // is finished, and again after the model was edited.
  void BuildIndex();
  std::shared_ptr<const StepIndex> index;
};

}  // namespace ckptfs
