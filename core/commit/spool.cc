// SPDX-License-Identifier: Apache-2.0
#include "core/commit/spool.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/fault_point.h"
#include "core/base/strings.h"
#include "core/base/trust.h"
#include "core/commit/world_commit.h"
#include "core/io/file_root.h"
#include "core/io/file_storage.h"
#include "core/records/records.h"
#include "core/store/blob_copy.h"
#include "core/store/store_index.h"

namespace ckptfs {
namespace {

constexpr std::string_view kFormat = "format";
constexpr std::string_view kStoreKey = "spool_of";
constexpr std::string_view kFolders[] = {".tmp", kPreparedFolder, "snapshots"};
constexpr int kMaxDepth = 3;

std::string RecordPath(const PreparedPart& part) { return FlatPartName(part, Digest()); }

tl::unexpected<Error> Foreign(const std::string& path, std::string_view rule) {
  return Fail(ErrorCode::kPermission, StrCat(path, " ", rule,
                                             ": ckptfs does not use it as part "
                                             "of a spool"));
}

// Only what this user's own processes can have written, and can write: no link leads
// anywhere.
Result<struct stat> CheckOwn(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) return Fail(ErrnoError(errno, path));
  const bool directory = S_ISDIR(info.st_mode);
  if (!directory && !S_ISREG(info.st_mode)) {
    return Foreign(path, S_ISLNK(info.st_mode) ? "is a symbolic link" : "is not a regular file");
  }
  if (!IsOwnerTrusted(info, Believed::kOwnUser)) {
    return Foreign(path, WhyNotTrusted(info, Believed::kOwnUser));
  }
  if ((info.st_mode & 077) != 0) {
    return Foreign(path, "may be entered or read by others (chmod go-rwx)");
  }
  return info;
}

// `settled`: what a killed process was writing has gone, so that files have one name.
Status CheckTree(const std::string& path, bool settled, int depth = 0) {
  CKPT_ASSIGN_OR_RETURN(const struct stat info, CheckOwn(path));
  if (!S_ISDIR(info.st_mode)) {
    if (settled && info.st_nlink != 1) return Foreign(path, "is a file with a second hard link");
    return {};
  }
  if (depth > kMaxDepth) return Foreign(path, "is nested too deeply");
  CKPT_ASSIGN_OR_RETURN(const auto entries, ListDirectory(path, false));
  for (const RootEntry& entry : entries) {
    CKPT_RETURN_IF_ERROR(CheckTree(StrCat(path, "/", entry.name), settled, depth + 1));
  }
  return {};
}

// A directory that is a spool, or empty.
Status CheckDirectory(const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const auto entries, ListDirectory(directory, false));
  for (const RootEntry& entry : entries) {
    const bool ours = entry.name == kFormat || std::find(std::begin(kFolders), std::end(kFolders),
                                                         entry.name) != std::end(kFolders);
    if (ours) continue;
    return Fail(ErrorCode::kInvalid, StrCat(directory, " is not a spool, and it is not empty (",
                                            entry.name, "); give it a directory of its own"));
  }
  return CheckTree(directory, false);
}

// The files are there, of the sizes that the record says.  Their bytes are compared when they
// are copied.
Status CheckFiles(const Root& root, const PreparedPart& part) {
  for (const PreparedRank& rank : part.ranks) {
    if (rank.chunk_list != Digest{}) return Refuse("record: rank ", rank.rank, " lacks its chunks");
    CKPT_RETURN_IF_ERROR(CheckFile(root, part, rank));
  }
  return {};
}

}  // namespace

uint64_t BytesOf(const PreparedPart& part) {
  uint64_t bytes = 0;
  for (const PreparedRank& rank : part.ranks) bytes += rank.bytes;
  return bytes;
}

Result<OpenedSpool> Spool::Open(const std::string& directory, const std::string& store) {
  const auto there = CheckOwn(directory);
  if (!there && there.error().code != ErrorCode::kNotFound) return Fail(Error(there.error()));
  if (there && !S_ISDIR(there->st_mode)) return Foreign(directory, "is not a directory");
  if (!there) CKPT_RETURN_IF_ERROR(FileStorage::Open(directory, true));
  auto lock = FileLock::Take(directory, O_RDONLY | O_DIRECTORY, LOCK_EX | LOCK_NB);
  if (!lock) return Fail(ErrorCode::kExists, StrCat(directory, ": another daemon uses this spool"));
  CKPT_RETURN_IF_ERROR(CheckDirectory(directory));
  CKPT_ASSIGN_OR_RETURN(auto storage, FileStorage::Open(directory, true));
  CKPT_RETURN_IF_ERROR(CheckTree(directory, true));
  CKPT_ASSIGN_OR_RETURN(OpenedSpool opened, OpenOn(std::move(storage), store));
  opened.spool->lock_ = std::move(lock);
  return opened;
}

Result<OpenedSpool> Spool::OpenOn(std::shared_ptr<Storage> storage, const std::string& store) {
  OpenedSpool opened;
  opened.spool = std::unique_ptr<Spool>(new Spool(std::move(storage)));
  CKPT_RETURN_IF_ERROR(opened.spool->Claim(store));
  CKPT_ASSIGN_OR_RETURN(opened.left, opened.spool->TakeStock(opened.notes));
  return opened;
}

// It is of one store for ever: what is in it would be published in another one.
Status Spool::Claim(const std::string& store) {
  const std::string path(kFormat);
  const std::string mine = DigestOf(store).Hex();
  Status published = PublishText(*storage_, path, RenderText(kStoreKey, mine));
  if (published || published.error().code != ErrorCode::kExists) return published;
  CKPT_ASSIGN_OR_RETURN(const std::string text, ReadWhole(*storage_, path, kRecordMaxBytes));
  const auto of = ParseText(text, kStoreKey);
  if (!of) return Fail(Error(of.error()).WithContext(storage_->PathOf(path)));
  if (*of == mine) return {};
  return Fail(ErrorCode::kInvalid, StrCat(storage_->name(), " is the spool of another store"));
}

namespace {

void SortByTime(std::vector<PreparedPart>& parts) {
  std::sort(parts.begin(), parts.end(), [](const PreparedPart& a, const PreparedPart& b) {
    return std::tie(a.mtime_ns, a.step, a.name) < std::tie(b.mtime_ns, b.step, b.name);
  });
}

}  // namespace

// Keeps whole saves and removes the rest.
Result<std::vector<PreparedPart>> Spool::TakeStock(std::vector<std::string>& notes) {
  std::vector<PreparedPart> parts;
  std::set<std::string> needed;
  CKPT_ASSIGN_OR_RETURN(const auto records, ListFilesBelow(*storage_, kPreparedFolder));
  for (const std::string& path : records) {
    CKPT_ASSIGN_OR_RETURN(const std::string text, ReadWhole(*storage_, path, kPreparedMaxBytes));
    const auto name = ParseFlatName(path);
    auto part = name && name->kind == CommitName::Kind::kPart
                    ? ParsePart(text, *name)
                    : Result<PreparedPart>(Refuse("its name is not that of a save"));
    if (!part && part.error().code == ErrorCode::kUnsupported) {
      return Fail(Error(part.error()).WithContext(storage_->PathOf(path)));
    }
    const Status whole = part ? CheckFiles(*storage_, *part) : Fail(Error(part.error()));
    if (!whole && whole.error().code == ErrorCode::kIo) return Fail(Error(whole.error()));
    if (!whole || RecordPath(*part) != path) {
      notes.push_back(StrCat(storage_->PathOf(path), ": removed: ",
                             whole ? "its record belongs under another "
                                     "name"
                                   : whole.error().message));
      CKPT_RETURN_IF_ERROR(storage_->Remove(path));
      continue;
    }
    for (const PreparedRank& rank : part->ranks) needed.insert(part->PathOf(rank.rank));
    parts.push_back(*std::move(part));
  }
  CKPT_ASSIGN_OR_RETURN(const auto files, ListFilesBelow(*storage_, "snapshots"));
  for (const std::string& path : files) {
    if (needed.contains(path)) continue;
    CKPT_RETURN_IF_ERROR(storage_->Remove(path));
    if (storage_->local()) (void)rmdir(storage_->PathOf(ParentPath(path)).c_str());
  }
  SortByTime(parts);
  return parts;
}

Result<std::vector<PreparedPart>> Spool::Look(const Storage& storage, const std::string& store) {
  std::vector<PreparedPart> parts;
  CKPT_ASSIGN_OR_RETURN(const std::string text, ReadWhole(storage, kFormat, kRecordMaxBytes));
  CKPT_ASSIGN_OR_RETURN(const std::string of, ParseText(text, kStoreKey));
  if (of != DigestOf(store).Hex()) return parts;
  CKPT_ASSIGN_OR_RETURN(const auto records, ListFilesBelow(storage, kPreparedFolder));
  for (const std::string& path : records) {
    const auto name = ParseFlatName(path);
    if (!name || name->kind != CommitName::Kind::kPart) continue;
    const auto record = ReadWhole(storage, path, kPreparedMaxBytes);
    auto part = record ? ParsePart(*record, *name) : Fail(Error(record.error()));
    if (part && RecordPath(*part) == path) parts.push_back(*std::move(part));  // or it has gone
  }
  SortByTime(parts);
  return parts;
}

Status Spool::Write(const PreparedPart& part, const Root& bytes) {
  Status done;
  for (const PreparedRank& rank : part.ranks) {
    const Blob blob = FileOf(part, rank);
    auto writer = storage_->Create(blob.path);
    FaultPoint();
    done = writer ? CopyOwnedBlob(bytes, blob, **writer) : Fail(std::move(writer).error());
    FaultPoint();
    if (!done) break;
  }
  if (done) done = PublishText(*storage_, RecordPath(part), RenderPart(part));
  FaultPoint();
  if (!done) (void)Remove(part);  // its record may have been published all the same
  return done;
}

Status Spool::RemoveFiles(const PreparedPart& part) {
  Status done;
  for (const PreparedRank& rank : part.ranks) {
    const Status removed = storage_->Remove(part.PathOf(rank.rank));
    FaultPoint();
    if (!removed && removed.error().code != ErrorCode::kNotFound) done = removed;
  }
  if (storage_->local()) (void)rmdir(storage_->PathOf(part.Directory()).c_str());
  return done;
}

Status Spool::Remove(const PreparedPart& part) {
  Status removed = storage_->Remove(RecordPath(part));
  FaultPoint();
  if (!removed && removed.error().code != ErrorCode::kNotFound) return removed;
  return RemoveFiles(part);
}

}  // namespace ckptfs
