// SPDX-License-Identifier: Apache-2.0
//
// The files of DCP's HuggingFaceStorageWriter with save_distributed, which has no metadata
// of its own: each header says where in the whole tensors its tensors begin
// (torch/distributed/checkpoint/hf_storage.py of torch 2.13).
//
//   __metadata__: { "DCP_SHARDING_INFO": json{ fqn: { "saved_offsets": [..] } }, ... }
//
// Nothing says how large a whole tensor is: as torch does, it is as large as its shards
// reach.  So a shard that is missing in the middle is found, and the last one is not.
//
// Thread safety: pure but for reading files.

#pragma once

#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"
#include "formats/dcp/metadata.h"

namespace ckptfs::dcp {

// True if a safetensors file says so of itself; a file that is not one is kInvalid.
Result<bool> IsShard(const Root& root, const std::string& path);

// The metadata that torch makes of such files; extents are the tensors' own bytes.
// `files`: names in the directory.  `whole`: files without sharding information, each of whose
// tensors is whole.
Result<DcpMetadata> ReadShards(const Root& root, const std::string& directory,
                               const std::vector<std::string>& files, bool whole);

}  // namespace ckptfs::dcp
