// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/own.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "core/access/kept_gates.h"
#include "core/access/searched_directories.h"
#include "core/adopt/taken_access.h"
#include "core/base/descriptor.h"
#include "core/base/digest.h"
#include "core/base/strings.h"
#include "core/base/work_list.h"
#include "core/blob/chunk_digests.h"
#include "core/blob/fingerprint.h"
#include "core/blob/frame.h"
#include "core/io/blob_directories.h"
#include "core/io/file_root.h"
#include "core/io/file_stamp.h"
#include "core/model/read_blobs.h"
#include "core/model/step_notes.h"

namespace ckptfs {
namespace {

namespace files = std::filesystem;

constexpr uint64_t kCopyChunk = 64 << 20;
constexpr int64_t kSecond = 1'000'000'000;  // ns

// The file's name as from the directory above the step.  A step may lie in several directories
// that are shown as one: the roots of the model, below which its files have the same paths.
Result<files::path> NameFrom(const std::string& above, const StepModel& model, const Blob& blob) {
  for (size_t i = 0; i <= model.roots.size(); ++i) {
    const std::string& root = model.roots[i == 0 ? blob.root : i - 1];
    const files::path path = files::path(root) / blob.path;
    files::path name = path.lexically_normal().lexically_relative(above);
    if (!name.empty() && *name.begin() != "..") return name;
  }
  return Fail(ErrorCode::kUnsupported,
              StrCat(model.PathOf(blob), " lies outside of ", above,
                     ": the store can refer to it, but not copy or link it"));
}

// Owner and mode of the directories that files of the step lie in.
std::vector<std::string> DirectoryLines(const StepModel& model, const std::string& top) {
  std::set<std::string> directories;
  for (const Blob& blob : model.blobs) {
    files::path parent = files::path(model.PathOf(blob)).parent_path();
    for (; parent.string().size() >= top.size(); parent = parent.parent_path()) {
      if (!directories.insert(parent.string()).second) break;
    }
  }
  std::vector<std::string> lines;
  for (const std::string& directory : directories) {
    struct stat info {};
    if (::stat(directory.c_str(), &info) != 0) continue;
    lines.push_back(StrCat(directory.substr(std::min(directory.size(), top.size())), "\n",
                           info.st_mode, " ", info.st_uid, " ", info.st_gid, "\n"));
  }
  return lines;
}

// Owners and modes of the directories above the step's, and of those that links lead
// through: what they are later says nothing of the copy.
std::string GatesAbove(const std::string& directory, const StepModel& model) {
  std::set<std::string> above;
  std::set<OwnerAndMode> gates;
  AddSearched(directory, above);
  const std::string parent = files::path(directory).parent_path().string();
  for (const Blob& blob : model.blobs) {
    const files::path folder = files::path(model.PathOf(blob)).parent_path();
    const bool elsewhere = !StrCat(folder.string(), "/").starts_with(StrCat(parent, "/"));
    if (elsewhere) AddSearched(folder.string(), above);
    const auto root = RootDirectory::Open(model.roots[blob.root]);
    const auto found = root ? root->Look(blob.path) : Fail(root.error());
    if (found) gates.insert(found->searched.begin(), found->searched.end());
  }
  for (const std::string& name : above) {
    const auto access = AccessOfDirectory(name);
    if (!access) gates.insert(OwnerAndMode{});  // nobody's
    if (access && *access) gates.insert(**access);
  }
  return RenderKeptGates({gates.begin(), gates.end()});
}

std::string DigestOfFiles(const std::string& directory, const StepModel& model, Ownership ownership,
                          const std::string& gates) {
  const bool link = ownership == Ownership::kLink;
  std::string text = StrCat(link ? "link" : "copy", "\n", gates);
  std::vector<std::string> lines = DirectoryLines(model, directory);
  for (const Blob& blob : model.blobs) {
    // Linking changes the change time, and a link shows whatever the file holds.
    lines.push_back(StrCat(blob.path, "\n", blob.stamp.size, " ", blob.stamp.mtime_ns, " ",
                           link ? 0 : blob.stamp.ctime_ns, " ", blob.stamp.inode, "\n"));
  }
  std::sort(lines.begin(), lines.end());
  for (const std::string& line : lines) text += line;
  return DigestOf(text).Hex();
}

// True where the kernel does not copy between these filesystems by itself.
bool NeedsBuffer(int error) {
  return error == EXDEV || error == EINVAL || error == EOPNOTSUPP || error == ENOSYS;
}

Status CopyBytes(const File& from, int to, const std::string& name) {
  for (uint64_t done = 0; done < from.size();) {
    const ssize_t count = ::copy_file_range(from.descriptor(), nullptr, to, nullptr,
                                            std::min(from.size() - done, kCopyChunk), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && NeedsBuffer(errno)) {
      return ReadAllOf(from, [&](uint64_t offset, std::span<const std::byte> bytes) {
        return WriteAll(to, offset, bytes, name);
      });
    }
    if (count < 0) return Fail(ErrnoError(errno, StrCat("copying ", from.name(), " to ", name)));
    if (count == 0) {
      return Fail(ErrorCode::kStale, StrCat(from.name(), " became shorter while it was copied"));
    }
    done += static_cast<uint64_t>(count);
  }
  return {};
}

// The file is the one that was read, and nobody has written it since; the change
// time is moved by our own links.
Status CheckUnchanged(const File& file, const Blob& read) {
  CKPT_ASSIGN_OR_RETURN(FileIdentity now, file.Identity());
  now.stamp.ctime_ns = read.stamp.ctime_ns;
  return CompareStamps(file.name(), read.stamp, now.stamp);
}

// A reflink, or a copy.
Status Duplicate(const File& from, const Blob& read, const std::string& to) {
  CKPT_ASSIGN_OR_RETURN(const Descriptor copy,
                        OpenDescriptor(to, O_WRONLY | O_CREAT | O_EXCL, 0600));
  if (::ioctl(copy.get(), FICLONE, from.descriptor()) != 0) {
    CKPT_RETURN_IF_ERROR(CopyBytes(from, copy.get(), to));
  }
  // A writer may have set the time of the last write back.
  CKPT_ASSIGN_OR_RETURN(const FileIdentity identity, from.Identity());
  CKPT_RETURN_IF_ERROR(CompareStamps(from.name(), read.stamp, identity.stamp));
  CKPT_RETURN_IF_ERROR(TakeAccess(copy.get(), to, identity.access, 0));
  const int64_t mtime = identity.stamp.mtime_ns;
  const timespec times[2] = {{0, UTIME_OMIT}, {mtime / kSecond, mtime % kSecond}};
  if (::futimens(copy.get(), times) != 0 || ::fsync(copy.get()) != 0) {
    return Fail(ErrnoError(errno, to));
  }
  return {};
}

Status WriteFile(const std::string& path, std::string_view text) {
  CKPT_ASSIGN_OR_RETURN(const Descriptor file,
                        OpenDescriptor(path, O_WRONLY | O_CREAT | O_EXCL, 0600));
  CKPT_RETURN_IF_ERROR(WriteAll(file.get(), 0, std::as_bytes(std::span(text)), path));
  return ::fsync(file.get()) == 0 ? Status() : Fail(ErrnoError(errno, path));
}

// The file that was read, below its root, whatever a link there leads to by now.
Result<std::shared_ptr<const File>> OpenSource(const StepModel& model, const Blob& blob) {
  CKPT_ASSIGN_OR_RETURN(auto file, FileRoot(model.roots[blob.root]).Open(blob.path));
  CKPT_RETURN_IF_ERROR(CheckUnchanged(*file, blob));
  return file;
}

// True if files of the step can be cloned into the directory.
bool HasReflinks(const std::string& directory, const StepModel& model) {
  if (model.blobs.empty()) return false;
  const auto source = OpenSource(model, model.blobs.front());
  const auto probe = OpenDescriptor(directory, O_TMPFILE | O_WRONLY, 0600);
  return source && probe && ::ioctl(probe->get(), FICLONE, (*source)->descriptor()) == 0;
}

Status CannotLink(const std::string& what, std::string_view why) {
  return Fail(
      Error{ErrorCode::kUnsupported, StrCat(what, ": cannot be linked into the store (", why, ")")}
          .Needing("use --copy, or a store on the same filesystem"));
}

// The directory, or the first above it that is there.
Result<Descriptor> OpenNearest(files::path directory) {
  for (;; directory = directory.parent_path()) {
    auto opened = OpenDescriptor(directory.string(), O_PATH | O_DIRECTORY);
    const bool away = !opened && opened.error().code == ErrorCode::kNotFound;
    if (!away || !directory.has_relative_path()) return opened;
  }
}

// linkat() stays within one mount, and some filesystems' volumes have devices of their own.
bool IsSameMount(const Descriptor& a, const Descriptor& b) {
  struct statx one {
  }, other{};
  if (::statx(a.get(), "", AT_EMPTY_PATH, STATX_MNT_ID, &one) != 0)
    return true;  // not refused unasked
  if (::statx(b.get(), "", AT_EMPTY_PATH, STATX_MNT_ID, &other) != 0) return true;
  const bool told = (one.stx_mask & other.stx_mask & STATX_MNT_ID) != 0;
  return one.stx_dev_major == other.stx_dev_major && one.stx_dev_minor == other.stx_dev_minor &&
         (!told || one.stx_mnt_id == other.stx_mnt_id);
}

// True if both are of one kind that has reflinks.
bool MayHaveReflinks(const Descriptor& a, const Descriptor& b) {
  struct statfs one {
  }, other{};
  if (::fstatfs(a.get(), &one) != 0 || ::fstatfs(b.get(), &other) != 0) return false;
  return one.f_type == other.f_type &&
         (one.f_type == BTRFS_SUPER_MAGIC || one.f_type == XFS_SUPER_MAGIC);
}

// True if a file of one directory can be cloned into the other; tried with files without names.
bool CanReflink(const Descriptor& from, const Descriptor& to) {
  const auto probe = [](const Descriptor& directory) {
    return OpenDescriptor(StrCat("/proc/self/fd/", directory.get()), O_TMPFILE | O_RDWR, 0600);
  };
  const auto source = probe(from), target = probe(to);
  if (!source || !target) return MayHaveReflinks(from, to);
  return ::ioctl(target->get(), FICLONE, source->get()) == 0;
}

Status TakeFile(const StepModel& model, const Blob& blob, const std::string& to,
                Ownership ownership) {
  CKPT_ASSIGN_OR_RETURN(const auto from, OpenSource(model, blob));
  if (ownership == Ownership::kCopy) return Duplicate(*from, blob, to);
  // Uses the opened file: its name may be another file's by now.
  const std::string opened = StrCat("/proc/self/fd/", from->descriptor());
  if (::linkat(AT_FDCWD, opened.c_str(), AT_FDCWD, to.c_str(), AT_SYMLINK_FOLLOW) == 0) return {};
  if (errno == EXDEV || errno == EPERM || errno == EMLINK) {
    return CannotLink(from->name(), "it is on another filesystem, or belongs to another user");
  }
  return Fail(ErrnoError(errno, to));
}

// Owner and mode of the source's directory; we must be able to remove it.
Status FinishDirectory(const std::string& from, const std::string& to) {
  CKPT_ASSIGN_OR_RETURN(const Descriptor made, OpenDescriptor(to, O_RDONLY | O_DIRECTORY));
  CKPT_ASSIGN_OR_RETURN(const auto access, AccessOfDirectory(from));
  if (!access) return Fail(ErrorCode::kStale, StrCat(from, " is not a directory any more"));
  CKPT_RETURN_IF_ERROR(TakeAccess(made.get(), to, *access, 0700));
  return ::fsync(made.get()) == 0 ? Status() : Fail(ErrnoError(errno, to));
}

// Where the files begin that nothing is read of: sources list them last.
size_t FirstNote(const StepModel& model) {
  const std::vector<uint8_t> read = FindReadBlobs(model);
  size_t end = read.size();
  while (end > 0 && read[end - 1] == 0) --end;
  return end;
}

// True for what one file alone is the reason of, and not the device or the store.
bool IsOfTheFile(const Error& error) {
  constexpr std::array kOfTheFile = {ErrorCode::kInvalid,    ErrorCode::kNotFound,
                                     ErrorCode::kPermission, ErrorCode::kUnsupported,
                                     ErrorCode::kStale,      ErrorCode::kDataLoss};
  return std::ranges::find(kOfTheFile, error.code) != kOfTheFile.end();
}

// The first bytes of a file.
class Beginning final : public File {
 public:
  Beginning(const File& file, uint64_t size) : File(file.name(), size), file_(file) {}
  Result<FileIdentity> Identity() const override { return file_.Identity(); }
  Status ReadAt(std::span<const ReadRequest> requests) const override {
    CKPT_RETURN_IF_ERROR(CheckRanges(requests));
    return file_.ReadAt(requests);
  }
  Result<std::shared_ptr<const Mapping>> Map() const override {
    return std::shared_ptr<const Mapping>();
  }
  int descriptor() const override { return -1; }

 private:
  const File& file_;
};

// A file that a training tool wrote belongs to its save: the next save's in its place would
// make one step of two.  A log that somebody keeps there goes on, and its old text stays.
Status CheckOnlyGrew(const File& file, const FileIdentity& now, const Blob& read) {
  const uint64_t size = read.stamp.size;
  if (now.stamp.inode == read.stamp.inode && size > 0 && file.size() > size) {
    CKPT_ASSIGN_OR_RETURN(const Digest begins, FingerprintOf(Beginning(file, size)));
    if (begins == read.fingerprint) return {};
  }
  return CheckUnchanged(file, read);
}

// A file as it is now.
Status DuplicateNow(const StepModel& model, const Blob& blob, const std::string& to) {
  CKPT_ASSIGN_OR_RETURN(const auto from, FileRoot(model.roots[blob.root]).Open(blob.path));
  CKPT_ASSIGN_OR_RETURN(const FileIdentity now, from->Identity());
  const OwnerAndMode& access = now.access;
  if (access.mode != blob.mode || access.uid != blob.uid || access.gid != blob.gid) {
    return Fail(ErrorCode::kStale, StrCat(from->name(),
                                          " has another owner or mode than when it "
                                          "was read"));
  }
  if (model.facts.tool) CKPT_RETURN_IF_ERROR(CheckOnlyGrew(*from, now, blob));
  Blob as_it_is = blob;
  as_it_is.stamp = now.stamp;
  return Duplicate(*from, as_it_is, to);
}

// A file that nothing is read of: somebody may be writing it, or it is another's and cannot be
// linked.  One that is gone, closed or written without an end is not taken; of a tool's directory
// it refuses the step.
Status TakeNote(const StepModel& model, const Blob& blob, const std::string& to,
                Ownership ownership) {
  Status taken = TakeFile(model, blob, to, ownership);
  if (!taken && IsOfTheFile(taken.error())) {
    ::unlink(to.c_str());
    taken = DuplicateNow(model, blob, to);
  }
  if (taken || model.facts.tool || !IsOfTheFile(taken.error())) return taken;
  ::unlink(to.c_str());
  return {};
}

// Every file of the step to `to`, named as from the directory above `step`, then
// the directories made durable.
Status TakeFiles(const std::string& step, const StepModel& model, const std::string& to,
                 Ownership ownership) {
  const files::path directory = files::path(step).parent_path();
  std::error_code error;
  std::map<std::string, std::string> directories;  // by their names below `to`, those they are of
  const size_t first_note = FirstNote(model);
  for (size_t i = 0; i < model.blobs.size(); ++i) {
    const Blob& blob = model.blobs[i];
    CKPT_ASSIGN_OR_RETURN(const files::path name, NameFrom(directory.string(), model, blob));
    files::create_directories(files::path(to) / name.parent_path(), error);
    files::path from = files::path(model.PathOf(blob)).lexically_normal().parent_path();
    for (files::path parent = name.parent_path(); !parent.empty(); parent = parent.parent_path()) {
      directories.try_emplace(parent.string(), from.string());
      from = from.parent_path();
    }
    const std::string taken = StrCat(to, "/", name.string());
    CKPT_RETURN_IF_ERROR(i < first_note ? TakeFile(model, blob, taken, ownership)
                                        : TakeNote(model, blob, taken, ownership));
  }
  if (error) return Fail(ErrnoError(error.value(), to));
  for (const auto& [inner, from] : directories) {
    CKPT_RETURN_IF_ERROR(FinishDirectory(from, StrCat(to, "/", inner)));
  }
  return {};
}

constexpr std::string_view kPartial = ".partial-";

// Removes what killed processes left.  Without locks it stays.
void RemoveLeftOvers(const std::string& store) {
  const auto directories = ListBlobDirectories(store);
  if (!directories) return;
  for (const std::string& name : *directories) {
    if (name.find(kPartial) == std::string::npos) continue;
    const auto claim = ClaimBlobDirectory(store, name);
    if (claim) (void)RemoveBlobDirectory(store, name);
  }
}

// How many names a file has; 0 if it is gone.
uint64_t NamesOf(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? info.st_nlink : 0;
}

// The directory in the store that holds what `directory` holds; `hold` keeps it.
Result<std::string> Take(const std::string& store, const std::string& directory,
                         const StepModel& model, Ownership ownership,
                         std::shared_ptr<const void>& hold) {
  const std::string blobs = store + "/blobs";
  if (::mkdir(blobs.c_str(), 0700) != 0 && errno != EEXIST) return Fail(ErrnoError(errno, blobs));
  if (ownership == Ownership::kLink && HasReflinks(blobs, model)) ownership = Ownership::kCopy;
  const std::string gates = GatesAbove(directory, model);
  const std::string name = DigestOfFiles(directory, model, ownership, gates);
  const std::string whole = StrCat(blobs, "/", name);
  // Lists all that the store owns, so only where there is something to copy; before the hold,
  // which keeps what is left over of this very step, too.
  if (!files::exists(whole)) RemoveLeftOvers(store);
  CKPT_ASSIGN_OR_RETURN(hold, HoldBlobDirectory(store, name));
  if (files::exists(whole)) return whole;
  std::string partial = StrCat(whole, kPartial, "XXXXXX");
  if (::mkdtemp(partial.data()) == nullptr) return Fail(ErrnoError(errno, partial));
  Status taken = TakeFiles(directory, model, partial, ownership);
  if (taken) taken = WriteFile(StrCat(partial, "/", kKeptGatesName), gates);
  if (taken) taken = SyncPath(partial);
  std::error_code error;
  if (taken) files::rename(partial, whole, error);
  const bool raced = error && files::exists(whole);  // another process took it meanwhile
  if (!taken || error) {
    std::error_code ignored;
    files::remove_all(partial, ignored);
  }
  if (!taken) return Fail(std::move(taken).error());
  if (error && !raced) return Fail(ErrnoError(error.value(), whole));
  CKPT_RETURN_IF_ERROR(SyncPath(blobs));
  return whole;
}

// A source's file as the store has it, with the digests of all chunks.  A copy is
// owned; a hard link is not, since a user with its other name may write it: it
// keeps its stamp, but for the change time.
Result<Blob> TakenBlob(const std::string& root, const std::string& path, const Blob& source,
                       bool note) {
  const std::string name = StrCat(root, "/", path);
  CKPT_ASSIGN_OR_RETURN(const auto file, OpenLocalFile(name));
  CKPT_ASSIGN_OR_RETURN(const FileIdentity identity, file->Identity());
  Blob blob = source;  // the bytes are the same: what was digested of them, too
  blob.root = 0;
  blob.path = path;
  blob.stamp = identity.stamp;
  const bool changed =
      blob.stamp.size != source.stamp.size || blob.stamp.mtime_ns != source.stamp.mtime_ns;
  if (note && changed) {
    blob.content = blob.frame = Digest{};
    CKPT_ASSIGN_OR_RETURN(blob.fingerprint, FingerprintOf(*file));
  } else if (blob.stamp.size != source.stamp.size) {
    return Fail(ErrorCode::kDataLoss, StrCat(name, " has ", blob.stamp.size,
                                             " bytes, but its source "
                                             "has ",
                                             source.stamp.size));
  }
  blob.chunk_bytes = kChunkBytes;
  CKPT_ASSIGN_OR_RETURN(blob.chunks, ChunkDigestsOfFile(*file));
  blob.stamp.ctime_ns = 0;
  if (NamesOf(name) == 1) {
    blob.stamp = FileStamp{blob.stamp.size, 0, 0, 0};
  } else if (blob.stamp.inode == source.stamp.inode) {
    CKPT_RETURN_IF_ERROR(CheckUnchanged(*file, source));  // by its other names
  }
  blob.mode = identity.access.mode;
  blob.uid = identity.access.uid;
  blob.gid = identity.access.gid;
  blob.store_owned = true;
  return blob;
}

// Takes out the files that were not taken, of which nothing is read and which come last.
void LeaveOutNotes(StepModel& model, std::vector<std::optional<Blob>>& taken) {
  std::vector<Blob> blobs;
  for (size_t i = 0; i < taken.size(); ++i) {
    if (taken[i]) {
      blobs.push_back(*std::move(taken[i]));
      continue;
    }
    model.notes.push_back(StrCat(kNotShownNote, "'", model.blobs[i].path,
                                 "', which changed while the step was taken"));
  }
  model.blobs = std::move(blobs);
}

}  // namespace

Status CheckLinks(const std::string& store, const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const Descriptor from, OpenNearest(directory));
  CKPT_ASSIGN_OR_RETURN(const Descriptor to, OpenNearest(store));
  if (IsSameMount(from, to) || CanReflink(from, to)) return {};
  return CannotLink(directory, StrCat(store, " is on another filesystem or mount"));
}

Result<OwnedStep> Own(const std::string& store, const std::string& directory, StepModel model,
                      Ownership ownership) {
  OwnedStep owned;
  CKPT_ASSIGN_OR_RETURN(const std::string root,
                        Take(store, directory, model, ownership, owned.hold));
  const files::path parent = files::path(directory).parent_path();
  std::vector<std::optional<Blob>> taken(model.blobs.size());
  const size_t first_note = FirstNote(model);
  uint64_t total = 0;
  for (const Blob& source : model.blobs) total += source.stamp.size;
  const auto take = [&](size_t i) -> Result<uint64_t> {
    const Blob& source = model.blobs[i];
    CKPT_ASSIGN_OR_RETURN(const files::path path, NameFrom(parent.string(), model, source));
    auto blob = TakenBlob(root, path.string(), source, i >= first_note);
    if (blob) {
      taken[i] = *std::move(blob);
    } else if (i < first_note || !IsOfTheFile(blob.error())) {
      return Fail(std::move(blob).error());
    }
    return source.stamp.size;
  };
  CKPT_RETURN_IF_ERROR(RunWorkList(taken.size(), total, {}, take));
  LeaveOutNotes(model, taken);
  model.roots = {root};
  owned.model = std::move(model);
  return owned;
}

}  // namespace ckptfs
