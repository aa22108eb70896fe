// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_shards/sharded_optimizer.h"

#include <algorithm>
#include <set>

#include "core/base/strings.h"

namespace ckptfs::rank_shards {
namespace {

constexpr std::string_view kOneSave = ": these files are not of one save";

// Settings, members and the names of states; nothing that ranks may have of their own.
Status CheckGroups(const deepspeed::TorchOptimizer& first, const deepspeed::TorchOptimizer& other,
                   size_t rank) {
  const bool same =
      std::ranges::equal(first.groups, other.groups, [](const auto& a, const auto& b) {
        return a.members == b.members && a.hyper_parameters == b.hyper_parameters;
      });
  if (same && first.names == other.names) return {};
  return Refuse("rank ", rank, "'s optimizer has other groups or settings than rank 0's", kOneSave);
}

const ScalarValue* Find(const deepspeed::TorchOptimizer& torch, int64_t number,
                        const std::string& kind) {
  const auto states = torch.states.find(number);
  if (states == torch.states.end()) return nullptr;
  const auto& scalars = states->second.scalars;
  const auto found = std::ranges::find(scalars, kind, &deepspeed::NamedScalar::name);
  return found == scalars.end() ? nullptr : &found->value;
}

size_t CountOf(const deepspeed::TorchOptimizer& torch) {
  size_t count = 0;
  for (const auto& [number, states] : torch.states) count += states.scalars.size();
  return count;
}

// Each rank counts for itself; ranks of one save count alike.
Status CheckNumbers(const deepspeed::TorchOptimizer& first, const deepspeed::TorchOptimizer& other,
                    size_t rank) {
  for (const auto& [number, states] : first.states) {
    for (const auto& scalar : states.scalars) {
      const ScalarValue* const own = Find(other, number, scalar.name);
      if (own != nullptr && *own == scalar.value) continue;
      return Refuse("rank ", rank, " has another '", scalar.name, "' of the optimizer's parameter ",
                    number, " than rank 0", kOneSave);
    }
  }
  if (CountOf(first) == CountOf(other)) return {};
  return Refuse("rank ", rank, "'s optimizer has states that rank 0's does not have", kOneSave);
}

}  // namespace

Result<ShardedOptimizer> ShardedOptimizer::Make(std::vector<RankOptimizer> by_rank) {
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    CKPT_RETURN_IF_ERROR(CheckGroups(by_rank[0].torch, by_rank[rank].torch, rank));
    CKPT_RETURN_IF_ERROR(CheckNumbers(by_rank[0].torch, by_rank[rank].torch, rank));
  }
  ShardedOptimizer out;
  CKPT_RETURN_IF_ERROR(out.TakeStates(by_rank));
  out.torch_ = std::move(by_rank[0].torch);
  return out;
}

Status ShardedOptimizer::TakeStates(std::vector<RankOptimizer>& by_rank) {
  std::set<Key> keys;
  for (const RankOptimizer& rank : by_rank) {
    for (const auto& [key, value] : rank.shards) keys.insert(key);
    strangers_.insert(rank.strangers.begin(), rank.strangers.end());
  }
  for (const Key& key : keys) {
    if (strangers_.contains(key)) continue;
    std::vector<ShardValue> values;
    for (RankOptimizer& rank : by_rank) {
      const auto found = rank.shards.find(key);
      if (found != rank.shards.end()) values.push_back(std::move(found->second));
    }
    const std::string what = StrCat("state '", key.second, "' of parameter ", key.first);
    if (values.size() != by_rank.size()) {
      why_not_ = StrCat(what, " is in ", Counted(values.size(), "file"), " of ", by_rank.size());
      return {};
    }
    if (values.front().form == ShardValue::Form::kPlain && values.size() > 1) {
      why_not_ = StrCat(what,
                        " is a plain tensor of each rank, and nothing says which part of the "
                        "parameter that is (FSDP1 has flat parameters; FSDP2 saves DTensors)");
      return {};
    }
    auto set = ShardSet::Make(std::move(values));
    if (set) {
      states_.emplace(key, *std::move(set));
    } else {
      strangers_.emplace(key, set.error().message);
    }
  }
  return {};
}

StateDict::Fate ShardedOptimizer::FateOf(const StateDict::State& state) const {
  const int64_t* const number = std::get_if<int64_t>(&state.owner);
  if (number == nullptr) return {};
  const auto stranger = strangers_.find({*number, state.kind});
  const auto known = torch_.states.find(*number);
  const bool nothing =
      known != torch_.states.end() &&
      std::ranges::find(known->second.nothing, state.kind) != known->second.nothing.end();
  const std::string why = stranger == strangers_.end()
                              ? std::string()
                              : StrCat("state '", state.kind, "': ", stranger->second);
  return StateDict::Fate{.kept = false, .said = !nothing, .why = why};
}

void ShardedOptimizer::AddTo(size_t optimizer, StateDict& dict) const {
  for (size_t g = 0; g < torch_.groups.size(); ++g) {
    StateDict::Group group{optimizer, torch_.groups[g].hyper_parameters, {}};
    for (size_t i = 0; i < torch_.groups[g].members.size(); ++i) {
      const int64_t number = torch_.groups[g].members[i];
      group.members.push_back({i < torch_.names[g].size() ? torch_.names[g][i] : "", number});
      const auto add = [&](const std::string& kind) -> StateDict::State& {
        return dict.states.emplace_back(StateDict::State{optimizer, number, kind});
      };
      const Key first(number, "");
      for (auto at = states_.lower_bound(first); at != states_.end() && at->first.first == number;
           ++at) {
        StateDict::State& added = add(at->first.second);
        added.dtype = at->second.dtype();
        added.shape = at->second.shape();
        added.place = [&set = at->second](Assembler& assembler, AtomIndex atom) {
          return set.Place(assembler, atom);
        };
      }
      for (auto at = strangers_.lower_bound(first);
           at != strangers_.end() && at->first.first == number; ++at) {
        add(at->first.second);
      }
      const auto state = torch_.states.find(number);
      if (state == torch_.states.end()) continue;
      for (const deepspeed::NamedScalar& entry : state->second.scalars) {
        StateDict::State& added = add(entry.name);
        added.shape = entry.value.shape;
        added.scalar = [&value = entry.value] { return std::optional(value); };
      }
      for (const std::string& kind : state->second.opaque) {
        if (!states_.contains({number, kind}) && !strangers_.contains({number, kind})) add(kind);
      }
    }
    dict.groups.push_back(std::move(group));
  }
}

}  // namespace ckptfs::rank_shards
