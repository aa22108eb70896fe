// SPDX-License-Identifier: Apache-2.0
//
// MetadataText is `.metadata`: the pickle of a torch.distributed.checkpoint.metadata
// .Metadata, as pickle.load takes it.  Its length is known without rendering it, and
// any part of it is rendered by itself, so that one of millions of chunks costs its
// readers what they read and nobody its whole length in memory.
//
//   metadata = PROTO 2, memo, Metadata{}, `{state_dict_metadata}`, `{planner_data}`,
//              `{storage_data}`, BUILD, STOP
//   memo     = what is said often: ( GLOBAL | string, BINPUT n, POP )*
//   tensor   = TensorStorageMetadata{properties, size, chunks [ChunkStorageMetadata*]}
//   chunk    = MetadataIndex{fqn, offset}: _StorageInfo{relative_path, offset, length}
//
// Integers have one width per tensor, so that all its chunks have one length.
//
// Thread safety: immutable; Render may be called concurrently.
// Lifetime: keeps the index.
// Units: bytes.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/view/plan.h"
#include "formats/dcp/directory_index.h"

namespace ckptfs::dcp {

// The name of a rank's data file.
std::string DataFileName(uint64_t rank);

// The exact length, in time of the number of entries and ranks, not of chunks.
uint64_t MetadataSize(const DirectoryIndex& index);

// The file as pieces that are rendered when they are read.
Plan MetadataPlan(std::shared_ptr<const DirectoryIndex> index);

}  // namespace ckptfs::dcp
