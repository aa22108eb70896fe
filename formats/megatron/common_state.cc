// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/common_state.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "formats/megatron/dist_keys.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/plain_value.h"

namespace ckptfs::megatron {
namespace {

// The dicts that have param_groups: the optimizer's own, inside Megatron's, or each of a chain's.
std::vector<PickleRef> OptimizersOf(PickleRef root) {
  const auto own = [](PickleRef value) {
    if (!value || !value.IsDict()) return PickleRef();
    if (value["param_groups"]) return value;
    const PickleRef inner = value["optimizer"];
    return inner && inner.IsDict() && inner["param_groups"] ? inner : PickleRef();
  };
  std::vector<PickleRef> out;
  const PickleRef optimizer = root["optimizer"];
  if (const PickleRef only = own(optimizer)) {
    out.push_back(only);
  } else if (optimizer && optimizer.IsDict()) {
    for (const auto& [key, value] : optimizer.Items()) {
      if (const PickleRef one = key.Int() ? own(value) : PickleRef()) out.push_back(one);
    }
  } else if (optimizer && optimizer.IsSequence()) {
    for (size_t i = 0; i < optimizer.size(); ++i) {
      if (const PickleRef one = own(optimizer.at(i))) out.push_back(one);
    }
  }
  return out;
}

PickleRef FieldsOf(PickleRef args) {
  if (!args) return {};
  const PickleRef fields = args.IsDict() ? args : args.State();
  return fields && fields.IsDict() ? fields : PickleRef();
}

}  // namespace

Result<CommonState> CommonState::Read(const StepCandidate& step, dcp::StoredState& state,
                                      Assembler& assembler) {
  CommonState out;
  const std::string path = JoinPath(step.directory, std::string(kCommonFile));
  CKPT_ASSIGN_OR_RETURN(const auto there, StatIfThere(*step.root, path));
  if (there) {
    const auto root = assembler.AddRoot(RootBelow(step.root, step.save));
    CKPT_ASSIGN_OR_RETURN(out.blob_, assembler.AddFile(root, StrCat(step.Prefix(), kCommonFile)));
    CKPT_ASSIGN_OR_RETURN(auto opened, step.root->Open(path));
    CKPT_ASSIGN_OR_RETURN(const FileIdentity now, opened->Identity());
    if (now.stamp != assembler.blob(out.blob_).stamp) {
      return Fail(ErrorCode::kStale, StrCat(opened->name(), ": changed while it was read"));
    }
    CKPT_ASSIGN_OR_RETURN(out.file_, TorchFile::Open(std::move(opened)));
  } else {
    const auto& objects = state.metadata().objects;
    const auto found = std::ranges::find(objects, kCommonObject, &dcp::ObjectEntry::name);
    if (found == objects.end()) {
      return Refuse(step.Path(), ": neither ", kCommonFile, " nor the object '", kCommonObject,
                    "', one of which every core writes");
    }
    CKPT_ASSIGN_OR_RETURN(auto object,
                          state.OpenObject(static_cast<size_t>(found - objects.begin())));
    out.file_ = std::move(object.file);
    out.blob_ = object.blob;
    const PickleRef root = out.file_.root();
    if (root.IsSequence() && root.size() == 1) out.place_ = Place::kOnlyOfList;
  }
  if (!out.root().IsDict()) {
    return Refuse(step.Path(), ": the state that ranks have in common is not a dict");
  }
  return out;
}

Result<CommonState> CommonState::Of(TorchFile file, BlobIndex blob) {
  if (!file.root().IsDict()) return Refuse(file.name(), ": it does not hold a dict");
  CommonState out;
  out.file_ = std::move(file);
  out.blob_ = blob;
  return out;
}

Result<CommonState> CommonState::OfArguments(TorchFile file, BlobIndex blob) {
  if (!FieldsOf(file.root())) return Refuse(file.name(), ": it does not hold a job's arguments");
  CommonState out;
  out.file_ = std::move(file);
  out.blob_ = blob;
  out.place_ = Place::kNowhere;
  return out;
}

PickleRef CommonState::root() const {
  switch (place_) {
    case Place::kRoot: return file_.root();
    case Place::kOnlyOfList: return file_.root().at(0);
    case Place::kNowhere: break;
  }
  return {};
}

PickleRef CommonState::args() const {
  return place_ == Place::kNowhere ? file_.root() : root()["args"];
}

FamilyVariables CommonState::Arguments() const {
  FamilyVariables out;
  const PickleRef fields = FieldsOf(args());
  if (!fields) return out;
  for (const auto& [key, value] : fields.Items()) {
    if (!key.String()) continue;
    if (const auto flag = value.Bool()) {
      out.emplace(*key.String(), *flag ? 1 : 0);
    } else if (const auto number = value.Int()) {
      out.emplace(*key.String(), *number);
    }
  }
  return out;
}

std::optional<int64_t> CommonState::Argument(std::string_view name) const {
  const PickleRef argument = ArgumentOf(name);
  return argument ? argument.Int() : std::nullopt;
}

bool CommonState::Flag(std::string_view name) const {
  const PickleRef argument = ArgumentOf(name);
  return argument && argument.Bool().value_or(false);
}

PickleRef CommonState::ArgumentOf(std::string_view name) const {
  const PickleRef fields = FieldsOf(args());
  return fields ? fields[name] : PickleRef();
}

std::optional<uint64_t> CommonState::Iteration() const {
  const auto iteration = root()["iteration"].Int();
  return iteration && *iteration >= 0 ? std::optional(static_cast<uint64_t>(*iteration))
                                      : std::nullopt;
}

std::vector<CommonGroup> GroupsOf(PickleRef optimizer) {
  std::vector<CommonGroup> out;
  const PickleRef groups = optimizer["param_groups"];
  for (size_t i = 0; groups.IsSequence() && i < groups.size(); ++i) {
    const PickleRef dict = groups.at(i);
    if (!dict.IsDict()) continue;
    CommonGroup group;
    group.dict = dict;
    group.experts = dict["is_expert_parallel"].Bool().value_or(false);
    group.decays = dict["wd_mult"].Number().value_or(1.0) != 0.0;
    group.step = dict["step"].Int();
    out.push_back(group);
  }
  return out;
}

Result<std::string> HyperParametersOf(PickleRef group) {
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> items;
  for (const auto& [key, value] : group.Items()) {
    if (!key.String() || key.String() == "params") continue;
    if (!RunsNoCode(value) && !value.Number() && !value.Bool()) continue;
    const NodeId name = builder.String(*key.String());
    CKPT_ASSIGN_OR_RETURN(const auto copy, CopyPlain(value, nullptr, builder));
    if (copy) items.emplace_back(name, *copy);
  }
  const NodeId root = builder.Dict(items);
  return PrintPickle(std::move(builder).Finish(root));
}

std::vector<CommonGroup> CommonState::Groups() const {
  std::vector<CommonGroup> out;
  for (const PickleRef optimizer : OptimizersOf(root())) {
    std::ranges::move(GroupsOf(optimizer), std::back_inserter(out));
  }
  return out;
}

std::optional<int64_t> CommonState::CommonStep() const {
  std::optional<int64_t> out;
  for (const PickleRef optimizer : OptimizersOf(root())) {
    const PickleRef state = optimizer["state"];
    const auto step = state ? state["common_step"].Int() : std::nullopt;
    if (!step || (out && out != step)) return std::nullopt;
    out = step;
  }
  return out;
}

std::string CommonState::OptimizerForm() const {
  const PickleRef content = root()["content_metadata"];
  if (content) {
    if (const auto form = content["distrib_optim_sharding_type"].String()) {
      return std::string(*form);
    }
  }
  const PickleRef optimizer = root()["optimizer"];
  const auto form = optimizer ? optimizer["param_state_sharding_type"].String() : std::nullopt;
  return std::string(form.value_or(""));
}

}  // namespace ckptfs::megatron
