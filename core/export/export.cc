// SPDX-License-Identifier: Apache-2.0

#include "core/export/export.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "core/base/checked_math.h"
#include "core/base/descriptor.h"
#include "core/base/digest.h"
#include "core/base/loading_cache.h"
#include "core/base/strings.h"
#include "core/store/store.h"
#include "core/view/plan_reader.h"

namespace ckptfs {
namespace {

namespace stdfs = std::filesystem;

constexpr uint64_t kChunk = uint64_t{64} << 20;
constexpr uint64_t kExportBuffer = uint64_t{4} << 20;
constexpr uint64_t kPlanBytes = uint64_t{64} << 20;
constexpr std::string_view kJournal = ".ckptfs-export";
constexpr std::string_view kPartial = ".ckptfs-partial";
constexpr std::string_view kMagic = "ckptfs-export 1";

struct Target {
  std::string view_path;  // below view/<layout>/
  std::string path;       // absolute
  std::string link;       // symlink target, if it is one
  uint64_t size = 0;
  std::unique_ptr<std::atomic<uint64_t>> chunks_left;
  bool done = false;  // whole from an earlier run
};

using PlanPtr = std::shared_ptr<const ShownPlan>;

struct Chunk {
  size_t target = 0;
  uint64_t number = 0;
};

class Export {
 public:
  Export(const ViewSet& views, std::string destination, BlobReader& blobs,
         const ExportAccess& access)
      : views_(views), destination_(std::move(destination)), blobs_(blobs), access_(access) {}

  Status Collect(std::string_view part);
  Status OpenJournal(std::string_view identity);
  // True if all of it is there already, byte for byte, from an export that was finished.
  Result<bool> IsThere(const JobOptions& options);
  ExportReport AllResumed() const;
  Status Prepare();
  Result<ExportReport> Run(const JobOptions& options);

 private:
  Status CollectDirectory(const std::string& directory, const std::string& below);
  void Add(const std::string& view_path, const std::string& below, const ViewEntry& entry);
  std::string Owner(std::string_view identity) const;
  Status LoadJournal(std::string_view identity, const std::string& path);
  Result<PlanPtr> PlanOf(size_t target);
  bool HasAllNames();
  Result<bool> SameChunk(const Chunk& chunk);
  Result<uint64_t> WriteChunk(const Chunk& chunk);
  Status FinishFile(Target& target);
  Status Record(const Chunk& chunk);
  Status SyncDirectories();
  Result<Descriptor> CreateFile(const std::string& path) const;
  Status MakeDirectory(const std::string& path) const;
  Status DropForeignGroup(int fd, const std::string& path) const;

  const ViewSet& views_;
  const std::string destination_;
  BlobReader& blobs_;
  const ExportAccess access_;
  // Says where the destination differs, if some of it is as it would be written.  Nothing
  // tells its owner: a user's own model may have files of the same names and sizes.
  std::string defect_;
  std::vector<Target> targets_;
  std::vector<std::string> directories_;
  std::vector<Chunk> chunks_;                           // still to do
  std::vector<std::pair<uint64_t, uint64_t>> durable_;  // (file, chunk) of the journal
  // By target: threads are at neighbouring chunks of few files.
  LoadingCache<size_t, PlanPtr> plans_{
      kPlanBytes, [](const PlanPtr& shown) { return shown->plan.MemoryBytes(); }};
  Descriptor journal_;
  ExportReport report_;
};

void Export::Add(const std::string& view_path, const std::string& below, const ViewEntry& entry) {
  Target target;
  target.view_path = view_path;
  target.path = StrCat(destination_, "/", below);
  if (entry.type == ViewEntry::Type::kSymlink) {
    target.link = entry.target;
  } else {
    target.size = entry.size;
  }
  targets_.push_back(std::move(target));
}

Status Export::CollectDirectory(const std::string& directory, const std::string& below) {
  CKPT_ASSIGN_OR_RETURN(const auto entries, views_.List(directory));
  for (const ViewEntry& entry : entries) {
    // Names may come from a checkpoint: none of them leaves the destination.
    if (!CheckName(entry.name, "the name of a view's file")) {
      return Fail(ErrorCode::kInvalid, StrCat("view file '", directory, "/", entry.name,
                                              "' has a name that cannot be exported"));
    }
    const std::string view_path =
        directory.empty() ? entry.name : StrCat(directory, "/", entry.name);
    const std::string path = below.empty() ? entry.name : StrCat(below, "/", entry.name);
    if (entry.type != ViewEntry::Type::kDirectory) {
      Add(view_path, path, entry);
      continue;
    }
    directories_.push_back(StrCat(destination_, "/", path));
    CKPT_RETURN_IF_ERROR(CollectDirectory(view_path, path));
  }
  return {};
}

Status Export::Collect(std::string_view part) {
  while (part.ends_with('/')) part.remove_suffix(1);
  if (!views_.offer().Any()) return Fail(views_.offer().Refusal());
  directories_.push_back(destination_);
  if (part.empty()) return CollectDirectory("", "");
  auto entry = views_.Find(part);
  if (!entry && entry.error().code == ErrorCode::kNotFound) {
    return Fail(views_.WhyAbsent(part));
  }
  if (!entry) return Fail(std::move(entry).error());
  if (entry->type == ViewEntry::Type::kDirectory) return CollectDirectory(std::string(part), "");
  Add(std::string(part), entry->name, *entry);
  return {};
}

Status Export::LoadJournal(std::string_view identity, const std::string& path) {
  std::ifstream in(path);
  std::string line;
  if (!std::getline(in, line)) return {};  // a new, empty one
  std::string owner;
  std::getline(in, owner);
  if (line != kMagic || owner != identity) {
    return Fail(
        Error{ErrorCode::kExists, StrCat(destination_, ": holds an export of '", owner, "'")}
            .Needing("choose an empty directory"));
  }
  while (std::getline(in, line) && !in.eof()) {  // a line without its end was cut off
    std::istringstream words(line);
    uint64_t file = 0, chunk = 0;
    if (words >> file >> chunk) durable_.emplace_back(file, chunk);
  }
  std::sort(durable_.begin(), durable_.end());
  return {};
}

// The journal's numbers refer to this: the identity and the list of files.
std::string Export::Owner(std::string_view identity) const {
  std::string list;
  for (const Target& target : targets_) {
    list += StrCat(target.view_path, "\n", target.size, "\n");
  }
  return StrCat(identity, " ", DigestOf(list).Hex());
}

Status Export::OpenJournal(std::string_view wanted) {
  const std::string identity = Owner(wanted);
  std::error_code code;
  CKPT_RETURN_IF_ERROR(MakeDirectory(destination_));
  const std::string path = StrCat(destination_, "/", kJournal);
  const bool fresh = !stdfs::exists(path, code);
  if (fresh && stdfs::directory_iterator(destination_, code) != stdfs::directory_iterator()) {
    const std::string differs =
        defect_.empty() ? "" : StrCat(", and its files differ from those to be written: ", defect_);
    return Fail(Error{ErrorCode::kExists, StrCat(destination_,
                                                 ": not empty, and not an export that "
                                                 "can be resumed",
                                                 differs)}
                    .Needing("choose an empty directory"));
  }
  CKPT_ASSIGN_OR_RETURN(journal_, OpenDescriptor(path, O_RDWR | O_CREAT | O_APPEND, 0600));
  if (::flock(journal_.get(), LOCK_EX | LOCK_NB) != 0) {
    return Fail(ErrorCode::kExists, StrCat(destination_, ": another export is writing there"));
  }
  CKPT_RETURN_IF_ERROR(LoadJournal(identity, path));
  struct stat info {};
  if (::fstat(journal_.get(), &info) == 0 && info.st_size > 0) return {};
  const std::string head = StrCat(kMagic, "\n", identity, "\n");
  if (::write(journal_.get(), head.data(), head.size()) != static_cast<ssize_t>(head.size())) {
    return Fail(ErrnoError(errno, path));
  }
  return {};
}

// Modes are those that the umask leaves of what the source's readers may.  A file
// may be born into another group than the source's (a directory's).
Status Export::DropForeignGroup(int fd, const std::string& path) const {
  const bool others = (access_.read_bits & 04) != 0;
  struct stat info {};
  if (::fstat(fd, &info) != 0) return Fail(ErrnoError(errno, path));
  if (others || info.st_gid == access_.gid || (info.st_mode & 070) == 0) return {};
  if (::fchmod(fd, info.st_mode & 0700) != 0) return Fail(ErrnoError(errno, path));
  return {};
}

Result<Descriptor> Export::CreateFile(const std::string& path) const {
  CKPT_ASSIGN_OR_RETURN(Descriptor file,
                        OpenDescriptor(path, O_RDWR | O_CREAT, 0600 | (access_.read_bits & 044)));
  CKPT_RETURN_IF_ERROR(DropForeignGroup(file.get(), path));
  return file;
}

// With those above it; what is there stays as it is.
Status Export::MakeDirectory(const std::string& path) const {
  const mode_t bits = access_.read_bits & 044;
  if (::mkdir(path.c_str(), 0700 | bits | bits >> 2) == 0) {
    CKPT_ASSIGN_OR_RETURN(const Descriptor made, OpenDescriptor(path, O_RDONLY | O_DIRECTORY));
    return DropForeignGroup(made.get(), path);
  }
  const int error = errno;
  if (error == EEXIST && stdfs::is_directory(path)) return {};
  const std::string parent = stdfs::path(path).parent_path().string();
  if (error != ENOENT || parent.empty() || parent == path) return Fail(ErrnoError(error, path));
  // There are places where nothing can be made though what is above is there (/proc).
  if (stdfs::is_directory(parent)) return Fail(ErrnoError(error, path));
  CKPT_RETURN_IF_ERROR(MakeDirectory(parent));
  return MakeDirectory(path);
}

// Directories, symlinks, files of their size; the list of chunks still to do.
Status Export::Prepare() {
  for (const std::string& directory : directories_) {
    CKPT_RETURN_IF_ERROR(MakeDirectory(directory));
  }
  for (size_t i = 0; i < targets_.size(); ++i) {
    Target& target = targets_[i];
    if (!target.link.empty()) {
      ::unlink(target.path.c_str());
      if (::symlink(target.link.c_str(), target.path.c_str()) != 0) {
        return Fail(ErrnoError(errno, target.path));
      }
      continue;
    }
    ++report_.files;
    report_.bytes += target.size;
    struct stat info {};
    target.done = ::stat(target.path.c_str(), &info) == 0 &&
                  static_cast<uint64_t>(info.st_size) == target.size;
    if (target.done) {
      report_.bytes_resumed += target.size;
      continue;
    }
    const std::string partial = StrCat(target.path, kPartial);
    const bool resumes =
        ::stat(partial.c_str(), &info) == 0 && static_cast<uint64_t>(info.st_size) == target.size;
    CKPT_ASSIGN_OR_RETURN(const Descriptor file, CreateFile(partial));
    if (!resumes && ::ftruncate(file.get(), static_cast<off_t>(target.size)) != 0) {
      return Fail(ErrnoError(errno, partial));
    }
    const uint64_t count = std::max<uint64_t>(1, CeilDiv(target.size, kChunk));
    target.chunks_left = std::make_unique<std::atomic<uint64_t>>(count);
    for (uint64_t number = 0; number < count; ++number) {
      const bool durable = resumes && std::binary_search(durable_.begin(), durable_.end(),
                                                         std::pair<uint64_t, uint64_t>(i, number));
      // The last chunk is always written again, so that one thread finishes the file.
      if (durable && number + 1 < count) {
        --*target.chunks_left;
        report_.bytes_resumed += kChunk;
      } else {
        chunks_.push_back(Chunk{i, number});
      }
    }
  }
  return {};
}

Status Export::Record(const Chunk& chunk) {
  const std::string line = StrCat(chunk.target, " ", chunk.number, "\n");
  // One O_APPEND write of a few bytes: threads need no lock for it.
  if (::write(journal_.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    return Fail(ErrnoError(errno, StrCat(destination_, "/", kJournal)));
  }
  return {};
}

Status Export::FinishFile(Target& target) {
  const std::string partial = StrCat(target.path, kPartial);
  CKPT_RETURN_IF_ERROR(SyncPath(partial));
  if (::rename(partial.c_str(), target.path.c_str()) != 0) {
    return Fail(ErrnoError(errno, target.path));
  }
  return {};
}

// Made once per file, however many chunks and threads.
Result<PlanPtr> Export::PlanOf(size_t target) {
  return plans_.Get(target, [&]() -> Result<PlanPtr> {
    const Target& file = targets_[target];
    CKPT_ASSIGN_OR_RETURN(ShownPlan shown, views_.MakePlan(file.view_path));
    if (shown.plan.size() != file.size) {
      return Fail(ErrorCode::kInternal, StrCat(file.view_path,
                                               ": the plan does not have the "
                                               "listed size"));
    }
    return std::make_shared<const ShownPlan>(std::move(shown));
  });
}

Result<uint64_t> Export::WriteChunk(const Chunk& chunk) {
  Target& target = targets_[chunk.target];
  const std::string partial = StrCat(target.path, kPartial);
  CKPT_ASSIGN_OR_RETURN(const PlanPtr shown, PlanOf(chunk.target));
  const PlanReader reader(shown->plan, *shown->step, blobs_);
  CKPT_ASSIGN_OR_RETURN(const Descriptor file, OpenDescriptor(partial, O_RDWR));
  const uint64_t begin = chunk.number * kChunk;
  const uint64_t end = std::min(target.size, begin + kChunk);
  std::vector<std::byte> buffer(std::min(kExportBuffer, end - begin));
  for (uint64_t at = begin; at < end;) {
    const std::span<std::byte> piece(buffer.data(), std::min<uint64_t>(buffer.size(), end - at));
    CKPT_ASSIGN_OR_RETURN(const size_t got, reader.Read(at, piece));
    if (got != piece.size()) return Fail(ErrorCode::kInternal, "short read of a plan");
    CKPT_RETURN_IF_ERROR(WriteAll(file.get(), at, piece, partial));
    at += got;
  }
  if (target.chunks_left->fetch_sub(1) == 1) {
    CKPT_RETURN_IF_ERROR(FinishFile(target));
  } else {
    if (::fdatasync(file.get()) != 0) return Fail(ErrnoError(errno, partial));
    CKPT_RETURN_IF_ERROR(Record(chunk));
  }
  return end - begin;
}

// Why the target is not there as it was exported; empty: it is.
std::string LacksOf(const Target& target) {
  std::error_code code;
  struct stat info {};
  if (::lstat(target.path.c_str(), &info) != 0)
    return StrCat("'", target.view_path, "' is missing");
  if (!target.link.empty()) {
    return stdfs::read_symlink(target.path, code) == target.link
               ? ""
               : StrCat("'", target.view_path, "' does not lead to ", target.link);
  }
  if (!S_ISREG(info.st_mode)) return StrCat("'", target.view_path, "' is not a file");
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size == target.size) return "";
  return StrCat("'", target.view_path, "' has ", size, " bytes instead of ", target.size);
}

// True if each file and link is there under its name, with its size.
bool Export::HasAllNames() {
  std::error_code code;
  if (stdfs::exists(StrCat(destination_, "/", kJournal), code)) return false;
  size_t lacking = 0;
  for (const Target& target : targets_) {
    const std::string lacks = LacksOf(target);
    if (!lacks.empty() && lacking++ == 0) defect_ = lacks;
  }
  if (lacking == targets_.size()) defect_.clear();  // something else lies there
  if (lacking > 1 && !defect_.empty()) defect_ += StrCat(" (and ", lacking - 1, " more)");
  return lacking == 0;
}

Result<bool> Export::SameChunk(const Chunk& chunk) {
  const Target& target = targets_[chunk.target];
  CKPT_ASSIGN_OR_RETURN(const PlanPtr shown, PlanOf(chunk.target));
  const PlanReader reader(shown->plan, *shown->step, blobs_);
  CKPT_ASSIGN_OR_RETURN(const Descriptor file, OpenDescriptor(target.path, O_RDONLY));
  const uint64_t end = std::min(target.size, (chunk.number + 1) * kChunk);
  const uint64_t begin = chunk.number * kChunk;
  std::vector<std::byte> mine(std::min(kExportBuffer, end - begin));
  std::vector<std::byte> theirs(mine.size());
  for (uint64_t at = begin; at < end;) {
    const size_t bytes = std::min<uint64_t>(mine.size(), end - at);
    CKPT_ASSIGN_OR_RETURN(const size_t got, reader.Read(at, std::span(mine).first(bytes)));
    const ssize_t read = ::pread(file.get(), theirs.data(), bytes, static_cast<off_t>(at));
    if (read < 0) return Fail(ErrnoError(errno, target.path));
    if (got != bytes || static_cast<size_t>(read) != bytes) return false;
    if (std::memcmp(mine.data(), theirs.data(), bytes) != 0) return false;
    at += bytes;
  }
  return true;
}

Result<bool> Export::IsThere(const JobOptions& options) {
  if (targets_.empty() || !HasAllNames()) return false;
  std::vector<Chunk> chunks;
  uint64_t total = 0;
  for (size_t i = 0; i < targets_.size(); ++i) {
    const uint64_t count = CeilDiv(targets_[i].size, kChunk);
    for (uint64_t number = 0; number < count; ++number) chunks.push_back(Chunk{i, number});
    total += targets_[i].size;
  }
  std::atomic<bool> same{true};
  std::atomic<size_t> different{0};
  const auto compare = [&](size_t i) -> Result<uint64_t> {
    if (!same) return uint64_t{0};
    CKPT_ASSIGN_OR_RETURN(const bool equal, SameChunk(chunks[i]));
    if (!equal) different = chunks[i].target;
    if (!equal) same = false;
    return std::min(kChunk, targets_[chunks[i].target].size - chunks[i].number * kChunk);
  };
  CKPT_RETURN_IF_ERROR(RunWorkList(chunks.size(), total, options, compare));
  if (!same) defect_ = StrCat("'", targets_[different].view_path, "' holds other bytes");
  return same.load();
}

ExportReport Export::AllResumed() const {
  ExportReport report;
  for (const Target& target : targets_) {
    if (!target.link.empty()) continue;
    ++report.files;
    report.bytes += target.size;
  }
  report.bytes_resumed = report.bytes;
  return report;
}

Status Export::SyncDirectories() {
  for (const std::string& directory : directories_) {
    CKPT_RETURN_IF_ERROR(SyncPath(directory));
  }
  const std::string journal = StrCat(destination_, "/", kJournal);
  if (::unlink(journal.c_str()) != 0) return Fail(ErrnoError(errno, journal));
  return SyncPath(destination_);
}

Result<ExportReport> Export::Run(const JobOptions& options) {
  JobOptions shown = options;
  if (options.progress) {
    shown.progress = [&](JobProgress progress) {
      progress.bytes_done += report_.bytes_resumed;
      options.progress(progress);
    };
  }
  CKPT_RETURN_IF_ERROR(RunWorkList(chunks_.size(), report_.bytes, shown,
                                   [this](size_t i) { return WriteChunk(chunks_[i]); }));
  CKPT_RETURN_IF_ERROR(blobs_.CheckOpen());
  CKPT_RETURN_IF_ERROR(SyncDirectories());
  return report_;
}

}  // namespace

Result<ExportReport> ExportView(const ViewSet& views, std::string_view part,
                                const std::string& destination, std::string_view identity,
                                BlobReader& blobs, const ExportAccess& access,
                                const JobOptions& options) {
  Export job(views, destination, blobs, access);
  CKPT_RETURN_IF_ERROR(job.Collect(part));
  CKPT_ASSIGN_OR_RETURN(const bool there, job.IsThere(options));
  if (there) return job.AllResumed();
  CKPT_RETURN_IF_ERROR(job.OpenJournal(identity));
  CKPT_RETURN_IF_ERROR(job.Prepare());
  return job.Run(options);
}

}  // namespace ckptfs
