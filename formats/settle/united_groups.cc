// SPDX-License-Identifier: Apache-2.0

#include "formats/settle/united_groups.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/base/strings.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle_writer.h"

namespace ckptfs {

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

Result<UnitedGroups::NumberedGroup*> UnitedGroups::GroupFor(size_t number,
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

Status UnitedGroups::Add(size_t number, const std::string& hyper_parameters,
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

void UnitedGroups::Finish(std::string_view label) && {
  const auto finish = [&](NumberedGroup& one) {
    if (!apart_.empty()) one.group.number = static_cast<uint32_t>(one.number);
    one.group.optimizer = label;
    assembler_.AddGroup(std::move(one.group));
  };
  std::ranges::for_each(groups_, finish);
  std::ranges::for_each(apart_, finish);
  if (!apart_.empty()) {
    assembler_.header().notes.push_back(StrCat("the optimizer groups of pipeline stages differ ('",
                                               apart_by_, "'): they are kept apart"));
  }
}

}  // namespace ckptfs
