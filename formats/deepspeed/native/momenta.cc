// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native/momenta.h"

#include <algorithm>

#include "core/base/strings.h"
#include "formats/deepspeed/zero_layout.h"

namespace ckptfs::deepspeed::native {
namespace {

constexpr std::string_view kOnSeveral =
    "each of the ranks that share the parameter keeps a copy of its own, and nothing proves that "
    "the copies are equal";

// Where the members of a group lie: the ranks of each, and each rank's whole members.
struct Lie {
  std::vector<std::vector<uint32_t>> ranks;
  std::vector<std::vector<uint32_t>> members;
};

Lie LieOf(const SharedGroup& group, size_t ranks) {
  Lie out;
  out.ranks.resize(group.members.size());
  out.members.resize(ranks);
  for (uint32_t i = 0; i < group.members.size(); ++i) {
    (void)VisitFlatMember(group.starts[i], group.members[i], group.partition,
                          [&](const ZeroSpan& span) -> Status {
                            out.ranks[i].push_back(span.rank);
                            out.members[span.rank].push_back(i);
                            return {};
                          });
  }
  return out;
}

// The reason why a rank's buffer cannot be that of its members; "" if it can.
std::string Misfit(const MomentumBuffer& buffer, uint64_t elements) {
  if (buffer.tensor == nullptr) return StrCat(LastComponent(*buffer.file), " has none of it");
  const FileTensor& tensor = *buffer.tensor;
  if (tensor.dense() && tensor.shape() == Shape{elements}) return "";
  return StrCat(LastComponent(*buffer.file), " has it of shape ", ShapeToString(tensor.shape()),
                tensor.dense() ? "" : ", not contiguous",
                ", and the parameters of its partition have ", elements, " elements");
}

}  // namespace

void Momenta::Add(const SharedGroup& group, std::span<const MomentumBuffer> ranks) {
  const bool none =
      std::ranges::all_of(ranks, [](const MomentumBuffer& rank) { return rank.tensor == nullptr; });
  if (none) {
    for (const ParameterIndex parameter : group.parameters) ++found_[parameter].holders;
    return;
  }
  const Lie lie = LieOf(group, ranks.size());
  std::string why;
  for (size_t r = 0; r < ranks.size() && why.empty(); ++r) {
    uint64_t elements = 0;
    for (const uint32_t member : lie.members[r]) elements += group.members[member];
    if (elements > 0) why = Misfit(ranks[r], elements);
  }
  for (const ParameterIndex parameter : group.parameters) {
    Found& found = found_[parameter];
    ++found.holders;
    if (!why.empty()) found.why = why;
  }
  for (size_t r = 0; r < ranks.size() && why.empty(); ++r) {
    uint64_t at = 0;
    for (const uint32_t member : lie.members[r]) {
      Found& found = found_[group.parameters[member]];
      if (lie.ranks[member].size() > 1) found.why = kOnSeveral;
      found.parts.push_back({group.holders[member], ranks[r].tensor, at, group.members[member]});
      at += group.members[member];
    }
  }
}

void Momenta::AddTo(const Named& named, StateDict& dict, StepModel& header) const {
  for (const auto& [parameter, found] : found_) {
    if (found.parts.empty() && found.why.empty()) continue;
    const std::string& name = named[parameter].name;
    std::string why = found.why;
    if (why.empty() && found.parts.size() != found.holders) why = "only some of its ranks have it";
    if (!why.empty()) {
      LeaveOut(header,
               {LeftOutPart::kOptimizer,
                StrCat("optimizer state '", kMomentum, "' of '", name, "'"), std::move(why), ""});
      continue;
    }
    StateDict::State& added =
        dict.states.emplace_back(StateDict::State{0, name, std::string(kMomentum)});
    added.dtype = found.parts.front().tensor->dtype();
    added.relation = Relation::kSame;
    added.place = [parts = found.parts](Assembler&, AtomParts& atom) -> Status {
      for (const Part& part : parts) {
        CKPT_ASSIGN_OR_RETURN(const auto local, atom.Add(part.holder));
        CKPT_ASSIGN_OR_RETURN(const Fragment fragment,
                              part.tensor->Slice(part.at, 0, part.elements));
        atom.AddFragment(local, fragment);
      }
      return {};
    };
  }
}

}  // namespace ckptfs::deepspeed::native
