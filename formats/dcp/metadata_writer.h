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

namespace ckptfs::dcp {

// The name of a rank's data file.
std::string DataFileName(uint64_t rank);

// `Index` says which boxes there are and where they lie: a DirectoryIndex or a BoxIndex.

// The exact length, in time of the number of entries and ranks, not of chunks.
template <class Index>
uint64_t MetadataSize(const Index& index);

// The file as pieces that are rendered when they are read.
template <class Index>
Plan MetadataPlan(std::shared_ptr<const Index> index);

}  // namespace ckptfs::dcp
