// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native_reader.h"

#include <algorithm>
#include <climits>
#include <functional>
#include <mutex>

#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/model_files/model_files.h"

namespace ckptfs::deepspeed {
namespace {

// Runs `work` over [0, count) on TBB's threads; the first error by index wins.
Status ParallelTry(size_t count, const std::function<Status(size_t)>& work) {
  std::vector<Status> outcomes(count);
  ParallelFor(count, [&](size_t i) { outcomes[i] = work(i); });
  for (Status& outcome : outcomes) CKPT_RETURN_IF_ERROR(std::move(outcome));
  return {};
}

}  // namespace

NativeReader::NativeReader(const StepCandidate& candidate, const SourceOptions& options,
                           StepFiles files)
    : candidate_(candidate), options_(options), files_(std::move(files)) {
  prefix_ = candidate_.Prefix();
}

std::string NativeReader::PathOf(const std::string& name) const {
  return candidate_.root->PathOf(JoinPath(candidate_.directory, name));
}

Result<TorchFile> NativeReader::OpenFile(const std::string& name) {
  CKPT_ASSIGN_OR_RETURN(auto opened, candidate_.root->Open(JoinPath(candidate_.directory, name)));
  CKPT_ASSIGN_OR_RETURN(TorchFile file, TorchFile::Open(std::move(opened)));
  CKPT_ASSIGN_OR_RETURN(const Digest frame, file.Frame());
  assembler_.SetFrame(BlobOf(name), frame);
  return file;
}

BlobIndex NativeReader::BlobOf(const std::string& name) const { return blobs_.at(name); }

const ModelStates& NativeReader::ModelOf(uint32_t mp) const { return models_.at(RankKey{mp, 0}); }

Status NativeReader::RegisterFiles() {
  const uint32_t root = assembler_.AddRoot(RootBelow(candidate_.root, candidate_.save));
  const auto add = [&](const std::string& name) -> Status {
    CKPT_ASSIGN_OR_RETURN(const BlobIndex blob, assembler_.AddFile(root, prefix_ + name));
    blobs_.emplace(name, blob);
    return {};
  };
  // In dp order within a kind, so that fragments form series.
  for (const auto& [key, name] : files_.optimizer) CKPT_RETURN_IF_ERROR(add(name));
  for (const auto& [key, name] : files_.model) CKPT_RETURN_IF_ERROR(add(name));
  for (const auto& [key, name] : files_.stage3_model) CKPT_RETURN_IF_ERROR(add(name));
  for (const auto& [key, name] : files_.layers) CKPT_RETURN_IF_ERROR(add(name));
  for (const auto& [key, name] : files_.experts) CKPT_RETURN_IF_ERROR(add(name));
  for (const auto& [key, name] : files_.expert_optimizer) CKPT_RETURN_IF_ERROR(add(name));
  for (const std::string& name : files_.others) CKPT_RETURN_IF_ERROR(add(name));
  return {};
}

Status NativeReader::ReadModels() {
  std::map<RankKey, std::string> names;
  for (const auto& [mp, name] : files_.model) names.emplace(RankKey{mp, 0}, name);
  if (names.empty()) names = files_.stage3_model;
  const std::vector<std::pair<RankKey, std::string>> list(names.begin(), names.end());
  std::vector<ModelStates> states(list.size());
  CKPT_RETURN_IF_ERROR(ParallelTry(list.size(), [&](size_t i) -> Status {
    const auto& [key, name] = list[i];
    CKPT_ASSIGN_OR_RETURN(const TorchFile file, OpenFile(name));
    const ModelStatesWanted wanted{key.dp == 0, key.dp == 0};
    CKPT_ASSIGN_OR_RETURN(states[i], ReadModelStates(file, BlobOf(name), wanted));
    return {};
  }));
  for (size_t i = 0; i < list.size(); ++i) models_.emplace(list[i].first, std::move(states[i]));
  return {};
}

Status NativeReader::ReadOptimizers() {
  const std::vector<std::pair<RankKey, std::string>> list(files_.optimizer.begin(),
                                                          files_.optimizer.end());
  std::vector<OptimizerStates> states(list.size());
  CKPT_RETURN_IF_ERROR(ParallelTry(list.size(), [&](size_t i) -> Status {
    const auto& [key, name] = list[i];
    CKPT_ASSIGN_OR_RETURN(const TorchFile file, OpenFile(name));
    CKPT_ASSIGN_OR_RETURN(states[i],
                          ReadOptimizerStates(file, BlobOf(name), key, key.dp == 0));
    return {};
  }));
  for (size_t i = 0; i < list.size(); ++i) {
    optimizers_.emplace(list[i].first, std::move(states[i]));
  }
  return {};
}

Status NativeReader::ReadTensorFiles() {
  std::vector<std::pair<std::string, TensorDict*>> jobs;
  for (const auto& [key, name] : files_.layers) jobs.emplace_back(name, &layers_[key]);
  for (const auto& [key, name] : files_.experts) jobs.emplace_back(name, &experts_[key]);
  return ParallelTry(jobs.size(), [&](size_t i) -> Status {
    const auto& [name, into] = jobs[i];
    CKPT_ASSIGN_OR_RETURN(const TorchFile file, OpenFile(name));
    CKPT_ASSIGN_OR_RETURN(*into, ReadTensorDict(file, BlobOf(name)));
    return {};
  });
}

Status NativeReader::SetDegrees() {
  const ModelStates& first = models_.begin()->second;
  const uint64_t dp_world = first.dp_world > 0 ? first.dp_world : files_.DataRanks();
  const uint64_t mp_world = first.mp_world > 0 ? first.mp_world : files_.ModelRanks();
  const auto mp = static_cast<uint32_t>(std::min<uint64_t>(mp_world, uint64_t{1} << 20));
  tp_ = first.tp_degree;
  pp_ = first.pp_degree;
  if (tp_ == 0 || pp_ == 0) {
    std::set<uint32_t> ranks;
    for (const auto& [key, name] : files_.layers) ranks.insert(key.tp);
    tp_ = files_.layers.empty() ? mp : std::max<uint32_t>(1, static_cast<uint32_t>(ranks.size()));
    pp_ = mp / tp_;
  }
  if (uint64_t{tp_} * pp_ != mp) {
    return Fail(ErrorCode::kInvalid,
                StrCat(first.file, ": tp ", tp_, " x pp ", pp_, " is not mp_world_size ", mp));
  }
  dp_ = static_cast<uint32_t>(std::min<uint64_t>(dp_world, 1u << 20));
  stage_ = optimizers_.empty() ? 0 : optimizers_.begin()->second.stage;
  CKPT_RETURN_IF_ERROR(CountExpertRanks());
  for (uint32_t rank = 0; rank < mp; ++rank) {
    if (models_.count(RankKey{rank, 0}) == 0) {
      return Fail(ErrorCode::kInvalid, StrCat(candidate_.Path(), ": no model states of "
                                              "model-parallel rank ", rank, " of ", mp));
    }
    for (uint32_t dp = 0; dp < dp_ && stage_ > 0; ++dp) {
      if (optimizers_.count(RankKey{rank, dp}) == 0) {
        return Fail(ErrorCode::kInvalid,
                    StrCat(candidate_.Path(), ": no optimizer states of data-parallel rank ",
                           dp, " of ", dp_, ", model-parallel rank ", rank));
      }
    }
  }
  return {};
}

// Without ZeRO only the files of the expert-parallel ranks tell how many there
// were; ZeRO's groups say it themselves (NameExpertGroup).
Status NativeReader::CountExpertRanks() {
  if (stage_ != 0) return {};
  for (const auto& [key, name] : files_.expert_optimizer) ep_ = std::max(ep_, key.dp + 1);
  for (uint32_t rank = 0; rank < ep_ && ep_ > 1; ++rank) {
    if (files_.expert_optimizer.contains(RankKey{0, rank})) continue;
    return Fail(ErrorCode::kInvalid, StrCat(candidate_.Path(), ": no optimizer states of "
                                            "expert-parallel rank ", rank, " of ", ep_));
  }
  if (dp_ % ep_ == 0) return {};
  return Fail(ErrorCode::kInvalid,
              StrCat(candidate_.Path(), ": files of ", ep_, " expert-parallel ranks, which do not "
                     "divide the ", dp_, " data-parallel ranks"));
}

Status NativeReader::CheckModelsAgree(const ModelStates& first, const ModelStates& other) const {
  const auto refuse = [&](std::string_view rule, uint64_t a, uint64_t b) -> Status {
    return Fail(ErrorCode::kInvalid,
                StrCat(other.file, ": ", rule, " is ", b, ", but ", a, " in ", first.file,
                       "; two runs lie in one directory"));
  };
  if (first.global_steps != other.global_steps) {
    return refuse("global_steps", first.global_steps, other.global_steps);
  }
  if (first.dp_world != other.dp_world) {
    return refuse("dp_world_size", first.dp_world, other.dp_world);
  }
  if (first.mp_world != other.mp_world) {
    return refuse("mp_world_size", first.mp_world, other.mp_world);
  }
  if (first.ds_config != other.ds_config || first.ds_version != other.ds_version) {
    return Fail(ErrorCode::kInvalid, StrCat(other.file, ": ds_config or ds_version differs from ",
                                            first.file, "; two runs lie in one directory"));
  }
  return {};
}

Status NativeReader::CheckOneRun() const {
  const ModelStates& first = models_.begin()->second;
  const uint64_t ranks = uint64_t{tp_} * pp_;
  for (const auto& [key, states] : models_) {
    CKPT_RETURN_IF_ERROR(CheckModelsAgree(first, states));
    const ModelStates& zero = ModelOf(std::min<uint32_t>(key.mp, static_cast<uint32_t>(ranks - 1)));
    if (key.mp >= ranks || (key.dp > 0 && key.dp >= dp_)) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(states.file, ": a rank beyond dp_world_size ", dp_, " x mp_world_size ",
                         ranks, " of ", first.file, "; two runs lie in one directory"));
    }
    if (states.shapes != zero.shapes) {
      return Fail(ErrorCode::kInvalid, StrCat(states.file, ": its param_shapes differ from those of ",
                                              zero.file, "; two runs lie in one directory"));
    }
  }
  for (const auto& [key, states] : optimizers_) {
    if (key.mp >= ranks || key.dp >= dp_) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(states.file, ": a rank beyond dp_world_size ", dp_, " x mp_world_size ",
                         ranks, " of ", first.file, "; two runs lie in one directory"));
    }
    const OptimizerStates& zero = optimizers_.begin()->second;
    const bool same = states.stage == zero.stage && states.ds_config == zero.ds_config &&
                      states.ds_version == zero.ds_version && states.trimmed == zero.trimmed &&
                      states.partition_count == optimizers_.at(RankKey{key.mp, 0}).partition_count;
    if (!same) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(states.file, ": its zero_stage, partition_count, ds_config or ds_version "
                                      "differs from ", zero.file, "; two runs lie in one directory"));
    }
    if (states.ds_config != Digest{} && states.ds_config != first.ds_config) {
      return Fail(ErrorCode::kInvalid, StrCat(states.file, ": its ds_config differs from that of ",
                                              first.file, "; two runs lie in one directory"));
    }
  }
  return {};
}

// The layers that each stage held, if its param_shapes tell of every layer;
// empty if that is what the layout says without a split.
std::vector<uint32_t> NativeReader::SplitOfStages() {
  std::map<uint32_t, std::set<uint32_t>> stages;  // by layer
  for (uint32_t mp = 0; mp < tp_ * pp_; ++mp) {
    for (const auto& group : ModelOf(mp).groups) {
      for (const NamedShape& entry : group) {
        const auto known = known_.find(entry.name);
        if (known == known_.end()) continue;  // of an expert: numbered per rank
        const Parameter& parameter = assembler_.parameter(known->second.index);
        if (parameter.stage == StageRule::kLayer) stages[parameter.layer].insert(mp / tp_);
      }
    }
  }
  std::vector<uint32_t> split(pp_);
  uint32_t last = 0;
  for (const auto& [layer, held] : stages) {
    if (held.size() != 1 || *held.begin() < last) return {};
    last = *held.begin();
    ++split[last];
  }
  if (stages.size() != assembler_.header().LayerCount()) return {};
  const bool even = std::count(split.begin(), split.end(), split[0]) == int64_t{pp_};
  return even ? std::vector<uint32_t>() : split;
}

void NativeReader::FillHeader() {
  const ModelStates& first = models_.begin()->second;
  StepModel& header = assembler_.header();
  header.framework = "deepspeed";
  header.framework_version = first.ds_version;
  header.id = candidate_.id;
  header.iteration = first.global_steps;
  header.layout.tp = tp_;
  header.layout.pp = pp_;
  header.layout.dp = dp_;
  header.layout.ep = ep_;
  header.layout.zero = static_cast<uint32_t>(stage_);
  header.layout.naming = files_.layers.empty() ? Naming::kPlain : Naming::kPipe;
  header.layout.split = SplitOfStages();
  // Layouts name directories.
  if (header.layout.ToString().size() > NAME_MAX) header.layout.split.clear();
}

Status NativeReader::KeepDocuments() {
  auto& documents = assembler_.header().documents;
  const auto keep = [&](const std::vector<Document>& first, const std::vector<Document>& other,
                        const std::string& scope) {
    for (const Document& document : other) {
      const auto same = std::find_if(first.begin(), first.end(), [&](const Document& known) {
        return known.key == document.key && known.pickle == document.pickle &&
               known.tensors.empty() && document.tensors.empty();
      });
      if (same != first.end()) continue;
      documents.push_back(document);
      documents.back().scope = scope;
    }
  };
  const ModelStates& model = ModelOf(0);
  documents.insert(documents.end(), model.documents.begin(), model.documents.end());
  const OptimizerStates* zero = optimizers_.empty() ? nullptr : &optimizers_.begin()->second;
  if (zero != nullptr) {
    documents.insert(documents.end(), zero->documents.begin(), zero->documents.end());
  }
  for (uint32_t mp = 1; mp < tp_ * pp_; ++mp) {
    keep(model.documents, ModelOf(mp).documents, StrCat("mp", mp));
    if (zero != nullptr) {
      keep(zero->documents, optimizers_.at(RankKey{mp, 0}).documents, StrCat("dp0_mp", mp));
    }
  }
  std::set<std::string> opaque;
  for (const auto& [key, states] : optimizers_) {
    documents.insert(documents.end(), states.opaque.begin(), states.opaque.end());
    for (const Document& document : states.opaque) opaque.insert(document.key);
  }
  for (const std::string& key : opaque) {
    assembler_.header().notes.push_back(
        StrCat("optimizer state '", key, "' is no flat tensor of its partition: carried for this "
                                         "layout only"));
  }
  return {};
}

Result<StepModel> NativeReader::Read() && {
  CKPT_RETURN_IF_ERROR(RegisterFiles());
  CKPT_RETURN_IF_ERROR(ReadModels());
  if (models_.empty()) {
    return Fail(ErrorCode::kInvalid, StrCat(candidate_.Path(), ": no model states file"));
  }
  if (models_.begin()->second.auto_experts && !files_.optimizer.empty()) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(models_.begin()->second.file, ": saved with AutoEP (expert parallelism that "
                       "DeepSpeed put into the model itself) under ZeRO, whose experts' optimizer "
                       "states are not understood"));
  }
  CKPT_RETURN_IF_ERROR(ReadOptimizers());
  CKPT_RETURN_IF_ERROR(ReadTensorFiles());
  CKPT_RETURN_IF_ERROR(SetDegrees());
  CKPT_RETURN_IF_ERROR(CheckOneRun());
  CKPT_RETURN_IF_ERROR(NameParameters());
  CKPT_RETURN_IF_ERROR(ResolveSharding());
  CKPT_RETURN_IF_ERROR(PlaceWeights());
  CKPT_RETURN_IF_ERROR(PlaceFrozenFragments());
  CKPT_RETURN_IF_ERROR(stage_ == 0 ? PlaceUnsharded() : PlaceOptimizer());
  CKPT_RETURN_IF_ERROR(DeriveWeights());
  FillHeader();
  CKPT_RETURN_IF_ERROR(KeepDocuments());
  for (Group& group : groups_) assembler_.AddGroup(std::move(group));
  for (const auto& [alias, stored] : aliases_) {
    const auto found = known_.find(stored);
    if (found != known_.end()) assembler_.AddAlias(alias, found->second.index);
  }
  CKPT_RETURN_IF_ERROR(
      CarryModelFiles(assembler_, RootBelow(candidate_.root, candidate_.save), prefix_));
  return std::move(assembler_).Finish();
}

}  // namespace ckptfs::deepspeed
