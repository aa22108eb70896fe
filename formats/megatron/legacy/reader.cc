// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/reader.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/state/model_config.h"
#include "formats/megatron/dist_keys.h"
#include "formats/megatron/job/job_state.h"
#include "formats/megatron/legacy/local_names.h"
#include "formats/megatron/legacy/stage_layers.h"
#include "formats/settle/settle.h"
#include "formats/tools/model_files.h"
#include "formats/tools/tool_files.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kOptimizer = "optimizer";
constexpr std::string_view kRandom = "rng_state";
constexpr std::string_view kScaler = "grad_scaler";
// dist_checkpointing drops it (models/gpt/gpt_model.py: sharded_state_dict).
constexpr std::string_view kNotSaved = "output_layer._extra_state";

bool IsModelKey(std::string_view key) {
  constexpr std::string_view kModel = "model";
  if (!key.starts_with(kModel)) return false;
  key.remove_prefix(kModel.size());
  return std::ranges::all_of(key, IsDigit);
}

}  // namespace

// ---- files --------------------------------------------------------------------------

Result<std::vector<BlobIndex>> LegacyReader::Register(std::string_view name) {
  const uint32_t root = assembler_.AddRoot(RootBelow(candidate_.root, candidate_.save));
  std::vector<BlobIndex> blobs;
  for (const RankPlace& place : files_.places) {
    const std::string path = StrCat(candidate_.Prefix(), FolderOf(files_.job, place), "/", name);
    CKPT_ASSIGN_OR_RETURN(const BlobIndex blob, assembler_.AddFile(root, path));
    blobs.push_back(blob);
  }
  return blobs;
}

Result<TorchFile> LegacyReader::Open(size_t rank, std::string_view name, BlobIndex blob) {
  const std::string folder = FolderOf(files_.job, files_.places[rank]);
  const std::string path = JoinPath(JoinPath(candidate_.directory, folder), std::string(name));
  CKPT_ASSIGN_OR_RETURN(auto opened, candidate_.root->Open(path));
  auto file = TorchFile::Open(std::move(opened));
  if (!file) return file;
  CKPT_ASSIGN_OR_RETURN(const Digest frame, file->Frame());
  assembler_.SetFrame(blob, frame);
  return file;
}

Status LegacyReader::ReadRanks(const std::vector<BlobIndex>& blobs) {
  std::vector<Result<RankModel>> read(blobs.size());
  ParallelFor(blobs.size(), [&](size_t rank) {
    read[rank] = [&]() -> Result<RankModel> {
      CKPT_ASSIGN_OR_RETURN(TorchFile file, Open(rank, kRankFile, blobs[rank]));
      CKPT_ASSIGN_OR_RETURN(CommonState state, CommonState::Of(std::move(file), blobs[rank]));
      auto model = ReadRankModel(std::move(state), files_.job, files_.places[rank]);
      if (model) return model;
      return Fail(std::move(model).error().WithContext(
          StrCat(FolderOf(files_.job, files_.places[rank]), "/", kRankFile)));
    }();
  });
  for (Result<RankModel>& one : read) {
    if (!one) return Fail(std::move(one).error());
    ranks_.push_back(*std::move(one));
  }
  for (const RankModel& rank : ranks_) {
    if (Status same = CheckSameSave(ranks_.front(), rank); !same) {
      return Fail(std::move(same).error().WithContext(StrCat(rank.folder, "/", kRankFile)));
    }
  }
  return CheckWriters(files_.job, ranks_);
}

// ---- weights ------------------------------------------------------------------------

Status LegacyReader::AddWeights() {
  for (const HeldTensor& tensor : tensors_.all()) {
    StateDict::Tensor& added = dict_.tensors.emplace_back();
    added.name = tensor.name;
    added.dtype = tensor.dtype;
    added.shape = tensor.shape;
    added.ranks = tensor.ranks;
    added.packed = !IsFloat(tensor.dtype);
    added.tied = tensor.copied;
    added.place = PlaceHeldParts(tensor, [this](const HeldPart& part) {
      const RankEntry& of = part.of;
      return std::optional(
          PartBytes{ranks_[of.rank].chunks[of.chunk].tensors[of.entry].tensor, {}});
    });
  }
  return {};
}

// ---- the optimizer ------------------------------------------------------------------

Status LegacyReader::ReadOptimizers(const std::vector<BlobIndex>& blobs) {
  dict_.optimizers.push_back({.label = "", .what = "the optimizer", .shown = ""});
  std::vector<Result<FlatFile>> flat(blobs.size());
  ParallelFor(blobs.size(), [&](size_t rank) {
    flat[rank] = [&]() -> Result<FlatFile> {
      CKPT_ASSIGN_OR_RETURN(TorchFile file, Open(rank, kFlatFile, blobs[rank]));
      return FlatFile{std::move(file), blobs[rank]};
    }();
  });
  for (Result<FlatFile>& one : flat) {
    if (!one) return Fail(std::move(one).error());
    flat_.push_back(*std::move(one));
  }
  std::vector<Result<RankStates>> read(ranks_.size());
  ParallelFor(ranks_.size(), [&](size_t rank) {
    read[rank] = ReadRankStates(ranks_[rank], files_.job, flat_.empty() ? nullptr : &flat_[rank]);
  });
  std::vector<RankStates> states;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (read[rank]) {
      states.push_back(*std::move(read[rank]));
      continue;
    }
    const ErrorCode code = read[rank].error().code;
    if (code != ErrorCode::kInvalid && code != ErrorCode::kUnsupported) {
      return Fail(std::move(read[rank]).error());
    }
    dict_.other_optimizers = true;
    LeaveOutOptimizer(StrCat(ranks_[rank].folder, ": ", read[rank].error().message));
    return {};
  }
  states_ = std::move(states);
  if (Status added = AddStates(); !added) {
    dict_.states.clear();
    states_.clear();
    dict_.other_optimizers = true;
    LeaveOutOptimizer(std::move(added).error().message);
    return {};
  }
  return AddAllGroups();
}

Status LegacyReader::AddStates() {
  for (const HeldTensor& tensor : tensors_.all()) {
    std::set<std::string> kinds;
    for (const HeldPart& part : tensor.parts) {
      const auto& states = states_[part.of.rank].states;
      const auto own = states.find({part.of.chunk, part.of.entry});
      if (own == states.end()) continue;
      for (const auto& [kind, bytes] : own->second) kinds.insert(kind);
    }
    for (const std::string& kind : kinds) CKPT_RETURN_IF_ERROR(AddState(tensor, kind));
    if (!kinds.empty()) CKPT_RETURN_IF_ERROR(AddSteps(tensor));
  }
  return {};
}

Status LegacyReader::AddState(const HeldTensor& tensor, const std::string& kind) {
  const auto bytes_of = [this, kind](const HeldPart& part) -> std::optional<PartBytes> {
    const auto& states = states_[part.of.rank].states;
    const auto own = states.find({part.of.chunk, part.of.entry});
    if (own == states.end()) return std::nullopt;
    const auto found = own->second.find(kind);
    return found == own->second.end() ? std::nullopt : std::optional(found->second);
  };
  std::set<DType> dtypes;
  for (const HeldPart& part : tensor.parts) {
    if (const auto bytes = bytes_of(part)) dtypes.insert(bytes->dtype());
  }
  const bool whole =
      MakeUpAll(tensor, [&](const HeldPart& part) { return bytes_of(part).has_value(); });
  if (!whole || dtypes.size() != 1) {
    return Refuse("ranks do not have all of '", kind, "' of '", tensor.name, "' in one type");
  }
  StateDict::State added{0, tensor.name, kind};
  added.kinds = StateDict::Kinds::kOurs;
  added.dtype = *dtypes.begin();
  added.shape = tensor.shape;
  added.place = PlaceHeldParts(tensor, bytes_of);
  dict_.states.push_back(std::move(added));
  return {};
}

// Adds the count of a parameter's steps where its own optimizer keeps one.
Status LegacyReader::AddSteps(const HeldTensor& tensor) {
  std::set<int64_t> counts;
  for (const HeldPart& part : tensor.parts) {
    const auto& steps = states_[part.of.rank].steps;
    const auto own = steps.find({part.of.chunk, part.of.entry});
    if (own != steps.end()) counts.insert(own->second);
  }
  if (counts.size() > 1) return Refuse("ranks count other steps of '", tensor.name, "'");
  if (!counts.empty()) dict_.states.push_back(StepState(tensor.name, *counts.begin()));
  return {};
}

// Groups of all ranks that are alike are one.
Status LegacyReader::AddAllGroups() {
  std::vector<CommonGroup> groups;
  std::set<std::string> seen;
  for (const RankStates& rank : states_) {
    for (const CommonGroup& group : rank.groups) {
      CKPT_ASSIGN_OR_RETURN(std::string text, HyperParametersOf(group.dict));
      if (seen.insert(std::move(text)).second) groups.push_back(group);
    }
  }
  return AddGroups(groups, std::nullopt, ranks_.front().state, assembler_.header(), dict_);
}

void LegacyReader::LeaveOutOptimizer(std::string why) {
  LeaveOut(assembler_.header(), {LeftOutPart::kOptimizer, "the optimizer's states",
                                 StrCat("nothing proves whose they are: ", why),
                                 "`--weights-only` takes the weights alone, without this message"});
}

// ---- the rest -----------------------------------------------------------------------

// Which modules keep something beside their tensors, as dist_checkpointing would name it.
void LegacyReader::AddModuleKeys(const StageLayers& layers) {
  ModuleKeys keys;
  const PickleRef frequency = ranks_.front().state.ArgumentOf("moe_layer_freq");
  keys.stacked = !frequency || frequency.IsNone() || frequency.Int() == 1;
  const auto experts = static_cast<uint64_t>(
      std::max<int64_t>(ranks_.front().state.Argument("num_experts").value_or(1), 1));
  for (const RankModel& rank : ranks_) {
    for (uint32_t chunk = 0; chunk < rank.chunks.size(); ++chunk) {
      const LocalNames names(rank.chunks[chunk], layers.First(rank.place.pp, chunk));
      for (const std::string& object : rank.chunks[chunk].objects) {
        const LocalName name = names.Of(object);
        if (name.name == kNotSaved) continue;
        const auto layered = LayeredNameOf(name.name);
        Shape grid = layered && keys.stacked ? Shape{files_.job.layers} : Shape{1};
        if (name.form != LocalName::Form::kPlain) grid.push_back(experts);
        keys.objects.emplace(
            layered && keys.stacked ? StrCat(layered->before, layered->after) : name.name,
            std::move(grid));
      }
    }
  }
  assembler_.header().facts.modules = std::move(keys);
}

void LegacyReader::LeaveOutRest() {
  StepModel& header = assembler_.header();
  std::set<std::string> objects;
  std::set<std::string> unknown;
  bool scaler = false;
  for (const RankModel& rank : ranks_) {
    for (const RankChunk& chunk : rank.chunks) {
      objects.insert(chunk.objects.begin(), chunk.objects.end());
    }
  }
  for (const RankStates& rank : states_) {
    scaler = scaler || rank.scaler;
    unknown.insert(rank.unknown.begin(), rank.unknown.end());
  }
  LeaveOutEntries(objects, header);
  if (scaler) {
    LeaveOut(header, {LeftOutPart::kDocument, StrCat("'", kScaler, "' of the optimizer"),
                      "nothing of another layout has it", ""});
  }
  for (const std::string& kind : unknown) {
    LeaveOut(header, {LeftOutPart::kOptimizer, StrCat("optimizer states '", kind, "'"),
                      "they are neither tensors nor counts", ""});
  }
  if (ranks_.front().state.root()[kRandom]) {
    LeaveOut(header, {LeftOutPart::kDocument, StrCat("'", kRandom, "'"),
                      "each rank saved its own, which no rank of another layout has", ""});
  }
}

void LegacyReader::FillHeader(std::optional<uint64_t> steps) {
  StepModel& header = assembler_.header();
  if (header.iteration == 0) header.iteration = steps.value_or(0);
  if (!dict_.states.empty()) {
    header.notes.push_back(
        "which parameters masters and moments are of follows from the order in which modules "
        "register them, which is Megatron's own rule; it is proved by the weights, which are the "
        "masters, cast, or by shapes that contradict every other order");
  }
  if (!dict_.groups.empty()) {
    header.notes.push_back(
        "which parameters each group of the optimizer has follows Megatron's rule: experts of "
        "expert parallelism apart, no weight decay for biases and vectors");
  }
}

Status LegacyReader::CarryFiles() {
  const auto root = RootBelow(candidate_.root, candidate_.save);
  CKPT_ASSIGN_OR_RETURN(const ModelFiles files,
                        CarryModelFiles(assembler_, root, candidate_.Prefix()));
  if (files.config() == nullptr) {
    std::vector<StateDict::Tensor> whole;
    for (const Parameter& parameter : assembler_.header().parameters) {
      whole.push_back({parameter.name, DType::kF32, parameter.shape, {}});
    }
    CarryConfigOf(ranks_.front().state, whole, assembler_);
  }
  return CarryOwnFiles(assembler_, candidate_);
}

Result<StepModel> LegacyReader::Read() && {
  StepModel& header = assembler_.header();
  header.framework = "megatron_legacy";
  header.id = candidate_.id;
  const auto work = [&]() -> Result<Settled> {
    CKPT_ASSIGN_OR_RETURN(const auto blobs, Register(kRankFile));
    std::vector<BlobIndex> flat;
    if (files_.flat) {
      CKPT_ASSIGN_OR_RETURN(flat, Register(kFlatFile));
    }
    CKPT_RETURN_IF_ERROR(ReadRanks(blobs));
    const CommonState& common = ranks_.front().state;
    header.iteration = common.Iteration().value_or(candidate_.iteration);
    if (const auto layout = LayoutOf(common)) header.layout = *layout;
    CKPT_ASSIGN_OR_RETURN(const StageLayers layers, StageLayers::Make(files_.job, ranks_));
    CKPT_ASSIGN_OR_RETURN(tensors_, HeldTensors::Make(files_.job, ranks_, layers));
    CKPT_RETURN_IF_ERROR(AddWeights());
    if (!options_.weights_only) CKPT_RETURN_IF_ERROR(ReadOptimizers(flat));
    CKPT_ASSIGN_OR_RETURN(dict_.sizes, SizesOf(common.Arguments(), options_, candidate_));
    dict_.sizes.recorded.erase("vocab");  // not the tokenizer's, whose last ids it may lack
    dict_.sizes.recorded.erase("vocab_size");
    CKPT_ASSIGN_OR_RETURN(Settled settled, Settle(dict_, options_, assembler_));
    CKPT_RETURN_IF_ERROR(AddDocuments(
        common,
        [](std::string_view key) { return key == kOptimizer || key == kRandom || IsModelKey(key); },
        header));
    AddModuleKeys(layers);
    return settled;
  };
  auto settled = work();
  if (!settled) return Fail(std::move(settled).error().WithContext(candidate_.Path()));
  LeaveOutRest();
  CKPT_RETURN_IF_ERROR(CarryFiles());
  FillHeader(settled->steps);
  auto model = std::move(assembler_).Finish();
  if (!model) return Fail(std::move(model).error().WithContext(candidate_.Path()));
  return model;
}

}  // namespace ckptfs::megatron
