// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/reader.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/device_error.h"
#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "core/model/step_counts.h"
#include "core/state/model_config.h"
#include "formats/huggingface/file_pieces.h"
#include "formats/huggingface/kept_states.h"
#include "formats/huggingface/optimizer_choice.h"
#include "formats/huggingface/other_weights.h"
#include "formats/huggingface/shown_tensors.h"
#include "formats/huggingface/torch_state.h"
#include "formats/huggingface/unread_files.h"
#include "formats/huggingface/whole_files.h"
#include "formats/settle/settle.h"
#include "formats/tools/step_names.h"
#include "formats/tools/step_tree.h"
#include "formats/tools/tool_files.h"
#include "formats/tools/trainer_rule.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs::huggingface {
namespace {

// The counters of a file of weights, the first that it has.
constexpr auto kCounters = std::to_array<std::string_view>(
    {"global_step", "iter_num", "iteration"});  // Lightning, nanoGPT, ...
constexpr std::string_view kSteps = "step";
constexpr std::string_view kEpochs = "epoch";  // where its name has no number, either

// Heads that share the embedding where a model ties them and its files hold one: the first of these
// that a model_type begins with, else kHead (_tied_weights_keys of transformers 5.23).
constexpr std::string_view kHead = "lm_head.weight";
constexpr std::array<std::pair<std::string_view, std::string_view>, 7> kHeads = {
    {{"whisper", "proj_out.weight"},
     {"moonshine", "proj_out.weight"},
     {"canary", "proj_out.weight"},
     {"cohere_asr", "proj_out.weight"},
     {"trocr", "output_projection.weight"},
     {"t5gemma", "lm_head.out_proj.weight"},
     {"ultrabert", "head.decoder.weight"}}};
constexpr std::array<std::string_view, 4> kEmbeddings = {
    "model.embed_tokens.weight", "transformer.wte.weight", "transformer.word_embeddings.weight",
    "model.decoder.embed_tokens.weight"};

bool IsEmbedding(std::string_view name) {
  return std::ranges::find(kEmbeddings, name) != kEmbeddings.end();
}

// True if the modules that the names lead to may have the same parameter.
bool EndAlike(std::string_view a, std::string_view b) {
  const auto dotted = [](std::string_view name) {
    return name.find('.') != std::string_view::npos;
  };
  return (!dotted(a) && !dotted(b)) || a.substr(a.rfind('.') + 1) == b.substr(b.rfind('.') + 1);
}

// Suffixes of the tensors that quantisers put beside packed weights.
constexpr std::array<std::string_view, 7> kPacked = {
    ".qweight", ".qzeros", ".absmax", ".quant_map", ".SCB", ".weight_scale", ".weight_scale_inv"};

bool HasHead(const std::string& architecture) {
  return architecture.ends_with("ForCausalLM") || architecture.ends_with("LMHeadModel") ||
         architecture.ends_with("ForConditionalGeneration");
}

constexpr uint64_t kMaxConfigBytes = 1 << 20;

// The epoch in a file without a number (model_best.pth) counts as those beside it do: they are of
// epochs, or have no number of a tool's form.
bool HasOwnEpoch(const StepCandidate& step) {
  if (step.iteration == 0) return true;
  if (FileNumber(step.id)) return false;
  const auto entries = step.root->List(step.save);
  if (!entries) return false;
  const auto numbered = [](const std::string& name) { return FileNumber(name).has_value(); };
  return std::ranges::none_of(*entries, numbered, &RootEntry::name) ||
         std::ranges::any_of(*entries, CountsEpochs, &RootEntry::name);
}

}  // namespace

Result<std::string> ConfiguredWeights(const Root& root, const std::string& directory) {
  const std::string path = JoinPath(directory, kModelConfig);
  CKPT_ASSIGN_OR_RETURN(const bool there, HasFile(root, path));
  const auto text = there ? ReadWhole(root, path, kMaxConfigBytes) : Result<std::string>("");
  // A config that is not one is told where it is carried; a disk that fails is an error here.
  if (!text && IsOfDevice(text.error())) return Fail(Error(text.error()));
  const auto facts = text ? ReadConfigFacts(*text) : Result<ConfigFacts>(ConfigFacts{});
  if (!facts) return std::string();
  const std::string& name = facts->weights;
  const bool weights = name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
  return weights && ShardPath(name) == name ? name : std::string();
}

Result<StepFiles> ListStep(const StepCandidate& candidate) {
  StepFiles out;
  const Root& root = *candidate.root;
  CKPT_ASSIGN_OR_RETURN(const bool single, HasFile(root, candidate.directory));
  if (single) {
    out.directory = candidate.save;
    out.weights = {LastComponent(candidate.directory)};
    out.optimizer = IsTorchName(out.weights[0]) ? out.weights[0] : "";
    return out;
  }
  out.directory = candidate.directory;
  out.prefix = candidate.Prefix();
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(out.directory));
  std::vector<std::string> names;
  names.reserve(entries.size());
  for (const RootEntry& entry : entries) names.push_back(entry.name);
  CKPT_ASSIGN_OR_RETURN(const std::string configured, ConfiguredWeights(root, out.directory));
  auto chosen = configured.empty() ? ChooseWeights(names)
                                   : Result<std::optional<WeightsName>>(WeightsName{
                                         configured, configured.ends_with(".json"), "", false});
  if (!chosen) return Fail(std::move(chosen).error().WithContext(candidate.Path()));
  if (!*chosen) return Fail(ErrorCode::kInvalid, StrCat(candidate.Path(), ": no weights"));
  const WeightsName& weights = **chosen;
  out.adapter = weights.adapter;
  std::set<std::string> read{weights.file};
  if (weights.index) {
    out.index = weights.file;
    CKPT_ASSIGN_OR_RETURN(out.map, ReadShardIndex(root, JoinPath(out.directory, out.index)));
    for (const auto& [tensor, file] : out.map) read.insert(file);
  }
  for (const std::string& name : read) {
    if (name != out.index && name != out.optimizer) out.weights.push_back(name);
  }
  out.optimizer = OptimizerFileAmong(names);
  // Without a file of its own it may stand beside the model.
  const bool none = std::ranges::none_of(names, IsOptimizerFile);
  if (none && out.weights.size() == 1 && IsTorchName(out.weights[0]))
    out.optimizer = out.weights[0];
  if (!out.optimizer.empty()) read.insert(out.optimizer);
  for (const RootEntry& entry : entries) {
    const bool other = !read.contains(entry.name) || entry.name == out.index;
    if (entry.kind == EntryKind::kFile && other) out.others.push_back(entry.name);
    if (entry.kind == EntryKind::kDirectory && !entry.name.starts_with('.')) {
      out.folders.push_back(entry.name);
    }
  }
  return out;
}

Reader::Reader(const StepCandidate& candidate, const SourceOptions& options, StepFiles files)
    : candidate_(candidate), options_(options), files_(std::move(files)) {}

std::shared_ptr<const Root> Reader::StepRoot() const {
  return RootBelow(candidate_.root, candidate_.save);
}

Status Reader::RegisterFiles() {
  const uint32_t root = assembler_.AddRoot(StepRoot());
  for (const std::string& name : files_.weights) {
    CKPT_ASSIGN_OR_RETURN(const BlobIndex blob, assembler_.AddFile(root, files_.prefix + name));
    blobs_.push_back(blob);
  }
  if (files_.optimizer.empty()) return {};
  CKPT_RETURN_IF_ERROR(assembler_.AddFile(root, files_.prefix + files_.optimizer));
  return {};
}

// A script's state that lies in several files is not told apart by each of them.
Status Reader::CheckOneFile() const {
  for (size_t i = 0; i < contents_.size() && contents_.size() > 1; ++i) {
    const bool optimizer = std::ranges::any_of(contents_[i].beside, [](const LeftOut& one) {
      return one.part == LeftOutPart::kOptimizer;
    });
    if (!optimizer || IsTorchName(files_.weights[i])) continue;
    return Fail(ErrorCode::kUnsupported,
                StrCat(candidate_.Path(), "/", files_.weights[i],
                       ": an optimizer's keys stand beside a model's in one of several files"));
  }
  return {};
}

Status Reader::ReadWeights() {
  contents_.resize(files_.weights.size());
  std::vector<Status> outcomes(contents_.size());
  ParallelFor(contents_.size(), [&](size_t i) {
    auto read = ReadWeightsFile(*candidate_.root, JoinPath(files_.directory, files_.weights[i]),
                                blobs_[i], options_.model);
    if (read) {
      assembler_.SetFrame(blobs_[i], read->frame);
      contents_[i] = *std::move(read);
    } else {
      outcomes[i] = Fail(std::move(read).error());
    }
  });
  for (Status& outcome : outcomes) CKPT_RETURN_IF_ERROR(std::move(outcome));
  CKPT_RETURN_IF_ERROR(CheckOneFile());
  std::map<std::string_view, size_t> holders;
  for (size_t i = 0; i < contents_.size(); ++i) {
    for (const StoredWeight& weight : contents_[i].weights) {
      const auto [at, first] = holders.try_emplace(weight.name, i);
      names_.insert(weight.name);
      if (first) continue;
      return Fail(ErrorCode::kInvalid,
                  StrCat(candidate_.Path(), ": '", weight.name, "' is in ",
                         files_.weights[at->second], " and in ", files_.weights[i]));
    }
  }
  return {};
}

// Each tensor that the index names is in some file; tensors that it does not name are taken, too:
// from_pretrained reads the files that are named, and their headers alone say what is in them.
// Rotary frequencies and a head that the config ties are made when the model is.
Status Reader::CheckIndex() const {
  std::set<std::string_view> held(names_.begin(), names_.end());
  for (const auto& [alias, name] : aliases_) held.insert(alias);
  for (const WeightsFile& content : contents_) {
    for (const auto& [alias, name] : content.aliases) held.insert(alias);
  }
  for (const auto& [tensor, file] : files_.map) {
    if (held.contains(tensor) || tensor.ends_with(".inv_freq")) continue;
    return Fail(ErrorCode::kInvalid, StrCat(candidate_.Path(), "/", files_.index, ": says that '",
                                            tensor, "' is in ", file, ", which does not have it"));
  }
  return {};
}

// Names of one tensor of a torch file; what a safetensors file says it dropped.
void Reader::TieByStorage() {
  for (WeightsFile& content : contents_) {
    std::map<std::string, std::string> stored;
    for (const StoredWeight& weight : content.weights) {
      if (weight.storage.empty()) continue;
      const auto [first, added] = stored.try_emplace(weight.storage, weight.name);
      if (!added) aliases_.emplace(weight.name, first->second);
    }
    for (const auto& [alias, name] : content.aliases) {
      if (IsTie(alias, name)) aliases_.emplace(alias, name);
    }
  }
}

// safetensors.torch.save_model writes {what it dropped: what it kept} among a file's other
// metadata, into a dictionary that may be of another model, or of no model: a name that differs in
// its last word or is another stored one with words before it is not taken, and of a head neither
// what the config denies nor another than an embedding, since what is shown of the two is not the
// head.
bool Reader::IsTie(const std::string& alias, const std::string& name) const {
  if (alias == "format" || names_.contains(alias) || !EndAlike(alias, name)) return false;
  for (size_t dot = alias.find('.'); dot != std::string::npos; dot = alias.find('.', dot + 1)) {
    const std::string_view rest = std::string_view(alias).substr(dot + 1);
    if (rest != name && names_.contains(rest)) return false;
  }
  if ((IsHead(alias) || IsHead(name)) && !config_.tied.value_or(true)) return false;
  return !IsHead(name) || IsHead(alias) || IsEmbedding(alias);
}

// A head that no file holds is the embedding, unless the config or a file says otherwise.
void Reader::TieByConfig() {
  const auto of_model = std::ranges::find_if(
      kHeads, [&](const auto& head) { return config_.model_type.starts_with(head.first); });
  const std::string tied_head(of_model != kHeads.end() ? of_model->second : kHead);
  const auto& classes = config_.architectures;
  const bool head = classes.empty() ? config_.tied.value_or(false)
                                    : std::any_of(classes.begin(), classes.end(), HasHead);
  if (!has_config_ || !head || !config_.tied.value_or(true) || names_.contains(tied_head) ||
      aliases_.contains(tied_head)) {
    return;
  }
  const auto embedding = std::find_if(kEmbeddings.begin(), kEmbeddings.end(),
                                      [&](std::string_view name) { return names_.contains(name); });
  if (embedding == kEmbeddings.end()) return;
  aliases_.emplace(tied_head, *embedding);
}

bool Reader::Quantised() const {
  return !config_.quantisation.empty() ||
         std::any_of(names_.begin(), names_.end(), [](const std::string& name) {
           return name.find(".quant_state.") != std::string::npos ||
                  std::any_of(kPacked.begin(), kPacked.end(),
                              [&](std::string_view suffix) { return name.ends_with(suffix); });
         });
}

// Takes the iteration that a script wrote under the key, unless one is known.
Status Reader::CountBy(std::string_view key, const TorchFile& file) {
  if (iteration_ || !file.root().IsDict() || !file.root()[key]) return {};
  CKPT_ASSIGN_OR_RETURN(const auto count, ScalarOf(file.root()[key], file));
  if (count) iteration_ = CountOf(count->dtype, count->bytes);
  return {};
}

// The optimizer beside the weights, or in their file, if there is one and it is asked for.
Status Reader::ReadOptimizer() {
  StepModel& header = assembler_.header();
  if (files_.optimizer.empty()) {
    for (const std::string& unread : files_.others) {
      if (!IsOptimizerFile(unread)) continue;
      LeaveOut(header, {LeftOutPart::kOptimizer, StrCat("the optimizer in ", unread),
                        "several models or optimizers lie there, and nothing tells which model "
                        "it trains",
                        ""});
    }
    return {};
  }
  const bool beside = files_.weights.size() == 1 && files_.optimizer == files_.weights[0];
  if (options_.weights_only && !beside) return {};
  const std::string path = JoinPath(files_.directory, files_.optimizer);
  optimizer_path_ = candidate_.root->PathOf(path);
  CKPT_ASSIGN_OR_RETURN(auto opened, candidate_.root->Open(path));
  CKPT_ASSIGN_OR_RETURN(TorchFile read_file, TorchFile::Open(std::move(opened)));
  optimizer_file_ = std::make_unique<const TorchFile>(std::move(read_file));
  const TorchFile& file = *optimizer_file_;
  for (const std::string_view key : kCounters) CKPT_RETURN_IF_ERROR(CountBy(key, file));
  // A `step` beside an epoch may be one in it: the name's number comes first.
  if (HasOwnEpoch(candidate_)) {
    if (candidate_.iteration == 0) CKPT_RETURN_IF_ERROR(CountBy(kSteps, file));
    CKPT_RETURN_IF_ERROR(CountBy(kEpochs, file));
  } else if (!file.root().IsDict() || !file.root()[kEpochs]) {
    CKPT_RETURN_IF_ERROR(CountBy(kSteps, file));
  }
  if (options_.weights_only) return {};
  OptimizerChoice choice =
      ChooseOptimizer(file.root(), files_.optimizer, beside ? &contents_.front() : nullptr);
  for (LeftOut& one : choice.left_out) LeaveOut(header, std::move(one));
  const PickleRef dict = choice.dict;
  if (!dict) return {};
  CKPT_ASSIGN_OR_RETURN(const BlobIndex blob,
                        assembler_.AddFile(0, files_.prefix + files_.optimizer));
  auto read = deepspeed::ReadTorchOptimizer(dict, file, blob);
  if (!read) return Fail(std::move(read).error().WithContext(optimizer_path_));
  optimizer_ = *std::move(read);
  optimizer_key_ = std::move(choice.key);
  CKPT_ASSIGN_OR_RETURN(const Digest frame, file.Frame());
  assembler_.SetFrame(blob, frame);
  return {};
}

void Reader::AddTensors(StateDict& dict) const {
  const bool quantised = Quantised();
  for (const WeightsFile& content : contents_) {
    for (const StoredWeight& weight : content.weights) {
      if (aliases_.contains(weight.name)) continue;
      dict.tensors.push_back({weight.name,
                              weight.dtype,
                              weight.shape,
                              PlaceHeld(weight.held),
                              {},
                              quantised || !IsFloat(weight.dtype)});
    }
  }
  dict.second_names.assign(aliases_.begin(), aliases_.end());
}

// The order of a torch file's dict is the model's; safetensors are sorted, and say nothing of it.
void Reader::AddOptimizer(StateDict& dict) const {
  StateDict::Optimizer added;
  added.what = StrCat("the optimizer in ", files_.optimizer);
  added.key = optimizer_key_;
  added.on_weights = true;
  added.left_out = optimizer_->left_out;
  if (files_.weights.size() == 1 && IsTorchName(files_.weights[0])) {
    added.rule = [this](auto hyper_parameters, auto parameters) {
      return TrainerRule(candidate_, hyper_parameters, parameters);
    };
  }
  dict.optimizers.push_back(std::move(added));
  deepspeed::AddTo(*optimizer_, 0, dict);
}

// Other models that the optimizer may train: in the file of the weights, and in the files in which
// accelerate keeps objects of a script.
Status Reader::AddModules(StateDict& dict) const {
  for (const WeightsFile& content : contents_) {
    if (dict.model.empty()) dict.model = content.model;
    dict.modules.insert(dict.modules.end(), content.modules.begin(), content.modules.end());
  }
  TrainableModule model;
  for (const StateDict::Tensor& tensor : dict.tensors) {
    model.parameters.push_back({tensor.name, tensor.shape});
  }
  for (const std::string& name : files_.others) {
    if (!name.starts_with("custom_checkpoint_") || !name.ends_with(".pkl")) continue;
    auto opened = candidate_.root->Open(JoinPath(files_.directory, name));
    const auto file = opened ? TorchFile::Open(*std::move(opened)) : Fail(Error(opened.error()));
    if (!file && IsOfDevice(file.error())) return Fail(Error(file.error()));
    if (!file) continue;  // no tensors of a state dict
    for (TrainableModule& module : TorchState(file->root()).Modules()) {
      module.key = module.key.empty() ? name : StrCat(name, ": ", module.key);
      // A copy of the model is its average: an optimizer's other model is saved as one.
      if (!AreTwins(module, model)) dict.modules.push_back(std::move(module));
    }
  }
  return {};
}

Status Reader::SettleAll() {
  StateDict dict;
  dict.unfit = StateDict::Unfit::kLeftOut;
  CKPT_ASSIGN_OR_RETURN(dict.sizes, SizesOf({}, options_, candidate_));
  AddTensors(dict);
  if (!optimizer_) {
    CKPT_RETURN_IF_ERROR(Settle(dict, options_, assembler_));
    return {};
  }
  AddOptimizer(dict);
  CKPT_RETURN_IF_ERROR(AddModules(dict));
  KeptStates kept(*optimizer_file_);
  dict.keep = [&](const StateDict::State& state, const std::string& parameter, auto) {
    const auto number = std::get<int64_t>(state.owner);
    return StateDict::Fate{.kept = kept.Keep(parameter, state.kind, optimizer_->values.at(number))};
  };
  CKPT_RETURN_IF_ERROR(Settle(dict, options_, assembler_));
  CKPT_ASSIGN_OR_RETURN(const BlobIndex blob,
                        assembler_.AddFile(0, files_.prefix + files_.optimizer));
  CKPT_ASSIGN_OR_RETURN(Document document, std::move(kept).Finish(blob));
  if (!document.pickle.empty()) assembler_.header().documents.push_back(std::move(document));
  return {};
}

// Folders that nothing is taken of (original/, onnx/, other steps); of a directory that is a step's
// alone they are carried.
void Reader::NoteFolders(const ModelFiles& carried) {
  if (candidate_.Own() != candidate_.save) return;
  constexpr size_t kShown = 5;
  std::string list;
  size_t others = 0;
  for (const std::string& folder : files_.folders) {
    const bool taken = std::any_of(
        carried.files.begin(), carried.files.end(),
        [&](const ModelFile& file) { return file.name.starts_with(StrCat(folder, "/")); });
    if (!taken && ++others <= kShown) list += StrCat(list.empty() ? "" : ", ", folder, "/");
  }
  if (others == 0) return;
  if (others > kShown) list += StrCat(", ... (", others, " in all)");
  assembler_.header().notes.push_back(
      StrCat("folders beside the model that are not taken: ", list));
}

// A save of another form leaves the files of the one before, which loaders may take first.
Status Reader::LeaveOutNewerWeights() {
  const std::string& taken = files_.Taken();
  CKPT_ASSIGN_OR_RETURN(const std::string newer, NewerWeights(*candidate_.root, files_, contents_));
  if (newer.empty()) return {};
  CKPT_ASSIGN_OR_RETURN(const bool trains, TrainsOther(*candidate_.root, files_, newer));
  if (trains && !options_.weights_only) {
    return Fail(Error{ErrorCode::kInvalid,
                      StrCat(candidate_.Path(), ": ", newer, ", which ", files_.optimizer,
                             " was written after, is newer than ", taken,
                             ", which loaders take first: parts of two saves are in one directory")}
                    .Needing("remove the parts of the earlier save"));
  }
  LeaveOut(assembler_.header(), {LeftOutPart::kModel, StrCat("'", newer, "'"),
                                 StrCat("it is newer than ", taken, ", which loaders take first"),
                                 StrCat("if ", taken, " is of an earlier save, remove it")});
  return {};
}

// A Trainer's step in a directory whose name has no number.
Status Reader::CountByTrainer() {
  constexpr uint64_t kMost = 64 << 20;  // its log of losses grows
  const bool there = std::ranges::find(files_.others, kTrainerState) != files_.others.end();
  if (iteration_ || candidate_.iteration != 0 || !there) return {};
  const auto text = ReadWhole(*StepRoot(), files_.prefix + std::string(kTrainerState), kMost);
  if (!text && IsOfDevice(text.error())) return Fail(Error(text.error()));
  if (text) iteration_ = ReadTrainerStep(*text);
  return {};
}

// First the model files, whose config tells of ties; logs and the like last.
Status Reader::CarryFiles() {
  CKPT_ASSIGN_OR_RETURN(const ModelFiles carried,
                        files_.adapter ? CarryAdapterFiles(assembler_, StepRoot(), files_.prefix)
                                       : CarryModelFiles(assembler_, StepRoot(), files_.prefix));
  const std::string* text = files_.adapter ? nullptr : carried.config();
  if (text != nullptr) {
    CKPT_ASSIGN_OR_RETURN(config_, ReadConfigFacts(*text));
    has_config_ = true;
  }
  CKPT_RETURN_IF_ERROR(CountByTrainer());
  NoteFolders(carried);
  CKPT_RETURN_IF_ERROR(LeaveOutAdapters(files_, *StepRoot(), assembler_.header()));
  CKPT_RETURN_IF_ERROR(LeaveOutNewerWeights());
  if (!options_.weights_only) {
    CKPT_RETURN_IF_ERROR(LeaveOutUnreadFiles(files_, *StepRoot(), assembler_.header()));
  }
  const ReadersSoFar readers(assembler_.header());
  for (const std::string& name : files_.others) {
    const auto readable = readers.MayRead(*StepRoot(), files_.prefix + name);
    if (!readable) {
      CKPT_RETURN_IF_ERROR(LeaveOut(Error(readable.error()), assembler_.header()));
      continue;
    }
    if (!*readable) continue;  // CarryOwnFiles decides, and says so
    auto added = assembler_.AddFile(0, files_.prefix + name);
    if (!added) CKPT_RETURN_IF_ERROR(LeaveOut(std::move(added).error(), assembler_.header()));
  }
  if (config_.weights.empty() || files_.weights.empty()) return {};
  const bool same = config_.weights == files_.index || config_.weights == files_.weights.front();
  if (same) return {};
  return Fail(Error{ErrorCode::kUnsupported,
                    StrCat(candidate_.Path(), "/config.json: its transformers_weights name '",
                           config_.weights, "'")}
                  .Needing("adopt that file by itself"));
}

void Reader::FillHeader() {
  StepModel& header = assembler_.header();
  header.framework = "huggingface";
  header.framework_version = config_.version;
  header.id = candidate_.id;
  header.iteration = iteration_.value_or(candidate_.iteration);
  if (Quantised()) {
    const bool blocks = config_.quantisation == "mxfp4" ||
                        (config_.quantisation == "fp8" && config_.quantised_block[0] != 0);
    header.notes.push_back(StrCat(
        "quantised", config_.quantisation.empty() ? "" : StrCat(" (", config_.quantisation, ")"),
        blocks ? ": its tensors are shown as stored; a dtype in the layout decodes them"
               : ": its tensors are shown as stored, and never cut"));
  }
  if (files_.adapter) {
    header.notes.push_back(
        "an adapter (PEFT): its tensors are shown apart from the model that they are for");
  }
  if (has_config_ && config_.tied.value_or(false) && names_.contains(kHead) &&
      !aliases_.contains(std::string(kHead))) {
    header.notes.push_back(
        "config.json says tie_word_embeddings, but the files hold a separate "
        "lm_head.weight: it is shown as a parameter");
  }
  std::set<std::string> left_out;
  for (WeightsFile& content : contents_) {
    left_out.insert(content.left_out.begin(), content.left_out.end());
    for (LeftOut& part : content.beside) {
      if (part.part != LeftOutPart::kOptimizer || !options_.weights_only)
        LeaveOut(header, std::move(part));
    }
    for (Document& one : content.documents) header.documents.push_back(std::move(one));
  }
  LeaveOutEntries(left_out, header);
  const bool beside = files_.weights.size() == 1 && files_.optimizer == files_.weights[0];
  for (const WeightsFile& content : contents_) {
    if (beside || options_.weights_only) break;  // ReadOptimizer has told
    for (const std::string& key : content.optimizers) {
      LeaveOut(header, {LeftOutPart::kOptimizer, StrCat("'", key, "'"),
                        "the step has a file of an optimizer beside that of its weights", ""});
    }
  }
  for (const std::string& name : files_.others) {
    if (IsAdapterFile(name)) {
      LeaveOut(header, {LeftOutPart::kModel, StrCat("'", name, "'"),
                        "it is an adapter (PEFT) beside a whole model", ""});
    }
    if (!IsOtherModel(name)) continue;
    LeaveOut(header,
             {LeftOutPart::kModel, StrCat("'", name, "'"),
              "a step has one model, and this one's is the first", "adopt that file by itself"});
  }
}

void Reader::KeepFiles() {
  auto& files = assembler_.header().facts.safetensors;
  for (size_t i = 0; i < contents_.size(); ++i) {
    if (contents_[i].data_offset) files.emplace(blobs_[i], *contents_[i].data_offset);
  }
}

Result<StepModel> Reader::Read() && {
  CKPT_RETURN_IF_ERROR(RegisterFiles());
  CKPT_RETURN_IF_ERROR(ReadWeights());
  CKPT_RETURN_IF_ERROR(ReadOptimizer());
  CKPT_RETURN_IF_ERROR(CarryFiles());
  CKPT_RETURN_IF_ERROR(LeaveOutRanks(candidate_, assembler_.header()));
  TieByStorage();
  TieByConfig();
  CKPT_RETURN_IF_ERROR(CheckIndex());
  CKPT_RETURN_IF_ERROR(CheckOneType(*candidate_.root, files_, contents_));
  CKPT_RETURN_IF_ERROR(SettleAll());
  FillHeader();
  KeepFiles();
  CKPT_RETURN_IF_ERROR(CarryOwnFiles(assembler_, candidate_));
  return std::move(assembler_).Finish();
}

}  // namespace ckptfs::huggingface
