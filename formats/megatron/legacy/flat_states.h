// SPDX-License-Identifier: Apache-2.0
//
// FlatStates finds the parameters in the flat buffers of distrib_optim.pt (rank_optimizer.h).  A
// buffer is the elements of its buckets, one after the other, without the padding at their ends:
//
//   - a parameter begins where the one before ends, up to the next multiple of 64 elements of its
//     bucket
//   - or a bucket ends there, and the parameter is the first of the next one
//
// Where buckets end is not said.  Without --overlap-grad-reduce there is one, but for an embedding
// that is tied.  So all ways are followed along which every master, cast, may be the parameter's
// weight, and only one may lead to the buffer's end.
//
// Thread safety: pure but for reading.
// Units: elements.

#pragma once

#include <span>

#include "core/base/result.h"
#include "formats/megatron/legacy/optimizer_chain.h"
#include "formats/megatron/legacy/rank_optimizer.h"

namespace ckptfs::megatron {

// Adds masters and moments to `out`.  Errors as ReadRankStates's.
Status ReadFlatStates(const RankModel& rank, std::span<const ChainedOptimizer> optimizers,
                      const FlatFile& flat, RankStates& out);

}  // namespace ckptfs::megatron
