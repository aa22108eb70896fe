// SPDX-License-Identifier: Apache-2.0
//
// The keys under which a DeepSpeed source keeps what is not an atom, and from
// which the DeepSpeed views emit it again.  A document's pickle is the value
// itself, as the checkpoint had it; a key whose value the file lacks has no
// document (a value of None is a document that holds None).
//
// Thread safety: constants.

#pragma once

#include <array>
#include <string_view>

namespace ckptfs::deepspeed {

// client_state: "client/args", "client/iteration", "client/universal_checkpoint_info" ...
// in the file's order.  Scope "" unless the ranks of one key differ: then the
// scope is the coordinate of the model-parallel rank ("mp1").
inline constexpr std::string_view kClientPrefix = "client/";

// Top-level keys of the model states file, each a document of the same name.
inline constexpr std::string_view kLrScheduler = "lr_scheduler";
inline constexpr std::string_view kDataSampler = "data_sampler";
inline constexpr std::string_view kRandomLtd = "random_ltd";
inline constexpr std::string_view kSparseTensorModuleNames = "sparse_tensor_module_names";
inline constexpr std::string_view kSkippedSteps = "skipped_steps";
inline constexpr std::string_view kGlobalSteps = "global_steps";
inline constexpr std::string_view kGlobalSamples = "global_samples";
inline constexpr std::string_view kDpWorldSize = "dp_world_size";  // the source's, an int
inline constexpr std::string_view kMpWorldSize = "mp_world_size";
inline constexpr std::string_view kParallelDimensions = "checkpoint_parallel_dimensions";
inline constexpr std::string_view kDsConfig = "ds_config";
inline constexpr std::string_view kDsVersion = "ds_version";
inline constexpr std::string_view kNumExperts = "num_experts";
inline constexpr std::string_view kAutoEpLayers = "ds_autoep_layers";

inline constexpr std::array<std::string_view, 14> kModelStateKeys = {
    kLrScheduler,  kDataSampler,        kRandomLtd,     kSparseTensorModuleNames,
    kSkippedSteps, kGlobalSteps,        kGlobalSamples, kDpWorldSize,
    kMpWorldSize,  kParallelDimensions, kDsConfig,      kDsVersion,
    kNumExperts,   kAutoEpLayers};

// Values of the ZeRO (or FP16_Optimizer) dict: the first rank's; where ranks
// differ each has its own scope ("dp3_mp1") besides the global one.
inline constexpr std::string_view kZeroPrefix = "zero/";  // "zero/" + any scalar key of the dict
inline constexpr std::string_view kLossScaler = "zero/loss_scaler";
inline constexpr std::string_view kDynamicLossScale = "zero/dynamic_loss_scale";
inline constexpr std::string_view kOverflow = "zero/overflow";
inline constexpr std::string_view kClipGrad = "zero/clip_grad";
inline constexpr std::string_view kZeroStage = "zero/zero_stage";

}  // namespace ckptfs::deepspeed
