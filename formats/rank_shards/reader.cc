// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_shards/reader.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/state/model_config.h"
#include "formats/settle/settle.h"
#include "formats/tools/model_files.h"
#include "formats/tools/tool_files.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs::rank_shards {
namespace {

constexpr std::string_view kModelFolder = "huggingface";
// Values of all ranks' files together; each takes some hundred bytes while the step is read.
constexpr uint64_t kMaxValues = uint64_t{1} << 22;

// Equal meshes become one object.
class Meshes {
 public:
  void Share(ShardValue& value) {
    if (value.at.mesh == nullptr) return;
    const auto [seen, fresh] = known_.try_emplace(value.at.mesh.get(), value.at.mesh);
    if (fresh) seen->second = *distinct_.insert(value.at.mesh).first;
    kept_.push_back(value.at.mesh);
    value.at.mesh = seen->second;
  }

 private:
  struct ByValue {
    bool operator()(const std::shared_ptr<const Mesh>& a,
                    const std::shared_ptr<const Mesh>& b) const {
      return *a < *b;
    }
  };
  std::map<const Mesh*, std::shared_ptr<const Mesh>> known_;
  std::set<std::shared_ptr<const Mesh>, ByValue> distinct_;
  std::vector<std::shared_ptr<const Mesh>> kept_;  // so that no address is used again
};

// For each tensor of a rank the first one with the same bytes; nothing where it holds none.
std::vector<std::optional<size_t>> TiesOf(const RankModel& rank) {
  std::map<std::tuple<std::string, uint64_t, Shape>, size_t> first;
  std::vector<std::optional<size_t>> out;
  for (size_t i = 0; i < rank.tensors.size(); ++i) {
    const auto& parts = rank.tensors[i].second.parts;
    out.emplace_back();
    if (parts.size() != 1 || parts[0].tensor.elements() == 0) continue;
    const FileTensor& tensor = parts[0].tensor;
    const auto [at, added] =
        first.try_emplace({tensor.storage_key(), tensor.storage_offset(), tensor.shape()}, i);
    const auto& other = rank.tensors[at->second].second.parts[0].tensor;
    out.back() = tensor.SameBytes(other) ? at->second : i;
  }
  return out;
}

// The same, as far as all ranks agree; itself where they do not.
std::vector<size_t> TiesOfAll(const std::vector<RankModel>& by_rank) {
  std::vector<std::optional<size_t>> agreed(by_rank[0].tensors.size());
  for (const RankModel& rank : by_rank) {
    const auto own = TiesOf(rank);
    for (size_t i = 0; i < own.size(); ++i) {
      if (own[i]) agreed[i] = agreed[i] && agreed[i] != own[i] ? i : *own[i];
    }
  }
  std::vector<size_t> out;
  for (size_t i = 0; i < agreed.size(); ++i) out.push_back(agreed[i].value_or(i));
  return out;
}

// The first name that one of the ranks has and the other does not.
Status CheckNames(const RankModel& first, const RankModel& other, size_t rank) {
  const auto [a, b] = std::ranges::mismatch(first.tensors, other.tensors, {},
                                            &std::pair<std::string, ShardValue>::first,
                                            &std::pair<std::string, ShardValue>::first);
  if (a == first.tensors.end() && b == other.tensors.end()) return {};
  const bool missing = b == other.tensors.end();
  return Refuse("rank ", rank, missing ? " does not have '" : " has '",
                missing ? a->first : b->first, "' where rank 0 has ",
                a == first.tensors.end() ? "nothing" : StrCat("'", a->first, "'"));
}

}  // namespace

Result<std::vector<BlobIndex>> Reader::Register(FileKind kind) {
  const uint32_t root = assembler_.AddRoot(RootBelow(candidate_.root, candidate_.save));
  std::vector<BlobIndex> blobs;
  for (uint64_t rank = 0; rank < files_.world; ++rank) {
    const std::string name = candidate_.Prefix() + FileName(kind, files_.world, rank);
    CKPT_ASSIGN_OR_RETURN(const BlobIndex blob, assembler_.AddFile(root, name));
    blobs.push_back(blob);
  }
  return blobs;
}

Result<TorchFile> Reader::Open(FileKind kind, uint64_t rank) const {
  const std::string path = JoinPath(candidate_.directory, FileName(kind, files_.world, rank));
  CKPT_ASSIGN_OR_RETURN(auto opened, candidate_.root->Open(path));
  auto file = TorchFile::Open(std::move(opened));
  if (!file) return Fail(std::move(file).error().WithContext(candidate_.root->PathOf(path)));
  return file;
}

// ---- the model -----------------------------------------------------------------------

Status Reader::ReadModel(const std::vector<BlobIndex>& blobs) {
  std::vector<Result<RankModel>> read(blobs.size());
  ParallelFor(blobs.size(), [&](size_t rank) {
    read[rank] = [&]() -> Result<RankModel> {
      CKPT_ASSIGN_OR_RETURN(const TorchFile file, Open(FileKind::kModel, rank));
      CKPT_ASSIGN_OR_RETURN(const Digest frame, file.Frame());
      assembler_.SetFrame(blobs[rank], frame);
      return ReadRankModel(file, blobs[rank], rank);
    }();
  });
  std::vector<RankModel> by_rank;
  uint64_t values = 0;
  for (Result<RankModel>& one : read) {
    if (!one) return Fail(std::move(one).error());
    values += one->tensors.size();
    if (values > kMaxValues) return Refuse("more than ", kMaxValues, " tensors in all files");
    by_rank.push_back(*std::move(one));
  }
  return Combine(std::move(by_rank));
}

Status Reader::Combine(std::vector<RankModel> by_rank) {
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    CKPT_RETURN_IF_ERROR(CheckNames(by_rank[0], by_rank[rank], rank));
  }
  if (by_rank[0].tensors.empty()) return Refuse("it does not hold the weights of a model");
  const std::vector<size_t> ties = TiesOfAll(by_rank);
  Meshes meshes;
  for (RankModel& rank : by_rank) {
    for (auto& [name, value] : rank.tensors) meshes.Share(value);
  }
  bool sharded = false;
  for (size_t i = 0; i < ties.size(); ++i) {
    const std::string name = by_rank[0].tensors[i].first;
    if (ties[i] != i) {
      second_names_.emplace_back(name, by_rank[0].tensors[ties[i]].first);
      continue;
    }
    std::vector<ShardValue> values;
    for (RankModel& rank : by_rank) values.push_back(std::move(rank.tensors[i].second));
    auto set = ShardSet::Make(std::move(values));
    if (!set) return Fail(std::move(set).error().WithContext(StrCat("'", name, "'")));
    sharded = sharded || set->form() != ShardValue::Form::kPlain;
    tensors_.emplace_back(name, *std::move(set));
  }
  others_ = std::move(by_rank[0].others);
  if (sharded || files_.world == 1) return {};
  return Fail(ErrorCode::kUnsupported,
              StrCat("every tensor of the ", files_.world,
                     " ranks is a plain one, and nothing says whether they are copies or parts"));
}

// ---- the optimizer -------------------------------------------------------------------

Status Reader::ReadOptimizer(const std::vector<BlobIndex>& blobs) {
  std::vector<Result<RankOptimizer>> read(blobs.size());
  ParallelFor(blobs.size(), [&](size_t rank) {
    read[rank] = [&]() -> Result<RankOptimizer> {
      CKPT_ASSIGN_OR_RETURN(const TorchFile file, Open(FileKind::kOptimizer, rank));
      CKPT_ASSIGN_OR_RETURN(const Digest frame, file.Frame());
      assembler_.SetFrame(blobs[rank], frame);
      auto optimizer = ReadRankOptimizer(file, blobs[rank], rank);
      if (!optimizer) return Fail(std::move(optimizer).error().WithContext(file.name()));
      return optimizer;
    }();
  });
  std::vector<RankOptimizer> by_rank;
  Meshes meshes;
  uint64_t values = 0;
  for (Result<RankOptimizer>& one : read) {
    if (!one) return Fail(std::move(one).error());
    for (auto& [key, value] : one->shards) meshes.Share(value);
    values += one->shards.size();
    if (values > kMaxValues) return Refuse("more than ", kMaxValues, " states in all files");
    by_rank.push_back(*std::move(one));
  }
  // SkyRL writes an empty dict where there is no optimizer.
  if (by_rank[0].torch.groups.empty()) return {};
  CKPT_ASSIGN_OR_RETURN(optimizer_, ShardedOptimizer::Make(std::move(by_rank)));
  return {};
}

// Each rank saves its schedule: of one save they are equal.
Status Reader::CheckSchedulers() const {
  std::optional<Digest> first;
  for (const uint64_t rank : files_.extra) {
    CKPT_ASSIGN_OR_RETURN(const TorchFile file, Open(FileKind::kExtra, rank));
    const PickleRef scheduler = file.root()["lr_scheduler"];
    if (!scheduler) return {};
    CKPT_ASSIGN_OR_RETURN(const Digest own, deepspeed::DigestOfValue(scheduler));
    if (first && *first != own) {
      return Refuse("the schedule in ", FileName(FileKind::kExtra, files_.world, rank),
                    " is not that of the ranks before: these files are not of one save");
    }
    first = own;
  }
  return {};
}

void Reader::AddOptimizer(StateDict& dict) const {
  StateDict::Optimizer added;
  added.what = StrCat("the optimizer in optim_world_size_", files_.world, "_rank_*.pt");
  added.on_weights = true;
  added.left_out = optimizer_->left_out();
  if (files_.configured && !files_.tool.empty()) {
    added.rule = [this](auto hyper_parameters, auto parameters) {
      if (hyper_parameters.size() != 1) return std::optional<ToolRule>();
      return std::optional(ToolRule{files_.tool, std::vector<uint64_t>(parameters.size(), 1)});
    };
  }
  dict.optimizers.push_back(std::move(added));
  optimizer_->AddTo(0, dict);
}

// ---- the step ------------------------------------------------------------------------

Status Reader::SettleAll() {
  StateDict dict;
  dict.unfit = StateDict::Unfit::kLeftOut;
  StepCandidate configured = candidate_;  // config.json lies a folder deeper
  configured.directory = JoinPath(candidate_.directory, kModelFolder);
  CKPT_ASSIGN_OR_RETURN(const bool deeper, HasDirectory(*candidate_.root, configured.directory));
  CKPT_ASSIGN_OR_RETURN(dict.sizes, SizesOf({}, options_, deeper ? configured : candidate_));
  for (const auto& [name, set] : tensors_) {
    dict.tensors.push_back(
        {name,
         set.dtype(),
         set.shape(),
         [&set](Assembler& assembler, AtomIndex atom) { return set.Place(assembler, atom); },
         {},
         !IsFloat(set.dtype())});
  }
  dict.second_names = second_names_;
  if (optimizer_ && optimizer_->why_not().empty()) AddOptimizer(dict);
  dict.keep = [&](const StateDict::State& state, const std::string&, StateDict::Unplaced how) {
    return how == StateDict::Unplaced::kOpaque ? optimizer_->FateOf(state) : StateDict::Fate{};
  };
  CKPT_RETURN_IF_ERROR(Settle(dict, options_, assembler_));
  return {};
}

// The model files in huggingface/, and all that lies in the step's own directory.
Status Reader::CarryFiles() {
  const auto root = RootBelow(candidate_.root, candidate_.save);
  const std::string folder = JoinPath(candidate_.directory, kModelFolder);
  CKPT_ASSIGN_OR_RETURN(const bool there, HasDirectory(*candidate_.root, folder));
  const std::string prefix = candidate_.Prefix() + (there ? StrCat(kModelFolder, "/") : "");
  CKPT_RETURN_IF_ERROR(CarryModelFiles(assembler_, root, prefix));
  return CarryOwnFiles(assembler_, candidate_);
}

Status Reader::LeaveOutOthers() {
  StepModel& header = assembler_.header();
  LeaveOutEntries({others_.begin(), others_.end()}, header);
  if (optimizer_ && !optimizer_->why_not().empty()) {
    LeaveOut(header, {LeftOutPart::kOptimizer,
                      StrCat("the optimizer in optim_world_size_", files_.world, "_rank_*.pt"),
                      optimizer_->why_not(), ""});
  }
  for (const uint64_t world : files_.other_worlds) {
    LeaveOut(header,
             {LeftOutPart::kModel, StrCat("'", FileName(FileKind::kModel, world, 0), "'"),
              StrCat("fsdp_config.json says that the step's world size is ", files_.world), ""});
  }
  if (candidate_.Own() == candidate_.directory) return {};
  CKPT_ASSIGN_OR_RETURN(const auto folders, ModelFolders(*candidate_.root, candidate_.Own()));
  for (const std::string& folder : folders) {
    if (JoinPath(candidate_.Own(), folder) == candidate_.directory) continue;
    LeaveOut(header, {LeftOutPart::kModel, StrCat("'", folder, "/'"),
                      StrCat("a step has one model, and this one's is ",
                             LastComponent(candidate_.directory), "/"),
                      "adopt that folder by itself"});
  }
  return {};
}

Result<StepModel> Reader::Read() && {
  StepModel& header = assembler_.header();
  header.framework = "rank_shards";
  header.id = candidate_.id;
  header.iteration = candidate_.iteration;
  const bool optimizer = !options_.weights_only && !files_.optimizer.empty();
  const auto work = [&]() -> Status {
    CKPT_ASSIGN_OR_RETURN(const auto model, Register(FileKind::kModel));
    std::vector<BlobIndex> states;
    if (optimizer) {
      CKPT_ASSIGN_OR_RETURN(states, Register(FileKind::kOptimizer));
    }
    CKPT_RETURN_IF_ERROR(ReadModel(model));
    if (optimizer) CKPT_RETURN_IF_ERROR(ReadOptimizer(states));
    if (!options_.weights_only) CKPT_RETURN_IF_ERROR(CheckSchedulers());
    return SettleAll();
  };
  if (Status done = work(); !done) {
    return Fail(std::move(done).error().WithContext(candidate_.Path()));
  }
  CKPT_RETURN_IF_ERROR(CarryFiles());
  CKPT_RETURN_IF_ERROR(LeaveOutOthers());
  auto step = std::move(assembler_).Finish();
  if (!step) return Fail(std::move(step).error().WithContext(candidate_.Path()));
  return step;
}

}  // namespace ckptfs::rank_shards
