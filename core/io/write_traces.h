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
// Units: bytes; nanoseconds of the files' machine.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/io/file.h"

namespace ckptfs {

// A process of this machine has the file open for writing, or mapped so.  False where the
// kernel does not tell: on network filesystems, and of files that are somebody else's.
bool IsOpenForWriting(const File& file);

// How many bytes were never written; of very many holes those of the first.
// BLOCKS: on writing back the file's pages where it has unwritten extents.
uint64_t BytesNeverWritten(const File& file);

// When a file was made and last written, and when it or its names were last changed.
struct WriteTimes {
  int64_t born_ns = 0;  // 0 where the filesystem does not tell
  int64_t written_ns = 0;
  int64_t changed_ns = 0;
};

// Nothing where the kernel does not tell.
std::optional<WriteTimes> WriteTimesOf(const File& file);

// A file of a step.
struct StepFile {
  WriteTimes times;
  uint64_t size = 0;
  bool saved = false;  // named as a file of a save is, or read
  bool read = false;   // something of the step is read of it
};

// Positions of the files that a later save wrote, though they should be older than one that saves
// write after them, which was written at `sealed_ns`: those that were there before it and were
// written in their places, and those that are read and took another's place (a rename) after a
// pause in which nobody wrote.  Programs that copy without times write in an order of their own,
// several files at once, and make no pause; where they kept the times of another machine, or the
// filesystem does not say when a file was made, the slowest writer is assumed. Pure.
std::vector<size_t> FindWrittenAnew(std::span<const StepFile> files, int64_t sealed_ns);

}  // namespace ckptfs
