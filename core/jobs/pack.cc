// SPDX-License-Identifier: Apache-2.0

#include "core/jobs/pack.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <optional>
#include <set>
#include <tuple>

#include "core/base/strings.h"
#include "core/io/file_stamp.h"
#include "core/blob/safetensors_header.h"
#include "core/jobs/work_list.h"
#include "core/view/source_runs.h"

namespace ckptfs {
namespace {

constexpr uint64_t kMinFragments = 16;
constexpr uint64_t kMaxMeanBytes = 4096;
constexpr uint64_t kMinLimit = uint64_t{64} << 20;
constexpr uint64_t kMaxLimit = uint64_t{1} << 30;
constexpr uint64_t kSourceShare = 10'000;
constexpr size_t kMaxPieces = size_t{16} << 20;
// Neighbours closer than this are read in one call.
constexpr uint64_t kGap = 4096;
constexpr uint64_t kReadBytes = uint64_t{1} << 20;

// Bytes of one file and where they go.
struct PieceRead {
  uint32_t blob;
  uint32_t length;
  uint64_t offset;
  uint64_t destination;  // of the side blob's data
};

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
  const bool gathered =
      (source.kind == SourceKind::kGather && source.gathers.size() == 1) ||
      (source.kind == SourceKind::kReplicas && source.gathers.size() > 1);
  if (!gathered || ByteWidth(atom.dtype) == 0 || SafetensorsName(atom.dtype).empty()) return {};
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
bool AddPieces(const Atom& atom, uint64_t begin, std::vector<PieceRead>& pieces) {
  const size_t before = pieces.size();
  const uint64_t width = ByteWidth(atom.dtype);
  const LocalTensor whole = WholeTensor(atom.shape);
  const uint64_t elements = ElementCount(atom.shape).value_or(0);
  const RunsEnd end = ForEachSourceRun(
      atom.source.gathers.front(), whole, 0, elements, [&](const SourceRun& run) {
        const bool dense = run.count == 1 || (run.source_stride == 1 && run.target_stride == 1);
        const bool plain = dense && run.factor == 1.0 && run.stored == atom.dtype;
        if (!plain || run.count * width > UINT32_MAX || pieces.size() == kMaxPieces) return false;
        pieces.push_back(PieceRead{static_cast<uint32_t>(run.blob),
                                 static_cast<uint32_t>(run.count * width), run.offset,
                                 begin + run.target * width});
        return true;
      });
  if (end == RunsEnd::kDone) return true;
  pieces.resize(before);
  return false;
}

// What is packed, arranged, and the pieces of it by file and offset.
struct Work {
  std::vector<Candidate> atoms;
  std::vector<PieceRead> pieces;
  std::vector<std::pair<size_t, size_t>> files;  // [first, last) pieces of one
};

Work Plan(const StepModel& model, uint64_t limit) {
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
  std::sort(work.pieces.begin(), work.pieces.end(), [](const PieceRead& a, const PieceRead& b) {
    return std::tie(a.blob, a.offset) < std::tie(b.blob, b.offset);
  });
  for (size_t i = 0; i < work.pieces.size(); ++i) {
    const bool same = i > 0 && work.pieces[i].blob == work.pieces[i - 1].blob;
    if (!same) work.files.emplace_back(i, i);
    work.files.back().second = i + 1;
  }
  return work;
}

// One source file, open, of which only what the stamp says is read.
class SourceFile {
 public:
  SourceFile(const SourceFile&) = delete;
  SourceFile& operator=(const SourceFile&) = delete;
  SourceFile(const StepModel& model, uint32_t blob)
      : blob_(model.blobs[blob]), path_(model.PathOf(blob_)) {}
  ~SourceFile() {
    if (fd_ >= 0) close(fd_);
  }

  Status Open() {
    // O_NONBLOCK: a fifo put in the file's place must not hang us.
    fd_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat info;
    if (fd_ < 0 || fstat(fd_, &info) != 0) return Fail(ErrnoError(errno, path_));
    if (!S_ISREG(info.st_mode)) {
      return Fail(ErrorCode::kStale, StrCat(path_, " is no file any more"));
    }
    // No read-ahead between the pieces, and no pages kept for their sake.
    (void)posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
    (void)posix_fadvise(fd_, 0, 0, POSIX_FADV_NOREUSE);
    return CompareStamps(path_, blob_.stamp, StampOf(info));
  }

  Status Read(uint64_t offset, char* out, uint64_t length) {
    while (length > 0) {
      const ssize_t n = pread(fd_, out, length, static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return Fail(ErrnoError(errno, path_));
      if (n == 0) return Fail(ErrorCode::kDataLoss, StrCat(path_, " ends at byte ", offset));
      offset += static_cast<uint64_t>(n);
      out += n;
      length -= static_cast<uint64_t>(n);
    }
    return {};
  }

  // The name and what is open are still what was adopted.
  Status Unchanged() const {
    struct stat info;
    if (fstat(fd_, &info) != 0) return Fail(ErrnoError(errno, path_));
    CKPT_RETURN_IF_ERROR(CompareStamps(path_, blob_.stamp, StampOf(info)));
    CKPT_ASSIGN_OR_RETURN(const BlobStamp named, StampOfFile(path_));
    return CompareStamps(path_, blob_.stamp, named);
  }

 private:
  const Blob& blob_;
  const std::string path_;
  int fd_ = -1;
};

// Reads the pieces of one file to `data`; returns the calls it took.
Result<uint64_t> ReadPieces(SourceFile& file, std::span<const PieceRead> pieces, char* data) {
  uint64_t calls = 0;
  std::string buffer;
  while (!pieces.empty()) {
    const PieceRead& first = pieces.front();
    uint64_t end = first.offset + first.length;
    size_t count = 1;  // of pieces that lie close together
    for (; count < pieces.size() && pieces[count].offset <= end + kGap; ++count) {
      const uint64_t further = std::max(end, pieces[count].offset + pieces[count].length);
      if (further - first.offset > kReadBytes) break;
      end = further;
    }
    ++calls;
    if (count == 1) {
      CKPT_RETURN_IF_ERROR(file.Read(first.offset, data + first.destination, first.length));
    } else {
      buffer.resize(end - first.offset);
      CKPT_RETURN_IF_ERROR(file.Read(first.offset, buffer.data(), buffer.size()));
      for (const PieceRead& piece : pieces.first(count)) {
        std::memcpy(data + piece.destination, buffer.data() + (piece.offset - first.offset),
                    piece.length);
      }
    }
    pieces = pieces.subspan(count);
  }
  return calls;
}

// Reads all files, several at a time; returns the calls it took.
Result<uint64_t> ReadFiles(const StepModel& model, const Work& work, unsigned threads,
                           char* data) {
  std::atomic<uint64_t> reads{0};
  const auto read_one = [&](size_t i) -> Result<uint64_t> {
    const auto [first, last] = work.files[i];
    SourceFile file(model, work.pieces[first].blob);
    CKPT_RETURN_IF_ERROR(file.Open());
    CKPT_ASSIGN_OR_RETURN(
        const uint64_t calls,
        ReadPieces(file, std::span(work.pieces).subspan(first, last - first), data));
    CKPT_RETURN_IF_ERROR(file.Unchanged());
    reads += calls;
    return last - first;
  };
  JobOptions job;
  job.threads = threads;
  CKPT_RETURN_IF_ERROR(RunWorkList(work.files.size(), work.pieces.size(), job, read_one));
  return reads.load();
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

FileAccess AccessOf(const StepModel& model, const Work& work) {
  std::vector<FileAccess> files;
  for (const auto& [first, last] : work.files) {
    const Blob& blob = model.blobs[work.pieces[first].blob];
    FileAccess access{blob.mode & 0777, blob.uid, blob.gid};
    if (HasAcl(model.PathOf(blob))) access.mode &= 0700;
    files.push_back(access);
  }
  return TightestAccess(files);
}

}  // namespace

FileAccess TightestAccess(std::span<const FileAccess> files) {
  if (files.empty()) return {};
  const bool one_owner = std::all_of(files.begin(), files.end(), [&](const FileAccess& file) {
    return file.uid == files.front().uid;
  });
  const bool one_group = std::all_of(files.begin(), files.end(), [&](const FileAccess& file) {
    return file.gid == files.front().gid;
  });
  uint32_t bits = 0777;
  for (const FileAccess& file : files) bits &= file.mode;
  uint32_t owner = bits >> 6 & 7;
  uint32_t group = bits >> 3 & 7;
  uint32_t others = bits & 7;
  // Who is another to this file may belong to the group of one of those, and
  // who is not its owner may own one.
  if (!one_group) group = others = group & others;
  if (!one_owner) {
    owner &= group & others;
    group &= bits >> 6;
    others &= bits >> 6;
  }
  return FileAccess{owner << 6 | group << 3 | others, one_owner ? files.front().uid : 0,
                    one_group ? files.front().gid : 0};
}

Result<Packing> PackSmallPieces(const StepModel& model, const PackOptions& options) {
  uint64_t source_bytes = 0;
  for (const Blob& blob : model.blobs) source_bytes += blob.stamp.size / kSourceShare;
  const uint64_t limit =
      options.limit != 0 ? options.limit : std::clamp(source_bytes, kMinLimit, kMaxLimit);
  const Work work = Plan(model, limit);
  Packing packing;
  if (work.atoms.empty()) return packing;
  uint64_t data_offset = 0;
  packing.bytes = BlankFile(model, work, data_offset);
  if (packing.bytes.empty()) return packing;
  CKPT_ASSIGN_OR_RETURN(
      packing.reads, ReadFiles(model, work, options.threads, packing.bytes.data() + data_offset));
  packing.pieces = work.pieces.size();
  packing.access = AccessOf(model, work);
  for (const Candidate& candidate : work.atoms) {
    packing.atoms.push_back(SideAtom{candidate.atom, data_offset + candidate.begin});
  }
  return packing;
}

}  // namespace ckptfs
