// SPDX-License-Identifier: Apache-2.0

#include "formats/sharding/placer.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/base/strings.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle_writer.h"

namespace ckptfs {

std::optional<DType> MostCommon(const std::map<DType, uint64_t>& counts,
                                std::optional<DType> otherwise) {
  uint64_t most = 0;
  for (const auto& [dtype, count] : counts) {
    if (count > most) otherwise = dtype;
    most = std::max(most, count);
  }
  return otherwise;
}

namespace {

// Names or numbers a stage's own parameters.
bool IsAboutMembers(std::string_view key) {
  return key == "params" || key == "param_names" || key == "name";
}

// Numbers, texts, truths, None and sequences of them.
bool IsPlain(PickleRef value, int depth = 4) {
  if (value.Number() || value.Bool() || value.String() || value.IsNone()) return true;
  if (!value.IsSequence() || depth == 0) return false;
  for (size_t i = 0; i < value.size(); ++i) {
    if (!IsPlain(value.at(i), depth - 1)) return false;
  }
  return true;
}

// These by their key, as printed.
Result<std::map<std::string, std::string>> PlainValues(const std::string& hyper_parameters) {
  std::map<std::string, std::string> out;
  CKPT_ASSIGN_OR_RETURN(const ParsedPickle parsed, ParsePickle(hyper_parameters));
  for (const auto& [key, value] : RootOf(parsed.tree).Items()) {
    const auto name = key.String();
    if (!name || IsAboutMembers(*name) || !IsPlain(value)) continue;
    PickleBuilder builder;
    const NodeId copy = builder.Copy(value);
    CKPT_ASSIGN_OR_RETURN(out[std::string(*name)], PrintPickle(std::move(builder).Finish(copy)));
  }
  return out;
}

// A key in whose value two dicts of hyper-parameters differ.
Result<std::optional<std::string>> DifferingKey(const std::string& a, const std::string& b) {
  std::optional<std::string> none;
  if (a == b) return none;
  CKPT_ASSIGN_OR_RETURN(const auto left, PlainValues(a));
  CKPT_ASSIGN_OR_RETURN(const auto right, PlainValues(b));
  const auto [one, other] = std::ranges::mismatch(left, right);
  if (one == left.end() && other == right.end()) return none;
  return std::optional(one == left.end() ? other->first : one->first);
}

}  // namespace

Parameter ParameterOf(std::string name, Role role, const Sharding& sharding) {
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.shape = sharding.shape;
  parameter.role = role;
  parameter.pattern = sharding.pattern;
  parameter.source_pattern = sharding.source_pattern;
  parameter.stage = sharding.stage;
  parameter.layer = sharding.layer.value_or(0);
  parameter.expert = sharding.expert;
  parameter.expert_at = sharding.expert_at;
  parameter.stacked_experts = sharding.stacked_experts;
  return parameter;
}

Result<ParameterIndex> Placer::Declare(std::string name, Role role, const Sharding& sharding,
                                       std::vector<uint32_t> stages) {
  Parameter parameter = ParameterOf(std::move(name), role, sharding);
  parameter.source_stages = std::move(stages);
  CKPT_ASSIGN_OR_RETURN(const ParameterIndex index, assembler_.AddParameter(std::move(parameter)));
  if (static_cast<uint32_t>(index) != declared_.size()) {
    return Refuse("'", assembler_.parameter(index).name, "' is the name of two parameters");
  }
  declared_.push_back(Declared{&sharding, std::nullopt, std::nullopt});
  return index;
}

Result<Placer::Local> Placer::LocalOf(ParameterIndex parameter, std::string_view kind, DType dtype,
                                      Holder holder) {
  Declared& declared = Of(parameter);
  const Sharding& sharding = *declared.sharding;
  CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                        assembler_.AddAtom(parameter, "", kind, dtype, sharding.shape));
  if (kind == "weight") declared.weight = atom;
  if (kind == "master") declared.master = atom;
  const bool average = sharding.how == Sharding::How::kAverage;
  const bool replicas = sharding.how == Sharding::How::kReplicas;
  if (average && holder.place > 0) {
    return Fail(Error{ErrorCode::kUnsupported,
                      "it is to be averaged, but lies on several "
                      "pipeline stages"}
                    .OfParameter(assembler_.parameter(parameter).name));
  }
  if (average) assembler_.DeclareAverage(atom);
  if (replicas || (holder.place > 0 && sharding.on_several_stages))
    assembler_.DeclareReplicas(atom);
  // Ranks that each hold all of it are copies; the parts of a cut are one.
  const auto ranks = static_cast<uint32_t>(sharding.locals.size());
  Local local{atom, average || replicas ? holder.place * ranks + holder.tp : holder.place, 0};
  const auto [at, added] = locals_.try_emplace({atom, local.copy, holder.tp}, 0);
  if (added) at->second = assembler_.AddLocal(atom, local.copy, sharding.locals[holder.tp]);
  local.index = at->second;
  return local;
}

void Placer::AddFragment(const Local& local, const Fragment& fragment) {
  assembler_.AddFragment(local.atom, local.copy, local.index, fragment);
}

Status Placer::AddHeld(ParameterIndex parameter, std::string_view kind, FileTensor::Held held,
                       Holder holder) {
  CKPT_ASSIGN_OR_RETURN(const Local local, LocalOf(parameter, kind, held.fragment.dtype, holder));
  assembler_.SetLocal(local.atom, local.copy, local.index, std::move(held.local));
  AddFragment(local, held.fragment);
  return {};
}

Status Placer::AddTensor(ParameterIndex parameter, std::string_view kind, const FileTensor& tensor,
                         Holder holder) {
  auto held = tensor.As(sharding(parameter).locals[holder.tp]);
  if (held) return AddHeld(parameter, kind, *std::move(held), holder);
  return Fail(std::move(held).error().WithContext(StrCat(assembler_.blob(tensor.blob()).path, ": '",
                                                         assembler_.parameter(parameter).name,
                                                         "' (", kind, ")")));
}

Status Placer::AddReduced(ParameterIndex parameter, std::string_view kind,
                          const FileTensor& tensor) {
  CKPT_ASSIGN_OR_RETURN(
      const AtomIndex atom,
      assembler_.AddAtom(parameter, "", kind, tensor.dtype(), tensor.shape(), Relation::kReduced));
  CKPT_ASSIGN_OR_RETURN(FileTensor::Held held, tensor.As(WholeTensor(tensor.shape())));
  AddFragment(Local{atom, 0, assembler_.AddLocal(atom, 0, std::move(held.local))}, held.fragment);
  return {};
}

Status Placer::AddScalar(ParameterIndex parameter, std::string_view kind,
                         const ScalarValue& value) {
  CKPT_ASSIGN_OR_RETURN(const AtomIndex atom, assembler_.AddAtom(parameter, "", kind, value.dtype,
                                                                 value.shape, Relation::kScalar));
  return assembler_.SetInline(atom, value.bytes, value.python_number);
}

Result<bool> Placer::DeriveWeight(ParameterIndex parameter, DType dtype) {
  const Declared& declared = Of(parameter);
  if (!declared.master) return false;
  CKPT_ASSIGN_OR_RETURN(const AtomIndex weight, assembler_.AddAtom(parameter, "", "weight", dtype,
                                                                   declared.sharding->shape));
  CKPT_RETURN_IF_ERROR(assembler_.SetCast(weight, *declared.master));
  return true;
}

Result<Placer::NumberedGroup*> Placer::GroupFor(size_t number,
                                                const std::string& hyper_parameters) {
  while (groups_.size() <= number) groups_.push_back({groups_.size(), {}, {}});
  NumberedGroup& first = groups_[number];
  if (first.group.hyper_parameters.empty()) first.group.hyper_parameters = hyper_parameters;
  if (hyper_parameters.empty()) return &first;
  CKPT_ASSIGN_OR_RETURN(const auto differs,
                        DifferingKey(first.group.hyper_parameters, hyper_parameters));
  if (!differs) return &first;
  apart_by_ = *differs;
  for (NumberedGroup& other : apart_) {
    if (other.number != number) continue;
    CKPT_ASSIGN_OR_RETURN(const auto other_differs,
                          DifferingKey(other.group.hyper_parameters, hyper_parameters));
    if (!other_differs) return &other;
  }
  apart_.push_back({number, {"", {}, hyper_parameters}, {}});
  return &apart_.back();
}

Status Placer::AddToGroup(size_t number, const std::string& hyper_parameters,
                          std::span<const ParameterIndex> parameters) {
  CKPT_ASSIGN_OR_RETURN(NumberedGroup* const group, GroupFor(number, hyper_parameters));
  for (const ParameterIndex parameter : parameters) {
    const auto has = [&](const NumberedGroup& other) {
      return &other != group && other.number == number && other.members.contains(parameter);
    };
    if (std::ranges::any_of(groups_, has) || std::ranges::any_of(apart_, has)) {
      return Refuse("'", assembler_.parameter(parameter).name, "' is in group ", number,
                    " of two ranks, but their '", apart_by_, "' differs");
    }
    if (group->members.insert(parameter).second) group->group.parameters.push_back(parameter);
  }
  return {};
}

Status Placer::FinishGroups() {
  PickleBuilder builder;
  std::vector<NodeId> numbers;
  const auto finish = [&](NumberedGroup& one) {
    numbers.push_back(builder.Int(static_cast<int64_t>(one.number)));
    assembler_.AddGroup(std::move(one.group));
  };
  std::ranges::for_each(groups_, finish);
  std::ranges::for_each(apart_, finish);
  if (!apart_.empty()) {
    const NodeId root = builder.List(std::move(numbers));
    CKPT_ASSIGN_OR_RETURN(std::string pickle, PrintPickle(std::move(builder).Finish(root)));
    assembler_.header().documents.push_back({.key = std::string(kGroupNumbers),
                                             .scope = "",
                                             .pickle = std::move(pickle),
                                             .tensors = {}});
    assembler_.header().notes.push_back(StrCat("the optimizer groups of pipeline stages differ ('",
                                               apart_by_, "'): they are kept apart"));
  }
  groups_.clear();
  apart_.clear();
  return {};
}

}  // namespace ckptfs
