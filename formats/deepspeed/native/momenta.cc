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

Result<Lie> LieOf(const SharedGroup& group, uint32_t ranks) {
  Lie out;
  out.ranks.resize(group.members.size());
  out.members.resize(ranks);
  CKPT_RETURN_IF_ERROR(VisitFlatGroup(group.members, group.paddings, group.partition, ranks,
                                      [&](const ZeroSpan& span) -> Status {
                                        out.ranks[span.member].push_back(span.rank);
                                        out.members[span.rank].push_back(span.member);
                                        return {};
                                      }));
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

Status Momenta::Add(const SharedGroup& group, std::span<const MomentumBuffer> ranks) {
  const bool none =
      std::ranges::all_of(ranks, [](const MomentumBuffer& rank) { return rank.tensor == nullptr; });
  if (none) {
    for (const ParameterIndex parameter : group.parameters) ++found_[parameter].holders;
    return {};
  }
  CKPT_ASSIGN_OR_RETURN(const Lie lie, LieOf(group, static_cast<uint32_t>(ranks.size())));
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
  return {};
}

Status Momenta::Place(const Named& named, Placer& placer, StepModel& header) const {
  for (const auto& [parameter, found] : found_) {
    if (found.parts.empty() && found.why.empty()) continue;
    std::string why = found.why;
    if (why.empty() && found.parts.size() != found.holders) why = "only some of its ranks have it";
    if (!why.empty()) {
      LeaveOut(header,
               {LeftOutPart::kOptimizer,
                StrCat("optimizer state '", kMomentum, "' of '", named[parameter].name, "'"),
                std::move(why), ""});
      continue;
    }
    for (const Part& part : found.parts) {
      CKPT_ASSIGN_OR_RETURN(
          const Placer::Local local,
          placer.LocalOf(parameter, kMomentum, part.tensor->dtype(), part.holder));
      CKPT_ASSIGN_OR_RETURN(const Fragment fragment, part.tensor->Slice(part.at, 0, part.elements));
      placer.AddFragment(local, fragment);
    }
  }
  return {};
}

}  // namespace ckptfs::deepspeed::native
