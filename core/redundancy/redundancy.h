// SPDX-License-Identifier: Apache-2.0
//
// FindRedundancy says which bytes of a step its files hold more than once.  It compares copies
// of one tensor element for element at the coordinates of the whole tensor, however each copy is
// cut over files, and finds other tensors whose bytes are equal.  It reports and never infers:
// a replica is a copy that the source's format says is one; equal bytes of other tensors (biases
// that are still zero) are told apart.
//
//   holders  of some bytes: the files that hold these bytes of this tensor
//   full     every file that holds anything of the class is a holder, and there are several
//   partial  several files are, but not all; of a tensor also: parts of it differ in this
//   none     one file is
//
// The class of a tensor is its atom's kind ("weight", "exp_avg").  "documents" are arguments,
// schedules, random states and the like, compared by name over their scopes.
//
// Copies are compared in units of kCompareUnit bytes of the whole tensor, cut where a copy goes
// on in another file: a unit of which one byte differs counts as another one.
//
// Thread safety: may run beside readers of the same step.
// Lifetime: the step and its blobs must outlive the call.
// Memory: of data kCompareRoom per thread and its marks, beside an index of the step's size.
// Units: bytes.

#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/base/work_list.h"
#include "core/blob/blob_reader.h"
#include "core/model/step_model.h"

namespace ckptfs {

inline constexpr uint64_t kCompareUnit = uint64_t{64} << 10;
inline constexpr uint64_t kCompareRoom = uint64_t{16} << 20;
inline constexpr std::string_view kDocumentClass = "documents";

enum class Sharing : uint8_t { kNone, kPartial, kFull };
inline constexpr size_t kSharings = 3;
std::string_view SharingName(Sharing sharing);

// A number for each Sharing.
using BySharing = std::array<uint64_t, kSharings>;

// The part of a tensor that one of its holders is to keep.
struct KeptPart {
  uint32_t file = 0;  // into RedundancyReport::files
  uint64_t bytes = 0;
  auto operator<=>(const KeptPart&) const = default;
};

struct TensorRedundancy {
  AtomIndex atom{};
  Sharing sharing = Sharing::kNone;
  uint64_t stored = 0;     // all copies
  uint64_t unique = 0;     // after dropping
  uint64_t differing = 0;  // of copies that the format calls equal, or averages: not equal
  uint32_t fewest_holders = 0, most_holders = 0;
  std::vector<KeptPart> keeps;  // who keeps what several hold; sorted
};

struct ClassRedundancy {
  std::string name;
  uint64_t files = 0;  // that hold anything of it (of documents: scopes)
  uint64_t stored = 0, unique = 0, differing = 0;
  BySharing tensors{};
  BySharing bytes{};  // of `unique`, by the number of holders
};

struct FileRedundancy {
  BlobIndex blob{};
  uint64_t stored = 0;  // of tensors
  uint64_t kept = 0;    // after dropping
  uint64_t shared = 0;  // of stored: other files hold it, too
};

// Tensors whose bytes are equal though they are not copies of each other.
struct EqualBytes {
  uint64_t bytes = 0;     // of one
  bool constant = false;  // each element is the same
  std::vector<AtomIndex> atoms;
};

struct SharedPair {
  uint32_t a = 0, b = 0;  // into files, a < b
  uint64_t bytes = 0;     // that both hold
  auto operator<=>(const SharedPair&) const = default;
};

struct RedundancyReport {
  std::vector<ClassRedundancy> classes;   // in the order of the step's atoms, documents last
  std::vector<TensorRedundancy> tensors;  // all that are stored, in the step's order
  std::vector<FileRedundancy> files;      // that hold tensors, in the step's order
  std::vector<EqualBytes> equal;          // the largest first
  // Sorted; nothing if more than kMostPairedFiles files share something.
  std::optional<std::vector<SharedPair>> pairs;
  uint64_t bytes_read = 0;
};

inline constexpr size_t kMostPairedFiles = 1024;

struct RedundancyOptions {
  unsigned threads = 0;  // JobOptions::threads
  // Shows the progress of a stage ("copies", "samples", "digests"); may be empty.
  std::function<std::function<void(const JobProgress&)>(std::string_view stage)> progress;
};

// kStale, kNotFound, ... with the file's name if one is not, or does not stay, what was adopted.
// BLOCKS: on reading all copies, and samples or all of tensors of equal size and dtype.
Result<RedundancyReport> FindRedundancy(const StepModel& step, BlobReader& blobs,
                                        const RedundancyOptions& options);

}  // namespace ckptfs
