// SPDX-License-Identifier: Apache-2.0

#include "core/redundancy/redundancy.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "core/base/mutex.h"
#include "core/redundancy/copy_compare.h"
#include "core/redundancy/document_copies.h"
#include "core/redundancy/equal_tensors.h"
#include "core/redundancy/file_checks.h"
#include "core/redundancy/kept_parts.h"
#include "core/redundancy/tensor_copies.h"

namespace ckptfs {
namespace {

constexpr uint64_t kItemBytes = uint64_t{64} << 20;  // of all copies

class RedundancyFinder {
 public:
  RedundancyFinder(const StepModel& step, BlobReader& blobs, const RedundancyOptions& options)
      : step_(step), blobs_(blobs), options_(options), copies_(step) {}

  Result<RedundancyReport> Run();

 private:
  // Elements [first, first + count) of a tensor; all of one that has a single copy.
  struct Item {
    size_t tensor = 0;
    uint64_t first = 0;
    uint64_t count = 0;
  };
  static constexpr uint64_t kAllElements = UINT64_MAX;

  void ListClasses();
  uint64_t ListItems();
  Result<uint64_t> CompareAll();
  Result<uint64_t> CompareItem(const Item& item);
  void Reduce(size_t tensor, const CopyComparison& found) EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ListFiles() EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TellSharing() EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Summarise();
  size_t ClassOf(const CopiedTensor& tensor) const {
    return class_of_.at(step_.atom(tensor.atom).kind);
  }

  const StepModel& step_;
  BlobReader& blobs_;
  const RedundancyOptions& options_;
  const TensorCopies copies_;
  std::vector<Item> items_;
  std::map<std::string, size_t> class_of_;  // by kind
  Mutex mutex_;
  std::map<size_t, CopyComparison> found_ GUARDED_BY(mutex_);  // of tensors with several copies
  std::vector<std::set<uint32_t>> class_blobs_ GUARDED_BY(mutex_);
  std::vector<FileRedundancy> by_blob_ GUARDED_BY(mutex_);
  std::vector<SharedPart> shared_ GUARDED_BY(mutex_);  // with blobs as holders until ListFiles
  RedundancyReport report_ GUARDED_BY(mutex_);
};

// Returns the bytes that are read.
uint64_t RedundancyFinder::ListItems() {
  uint64_t total = 0;
  for (size_t i = 0; i < copies_.tensors().size(); ++i) {
    const CopiedTensor& tensor = copies_.tensors()[i];
    if (tensor.copies.size() < 2) {
      items_.push_back({i, 0, kAllElements});
      continue;
    }
    const uint64_t at_once = ElementsAtOnce(tensor);
    const uint64_t bytes_at_once = at_once * tensor.width * tensor.copies.size();
    const uint64_t each = at_once * std::max<uint64_t>(kItemBytes / bytes_at_once, 1);
    for (uint64_t first = 0; first < tensor.elements; first += each)
      items_.push_back({i, first, std::min(each, tensor.elements - first)});
    total += tensor.bytes() * tensor.copies.size();
  }
  return total;
}

Result<uint64_t> RedundancyFinder::CompareItem(const Item& item) {
  const CopiedTensor& tensor = copies_.tensors()[item.tensor];
  if (item.count == kAllElements) {
    CopyComparison found;
    if (!tensor.copies.empty()) {
      CKPT_RETURN_IF_ERROR(copies_.VisitFiles(tensor, 0, [&](uint32_t blob, uint64_t elements) {
        found.stored[blob] += elements * tensor.width;
      }));
    }
    for (const auto& [blob, bytes] : found.stored) found.held[{blob}] = {bytes, bytes};
    const MutexLock lock(mutex_);
    Reduce(item.tensor, found);
    return uint64_t{0};
  }
  CKPT_ASSIGN_OR_RETURN(const CopyComparison part,
                        CompareCopies(copies_, blobs_, tensor, item.first, item.count));
  const MutexLock lock(mutex_);
  found_[item.tensor].Add(part);
  return item.count * tensor.width * tensor.copies.size();
}

// Returns the bytes that were read.
Result<uint64_t> RedundancyFinder::CompareAll() {
  ListClasses();
  const uint64_t total = ListItems();
  JobOptions job;
  job.threads = options_.threads;
  if (options_.progress && total > 0) job.progress = options_.progress("copies");
  CKPT_RETURN_IF_ERROR(
      RunWorkList(items_.size(), total, job, [this](size_t i) { return CompareItem(items_[i]); }));
  return total;
}

void RedundancyFinder::ListClasses() {
  const MutexLock lock(mutex_);
  for (const CopiedTensor& tensor : copies_.tensors()) {
    const std::string& kind = step_.atom(tensor.atom).kind;
    if (!class_of_.try_emplace(kind, report_.classes.size()).second) continue;
    report_.classes.emplace_back();
    report_.classes.back().name = kind;
  }
  class_blobs_.resize(report_.classes.size());
  report_.tensors.resize(copies_.tensors().size());
  by_blob_.resize(step_.blobs.size());
}

// Adds what was found of a tensor to the sums of its class and files.
void RedundancyFinder::Reduce(size_t index, const CopyComparison& found) {
  const CopiedTensor& tensor = copies_.tensors()[index];
  TensorRedundancy& told = report_.tensors[index];
  told.atom = tensor.atom;
  told.differing = found.differing;
  told.fewest_holders = found.held.empty() ? 0 : UINT32_MAX;
  for (const auto& [blob, bytes] : found.stored) {
    by_blob_[blob].stored += bytes;
    class_blobs_[ClassOf(tensor)].insert(blob);
  }
  for (const auto& [holders, tally] : found.held) {
    const auto count = static_cast<uint32_t>(holders.size());
    told.stored += tally.stored;
    told.unique += tally.unique;
    told.fewest_holders = std::min(told.fewest_holders, count);
    told.most_holders = std::max(told.most_holders, count);
    if (count == 1) {
      by_blob_[holders[0]].kept += tally.unique;
      continue;
    }
    for (const uint32_t blob : holders) by_blob_[blob].shared += tally.unique;
    shared_.push_back({index, holders, tally.unique});
  }
  ClassRedundancy& of = report_.classes[ClassOf(tensor)];
  of.stored += told.stored;
  of.unique += told.unique;
  of.differing += told.differing;
}

// Lists the files that hold something, and names the holders by them.
void RedundancyFinder::ListFiles() {
  std::vector<uint32_t> file_of(by_blob_.size());
  for (uint32_t blob = 0; blob < by_blob_.size(); ++blob) {
    if (by_blob_[blob].stored == 0) continue;
    file_of[blob] = static_cast<uint32_t>(report_.files.size());
    report_.files.push_back(by_blob_[blob]);
    report_.files.back().blob = BlobIndex{blob};
  }
  for (SharedPart& part : shared_)
    for (uint32_t& holder : part.holders) holder = file_of[holder];
}

// Says who holds what, now that the files of each class are known.
void RedundancyFinder::TellSharing() {
  std::vector<BySharing> bytes(report_.tensors.size());  // of each tensor
  for (const SharedPart& part : shared_) {
    const size_t files = class_blobs_[ClassOf(copies_.tensors()[part.tensor])].size();
    const Sharing sharing = part.holders.size() == files ? Sharing::kFull : Sharing::kPartial;
    bytes[part.tensor][static_cast<size_t>(sharing)] += part.bytes;
  }
  for (size_t i = 0; i < report_.tensors.size(); ++i) {
    TensorRedundancy& tensor = report_.tensors[i];
    const uint64_t full = bytes[i][static_cast<size_t>(Sharing::kFull)];
    const uint64_t partial = bytes[i][static_cast<size_t>(Sharing::kPartial)];
    const uint64_t none = tensor.unique - full - partial;
    bytes[i][static_cast<size_t>(Sharing::kNone)] = none;
    if (full + partial > 0)
      tensor.sharing = none + partial == 0 ? Sharing::kFull : Sharing::kPartial;
    ClassRedundancy& of = report_.classes[ClassOf(copies_.tensors()[i])];
    ++of.tensors[static_cast<size_t>(tensor.sharing)];
    for (size_t s = 0; s < kSharings; ++s) of.bytes[s] += bytes[i][s];
  }
  for (size_t i = 0; i < report_.classes.size(); ++i)
    report_.classes[i].files = class_blobs_[i].size();
}

// Finishes what is said of copies.
void RedundancyFinder::Summarise() {
  const MutexLock lock(mutex_);
  for (const auto& [tensor, found] : found_) Reduce(tensor, found);
  found_.clear();
  ListFiles();
  TellSharing();
  report_.pairs = PairsOf(shared_, report_.files.size());
  AssignKeepers(std::move(shared_), report_);
}

Result<RedundancyReport> RedundancyFinder::Run() {
  CKPT_RETURN_IF_ERROR(CheckFilesBefore(step_, blobs_));
  CKPT_ASSIGN_OR_RETURN(const uint64_t compared, CompareAll());
  Summarise();
  CKPT_ASSIGN_OR_RETURN(EqualSearch equal, FindEqualTensors(copies_, blobs_, options_));
  CKPT_ASSIGN_OR_RETURN(ClassRedundancy documents, CompareDocuments(step_, blobs_));
  CKPT_RETURN_IF_ERROR(CheckFilesAfter(step_, blobs_));
  const MutexLock lock(mutex_);
  report_.equal = std::move(equal.groups);
  report_.bytes_read = compared + equal.bytes_read;
  if (!step_.documents.empty()) report_.classes.push_back(std::move(documents));
  return std::move(report_);
}

}  // namespace

std::string_view SharingName(Sharing sharing) {
  switch (sharing) {
    case Sharing::kNone: return "none";
    case Sharing::kPartial: return "partial";
    case Sharing::kFull: return "full";
  }
  return "none";
}

Result<RedundancyReport> FindRedundancy(const StepModel& step, BlobReader& blobs,
                                        const RedundancyOptions& options) {
  return RedundancyFinder(step, blobs, options).Run();
}

}  // namespace ckptfs
