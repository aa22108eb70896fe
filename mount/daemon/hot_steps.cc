// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/hot_steps.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/strings.h"

namespace ckptfs {

// One file's pages, in memory while it lives.
class LockedFile {
 public:
  LockedFile() = default;
  LockedFile(LockedFile&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  LockedFile& operator=(LockedFile&&) = delete;
  ~LockedFile() {
    if (bytes_ != 0) ::munmap(address_, bytes_);
  }

  static Result<LockedFile> Lock(const std::string& path, size_t bytes) {
    LockedFile file;
    if (bytes == 0) return file;
    CKPT_ASSIGN_OR_RETURN(const Descriptor opened, OpenDescriptor(path, O_RDONLY | O_NOFOLLOW));
    void* const address = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, opened.get(), 0);
    if (address == MAP_FAILED) return Fail(ErrnoError(errno, path));
    file.address_ = address;
    file.bytes_ = bytes;
    if (::mlock(address, bytes) == 0) return file;
    return Fail(
        ErrorCode::kExhausted,
        StrCat(path, ": its ", bytes, " bytes may not be locked in memory (RLIMIT_MEMLOCK)"));
  }

 private:
  void* address_ = nullptr;
  size_t bytes_ = 0;
};

struct HotSteps::Kept {
  StepRecord record;
  uint64_t bytes = 0;
  std::vector<LockedFile> files;
};

HotSteps::HotSteps(uint64_t steps, uint64_t budget) : steps_(steps), budget_(budget) {
  rlimit limit{};
  if (steps_ == 0 || ::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_MEMLOCK, &limit);  // as far as that goes
}
HotSteps::~HotSteps() = default;

std::vector<HotSteps::KeptPtr> HotSteps::MakeRoom(uint64_t bytes) {
  std::vector<KeptPtr> gone;
  MutexLock lock(mutex_);
  uint64_t used = bytes;
  for (const KeptPtr& kept : kept_) used += kept->bytes;
  while (!kept_.empty() && (kept_.size() >= steps_ || used > budget_)) {
    used -= kept_.front()->bytes;
    gone.push_back(std::move(kept_.front()));
    kept_.pop_front();
  }
  return gone;
}

Result<HotSteps::KeptPtr> HotSteps::Lock(const StepRecord& record,
                                         const std::vector<std::string>& paths) {
  auto kept = std::make_shared<Kept>();
  kept->record = record;
  std::vector<size_t> sizes;
  for (const std::string& path : paths) {
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) return Fail(ErrnoError(errno, path));
    sizes.push_back(static_cast<size_t>(info.st_size));
    kept->bytes += sizes.back();
  }
  if (kept->bytes > budget_) {
    return Fail(ErrorCode::kExhausted, StrCat("a step of ", kept->bytes, " bytes is more than the ",
                                              budget_, " that hot steps may take (--hot-memory)"));
  }
  MakeRoom(kept->bytes);
  for (size_t i = 0; i < paths.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(LockedFile file, LockedFile::Lock(paths[i], sizes[i]));
    kept->files.push_back(std::move(file));
  }
  return KeptPtr(std::move(kept));
}

Status HotSteps::Add(const StepRecord& record, const std::vector<std::string>& paths) {
  if (steps_ == 0) return {};
  auto kept = Lock(record, paths);
  MutexLock lock(mutex_);
  why_not_ = kept ? "" : kept.error().message;
  if (!kept) return Fail(std::move(kept).error());
  kept_.push_back(*std::move(kept));
  return {};
}

void HotSteps::Remove(const StepRecord& record) {
  KeptPtr gone;
  MutexLock lock(mutex_);
  const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const KeptPtr& kept) {
    return kept->record.run == record.run && kept->record.id == record.id;
  });
  if (found == kept_.end()) return;
  gone = std::move(*found);
  kept_.erase(found);
}

HotStepsStatus HotSteps::status() const {
  MutexLock lock(mutex_);
  HotStepsStatus status{.steps = kept_.size(), .bytes = 0, .why_not = why_not_};
  for (const KeptPtr& kept : kept_) status.bytes += kept->bytes;
  return status;
}

}  // namespace ckptfs
