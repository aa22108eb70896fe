// SPDX-License-Identifier: Apache-2.0
//
// BlobReader opens the blobs of one step and reads them.  Files are mapped
// and read through the page cache (one copy of every byte per node); a read of
// a mapping that the file no longer backs is an error, never a signal.
// Mappings are bounded and recycled, the least recently used first; no
// descriptor stays open (a mapping needs none).
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
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/io/open_beneath.h"
#include "core/model/step_model.h"

namespace ckptfs {

// Where the roots of a manifest lie on this machine; absent: as adopted.
using RootMap = std::map<std::string, std::string>;

// One copy: `length` bytes of a blob to `destination`.
struct BlobRead {
  BlobIndex blob{};
  uint64_t offset = 0;
  uint64_t length = 0;
  std::byte* destination = nullptr;
};

class BlobReader {
 public:
  struct Options {
    RootMap roots;
    size_t max_open = 4096;                          // mappings kept
    std::chrono::milliseconds check_interval{1000};  // stamp checks per blob
  };

  static std::unique_ptr<BlobReader> Create(const StepModel& model, Options options);
  virtual ~BlobReader();

  // Read one range.  kStale with the file's name if size, mtime, ctime or inode
  // differ from the stamp; kDataLoss if the range is not there; kNotFound,
  // kPermission, kIo from the system.
  // BLOCKS: on the device.
  Status Read(BlobIndex blob, uint64_t offset, std::span<std::byte> out);

  // A mapped blob that stays mapped while held; its stamp was checked within
  // check_interval.  Touch its bytes only inside Guard.
  class Mapping {
   public:
    virtual ~Mapping() = default;
    std::span<const std::byte> bytes() const { return bytes_; }
    BlobIndex blob() const { return blob_; }

   protected:
    std::span<const std::byte> bytes_;
    BlobIndex blob_{};
  };
  Result<std::shared_ptr<const Mapping>> Map(BlobIndex blob);

  // Start reading the range into the page cache if it is not there.
  void Prefetch(const Mapping& mapping, uint64_t offset, uint64_t length);

  // False if the page of `offset` is known not to be in the page cache (the
  // kernel tells only owners and writers of a file; others get true).
  static bool Resident(const Mapping& mapping, uint64_t offset);

  // Run `function(context)`; a bus error inside it (the file was truncated
  // under the mapping) is returned as kDataLoss instead of ending the process.
  // REQUIRES: `function` holds no lock and owns no resource while it touches
  // mapped bytes.
  Status Guard(BlobIndex blob, void (*function)(void*), void* context);

  // The error of a bus error while the blob was copied.
  Error Vanished(BlobIndex blob) const;

  // Compare the file with its stamp now.  Whose it is and what its mode says (but
  // of ACLs, of what is not linked) is in `found`, also if the stamp differs.
  Status Check(BlobIndex blob, FoundFile* found = nullptr);

  // Compare every mapped file with its stamp now: at the end of a job, so that
  // what was read since the last check is known to be good.
  Status CheckOpen();

  // The file itself, opened below its root (core/io/open_beneath.h); what was
  // opened is compared with the stamp.  Errors as of Read.
  Result<OpenedFile> Open(BlobIndex blob) const;

  // Absolute path on this machine, and that of the root it begins with.
  std::string PathOf(BlobIndex blob) const;
  const std::string& RootOf(BlobIndex blob) const;

  // Bytes read from blobs so far (for the status).
  uint64_t bytes_read() const;
  void CountRead(uint64_t bytes);  // by who copies out of a Mapping

 protected:
  struct State;
  explicit BlobReader(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ckptfs
