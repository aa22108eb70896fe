// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/rank_optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string_view>

#include "core/base/strings.h"
#include "core/state/ownership.h"
#include "formats/megatron/buckets/stored_buckets.h"
#include "formats/megatron/legacy/cast_match.h"
#include "formats/megatron/legacy/flat_states.h"
#include "formats/megatron/legacy/optimizer_chain.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kMasters = "fp32_from_fp16_params";
constexpr std::string_view kTool = "Megatron";

bool IsWide(const RankParameter& one) { return one.tensor->tensor.dtype() == DType::kF32; }

std::string Named(const RankParameter& one) { return StrCat("'", one.tensor->name, "'"); }

// A count as a whole number; nothing for any other value.
std::optional<int64_t> CountOf(const ScalarValue& value) {
  double number = -1;
  if (value.dtype == DType::kI64) {
    int64_t whole = 0;
    std::memcpy(&whole, value.bytes.data(), sizeof(whole));
    return whole;
  }
  if (value.dtype == DType::kF32) {
    float single = 0;
    std::memcpy(&single, value.bytes.data(), sizeof(single));
    number = static_cast<double>(single);
  } else if (value.dtype == DType::kF64) {
    std::memcpy(&number, value.bytes.data(), sizeof(number));
  }
  const bool whole = number >= 0 && number < 1e15 && number == std::floor(number);
  return whole ? std::optional(static_cast<int64_t>(number)) : std::nullopt;
}

// The numbered form of one optimizer of a rank.
class Numbered {
 public:
  Numbered(const RankModel& rank, const ChainedOptimizer& optimizer, RankStates& out)
      : rank_(rank), optimizer_(optimizer), out_(out) {}

  Status Read() && {
    inner_ = optimizer_.root["param_groups"] ? optimizer_.root : optimizer_.root["optimizer"];
    masters_ = optimizer_.root[kMasters];
    const bool narrow = std::ranges::any_of(optimizer_.parameters,
                                            [](const RankParameter& one) { return !IsWide(one); });
    if (narrow && !masters_) return Refuse("it does not have ", kMasters);
    for (size_t g = 0; g < optimizer_.groups.size(); ++g) CKPT_RETURN_IF_ERROR(ReadGroup(g));
    return narrow ? Status() : ProveByShapes();
  }

 private:
  const RankParameter& MemberOf(size_t group, size_t i) const {
    return optimizer_.parameters[optimizer_.members[group][i]];
  }

  Status ReadGroup(size_t g) {
    const PickleRef numbers = optimizer_.groups[g].dict["params"];
    const size_t members = optimizer_.members[g].size();
    if (!numbers || !numbers.IsSequence() || numbers.size() != members) {
      return Refuse("its group ", g, " has ", numbers ? numbers.size() : 0,
                    " members, and Megatron's rule gives it ", members);
    }
    const PickleRef masters = masters_ ? masters_.at(g) : PickleRef();
    size_t master = 0;
    for (size_t i = 0; i < members; ++i) {
      const RankParameter& one = MemberOf(g, i);
      const auto number = numbers.at(i).Int();
      if (!number || !seen_.insert(*number).second) {
        return Refuse("its group ", g, " does not have numbers, each once");
      }
      auto& states = out_.states[{one.chunk, one.entry}];
      CKPT_RETURN_IF_ERROR(ReadState(one, *number, states));
      if (IsWide(one)) {
        states.insert_or_assign(std::string(kMasterKind), PartBytes{one.tensor->tensor, {}});
      } else {
        CKPT_RETURN_IF_ERROR(ReadMaster(one, masters ? masters.at(master++) : PickleRef(), states));
      }
    }
    if (masters && masters.size() != master) {
      return Refuse("its group ", g, " has ", masters.size(), " masters of ", master,
                    " 16-bit members");
    }
    return {};
  }

  Status ReadMaster(const RankParameter& one, PickleRef value,
                    std::map<std::string, PartBytes>& states) {
    CKPT_ASSIGN_OR_RETURN(const FileTensor master,
                          FileTensorOf(value, rank_.file(), rank_.state.blob(), kMasters));
    if (master.shape() != one.tensor->tensor.shape()) {
      return Refuse("the master that the rule gives ", Named(one), " has the shape ",
                    ShapeToString(master.shape()));
    }
    CKPT_ASSIGN_OR_RETURN(const bool fits, MayBeCast({&rank_.file(), &master}, 0,
                                                     {&rank_.file(), &one.tensor->tensor}));
    if (!fits) {
      return Refuse("the master that the rule gives ", Named(one), " is not its weight, cast");
    }
    states.insert_or_assign(std::string(kMasterKind), PartBytes{master, {}});
    return {};
  }

  Status ReadState(const RankParameter& one, int64_t number,
                   std::map<std::string, PartBytes>& states) {
    const PickleRef all = inner_["state"];
    const PickleRef own = all ? all.AtInt(number) : PickleRef();
    if (!own) return {};  // it had no gradient yet
    for (const auto& [key, value] : own.Items()) {
      const auto kind = key.String();
      if (!kind || *kind == kMasterKind || *kind == "weight") {
        return Refuse("a state of ", Named(one), " has a name that ckptfs uses for something else");
      }
      if (*kind == "step") {
        CKPT_ASSIGN_OR_RETURN(const auto count, ScalarOf(value, rank_.file()));
        const auto steps = count ? CountOf(*count) : std::nullopt;
        if (steps) out_.steps[{one.chunk, one.entry}] = *steps;
        continue;
      }
      const TensorNode* node = value.Tensor();
      if (node == nullptr) {
        out_.unknown.emplace_back(*kind);
        continue;
      }
      CKPT_ASSIGN_OR_RETURN(FileTensor tensor,
                            FileTensorOf(value, rank_.file(), rank_.state.blob(), *kind));
      if (tensor.shape() != one.tensor->tensor.shape()) {
        return Refuse("the state '", *kind, "' that the rule gives ", Named(one), " has the shape ",
                      ShapeToString(tensor.shape()), ", not its ",
                      ShapeToString(one.tensor->tensor.shape()));
      }
      states.insert_or_assign(std::string(*kind), PartBytes{std::move(tensor), {}});
    }
    return {};
  }

  // Without masters the rule counts where shapes contradict every other order.
  Status ProveByShapes() const {
    std::vector<OwnableParameter> parameters;
    ToolRule rule{std::string(kTool), std::vector<uint64_t>(optimizer_.parameters.size(), 0)};
    for (const RankParameter& one : optimizer_.parameters) {
      parameters.push_back({one.tensor->name, one.tensor->tensor.shape()});
    }
    std::vector<std::vector<OptimizerMember>> groups(optimizer_.groups.size());
    if (groups.size() > 64) return Refuse("it has ", groups.size(), " groups");
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < optimizer_.members[g].size(); ++i) {
        const RankParameter& one = MemberOf(g, i);
        rule.groups[optimizer_.members[g][i]] |= uint64_t{1} << g;
        OptimizerMember& member = groups[g].emplace_back();
        for (const auto& [kind, bytes] : out_.states.at({one.chunk, one.entry})) {
          if (kind != kMasterKind) member.states.push_back({kind, bytes.tensor.shape()});
        }
      }
    }
    OwnershipQuestion question{parameters, groups, {}, {}, std::move(rule), {}};
    CKPT_ASSIGN_OR_RETURN(const StateOwners owners, DecideOwners(question));
    if (!owners.why.empty()) {
      return Refuse(
          "its parameters are in fp32, so that no masters tell whose states are whose, and ",
          owners.why);
    }
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < groups[g].size(); ++i) {
        if (owners.groups[g][i].parameter == optimizer_.members[g][i]) continue;
        return Refuse("shapes give its members to others than Megatron's rule does");
      }
    }
    return {};
  }

  const RankModel& rank_;
  const ChainedOptimizer& optimizer_;
  RankStates& out_;
  PickleRef inner_;
  PickleRef masters_;
  std::set<int64_t> seen_;
};

}  // namespace

Result<RankStates> ReadRankStates(const RankModel& rank, const JobDegrees& job,
                                  const FlatFile* flat) {
  RankStates out;
  CKPT_ASSIGN_OR_RETURN(const std::vector<ChainedOptimizer> optimizers, OptimizersOf(rank, job));
  if (flat != nullptr) CKPT_RETURN_IF_ERROR(ReadFlatStates(rank, optimizers, *flat, out));
  for (const ChainedOptimizer& optimizer : optimizers) {
    const PickleRef scaler = optimizer.root["grad_scaler"];
    out.scaler = out.scaler || (scaler && !scaler.IsNone());
    for (size_t g = 0; g < optimizer.groups.size(); ++g) {
      if (!optimizer.members[g].empty()) out.groups.push_back(optimizer.groups[g]);
    }
    if (flat == nullptr) CKPT_RETURN_IF_ERROR(Numbered(rank, optimizer, out).Read());
  }
  return out;
}

}  // namespace ckptfs::megatron
