// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/plan_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <sstream>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/descriptor.h"
#include "core/base/fault_point.h"
#include "core/base/mutex.h"
#include "core/base/pages.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/io/file_root.h"
#include "core/view/plan_reader.h"

namespace ckptfs {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{64} << 20;  // a multiple of kChunkBytes
constexpr uint64_t kBufferBytes = uint64_t{4} << 20;  // likewise
constexpr uint64_t kMaxJournal = uint64_t{8} << 30;
constexpr std::string_view kMagic = "ckptfs-pieces 1";
static_assert(kPieceBytes % kBufferBytes == 0 && kBufferBytes % kChunkBytes == 0);

struct FilePiece {
  size_t file = 0;
  uint64_t number = 0;
};

std::optional<Digest> DigestFrom(std::string_view hex) {
  constexpr size_t kHalf = 16;
  if (hex.size() != 2 * kHalf) return std::nullopt;
  Digest digest;
  const auto half = [&](size_t at, uint64_t& to) {
    const char* const begin = hex.data() + at;
    return std::from_chars(begin, begin + kHalf, to, 16).ptr == begin + kHalf;
  };
  if (!half(0, digest.high) || !half(kHalf, digest.low)) return std::nullopt;
  return digest;
}

class PlanWriter {
 public:
  PlanWriter(const std::string& directory, std::span<const PlannedFile> files,
             const StepModel& model, BlobReader& blobs)
      : directory_(directory), files_(files), model_(model), blobs_(blobs) {}

  Status OpenJournal();
  // Gives every file its size, and finds what is still to do.
  Status Prepare();
  Status Write(const JobOptions& options);
  Result<WrittenPlans> Finish();

 private:
  std::string PathOf(size_t file) const { return StrCat(directory_, "/", files_[file].path); }
  uint64_t PiecesOf(size_t file) const { return CeilDiv(files_[file].plan.size(), kPieceBytes); }
  uint64_t BytesOf(const FilePiece& piece) const {
    return std::min(kPieceBytes, files_[piece.file].plan.size() - piece.number * kPieceBytes);
  }
  void TakeLine(std::string_view line);
  Result<bool> MakeFile(size_t file) const;
  Result<uint64_t> WritePiece(const FilePiece& piece);
  Status Record(const FilePiece& piece, std::span<const Digest> chunks);

  const std::string& directory_;
  const std::span<const PlannedFile> files_;
  const StepModel& model_;
  BlobReader& blobs_;
  std::vector<std::vector<std::vector<Digest>>> pieces_;  // by file and piece; empty: not written
  std::vector<FilePiece> todo_;
  uint64_t resumed_ = 0;
  Mutex mutex_;  // of the journal's end, and of pieces_ while pieces are written
  Descriptor journal_;
};

// A line that does not end in its own digest was cut off, or never reached the disk.
void PlanWriter::TakeLine(std::string_view line) {
  const size_t end = line.rfind(' ');
  if (end == std::string_view::npos) return;
  if (DigestOf(line.substr(0, end)).Hex() != line.substr(end + 1)) return;
  std::istringstream words{std::string(line.substr(0, end))};
  size_t file = 0;
  uint64_t number = 0;
  if (!(words >> file >> number) || file >= pieces_.size() || number >= pieces_[file].size()) {
    return;
  }
  std::vector<Digest> chunks;
  for (std::string word; words >> word;) {
    const auto digest = DigestFrom(word);
    if (!digest) return;
    chunks.push_back(*digest);
  }
  if (chunks.size() != ChunkCount(BytesOf({file, number}), kChunkBytes)) return;
  pieces_[file][number] = std::move(chunks);
}

Status PlanWriter::OpenJournal() {
  const std::string path = StrCat(directory_, "/", kPiecesJournal);
  CKPT_ASSIGN_OR_RETURN(journal_, OpenDescriptor(path, O_RDWR | O_CREAT | O_APPEND, 0600));
  if (::flock(journal_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return Fail(ErrnoError(errno, path));
    return Fail(ErrorCode::kExists, StrCat(directory_, ": another process is writing it"));
  }
  pieces_.resize(files_.size());
  for (size_t i = 0; i < files_.size(); ++i) pieces_[i].resize(PiecesOf(i));
  CKPT_ASSIGN_OR_RETURN(const std::string text,
                        ReadWhole(FileRoot(directory_), kPiecesJournal, kMaxJournal));
  std::istringstream in(text);
  std::string line;
  if (std::getline(in, line) && line == kMagic) {
    while (std::getline(in, line)) TakeLine(line);
    // The next entry begins a line of its own, whatever was cut off.
    return WriteAll(journal_.get(), 0, std::as_bytes(std::span("\n", 1)), path);
  }
  if (::ftruncate(journal_.get(), 0) != 0) return Fail(ErrnoError(errno, path));
  const std::string head = StrCat(kMagic, "\n");
  return WriteAll(journal_.get(), 0, std::as_bytes(std::span(head)), path);
}

// True if an earlier call had made it.
Result<bool> PlanWriter::MakeFile(size_t file) const {
  const std::string path = PathOf(file);
  const auto size = static_cast<off_t>(files_[file].plan.size());
  for (size_t slash = path.find('/', directory_.size() + 1); slash != std::string::npos;
       slash = path.find('/', slash + 1)) {
    const std::string folder = path.substr(0, slash);
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
      return Fail(ErrnoError(errno, folder));
    }
    if (::chmod(folder.c_str(), 0755) != 0) return Fail(ErrnoError(errno, folder));
  }
  CKPT_ASSIGN_OR_RETURN(const Descriptor made, OpenDescriptor(path, O_RDWR | O_CREAT, 0600));
  struct stat info {};
  if (::fstat(made.get(), &info) != 0) return Fail(ErrnoError(errno, path));
  if (size == 0 || info.st_size == size) return info.st_size == size;
  if (::fallocate(made.get(), 0, 0, size) == 0) return false;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return Fail(ErrnoError(errno, path));
  if (::ftruncate(made.get(), size) != 0) return Fail(ErrnoError(errno, path));
  return false;
}

Status PlanWriter::Prepare() {
  for (size_t i = 0; i < files_.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(const bool there, MakeFile(i));
    for (uint64_t number = 0; number < pieces_[i].size(); ++number) {
      const FilePiece piece{i, number};
      if (there && !pieces_[i][number].empty()) {
        resumed_ += BytesOf(piece);
        continue;
      }
      pieces_[i][number].clear();
      todo_.push_back(piece);
    }
  }
  return {};
}

Status PlanWriter::Record(const FilePiece& piece, std::span<const Digest> chunks) {
  std::string line = StrCat(piece.file, " ", piece.number);
  for (const Digest& digest : chunks) line += StrCat(" ", digest.Hex());
  line += StrCat(" ", DigestOf(line).Hex(), "\n");
  MutexLock lock(mutex_);
  return WriteAll(journal_.get(), 0, std::as_bytes(std::span(line)),
                  StrCat(directory_, "/", kPiecesJournal));
}

Result<uint64_t> PlanWriter::WritePiece(const FilePiece& piece) {
  static thread_local const Pages buffer = MakePages(kBufferBytes);
  const std::string path = PathOf(piece.file);
  CKPT_ASSIGN_OR_RETURN(const Descriptor file, OpenDescriptor(path, O_RDWR));
  const PlanReader reader(files_[piece.file].plan, model_, blobs_);
  const uint64_t begin = piece.number * kPieceBytes;
  const uint64_t end = begin + BytesOf(piece);
  ChunkDigester digester(kChunkBytes);
  for (uint64_t at = begin; at < end;) {
    const std::span<std::byte> part(buffer.get(), std::min(kBufferBytes, end - at));
    CKPT_ASSIGN_OR_RETURN(const size_t got, reader.Read(at, part));
    if (got != part.size()) return Fail(ErrorCode::kInternal, "short read of a plan");
    digester.Add(part);
    CKPT_RETURN_IF_ERROR(WriteAll(file.get(), at, part, path));
    at += got;
  }
  FaultPoint();
  if (::fdatasync(file.get()) != 0) return Fail(ErrnoError(errno, path));
  std::vector<Digest> chunks = std::move(digester).Finish();
  CKPT_RETURN_IF_ERROR(Record(piece, chunks));
  pieces_[piece.file][piece.number] = std::move(chunks);  // nobody else has this piece
  FaultPoint();
  return end - begin;
}

Status PlanWriter::Write(const JobOptions& options) {
  uint64_t total = 0;
  for (const PlannedFile& file : files_) total += file.plan.size();
  JobOptions shown = options;
  if (options.progress) {
    shown.progress = [&](JobProgress progress) {
      progress.bytes_done += resumed_;
      options.progress(progress);
    };
  }
  return RunWorkList(todo_.size(), total, shown, [this](size_t i) { return WritePiece(todo_[i]); });
}

Result<WrittenPlans> PlanWriter::Finish() {
  WrittenPlans written;
  written.bytes_resumed = resumed_;
  for (size_t i = 0; i < files_.size(); ++i) {
    CKPT_RETURN_IF_ERROR(SyncPath(PathOf(i)));
    std::vector<Digest>& chunks = written.chunks.emplace_back();
    for (const auto& piece : pieces_[i]) chunks.insert(chunks.end(), piece.begin(), piece.end());
  }
  return written;
}

}  // namespace

Result<WrittenPlans> WritePlans(const std::string& directory, std::span<const PlannedFile> files,
                                const StepModel& model, BlobReader& blobs,
                                const JobOptions& options) {
  PlanWriter writer(directory, files, model, blobs);
  CKPT_RETURN_IF_ERROR(writer.OpenJournal());
  FaultPoint();
  CKPT_RETURN_IF_ERROR(writer.Prepare());
  CKPT_RETURN_IF_ERROR(writer.Write(options));
  return writer.Finish();
}

}  // namespace ckptfs
