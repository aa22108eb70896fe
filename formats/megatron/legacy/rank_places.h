// SPDX-License-Identifier: Apache-2.0
//
// RankPlaces says which ranks of a job write files of a legacy checkpoint, by the job's arguments,
// and where each of them lies (megatron/training/checkpointing.py: get_checkpoint_name):
//
//   mp_rank_<tensor rank, 2 digits>          all stages, experts in one group
//   mp_rank_TT_<stage, 3 digits>             with a pipeline
//   mp_rank_TT[_PPP]_<expert rank, 3 digits> with expert parallelism
//
// Ranks of a stage are numbered tensor ranks fastest, those of experts experts' tensor ranks
// fastest, then expert ranks (parallel_state.py).  Data-parallel ranks hold what the first has.
//
// Thread safety: values; pure functions.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "formats/megatron/common_state.h"

namespace ckptfs::megatron {

struct JobDegrees {
  uint32_t tp = 1;
  uint32_t pp = 1;
  uint32_t chunks = 1;  // of a stage: virtual stages
  uint32_t ep = 1;
  uint32_t etp = 1;  // of experts; tp where they are cut as all else
  uint64_t layers = 0;
  std::optional<uint64_t> world;  // ranks of the job, where the arguments say it
};

// kInvalid and kUnsupported name the argument that is missing or says what is not understood.
Result<JobDegrees> DegreesOf(const CommonState& state);

// A rank that writes a file.
struct RankPlace {
  uint32_t tp = 0;
  uint32_t pp = 0;
  uint32_t ep = 0;
  uint32_t etp = 0;
  bool operator==(const RankPlace&) const = default;
};

// Stage by stage, in the order of ranks.  kUnsupported where two ranks would write one file.
Result<std::vector<RankPlace>> PlacesOfJob(const JobDegrees& job);

// "mp_rank_01_003"
std::string FolderOf(const JobDegrees& job, const RankPlace& place);

// The place of a rank by its number (args.rank); nothing where the job numbers its ranks otherwise.
std::optional<RankPlace> PlaceOfRank(const JobDegrees& job, const CommonState& state,
                                     uint64_t rank);

// True of names of folders that a rank writes: "mp_rank_00", "mp_rank_00_001_003".
bool IsRankFolder(std::string_view name);

}  // namespace ckptfs::megatron
