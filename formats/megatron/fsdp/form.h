// SPDX-License-Identifier: Apache-2.0
//
// Directories that Megatron's training writes with --ckpt-format fsdp_dtensor, that is of models
// that Megatron-FSDP wraps (megatron/training/checkpointing.py of core 0.16 to 0.20), as a form of
// what torch.distributed.checkpoint writes:
//
//   args                                          Namespace of the job, whose ckpt_format is
//                                                 "fsdp_dtensor"; not of Megatron-Bridge's jobs
//   checkpoint_version, iteration, ...            objects
//   opt_param_scheduler.<key>
//   rng_state.(<pp>, <tp>)...                     of each rank
//   model.module.<name>                           what the optimizer trains, in fp32 where
//                                                 Megatron-FSDP keeps masters (keys.h)
//   optimizer.state.<wrappers><name>.<kind>
//   optimizer.param_to_group_meta.<wrappers><name>.<key>
//
// The job's own word for the form is what decides: torch_dcp has the same objects.  Without
// arguments the hyper-parameters do, which name every parameter (tensors.h: FsdpJobOf).
//
// Thread safety: pure functions.

#pragma once

#include "formats/dcp/form.h"

namespace ckptfs::megatron {

dcp::Form FsdpForm();

}  // namespace ckptfs::megatron
