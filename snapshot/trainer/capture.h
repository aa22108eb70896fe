// SPDX-License-Identifier: Apache-2.0
//
// A Capture is what one rank has to save of one step: where the bytes lie in the
// trainer's memory and what they are.  CaptureFile says how they make up the rank's
// file (core/state/rank_file.h), byte by byte, before any of them is copied.
//
// Thread safety: values.
// Lifetime: a capture's owner keeps all its memory; a CaptureFile keeps the capture.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/blob/safetensors_header.h"
#include "core/state/state_part.h"
#include "snapshot/device/copier.h"
#include "snapshot/trainer/capture_plan.h"
#include "snapshot/trainer/kept_tensors.h"

namespace ckptfs {

// A tensor in row-major order of its dimensions as they lie (StatePart::order), in host memory
// or a device's: a whole state, or a part of one.
struct CapturedTensor {
  std::string key;        // unique; empty: "<name>" of a weight, else "<kind>/<name>"
  std::string parameter;  // empty: part of a group or a document
  std::string kind;       // "weight", "exp_avg", "step", ...
  std::string optimizer;  // empty: the only one
  bool number = false;    // was a Python number
  DType dtype = DType::kF32;
  Shape shape;
  std::optional<StatePart> part;  // of what state; absent: it is all of it
  const std::byte* from = nullptr;
  int device = kHost;  // where that is (copier.h)
  // True if nothing but an optimizer's step writes it: it may be copied
  // until then.  If false, it is copied before the save returns.
  bool lazy = false;
};

struct CapturedParameter {
  std::string name;
  std::string role;  // "trainable", "frozen", "buffer"
};

struct CapturedGroup {
  std::string optimizer;
  std::vector<std::string> parameters;
  std::string pickle;  // key
};

struct CapturedDocument {
  std::string key;
  std::string scope;
  std::string pickle;                // key
  std::vector<std::string> tensors;  // keys
};

struct Capture {
  uint64_t step = 0;
  std::string framework = "torch";
  std::string framework_version;
  std::string layout;  // of the job (core/model/layout.h); empty: dp<world>
  std::vector<CapturedTensor> tensors;
  // More tensors, planned before, and the present place of each,
  // in the order of the tensors that the plan was made of.
  std::shared_ptr<const CapturePlan> plan;
  std::vector<const std::byte*> sources;
  std::vector<CapturedParameter> parameters;
  std::vector<std::pair<std::string, std::string>> aliases;  // alias, name
  std::vector<CapturedGroup> groups;
  std::vector<CapturedDocument> documents;
  // One entry per set of ranks that hold something alike and share out its writing,
  // if this rank is in the set: a digest of what they hold, and the number of ranks.
  std::vector<std::pair<std::string, uint32_t>> alike;
  std::shared_ptr<const void> owner;
  // Streams that may still be writing the tensors of devices.
  std::vector<DeviceStream> streams;
  // Names a tensor that was written since the save, in words; empty: none.  Save asks when the
  // tensors that cannot wait are copied (false: only about those); another thread may have written
  // them.  The writer's own thread asks when all is copied (true: about those that waited).
  std::function<std::string(bool all)> changed;
  // Save's thread asks this several times a second while Save waits
  // for room or for a daemon: true ends the wait.  May be empty.
  std::function<bool()> interrupted;
};

// Bytes of memory that make up a range of the file.
struct CopyRun {
  const std::byte* from = nullptr;
  uint64_t at = 0;  // in the file
  uint64_t bytes = 0;
  int device = kHost;
};

class CaptureFile {
 public:
  CaptureFile() = default;
  CaptureFile(CaptureFile&&) = default;
  CaptureFile& operator=(CaptureFile&&) = default;

  // kInvalid if two tensors have one key, a name is not UTF-8, a part is not one
  // (LocalRangeOf), or a plan has more or fewer tensors than there are sources.
  // `kept`: what of it durable saves have is left out; null: nothing is.
  static Result<CaptureFile> Make(Capture capture, uint32_t rank, uint32_t world,
                                  const KeptTensors* kept = nullptr);

  // The capture without its tensors.
  const Capture& capture() const { return capture_; }
  uint64_t bytes() const { return bytes_; }
  // The keys of the tensors for which it names earlier saves.
  const std::set<std::string>& kept() const { return kept_; }
  // Takes the digests of its tensors, to be made while it is handed over.
  TensorDigests TakeDigests() { return std::move(digests_); }
  // Returns the runs that make up [begin, end) of the file, in order:
  // those of the lazy tensors, or those of all else (the header, too).
  std::vector<CopyRun> Runs(uint64_t begin, uint64_t end, bool lazy) const;
  // Says for a lazy tensor in host memory which part of it
  // may be copied late.  Narrow makes the rest not lazy.
  using LatePart = std::function<std::span<const std::byte>(std::span<const std::byte>)>;
  void Narrow(const LatePart& late);
  // Writes into the header how many bytes nothing proves (kUnprovedKey).  REQUIRES: before the
  // header is copied.
  void SayUnproved(uint64_t bytes);
  // Returns the key of the tensor that a byte of the file belongs to; "" for the header.
  std::string KeyAt(uint64_t at) const;

 private:
  struct Part {
    uint64_t begin = 0;
    uint64_t end = 0;
    const std::byte* from = nullptr;
    bool lazy = false;
    int device = kHost;
    const std::string* key = nullptr;  // of a plan; of the header none
  };
  Capture capture_;
  CapturePlan rest_;                     // of what was not planned before
  std::shared_ptr<std::string> header_;  // runs refer to it
  std::vector<Part> parts_;              // sorted, without gaps from 0 to bytes_
  uint64_t bytes_ = 0;
  std::set<std::string> kept_;
  TensorDigests digests_;
};

// The bytes that a capture takes.
struct SnapshotSize {
  uint64_t file_bytes = 0;
  uint64_t lazy_bytes = 0;   // of them, copied after the save has returned
  uint64_t arena_bytes = 0;  // of a daemon's with the usual chunks
};

// With room for `slots` of them.  kInvalid as CaptureFile::Make.
Result<SnapshotSize> SizeOf(Capture capture, uint32_t rank, uint32_t world, uint32_t slots);

}  // namespace ckptfs
