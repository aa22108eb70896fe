// SPDX-License-Identifier: Apache-2.0
//
// Traces that the filesystem has of a file that is being written, or whose writer died: a process
// that has it open for writing, and bytes below its size that nobody ever wrote.  Programs that
// copy give a file its size first (ftruncate, fallocate), or write it from its end.
//
// Bytes that nobody wrote are holes (SEEK_HOLE) and extents that are allocated
// and unwritten (FIEMAP): once such an extent was read, SEEK_HOLE calls it data.
// Nothing is told of ZFS, since it makes holes of zeros that somebody wrote.
//
// Neither is told of every filesystem: the absence of a trace proves nothing.
//
// Thread safety: may be called concurrently.
// Units: bytes.

#pragma once

#include <cstdint>

#include "core/io/file.h"

namespace ckptfs {

// A process of this machine has the file open for writing, or mapped so.  False where the
// kernel does not tell: on network filesystems, and of files that are somebody else's.
bool IsOpenForWriting(const File& file);

// How many bytes were never written; of very many holes those of the first.
// BLOCKS: on writing back the file's pages where it has unwritten extents.
uint64_t BytesNeverWritten(const File& file);

// True if the file was there at that time and was written after it: it was written anew in its
// place.  A copy is made after what it is copied of was sealed.
bool WasWrittenAnew(const File& file, int64_t since_ns);

}  // namespace ckptfs
