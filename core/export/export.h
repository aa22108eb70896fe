// SPDX-License-Identifier: Apache-2.0
//
// ExportView writes a view (or a part of one) as plain files.  The work list is
// chunks of equal size over all files, so it is balanced whatever the file
// sizes; memory is one buffer per thread.  It is resumable: a journal in the
// destination names the chunks that are durable, a file gets its name only
// when it is whole, and the journal goes last.
//
//   <destination>/.ckptfs-export          journal (text, below)
//   <destination>/PATH.ckptfs-partial     a file being written
//   <destination>/PATH                    a file that is whole and durable
//   journal = "ckptfs-export 1" LF identity SP digest LF *( file-number SP chunk-number LF )
//   digest  = of the list of files and sizes, which the numbers refer to
//
// Thread safety: one export per destination at a time (the journal is locked).
// Lifetime: everything given must outlive the call.
// Units: bytes.

#pragma once

#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/base/work_list.h"
#include "core/blob/blob_reader.h"
#include "core/view/view_set.h"

namespace ckptfs {

// The readers of the written files beside their owner: those who could read all of the
// source.
struct ExportAccess {
  uint32_t read_bits = 0;  // of 0044
  uint32_t gid = 0;        // the group that 0040 is about
};

struct ExportReport {
  uint64_t files = 0;
  uint64_t bytes = 0;          // of all files
  uint64_t bytes_resumed = 0;  // found durable from an earlier run
};

// `part` is a path below view/<layout>/ ("deepspeed", "rank3", "rank3/model.pt")
// or empty for all of it; what it names is written directly into `destination`
// (a directory; created).  `identity` tells exports apart (step and view): a
// destination with another identity's journal, or with files and no journal, is kExists,
// unless all that would be written is there byte for byte: then nothing is left to do; where
// part of it is, the error names what is missing or other.  kNotFound if no format has the part,
// kUnsupported if none shows the layout at all.  Files and directories that are made have no wider
// modes than `access` and the umask say.
// BLOCKS: until all files are durable.
Result<ExportReport> ExportView(const ViewSet& views, std::string_view part,
                                const std::string& destination, std::string_view identity,
                                BlobReader& blobs, const ExportAccess& access,
                                const JobOptions& options);

}  // namespace ckptfs
