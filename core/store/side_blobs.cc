// SPDX-License-Identifier: Apache-2.0

#include "core/store/side_blobs.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <set>
#include <vector>

#include "core/base/file_lock.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/io/file_stamp.h"
#include "core/model/side_blob.h"

namespace ckptfs {
namespace {

constexpr std::string_view kBlobs = "blobs";
constexpr std::string_view kFolder = "blobs/side";
constexpr std::string_view kSuffix = ".safetensors";
constexpr size_t kFingerprintBytes = 4096;
constexpr int kMaxSideBlobRaces = 100;

// As for a source: of the first and last 4 KiB.
Digest FingerprintOf(std::string_view bytes) {
  if (bytes.size() <= 2 * kFingerprintBytes) return DigestOf(bytes);
  return DigestOf(
      StrCat(bytes.substr(0, kFingerprintBytes), bytes.substr(bytes.size() - kFingerprintBytes)));
}

// The object is there, whole.
Status PutObject(Storage& storage, const std::string& name, std::string_view bytes) {
  Status published = PublishText(storage, name, bytes);
  if (published || published.error().code != ErrorCode::kExists) return published;
  const auto there = ReadWhole(storage, name, bytes.size());
  if (!there && there.error().code != ErrorCode::kInvalid) return Fail(Error(there.error()));
  if (there && *there == bytes) return {};
  // Damaged since it was written: its name says what it has to hold.
  CKPT_ASSIGN_OR_RETURN(const auto writer, storage.Create(name));
  CKPT_RETURN_IF_ERROR(writer->WriteAt(0, std::as_bytes(std::span(bytes))));
  return writer->Close();
}

// The names of the side blobs that live steps need; nothing if a record cannot
// be read.
Result<std::optional<std::set<std::string>>> NeededNames(Storage& storage,
                                                         const KnownRecord& known) {
  RecordTexts unused;
  CKPT_ASSIGN_OR_RETURN(const StoreIndex index, BuildStoreIndex(storage, "", known, unused));
  std::set<std::string> names;
  for (const auto& [run, steps] : index.runs) {
    for (const auto& [id, step] : steps) {
      if (!step.record) return std::optional<std::set<std::string>>();
      const auto& side = step.record->side;
      if (side) names.insert(StrCat(kBlobs, "/", SideBlobPath(*side)));
    }
  }
  return std::optional(std::move(names));
}

}  // namespace

std::string BlobsDirectory(const std::string& directory) {
  return directory.empty() ? std::string() : StrCat(directory, "/", kBlobs);
}

std::string SideBlobPath(const Digest& content) { return StrCat("side/", content.Hex(), kSuffix); }

Result<SideBlob> PutSideBlob(Storage& storage, const std::string& directory,
                             std::string_view bytes) {
  SideBlob side;
  side.blob.content = DigestOf(bytes);
  side.blob.fingerprint = FingerprintOf(bytes);
  side.blob.path = SideBlobPath(side.blob.content);
  side.blob.side = side.blob.store_owned = true;
  side.blob.stamp.size = bytes.size();
  side.blob.chunk_bytes = kChunkBytes;
  side.blob.chunks = ChunkDigestsOf(bytes);
  side.root = BlobsDirectory(directory);
  const std::string name = StrCat(kBlobs, "/", side.blob.path);
  const std::string path = StrCat(directory, "/", name);
  for (int race = 0; race < kMaxSideBlobRaces; ++race) {
    const Status put = PutObject(storage, name, bytes);
    const bool swept = !put && put.error().code == ErrorCode::kNotFound;  // between two looks
    if (swept) continue;
    if (!put) return Fail(Error(put.error()));
    if (directory.empty()) return side;
    // Waits for a sweep that is looking at it; what that removed is put again.
    auto held = FileLock::Take(path, O_RDONLY, LOCK_SH);
    if (!held) continue;
    side.hold = std::move(held);
    return side;
  }
  return Fail(ErrorCode::kExhausted, StrCat(path, " is being removed all the time"));
}

ResolvedModel ResolveSideBlob(const std::string& directory, StepModel model) {
  const auto index = FindSideBlob(model);
  if (!index || directory.empty()) return {std::move(model), nullptr};
  const Blob& blob = model.blob(*index);
  const std::string path = StrCat(directory, "/", kBlobs, "/", blob.path);
  std::string wrong;
  if (blob.path != SideBlobPath(blob.content)) {
    wrong = "not named by its content";
  } else if (auto held = FileLock::Take(path, O_RDONLY, LOCK_SH | LOCK_NB); !held) {
    wrong = "missing";
  } else if (struct stat info; fstat(held->fd(), &info) != 0) {
    wrong = "unreadable";
  } else if (Status same = CompareStamps(path, blob.stamp, StampOf(info)); !same) {
    wrong = "not the file that was packed";
  } else {
    model.roots.back() = StrCat(directory, "/", kBlobs);  // version 1 names another place
    return {std::move(model), std::move(held)};
  }
  StepModel pieces = WithoutSideBlob(std::move(model));
  pieces.notes.push_back(
      StrCat("the side blob ", path, " is ", wrong, ": small pieces are read from the source"));
  return {std::move(pieces), nullptr};
}

Status SweepSideBlobs(Storage& storage, const std::string& directory, const KnownRecord& known) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListFilesBelow(storage, kFolder));
  if (names.empty()) return {};
  CKPT_ASSIGN_OR_RETURN(auto needed, NeededNames(storage, known));
  if (!needed) return {};
  std::vector<std::pair<std::string, std::unique_ptr<const FileLock>>> unneeded;
  for (const std::string& name : names) {
    if (needed->contains(name) || !name.ends_with(kSuffix)) continue;
    std::unique_ptr<const FileLock> lock;
    if (!directory.empty()) {
      lock = FileLock::Take(StrCat(directory, "/", name), O_RDWR, LOCK_EX | LOCK_NB);
      if (!lock) continue;  // held
    }
    unneeded.emplace_back(name, std::move(lock));
  }
  if (unneeded.empty()) return {};
  // Once more under the locks: a holder of one may have published meanwhile.
  CKPT_ASSIGN_OR_RETURN(needed, NeededNames(storage, known));
  for (const auto& [name, lock] : unneeded) {
    if (!needed || needed->contains(name)) continue;
    CKPT_RETURN_IF_ERROR(storage.Remove(name));
  }
  return {};
}

}  // namespace ckptfs
