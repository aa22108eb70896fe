// SPDX-License-Identifier: Apache-2.0

#include "core/check/verify.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "core/base/checked_math.h"
#include "core/base/mutex.h"
#include "core/base/parallel.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/blob/chunk_list.h"
#include "core/check/split_copies.h"
#include "core/check/weight_check.h"
#include "core/model/read_blobs.h"
#include "core/view/plan.h"
#include "core/view/plan_reader.h"
#include "core/view/whole_atom.h"

namespace ckptfs {
namespace {

constexpr uint64_t kVerifyBuffer = uint64_t{4} << 20;
constexpr size_t kDefectsKept = 100;

// A step in which every copy of a replicated or averaged atom is an atom of its
// own, so that the plan reader can read each.
struct SplitStep {
  StepModel model;
  std::vector<std::pair<uint32_t, uint32_t>> copies;  // [first, end) per original atom
};

SplitStep SplitCopies(const StepModel& step) {
  SplitStep split;
  split.model = WithoutAtoms(step);
  split.model.atoms = step.atoms;  // casts refer by index: keep the originals first
  for (const Atom& atom : step.atoms) split.copies.push_back(AddCopies(atom, split.model));
  return split;
}

// Index of the first NaN or infinity, or values.size().
template <class T>
size_t FirstBad(std::span<const std::byte> bytes, T* bad) {
  const size_t count = bytes.size() / sizeof(T);
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(bad, bytes.data() + i * sizeof(T), sizeof(T));
    if (!std::isfinite(*bad)) return i;
  }
  return count;
}

// "subject: rest" and "subject rest" without the subject.
std::string WithoutSubject(std::string_view message, std::string_view subject) {
  if (!message.starts_with(subject)) return std::string(message);
  message.remove_prefix(subject.size());
  const size_t rest = message.find_first_not_of(": ");
  return std::string(rest == std::string_view::npos ? "" : message.substr(rest));
}

// Where a weight is not its master, over all its copies.
struct WeightDefect {
  uint64_t count = 0;
  std::string first;  // the first element and both files
};

class Verification {
 public:
  Verification(const StepModel& step, BlobReader& blobs, const VerifyOptions& options)
      : step_(step), blobs_(blobs), options_(options), split_(SplitCopies(step)) {}

  Result<VerifyReport> Run();

 private:
  void CheckBlobs();
  bool Intact(const Atom& atom) const;
  Result<uint64_t> ListItems();
  Result<uint64_t> ListWeights(std::vector<uint8_t>& read);
  Result<uint64_t> VerifyItem(size_t item);
  Result<uint64_t> DigestBlob(BlobIndex index);
  // Says what is wrong with the blob, whose chunks have these digests; "" if nothing is.  A file of
  // digests that is missing or damaged is a defect of its own.
  std::string WrongChunks(BlobIndex index, std::span<const Digest> found);
  RecordSums SumsOf(BlobIndex index);
  // True if no record is wrong; defects say which.
  bool CompareSums(BlobIndex index, const RecordSums& sums);
  Result<uint64_t> CompareCopies(size_t atom);
  Result<uint64_t> CompareWeight(const WeightPair& pair);
  Result<uint64_t> CompareLocal(AtomIndex weight, AtomIndex master, const LocalTensor& local,
                                WeightDefect& defect);
  Result<uint64_t> ReadWhole(size_t atom);
  // The local tensor as a file of its own; it fits the model.
  Result<Plan> PlanOf(AtomIndex atom, std::shared_ptr<const LocalTensor> local, DType dtype) const;
  Result<Plan> WholeAtom(AtomIndex atom, DType dtype) const;
  std::string FileAt(AtomIndex atom, DType dtype, uint64_t at) const;
  std::string FileAt(const Plan& plan, uint64_t at) const;
  Result<bool> SameAsFirst(const Atom& atom, uint32_t first, uint32_t other,
                           const PlanReader& reader, uint64_t at, std::span<const std::byte> mine,
                           std::span<std::byte> buffer);
  template <class T>
  bool IsFinite(AtomIndex index, DType dtype, uint64_t at, std::span<const std::byte> bytes);
  // Calls visit(offset, bytes) over the whole atom read as `dtype`; false stops.
  template <class Visit>
  Result<uint64_t> ReadAtom(AtomIndex atom, DType dtype, const Visit& visit);
  void Defect(std::string subject, std::string rule);
  // A file that changes meanwhile is one defect, however many atoms meet it.
  void Unreadable(const std::string& subject, const Error& error);
  // Compares a whole file.  One that somebody else may write and that nothing is read of is
  // not a defect.
  void UnreadableFile(BlobIndex index, const Error& error);
  std::string NameOf(const Atom& atom) const {
    return StrCat(step_.parameter(atom.parameter).name, " (", atom.kind, ")");
  }

  const StepModel& step_;
  BlobReader& blobs_;
  const VerifyOptions& options_;
  SplitStep split_;
  std::vector<WeightPair> weights_;  // stored beside their masters
  std::vector<size_t> compared_;     // atoms with copies that must be equal
  std::vector<size_t> read_;         // other atoms, read whole: every element is found
  std::vector<uint8_t> changed_;     // by blob: not the file that was adopted, so not read
  std::vector<uint8_t> of_step_;     // by blob: something is read of it
  std::vector<uint8_t> holds_;       // by blob: bytes of atoms lie in it
  Mutex mutex_;
  VerifyReport report_ GUARDED_BY(mutex_);
  std::set<std::string> stale_ GUARDED_BY(mutex_);  // files that changed meanwhile
};

void Verification::Defect(std::string subject, std::string rule) {
  const MutexLock lock(mutex_);
  ++report_.defect_count;
  if (report_.defects.size() < kDefectsKept) {
    report_.defects.push_back(VerifyDefect{std::move(subject), std::move(rule)});
  }
}

void Verification::Unreadable(const std::string& subject, const Error& error) {
  const std::string rule = WithoutSubject(error.message, subject);
  if (error.code == ErrorCode::kStale) {
    // The same text, whether the file or an atom in it met the change.
    const bool labelled = error.message.starts_with(StrCat(subject, ": "));
    const MutexLock lock(mutex_);
    if (!stale_.insert(labelled ? rule : error.message).second) return;
  }
  Defect(subject, rule);
}

void Verification::UnreadableFile(BlobIndex index, const Error& error) {
  const std::string path = blobs_.PathOf(index);
  const Blob& blob = step_.blob(index);
  const bool ours = blob.store_owned && blob.stamp.inode == 0;  // nobody else has a name of it
  const bool changed = error.code == ErrorCode::kStale || error.code == ErrorCode::kNotFound;
  if (of_step_[static_cast<uint32_t>(index)] != 0 || ours || !changed)
    return Unreadable(path, error);
  const std::string how = StrCat(path, ": ", WithoutSubject(error.message, path));
  const MutexLock lock(mutex_);
  ++report_.changed_notes;
  if (report_.changed_note.empty() || how < report_.changed_note) report_.changed_note = how;
}

// One defect for a file that is not the one that was adopted, however many
// tensors it held.
void Verification::CheckBlobs() {
  of_step_ = FindReadBlobs(step_);
  changed_.assign(step_.blobs.size(), 0);
  ParallelFor(step_.blobs.size(), [this](size_t i) {
    const BlobIndex index{static_cast<uint32_t>(i)};
    const Status same = blobs_.Check(index);
    if (same) return;
    changed_[i] = 1;
    UnreadableFile(index, same.error());
  });
}

bool Verification::Intact(const Atom& atom) const {
  if (const auto of = DerivedFrom(atom.source)) return Intact(step_.atom(*of));
  return !AnyBlobOf(atom.source, [this](uint32_t blob) { return changed_[blob] != 0; });
}

RecordSums Verification::SumsOf(BlobIndex index) {
  if (!options_.records) return RecordSums({});
  const std::string path = blobs_.PathOf(index);
  const auto file = blobs_.Open(index);
  auto records = file ? options_.records(*file) : Fail(Error(file.error()));
  if (records) return RecordSums(*std::move(records));
  // Adoption reads the directories only of files that it takes tensors from.
  if (holds_[static_cast<uint32_t>(index)] != 0) Unreadable(path, records.error());
  return RecordSums({});
}

bool Verification::CompareSums(BlobIndex index, const RecordSums& sums) {
  const Blob& blob = step_.blob(index);
  const std::string path = blobs_.PathOf(index);
  const bool recorded = blob.chunk_bytes != 0 || blob.content != Digest{};
  std::vector<std::string> wrong = sums.Wrong();
  const bool good = wrong.empty();
  for (std::string& rule : wrong) Defect(path, std::move(rule));
  const MutexLock lock(mutex_);
  report_.summed_bytes += recorded ? blob.stamp.size : sums.bytes_with_sum();
  if (sums.bytes_without_sum() == 0) return good;
  ++report_.unsummed_blobs;
  if (report_.unsummed.empty() || path < report_.unsummed) report_.unsummed = path;
  return good;
}

std::string Verification::WrongChunks(BlobIndex index, std::span<const Digest> found) {
  const Blob& blob = step_.blob(index);
  if (blob.chunk_list == Digest{}) return FirstWrongChunk(blob, found);
  const bool whole = HasChunks(blob, found);
  auto list = ReadChunkList(blobs_.RootOf(index), blob);
  if (!list) {
    const std::string path = blobs_.RootOf(index).PathOf(ChunkListPath(blob));
    Defect(path, StrCat(WithoutSubject(list.error().message, path),
                        whole ? "; all bytes of that file are what was stored" : ""));
  }
  if (whole) return {};
  if (!list) return "its bytes are not what was stored, and nothing tells which of them";
  Blob listed = blob;
  listed.chunks = *std::move(list);
  return FirstWrongChunk(listed, found);
}

Result<uint64_t> Verification::DigestBlob(BlobIndex index) {
  const Blob& blob = step_.blob(index);
  const std::string path = blobs_.PathOf(index);
  if (changed_[static_cast<uint32_t>(index)] != 0) return blob.stamp.size;
  RecordSums sums = SumsOf(index);
  DigestStream content;
  const bool by_chunks = blob.chunk_bytes != 0;
  ChunkDigester chunks(std::max<uint64_t>(blob.chunk_bytes, 1));
  std::vector<std::byte> buffer(std::min(kVerifyBuffer, blob.stamp.size));
  for (uint64_t at = 0; at < blob.stamp.size;) {
    const std::span<std::byte> piece(buffer.data(),
                                     std::min<uint64_t>(buffer.size(), blob.stamp.size - at));
    if (auto read = blobs_.Read(index, at, piece); !read) {
      UnreadableFile(index, read.error());
      return blob.stamp.size;
    }
    if (blob.content != Digest{}) content.Add(piece);
    sums.Add(at, piece);
    if (by_chunks) chunks.Add(piece);
    at += piece.size();
  }
  if (auto same = blobs_.CheckAgain(index); !same) {
    UnreadableFile(index, same.error());
    return blob.stamp.size;
  }
  const bool summed = CompareSums(index, sums);
  const Digest digest = content.Finish();
  std::string wrong = by_chunks ? WrongChunks(index, std::move(chunks).Finish()) : "";
  if (wrong.empty() && blob.content != Digest{} && blob.content != digest) {
    wrong = StrCat("content digest is ", digest.Hex(), ", recorded ", blob.content.Hex());
  }
  // The defects that the file's own checksums show are reported already.
  if (!wrong.empty() && summed) Defect(path, wrong);
  const MutexLock lock(mutex_);
  report_.blob_bytes += blob.stamp.size;
  ++report_.blobs;
  return blob.stamp.size;
}

Result<Plan> Verification::PlanOf(AtomIndex atom, std::shared_ptr<const LocalTensor> local,
                                  DType dtype) const {
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(local->shape));
  PlanBuilder builder;
  builder.Atom(atom, std::move(local), 0, elements, dtype);
  Plan plan = std::move(builder).Finish();
  CKPT_RETURN_IF_ERROR(plan.Validate(split_.model));
  return plan;
}

Result<Plan> Verification::WholeAtom(AtomIndex atom, DType dtype) const {
  return PlanOfWholeAtom(split_.model, atom, dtype);
}

template <class Visit>
Result<uint64_t> Verification::ReadAtom(AtomIndex atom, DType dtype, const Visit& visit) {
  CKPT_ASSIGN_OR_RETURN(const Plan plan, WholeAtom(atom, dtype));
  const PlanReader reader(plan, split_.model, blobs_);
  std::vector<std::byte> buffer(std::min(kVerifyBuffer, plan.size()));
  for (uint64_t at = 0; at < plan.size();) {
    const std::span<std::byte> piece(buffer.data(),
                                     std::min<uint64_t>(buffer.size(), plan.size() - at));
    CKPT_ASSIGN_OR_RETURN(const size_t got, reader.Read(at, piece));
    if (!visit(at, std::span<const std::byte>(piece))) break;
    at += got;
  }
  return plan.size();
}

// The file that holds byte `at` of the whole atom shown as `dtype`.
std::string Verification::FileAt(AtomIndex atom, DType dtype, uint64_t at) const {
  const auto plan = WholeAtom(atom, dtype);
  return plan ? FileAt(*plan, at) : "?";
}

std::string Verification::FileAt(const Plan& plan, uint64_t at) const {
  const auto origins = PlanReader(plan, split_.model, blobs_).Explain(at, 1, 1);
  if (!origins || origins->empty() || origins->front().kind != Origin::Kind::kBlob) return "?";
  return blobs_.PathOf(origins->front().blob);
}

// Compares copy `other` with `mine`, the bytes from `at` on of the first copy.
// False if they differ, which is noted.
Result<bool> Verification::SameAsFirst(const Atom& atom, uint32_t first, uint32_t other,
                                       const PlanReader& reader, uint64_t at,
                                       std::span<const std::byte> mine,
                                       std::span<std::byte> buffer) {
  const std::span<std::byte> theirs = buffer.first(mine.size());
  CKPT_RETURN_IF_ERROR(reader.Read(at, theirs));
  if (std::memcmp(mine.data(), theirs.data(), mine.size()) == 0) return true;
  const auto [a, b] = std::mismatch(mine.begin(), mine.end(), theirs.begin());
  const uint64_t byte = at + static_cast<uint64_t>(a - mine.begin());
  Defect(NameOf(atom),
         StrCat("replica ", other - first, " (", FileAt(AtomIndex{other}, atom.dtype, byte),
                ") differs from replica 0 (", FileAt(AtomIndex{first}, atom.dtype, byte),
                ") at element ", byte / std::max(1u, ByteWidth(atom.dtype))));
  return false;
}

Result<uint64_t> Verification::CompareCopies(size_t item) {
  const Atom& atom = step_.atoms[item];
  const uint32_t first = split_.copies[item].first;
  const uint32_t end = split_.copies[item].second;
  uint64_t bytes = 0;
  for (uint32_t copy = first + 1; copy < end; ++copy) {
    CKPT_ASSIGN_OR_RETURN(const Plan other, WholeAtom(AtomIndex{copy}, atom.dtype));
    const PlanReader reader(other, split_.model, blobs_);
    std::vector<std::byte> buffer(std::min(kVerifyBuffer, other.size()));
    Status failed;
    const auto visit = [&](uint64_t at, std::span<const std::byte> mine) {
      const auto same = SameAsFirst(atom, first, copy, reader, at, mine, buffer);
      if (!same) failed = Fail(same.error());
      return same && *same;
    };
    CKPT_ASSIGN_OR_RETURN(const uint64_t read, ReadAtom(AtomIndex{first}, atom.dtype, visit));
    CKPT_RETURN_IF_ERROR(failed);
    bytes += read;
  }
  const MutexLock lock(mutex_);
  ++report_.atoms_compared;
  return bytes;
}

// One rank's weights against its masters, both as weights.
Result<uint64_t> Verification::CompareLocal(AtomIndex weight, AtomIndex master,
                                            const LocalTensor& local, WeightDefect& defect) {
  const Atom& atom = split_.model.atom(weight);
  // As the rank holds them, which is how they lie in the file; but one place of a
  // tensor that was expanded is several elements, whose masters may differ.
  auto shown = std::make_shared<const LocalTensor>(local);
  auto weights = PlanOf(weight, shown, atom.dtype);
  if (!weights) {
    shown = std::make_shared<const LocalTensor>(WholeTensor(atom.shape));
    weights = PlanOf(weight, shown, atom.dtype);
  }
  if (!weights) return Fail(std::move(weights).error());
  CKPT_ASSIGN_OR_RETURN(const Plan masters, PlanOf(master, shown, atom.dtype));
  const PlanReader stored(*weights, split_.model, blobs_);
  const PlanReader cast(masters, split_.model, blobs_);
  const uint32_t width = ByteWidth(atom.dtype);
  std::vector<std::byte> buffer(2 * std::min(kVerifyBuffer, masters.size()));
  for (uint64_t at = 0; at < masters.size();) {
    const size_t bytes = std::min<uint64_t>(buffer.size() / 2, masters.size() - at);
    const std::span<std::byte> mine(buffer.data(), bytes);
    const std::span<std::byte> theirs(buffer.data() + bytes, bytes);
    CKPT_RETURN_IF_ERROR(stored.Read(at, mine));
    CKPT_RETURN_IF_ERROR(cast.Read(at, theirs));
    const Difference found = FindDifference(atom.dtype, mine, theirs);
    if (found.count > 0 && defect.count == 0) {
      const uint64_t byte = found.first * width;
      const auto text = [&](std::span<const std::byte> from) {
        return ElementText(atom.dtype, from.subspan(byte, width));
      };
      defect.first = StrCat(
          "element ", AtomElement(*shown, atom.shape, at / width + found.first).value_or(0), " is ",
          text(mine), " in ", FileAt(*weights, at + byte), ", but its master, cast to ",
          DTypeName(atom.dtype), ", is ", text(theirs), " in ", FileAt(masters, at + byte));
    }
    defect.count += found.count;
    at += bytes;
  }
  return masters.size();
}

Result<uint64_t> Verification::CompareWeight(const WeightPair& pair) {
  const auto copy_of = [&](AtomIndex atom, uint32_t copy) {
    const uint32_t first = split_.copies[static_cast<uint32_t>(atom)].first;
    return pair.copies == 1 ? atom : AtomIndex{first + copy};
  };
  const Atom& weight = step_.atom(pair.weight);
  WeightDefect defect;
  uint64_t bytes = 0;
  for (uint32_t copy = 0; copy < pair.copies; ++copy) {
    for (const LocalTensor& local : weight.source.gathers[copy].locals) {
      CKPT_ASSIGN_OR_RETURN(
          const uint64_t read,
          CompareLocal(copy_of(pair.weight, copy), copy_of(pair.master, copy), local, defect));
      bytes += read;
    }
  }
  if (defect.count > 0) {
    Defect(NameOf(weight), StrCat(defect.first, "; ", defect.count, " elements differ"));
  }
  const MutexLock lock(mutex_);
  ++report_.weights_compared;
  return bytes;
}

template <class T>
bool Verification::IsFinite(AtomIndex index, DType dtype, uint64_t at,
                            std::span<const std::byte> bytes) {
  T bad = 0;
  const size_t i = FirstBad(bytes, &bad);
  if (i == bytes.size() / sizeof(T)) return true;
  Defect(NameOf(step_.atom(index)),
         StrCat("element ", at / sizeof(T) + i, " is ", std::isnan(bad) ? "NaN" : "infinite",
                " in ", FileAt(index, dtype, at + i * sizeof(T))));
  return false;
}

// Every element of the atom is found, averaged, cast; on request it is finite.
Result<uint64_t> Verification::ReadWhole(size_t item) {
  const AtomIndex index{static_cast<uint32_t>(item)};
  const Atom& atom = step_.atom(index);
  const bool finite = options_.finite && IsFloat(atom.dtype);
  const bool wide = atom.dtype == DType::kF64;
  const DType dtype = finite && !wide ? DType::kF32 : atom.dtype;
  const auto visit = [&](uint64_t at, std::span<const std::byte> bytes) {
    if (!finite) return true;
    return wide ? IsFinite<double>(index, dtype, at, bytes)
                : IsFinite<float>(index, dtype, at, bytes);
  };
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ReadAtom(index, dtype, visit));
  const MutexLock lock(mutex_);
  ++report_.atoms_read;
  if (finite) ++report_.atoms_finite;
  return bytes;
}

Result<uint64_t> Verification::VerifyItem(size_t item) {
  if (item < step_.blobs.size()) return DigestBlob(BlobIndex{static_cast<uint32_t>(item)});
  item -= step_.blobs.size();
  size_t atom = 0;
  Result<uint64_t> bytes = 0;
  if (item < weights_.size()) {
    atom = static_cast<uint32_t>(weights_[item].weight);
    bytes = CompareWeight(weights_[item]);
  } else if (item -= weights_.size(); item < compared_.size()) {
    atom = compared_[item];
    bytes = CompareCopies(atom);
  } else {
    atom = read_[item - compared_.size()];
    bytes = ReadWhole(atom);
  }
  if (bytes) return bytes;
  Unreadable(NameOf(step_.atoms[atom]), bytes.error());  // an unreadable atom is a defect
  return 0;
}

// Weights and masters that are read for each other's sake.
Result<uint64_t> Verification::ListWeights(std::vector<uint8_t>& read) {
  uint64_t total = 0;
  WeightPairs pairs = FindWeightPairs(step_);
  for (const WeightPair& pair : pairs.compared) {
    if (!Intact(step_.atom(pair.weight)) || !Intact(step_.atom(pair.master))) continue;
    weights_.push_back(pair);
    // All their elements are found so, unless copies are averaged when shown.
    const Atom& weight = step_.atom(pair.weight);
    const bool whole = !options_.finite && !IsAveraged(weight.source);
    read[static_cast<uint32_t>(pair.weight)] = read[static_cast<uint32_t>(pair.master)] = whole;
    CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount(weight.shape, weight.dtype));
    total += bytes * pair.copies;
  }
  const MutexLock lock(mutex_);
  report_.weights_skipped = pairs.skipped.size();
  if (!pairs.skipped.empty()) report_.skipped = NameOf(step_.atom(pairs.skipped.front()));
  return total;
}

// The bytes that are read and compared.
Result<uint64_t> Verification::ListItems() {
  std::vector<uint8_t> read(step_.atoms.size(), 0);  // with another item
  CKPT_ASSIGN_OR_RETURN(uint64_t total, ListWeights(read));
  holds_.assign(step_.blobs.size(), 0);
  for (const Blob& blob : step_.blobs) total += blob.stamp.size;
  for (size_t i = 0; i < step_.atoms.size(); ++i) {
    const Atom& atom = step_.atoms[i];
    const auto bytes = ByteCount(atom.shape, atom.dtype);
    if (!bytes) return Fail(bytes.error());
    AnyBlobOf(atom.source, [this](uint32_t blob) { return (holds_[blob] = 1) == 0; });
    if (!Intact(atom)) continue;
    if (const auto copies = EqualCopies(atom.source); !copies.empty()) {
      compared_.push_back(i);
      total += *bytes * (copies.size() - 1);
    }
    if (ByteWidth(atom.dtype) == 0) continue;  // packed types cannot be read by elements
    if (read[i] != 0) continue;
    read_.push_back(i);
    total += *bytes;
  }
  return total;
}

Result<VerifyReport> Verification::Run() {
  CheckBlobs();
  CKPT_ASSIGN_OR_RETURN(const uint64_t total, ListItems());
  const size_t items = step_.blobs.size() + weights_.size() + compared_.size() + read_.size();
  CKPT_RETURN_IF_ERROR(
      RunWorkList(items, total, options_.job, [this](size_t i) { return VerifyItem(i); }));
  const MutexLock lock(mutex_);
  std::sort(report_.defects.begin(), report_.defects.end());  // in any order of finding
  return std::move(report_);
}

}  // namespace

Result<VerifyReport> VerifyStep(const StepModel& step, BlobReader& blobs,
                                const VerifyOptions& options) {
  return Verification(step, blobs, options).Run();
}

}  // namespace ckptfs
