// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/pack.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>

#include "core/access/access_rule.h"
#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "core/check/scattered_read.h"
#include "core/view/source_runs.h"

namespace ckptfs {
namespace {

constexpr uint64_t kMinFragments = 16;
constexpr uint64_t kMaxMeanBytes = 4096;
constexpr uint64_t kMinLimit = uint64_t{64} << 20;
constexpr uint64_t kMaxLimit = uint64_t{1} << 30;
constexpr uint64_t kSourceShare = 10'000;
constexpr size_t kMaxPieces = size_t{16} << 20;

struct Candidate {
  AtomIndex atom{};
  uint64_t bytes = 0;
  uint64_t fragments = 0;
  std::string key;
  uint64_t begin = 0;  // of the side blob's data
};

std::string KeyOf(const StepModel& model, const Atom& atom) {
  const std::string& name = model.parameter(atom.parameter).name;
  return atom.optimizer.empty() ? StrCat(atom.kind, "/", name)
                                : StrCat(atom.optimizer, "/", atom.kind, "/", name);
}

// The atom's bytes and fragments if it lies in many small ones.
std::optional<Candidate> AsCandidate(const StepModel& model, AtomIndex index) {
  const Atom& atom = model.atom(index);
  const AtomSource& source = atom.source;
  if (!IsCopyable(source) || ByteWidth(atom.dtype) == 0 || SafetensorsName(atom.dtype).empty()) {
    return {};
  }
  Candidate found{index, ByteCount(atom.shape, atom.dtype).value_or(0), 0, KeyOf(model, atom)};
  for (const FragmentSeries& series : source.gathers.front().series) {
    if (series.dtype != atom.dtype) return {};
    found.fragments += series.count;
  }
  if (found.bytes == 0 || found.fragments < kMinFragments ||
      found.bytes / found.fragments > kMaxMeanBytes) {
    return {};
  }
  return found;
}

// Smallest fragments first, as many as the limit lets in, no key twice.
std::vector<Candidate> Choose(const StepModel& model, uint64_t limit) {
  std::vector<Candidate> all;
  for (uint32_t i = 0; i < model.atoms.size(); ++i) {
    if (auto candidate = AsCandidate(model, AtomIndex{i})) all.push_back(*std::move(candidate));
  }
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
    return a.bytes / a.fragments < b.bytes / b.fragments;
  });
  std::vector<Candidate> chosen;
  std::set<std::string_view> keys;
  uint64_t bytes = 0;
  uint64_t fragments = 0;
  for (Candidate& candidate : all) {
    if (candidate.bytes > limit - bytes || candidate.fragments > kMaxPieces - fragments) continue;
    if (!keys.insert(candidate.key).second) continue;
    bytes += candidate.bytes;
    fragments += candidate.fragments;
    chosen.push_back(candidate);  // its key stays in `all`, where `keys` looks
  }
  return chosen;
}

// In the order of the file: wide types first, which keeps all aligned, and of a
// kind in model order, which is how a rank reads them.
void Arrange(const StepModel& model, std::vector<Candidate>& chosen) {
  const auto order = [&model](const Candidate& candidate) {
    const Atom& atom = model.atom(candidate.atom);
    return std::tuple(-static_cast<int>(ByteWidth(atom.dtype)), std::string_view(atom.kind),
                      atom.parameter, candidate.atom);
  };
  std::sort(chosen.begin(), chosen.end(),
            [&](const Candidate& a, const Candidate& b) { return order(a) < order(b); });
  uint64_t at = 0;
  for (Candidate& candidate : chosen) {
    candidate.begin = at;
    at += candidate.bytes;
  }
}

// Appends the atom's pieces; false if it is scaled, strided or beyond the bound.
bool AddPieces(const Atom& atom, uint64_t begin, std::vector<ScatteredPiece>& pieces) {
  const size_t before = pieces.size();
  const uint64_t width = ByteWidth(atom.dtype);
  const LocalTensor whole = WholeTensor(atom.shape);
  const uint64_t elements = ElementCount(atom.shape).value_or(0);
  const RunsEnd end =
      ForEachSourceRun(atom.source.gathers.front(), whole, 0, elements, [&](const SourceRun& run) {
        const bool dense = run.count == 1 || (run.source_stride == 1 && run.target_stride == 1);
        const bool plain = dense && run.factor == 1.0 && run.stored == atom.dtype;
        if (!plain || run.count * width > UINT32_MAX || pieces.size() == kMaxPieces) return false;
        pieces.push_back(ScatteredPiece{static_cast<uint32_t>(run.blob),
                                        static_cast<uint32_t>(run.count * width), run.offset,
                                        begin + run.target * width});
        return true;
      });
  if (end == RunsEnd::kDone) return true;
  pieces.resize(before);
  return false;
}

// The packed tensors as they are arranged, and their pieces.
struct Work {
  std::vector<Candidate> atoms;
  std::vector<ScatteredPiece> pieces;  // their destinations are of the data
};

Work PlanOf(const StepModel& model, uint64_t limit) {
  Work work;
  work.atoms = Choose(model, limit);
  std::erase_if(work.atoms, [&](const Candidate& candidate) {
    return !AddPieces(model.atom(candidate.atom), 0, work.pieces);
  });
  work.pieces.clear();
  Arrange(model, work.atoms);  // now that it is known which there are
  for (const Candidate& candidate : work.atoms) {
    CKPT_CHECK(AddPieces(model.atom(candidate.atom), candidate.begin, work.pieces));
  }
  return work;
}

// Header and room for the data; empty if the names do not fit into a header.
std::string BlankFile(const StepModel& model, const Work& work, uint64_t& data_offset) {
  std::vector<SafetensorsEntry> entries;
  for (const Candidate& candidate : work.atoms) {
    const Atom& atom = model.atom(candidate.atom);
    entries.push_back(SafetensorsEntry{candidate.key, atom.dtype, atom.shape});
  }
  auto header = RenderSafetensorsHeader({{"format", "pt"}}, entries);
  if (!header) return {};
  data_offset = header->size();
  header->resize(data_offset + entries.back().end);
  return *std::move(header);
}

Result<OwnerAndMode> AccessToAll(const BlobReader& blobs, const StepModel& model,
                                 const Work& work) {
  std::vector<OwnerAndMode> files;
  for (const uint32_t index : BlobsOf(work.pieces)) {
    const Blob& blob = model.blobs[index];
    CKPT_ASSIGN_OR_RETURN(const auto file, blobs.Open(BlobIndex{index}));
    CKPT_ASSIGN_OR_RETURN(const FileIdentity identity, file->Identity());
    files.push_back({blob.mode & 0777, blob.uid, blob.gid, identity.access.acl});
  }
  return TightestAccess(files);
}

}  // namespace

Result<Packing> PackSmallPieces(const StepModel& model, BlobReader& blobs,
                                const PackOptions& options) {
  uint64_t source_bytes = 0;
  for (const Blob& blob : model.blobs) source_bytes += blob.stamp.size / kSourceShare;
  const uint64_t limit =
      options.limit != 0 ? options.limit : std::clamp(source_bytes, kMinLimit, kMaxLimit);
  Work work = PlanOf(model, limit);
  Packing packing;
  if (work.atoms.empty()) return packing;
  uint64_t data_offset = 0;
  packing.bytes = BlankFile(model, work, data_offset);
  if (packing.bytes.empty()) return packing;
  CKPT_ASSIGN_OR_RETURN(packing.reads, ReadScattered(blobs, work.pieces, options.threads,
                                                     packing.bytes.data() + data_offset));
  packing.pieces = work.pieces.size();
  CKPT_ASSIGN_OR_RETURN(packing.access, AccessToAll(blobs, model, work));
  for (const Candidate& candidate : work.atoms) {
    packing.atoms.push_back(SideAtom{candidate.atom, data_offset + candidate.begin});
  }
  return packing;
}

}  // namespace ckptfs
