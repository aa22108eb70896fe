// SPDX-License-Identifier: Apache-2.0
//
// KeptTensors knows which tensors this rank's durable saves hold, so that one whose bytes are
// still the same is not written again: the rank's file then names the directory of the save
// that has it (core/state/rank_file.h).
//
// A tensor is the same exactly if the digest of all its bytes, as they are at the save, is that
// of the bytes that were handed over then.  Its first bytes tell at once of most tensors that
// they changed; only of the others all bytes are digested.
//
// Thread safety: KeptTensors: all methods may be called concurrently.  TensorDigests: none.
// Lifetime: values.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/base/digest.h"
#include "core/base/mutex.h"
#include "core/blob/safetensors_header.h"

namespace ckptfs {

// Smaller tensors are always written.
inline constexpr uint64_t kLeastKept = 64 << 10;

// The bytes of a tensor that are compared first.
inline constexpr size_t kHeadBytes = 64;

// The digests of the tensors of a rank's file, made while it is handed over.
class TensorDigests {
 public:
  struct One {
    SafetensorsEntry entry;  // its range is that in the file
    std::string head;        // the first kHeadBytes at the save
    bool wanted = false;     // all of it is digested
    std::optional<Digest> digest = {};
  };
  // Ascending, without overlaps.
  void Add(One one) { all_.push_back(std::move(one)); }
  // The file's bytes from `begin` on.  REQUIRES: in order, each byte once.
  void Take(uint64_t begin, std::span<const std::byte> bytes);
  const std::vector<One>& all() const { return all_; }

 private:
  std::vector<One> all_;
  size_t next_ = 0;  // the first that is not over
  DigestStream stream_;
};

class KeptTensors {
 public:
  struct Place {
    std::string directory;    // of a durable save
    uint64_t file_bytes = 0;  // of the rank's file there
  };
  // Where the newest durable save has the tensor, if with just the bytes `now`.
  // Nothing if a save that is under way writes it anew: that one may be the newest durable one
  // by the time that this is stored, and the only one that is not removed.
  std::optional<Place> Find(const SafetensorsEntry& entry, std::span<const std::byte> now) const;
  // True if a digest of the tensor could be of use at the next save: nothing is known of it, or
  // it begins as it did at the last one.
  bool IsWanted(const SafetensorsEntry& entry, std::string_view head) const;

  // Remembers a save until it is over.  `kept`: the keys for which its file names earlier ones;
  // `bytes`: its size.
  void Begin(uint64_t attempt, std::shared_ptr<const TensorDigests> digests,
             std::set<std::string> kept, uint64_t bytes);
  // The save is durable, its files lie in `place` (empty: nobody knows where).
  void Durable(uint64_t attempt, const std::string& place);
  // The save was dropped.
  void Forget(uint64_t attempt);
  // The daemon dropped it.  If it named earlier ones these may have gone, or another daemon cannot
  // read them: the next saves write all, twice as many each time until one that names some lasts.
  void Refused(uint64_t attempt);

 private:
  struct Held {
    DType dtype = DType::kF32;
    Shape shape;
    std::string head;
    std::optional<Digest> digest;
    Place place;
    bool IsLike(const SafetensorsEntry& entry) const {
      return dtype == entry.dtype && shape == entry.shape;
    }
  };
  struct Pending {
    std::shared_ptr<const TensorDigests> digests;
    std::set<std::string> kept;
    uint64_t bytes = 0;
  };
  mutable Mutex mutex_;
  std::map<std::string, Held> held_ GUARDED_BY(mutex_);  // by the newest durable save; by key
  std::map<uint64_t, Pending> pending_ GUARDED_BY(mutex_);
  uint64_t last_ GUARDED_BY(mutex_) = 0;   // the newest durable attempt
  uint64_t rest_ GUARDED_BY(mutex_) = 0;   // saves that are still to be written whole
  uint64_t pause_ GUARDED_BY(mutex_) = 1;  // as many after the next refusal
};

std::string HeadOf(std::span<const std::byte> bytes);

}  // namespace ckptfs
