// SPDX-License-Identifier: Apache-2.0

#include "core/jobs/verify.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/base/checked_math.h"
#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/view/plan.h"
#include "core/view/plan_reader.h"

namespace ckptfs {
namespace {

constexpr uint64_t kBuffer = uint64_t{4} << 20;
constexpr size_t kDefectsKept = 100;

// A step in which every copy of a replicated or averaged atom is an atom of its
// own, so that the plan reader can read each.
struct SplitStep {
  StepModel model;
  std::vector<std::pair<AtomIndex, AtomIndex>> copies;  // [first, last] per original atom
};

SplitStep SplitCopies(const StepModel& step) {
  SplitStep split;
  split.model.roots = step.roots;
  split.model.blobs = step.blobs;
  split.model.parameters = step.parameters;
  split.model.atoms = step.atoms;  // casts refer by index: keep the originals first
  for (size_t i = 0; i < step.atoms.size(); ++i) {
    const Atom& atom = step.atoms[i];
    const size_t first = split.model.atoms.size();
    for (const Gather& gather : atom.source.gathers) {
      Atom copy = atom;
      copy.source = AtomSource{};
      copy.source.gathers.push_back(gather);
      split.model.atoms.push_back(std::move(copy));
    }
    split.copies.emplace_back(AtomIndex{static_cast<uint32_t>(first)},
                              AtomIndex{static_cast<uint32_t>(split.model.atoms.size())});
  }
  return split;
}

bool AllFinite(std::span<const float> values, size_t* bad) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      *bad = i;
      return false;
    }
  }
  return true;
}

class Verification {
 public:
  Verification(const StepModel& step, BlobReader& blobs, const VerifyOptions& options)
      : step_(step), blobs_(blobs), options_(options), split_(SplitCopies(step)) {}

  Result<VerifyReport> Run();

 private:
  Result<uint64_t> VerifyItem(size_t item);
  Result<uint64_t> DigestBlob(BlobIndex index);
  Result<uint64_t> CompareCopies(size_t atom);
  Result<uint64_t> CheckFinite(size_t atom);
  // Calls visit(offset, bytes) over the whole atom read as `dtype`; false stops.
  template <class Visit>
  Result<uint64_t> ReadAtom(AtomIndex atom, DType dtype, const Visit& visit);
  void Defect(std::string subject, std::string rule);
  std::string NameOf(const Atom& atom) const {
    return StrCat(step_.parameter(atom.parameter).name, " (", atom.kind, ")");
  }

  const StepModel& step_;
  BlobReader& blobs_;
  const VerifyOptions& options_;
  SplitStep split_;
  std::vector<size_t> compared_;  // atoms with copies that must be equal
  std::vector<size_t> finite_;    // atoms to check for NaN
  Mutex mutex_;
  VerifyReport report_ GUARDED_BY(mutex_);
};

void Verification::Defect(std::string subject, std::string rule) {
  const MutexLock lock(mutex_);
  ++report_.defect_count;
  if (report_.defects.size() < kDefectsKept) {
    report_.defects.push_back(VerifyDefect{std::move(subject), std::move(rule)});
  }
}

Result<uint64_t> Verification::DigestBlob(BlobIndex index) {
  const Blob& blob = step_.blob(index);
  const std::string path = blobs_.PathOf(index);
  if (auto same = blobs_.Check(index); !same) {
    Defect(path, same.error().message);
    return blob.stamp.size;
  }
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  std::vector<std::byte> buffer(std::min(kBuffer, blob.stamp.size));
  for (uint64_t at = 0; at < blob.stamp.size;) {
    const std::span<std::byte> piece(buffer.data(),
                                     std::min<uint64_t>(buffer.size(), blob.stamp.size - at));
    if (auto read = blobs_.Read(index, at, piece); !read) {
      Defect(path, read.error().message);
      return blob.stamp.size;
    }
    XXH3_128bits_update(&state, piece.data(), piece.size());
    at += piece.size();
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  const Digest digest{hash.high64, hash.low64};
  if (blob.content != Digest{} && blob.content != digest) {
    Defect(path, StrCat("content digest is ", digest.Hex(), ", recorded ", blob.content.Hex()));
  }
  const MutexLock lock(mutex_);
  report_.digests[static_cast<uint32_t>(index)] = digest;
  report_.blob_bytes += blob.stamp.size;
  ++report_.blobs;
  return blob.stamp.size;
}

template <class Visit>
Result<uint64_t> Verification::ReadAtom(AtomIndex atom, DType dtype, const Visit& visit) {
  const Atom& of = split_.model.atom(atom);
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(of.shape));
  PlanBuilder builder;
  builder.Atom(atom, std::make_shared<const LocalTensor>(WholeTensor(of.shape)), 0, elements,
               dtype);
  const Plan plan = std::move(builder).Finish();
  const PlanReader reader(plan, split_.model, blobs_);
  std::vector<std::byte> buffer(std::min(kBuffer, plan.size()));
  for (uint64_t at = 0; at < plan.size();) {
    const std::span<std::byte> piece(buffer.data(),
                                     std::min<uint64_t>(buffer.size(), plan.size() - at));
    CKPT_ASSIGN_OR_RETURN(const size_t got, reader.Read(at, piece));
    if (!visit(at, std::span<const std::byte>(piece))) break;
    at += got;
  }
  return plan.size();
}

Result<uint64_t> Verification::CompareCopies(size_t item) {
  const Atom& atom = step_.atoms[item];
  const AtomIndex first = split_.copies[item].first;  // no binding: a lambda captures it
  const AtomIndex end = split_.copies[item].second;
  uint64_t bytes = 0;
  for (uint32_t copy = static_cast<uint32_t>(first) + 1; copy < static_cast<uint32_t>(end);
       ++copy) {
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(atom.shape));
    PlanBuilder builder;
    builder.Atom(AtomIndex{copy}, std::make_shared<const LocalTensor>(WholeTensor(atom.shape)), 0,
                 elements, atom.dtype);
    const Plan other = std::move(builder).Finish();
    const PlanReader other_reader(other, split_.model, blobs_);
    std::vector<std::byte> buffer(std::min(kBuffer, other.size()));
    Status failed;
    auto read = ReadAtom(first, atom.dtype, [&](uint64_t at, std::span<const std::byte> mine) {
      const std::span<std::byte> theirs(buffer.data(), mine.size());
      if (auto got = other_reader.Read(at, theirs); !got) {
        failed = Fail(std::move(got).error());
        return false;
      }
      const auto [a, b] = std::mismatch(mine.begin(), mine.end(), theirs.begin());
      if (a == mine.end()) return true;
      const uint64_t byte = at + static_cast<uint64_t>(a - mine.begin());
      Defect(NameOf(atom), StrCat("replica ", copy - static_cast<uint32_t>(first),
                                  " differs from replica 0 at element ",
                                  byte / std::max(1u, ByteWidth(atom.dtype))));
      return false;
    });
    if (!failed) return Fail(std::move(failed).error());
    if (!read) return Fail(std::move(read).error());
    bytes += *read;
  }
  const MutexLock lock(mutex_);
  ++report_.atoms_compared;
  return bytes;
}

Result<uint64_t> Verification::CheckFinite(size_t item) {
  const Atom& atom = step_.atoms[item];
  const auto visit = [&](uint64_t at, std::span<const std::byte> bytes) {
    const std::span<const float> values(reinterpret_cast<const float*>(bytes.data()),
                                        bytes.size() / sizeof(float));
    size_t bad = 0;
    if (AllFinite(values, &bad)) return true;
    Defect(NameOf(atom), StrCat("element ", at / sizeof(float) + bad, " is ",
                                std::isnan(values[bad]) ? "NaN" : "infinite"));
    return false;
  };
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ReadAtom(AtomIndex{static_cast<uint32_t>(item)},
                                                       DType::kF32, visit));
  const MutexLock lock(mutex_);
  ++report_.atoms_finite;
  return bytes;
}

Result<uint64_t> Verification::VerifyItem(size_t item) {
  if (item < step_.blobs.size()) return DigestBlob(BlobIndex{static_cast<uint32_t>(item)});
  item -= step_.blobs.size();
  const bool compares = item < compared_.size();
  const size_t atom = compares ? compared_[item] : finite_[item - compared_.size()];
  auto bytes = compares ? CompareCopies(atom) : CheckFinite(atom);
  if (bytes) return bytes;
  Defect(NameOf(step_.atoms[atom]), bytes.error().message);  // what cannot be read is a defect
  return 0;
}

Result<VerifyReport> Verification::Run() {
  uint64_t total = 0;
  for (const Blob& blob : step_.blobs) total += blob.stamp.size;
  for (size_t i = 0; i < step_.atoms.size(); ++i) {
    const Atom& atom = step_.atoms[i];
    const auto bytes = ByteCount(atom.shape, atom.dtype);
    if (!bytes) return Fail(bytes.error());
    if (atom.source.kind == SourceKind::kReplicas) {
      compared_.push_back(i);
      total += *bytes * (atom.source.gathers.size() - 1);
    }
    const bool readable = atom.source.kind != SourceKind::kReplay && atom.dtype != DType::kF64;
    if (options_.finite && IsFloat(atom.dtype) && readable) {
      finite_.push_back(i);
      total += *bytes / ByteWidth(atom.dtype) * sizeof(float);
    }
  }
  {
    const MutexLock lock(mutex_);
    report_.digests.resize(step_.blobs.size());
  }
  CKPT_RETURN_IF_ERROR(RunWorkList(step_.blobs.size() + compared_.size() + finite_.size(), total,
                                   options_.job, [this](size_t i) { return VerifyItem(i); }));
  const MutexLock lock(mutex_);
  return std::move(report_);
}

}  // namespace

Result<VerifyReport> VerifyStep(const StepModel& step, BlobReader& blobs,
                                const VerifyOptions& options) {
  return Verification(step, blobs, options).Run();
}

}  // namespace ckptfs
