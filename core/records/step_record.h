// SPDX-License-Identifier: Apache-2.0
//
// StepRecord is a committed step as the names of a store show it: which manifest, of which save,
// from where.  records.h has its text.
//
// Thread safety: values.
// Units: times are nanoseconds since the epoch.

#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/base/digest.h"

namespace ckptfs {

// Where a mount shows a step: /run/<run>/step/<id>, or /run/<run>/memory/<id> while several
// daemons hold it in memory (core/peer).  `latest` is a step of the first kind.
enum class StepPlace : uint8_t { kStep, kMemory };

// A committed step as the names show it.
struct StepRecord {
  std::string run;
  std::string id;  // unique in the run
  Digest manifest;
  uint64_t iteration = 0;
  int64_t mtime_ns = 0;        // newest source file
  bool converted = false;      // made from another save: that one counts as newer
  std::string source;          // absolute path it was adopted from
  std::string root;            // absolute save directory: what the run's name belongs to
  std::optional<Digest> side;  // content of its side blob
  // The digest of the step's identity (IdentityOf): steps with equal digests are the same.
  Digest unpacked;
  std::optional<Digest> replaces;  // the manifest whose place it took (--refresh)
  uint32_t life = 0;  // of the run, counted from 0 (core/store/lives.h); of snapshots always 0
  // It was taken while nothing proved that its save was over: another of its source takes its
  // place.
  bool provisional = false;
  // Its tensors were put into files of the store's own, in another form than the source's
  // (core/adopt/compact.h).
  bool compacted = false;
  StepPlace place = StepPlace::kStep;
};

// How a step is to be published.
struct PublishHow {
  bool converted = false;  // StepRecord::converted
  bool replace = false;    // another step of the same id and source
  bool notes = false;      // with `replace`: also the same one with other notes beside it
  // Into the run whatever root it belongs to: several save directories are one run,
  // that of the first one's root.
  bool join = false;
  uint32_t life = 0;         // StepRecord::life
  bool provisional = false;  // StepRecord::provisional
};

// A model's manifest as one store would publish it.
struct RenderedStep {
  std::string bytes;
  Digest manifest;
  Digest unpacked;  // StepRecord::unpacked
};

}  // namespace ckptfs
