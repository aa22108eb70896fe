// SPDX-License-Identifier: Apache-2.0
//
// BlobReader opens the blobs of one step, below the roots of its manifest, and
// reads them.  Files that can be mapped are mapped and read through the page
// cache (one copy of every byte per node); a read of a mapping that the file no
// longer backs is an error, never a signal.  Other files are read in blocks,
// through a cache of our own (core/io/block_cache.h).  The number of open blobs is
// bounded, the least recently used is closed first; no descriptor stays open (a
// mapping needs none).
//
// Thread safety: all methods may be called concurrently; no lock is held
// across I/O.
// Lifetime: `model` must outlive the reader.
// Units: bytes.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/blob/fingerprint.h"
#include "core/io/block_cache.h"
#include "core/io/root.h"
#include "core/model/step_model.h"

namespace ckptfs {

// Where the roots of a manifest lie on this machine; absent: as adopted.
using RootMap = std::map<std::string, std::string>;

// Roots that are not directories, by their name in the manifest.
using OpenRoots = std::map<std::string, std::shared_ptr<const Root>>;

class BlobReader {
 public:
  struct Options {
    RootMap roots;
    OpenRoots open_roots;                            // before `roots`
    size_t max_open = 4096;                          // blobs held open
    std::chrono::milliseconds check_interval{1000};  // stamp checks per blob
    // Shared by readers; made when a file that cannot be mapped is met.
    std::shared_ptr<BlockCache> cache;
    // Shared by readers; without it a moved modification time is a change.
    std::shared_ptr<TouchedFiles> touched;
  };

  static std::unique_ptr<BlobReader> Create(const StepModel& model, Options options);
  virtual ~BlobReader();

  // Read one range.  kStale with the file's name if it is not what was adopted
  // (its stamp, and its bytes where only times moved: FileCheck::CheckOpen);
  // kDataLoss if the range is not there; kNotFound, kPermission, kIo from the
  // system.
  // BLOCKS: on the device.
  Status Read(BlobIndex blob, uint64_t offset, std::span<std::byte> out);

  // A blob that stays open while held; its stamp was checked within
  // check_interval.
  class Held {
   public:
    virtual ~Held() = default;
    BlobIndex blob() const { return blob_; }
    uint64_t size() const { return size_; }
    // The mapping of a blob that is mapped, to be touched only inside Guard; else null.
    const std::byte* mapped() const { return mapped_; }
    // The file of a blob that is not mapped.
    const BlockCache::Source& source() const { return source_; }

   protected:
    Held() = default;
    BlobIndex blob_{};
    uint64_t size_ = 0;
    const std::byte* mapped_ = nullptr;
    BlockCache::Source source_;
  };
  Result<std::shared_ptr<const Held>> Hold(BlobIndex blob);

  // Start reading the range of a mapped blob into the page cache if it is not there.
  void Prefetch(const Held& held, uint64_t offset, uint64_t length);

  // False if the page (or block) of `offset` is known not to be in its cache (of
  // a page the kernel tells only owners and writers of a file; others get true).
  bool Resident(const Held& held, uint64_t offset);

  // True if some file may be one that cannot be mapped: what reads need of it has
  // to be asked for all at once, and ahead.
  bool far() const;
  // REQUIRES: some held blob is not mapped.
  BlockCache& cache() const;

  // Run `function(context)`; a bus error inside it (the file was truncated
  // under the mapping) is returned as kDataLoss instead of ending the process.
  // REQUIRES: `function` holds no lock and owns no resource while it touches
  // mapped bytes.
  Status Guard(BlobIndex blob, void (*function)(void*), void* context);

  // The error of a bus error while the blob was copied.
  Error Vanished(BlobIndex blob) const;

  // Compare the file with its stamp now, and its bytes if only times moved: by its
  // fingerprint, or all of them if it was touched.  `found` gets the owner and the mode
  // (without ACLs, without what is not linked) even if the stamp differs.
  Status Check(BlobIndex blob, std::optional<EntryStat>* found = nullptr);
  // The same without comparing bytes: what of them would have to be.
  Result<Look> LookAt(BlobIndex blob, std::optional<EntryStat>* found = nullptr);
  // The same after reading: times that moved since the last check are kStale.
  Status CheckAgain(BlobIndex blob);
  // The same of an open file, which is `now`.
  Status CheckAgain(BlobIndex blob, const FileStamp& now);

  // CheckAgain of every open file, and that none was touched after it was opened: at
  // the end of a job, so that what was read since the last check is known to be good.
  Status CheckOpen();
  // How many files were touched after they were opened, and found the same.
  uint64_t moved() const;

  // The file itself, compared with the stamp.  Errors as of Read.
  Result<std::shared_ptr<const File>> Open(BlobIndex blob) const;

  // Where the blob lies on this machine: an absolute path for a local file.
  const Root& RootOf(BlobIndex blob) const;
  std::string PathOf(BlobIndex blob) const;

  // Bytes read from blobs so far (for the status).
  uint64_t bytes_read() const;
  void CountRead(uint64_t bytes);  // by who copies out of a held blob

 protected:
  struct State;
  explicit BlobReader(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ckptfs
