// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/open_files.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_map>

#include "core/base/checked_math.h"
#include "core/base/descriptor.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr uint64_t kPlanCacheBytes = uint64_t{64} << 20;

// The source file, if what was opened is what was adopted.
Result<std::shared_ptr<const Backing>> OpenSource(const MountedStep& step, BlobIndex blob) {
  CKPT_ASSIGN_OR_RETURN(const std::shared_ptr<const File> file, step.blobs().Open(blob));
  return std::make_shared<const Backing>(ServingMode::kDirect, file->descriptor(), file);
}

size_t CopyText(const std::string& text, uint64_t offset, std::span<std::byte> out) {
  if (offset >= text.size()) return 0;
  const size_t length = std::min<uint64_t>(out.size(), text.size() - offset);
  std::memcpy(out.data(), text.data() + offset, length);
  return length;
}

// A filled file read by READs after all (no passthrough, or the kernel refused).
Result<size_t> ReadFilled(int fd, uint64_t offset, std::span<std::byte> out) {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t count =
        pread(fd, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Fail(ErrnoError(errno, "reading a materialised file"));
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  return done;
}

}  // namespace

OpenFiles::OpenFiles(const FilesystemOptions& options, const Resolver& resolver, Counters& counters)
    : options_(options),
      resolver_(resolver),
      counters_(counters),
      passthrough_(options.passthrough),
      plans_(kPlanCacheBytes, [](const auto& plan) { return plan->MemoryBytes(); }) {
  const bool wanted = options_.passthrough || options_.force_mode == ServingMode::kMaterialise;
  if (!wanted) return;
  const uint64_t memory = MemoryToUse();
  const uint64_t budget = MaterialiseBudget(options_.materialise_budget, memory);
  if (budget < options_.materialise_budget) {
    options_.Say(StrCat("the machine has ", memory, " bytes of memory: files may take ", budget,
                        " of them, not ", options_.materialise_budget));
  }
  auto pool = PagePool::Create(budget);
  if (!pool) {
    options_.Say(StrCat("files are not materialised but streamed: ", pool.error().message));
    return;
  }
  PagePool& pages = **pool;
  materialiser_ = std::make_unique<Materialiser>(*std::move(pool));
  reserve_ = std::make_unique<PageReserve>(pages, options_.reserve.value_or(DefaultReserve(budget)),
                                           [this] { return counters_.activity(); });
}

Result<std::shared_ptr<const PreparedPlan>> OpenFiles::Prepare(const Node& file) {
  auto plan = plans_.Find(file.inode).value_or(nullptr);
  if (!plan) {
    CKPT_ASSIGN_OR_RETURN(auto mounted, file.step->Mounted());
    CKPT_ASSIGN_OR_RETURN(ShownPlan fresh, resolver_.MakePlan(file, *mounted));
    plan = plans_.Insert(file.inode, std::make_shared<const PreparedPlan>(
                                         std::move(mounted), std::move(fresh), file.path));
  }
  if (Status unchanged = plan->step().CheckStamps(plan->blobs()); !unchanged) {
    return Fail(std::move(unchanged).error().WithContext(file.path));
  }
  return plan;
}

void OpenFiles::Expect(const Node& file) {
  if (!materialiser_ || file.kind != NodeKind::kViewEntry || file.type != ViewEntry::Type::kFile ||
      file.reading == Reading::kOnce || file.size < kSmallFile) {
    return;
  }
  materialiser_->Expect(file.inode, file.size);
}

ServingChoice OpenFiles::Choose(const Node& file, const PreparedPlan& plan, bool warming) const {
  ServingQuestion question;
  question.size = file.size;
  question.whole_blob = plan.plan().WholeBlob(plan.model()).has_value();
  question.passthrough = passthrough_.load(std::memory_order_relaxed);
  question.materialise = materialiser_ != nullptr;
  question.filled = materialiser_ && materialiser_->IsFilled(file.inode);
  question.read_once = file.reading == Reading::kOnce && !warming;
  question.budget = materialiser_ ? materialiser_->pool().budget() : 0;
  question.forced = options_.force_mode;
  return ChooseServing(question);
}

Result<std::shared_ptr<const Backing>> OpenFiles::MakeBacking(const Node& file,
                                                              const PreparedPlan& plan,
                                                              std::string* reason) {
  const ServingChoice choice = Choose(file, plan, false);
  *reason = choice.reason;
  if (choice.mode == ServingMode::kStream) return nullptr;
  if (choice.mode == ServingMode::kDirect) {
    auto source = OpenSource(plan.step(), *plan.plan().WholeBlob(plan.model()));
    if (!source) return Fail(std::move(source).error().WithContext(file.path));
    if ((*source)->fd() >= 0) return source;
    *reason = "its file has no descriptor";
    return nullptr;
  }
  auto filled = materialiser_->Acquire(file.inode, plan);
  if (filled) return filled;
  if (filled.error().code == ErrorCode::kExhausted) {
    *reason = StrCat("no room: ", filled.error().message);
    return nullptr;
  }
  return Fail(std::move(filled).error().WithContext(file.path));
}

OpenFile OpenFiles::Describe(FileHandle handle, const OpenHandle& open) const {
  OpenFile file;
  file.handle = handle;
  if (open.backing) {
    file.mode = open.backing->mode();
    // Not `passthrough`: opens that are live stay passed through when it ends.
    if (options_.passthrough) {
      file.backing_fd = open.backing->fd();
      file.backing_token = open.backing->token();
    }
  }
  // Passed-through opens must not keep the cache; the bytes of all others
  // never change.
  file.keep_cache = file.backing_fd < 0;
  file.direct_io = file.backing_fd < 0 && options_.direct_io_mmap && open.plan &&
                   ReadByCopy(open.reading, open.plan->plan().size());
  return file;
}

Result<OpenFile> OpenFiles::Open(const Node& file) {
  OpenHandle open;
  open.inode = file.inode;
  open.reading = file.reading;
  CKPT_ASSIGN_OR_RETURN(open.plan, Prepare(file));
  RecentOpen told;
  told.path = file.path;
  told.size = open.plan->plan().size();
  told.reason = "like earlier opens of the file";
  std::shared_ptr<const Backing> wanted;
  if (const auto now = live_.Peek(file.inode)) {
    wanted = *now;
  } else {
    counters_.CountFill();  // so that a reserve leaves the processors to it
    CKPT_ASSIGN_OR_RETURN(wanted, MakeBacking(file, *open.plan, &told.reason));
  }
  open.backing = live_.Join(file.inode, wanted);
  if (open.backing != wanted) told.reason = "like a concurrent open of the file";
  if (open.backing) told.mode = open.backing->mode();
  counters_.CountOpen(std::move(told));
  const OpenHandle described = open;
  return Describe(handles_.Add(std::move(open)), described);
}

Result<OpenFile> OpenFiles::OpenText(InodeNumber inode, std::string text) {
  OpenHandle open;
  open.inode = inode;
  open.text = std::make_shared<const std::string>(std::move(text));
  OpenFile result;
  result.handle = handles_.Add(std::move(open));
  result.direct_io = true;  // its size is not known before it is read
  return result;
}

Result<size_t> OpenFiles::Read(FileHandle handle, uint64_t offset, std::span<std::byte> out) {
  const auto open = handles_.Find(handle);
  if (!open) return Fail(ErrorCode::kStale, "the process that had the file open is gone");
  if (open->text) return CopyText(*open->text, offset, out);
  const bool filled = open->backing && open->backing->mode() == ServingMode::kMaterialise;
  if (!open->plan && !filled) {
    return Fail(ErrorCode::kStale, "the file is not what it was when an earlier process opened it");
  }
  Result<size_t> count =
      filled ? ReadFilled(open->backing->fd(), offset, out) : Stream(*open, offset, out);
  if (count) {
    counters_.CountServed(open->backing ? open->backing->mode() : ServingMode::kStream, *count);
    return count;
  }
  Error error = std::move(count).error();
  if (open->plan) error = std::move(error).WithContext(open->plan->path());
  counters_.CountError(error);
  options_.Say(error.message);
  return Fail(std::move(error));
}

Result<size_t> OpenFiles::Stream(const OpenHandle& open, uint64_t offset,
                                 std::span<std::byte> out) {
  CKPT_ASSIGN_OR_RETURN(const size_t count, open.plan->reader().Read(offset, out));
  if (count == 0) return count;
  const uint64_t size = open.plan->plan().size();
  const uint64_t before = open.streamed->fetch_add(count, std::memory_order_relaxed);
  if (before / size != (before + count) / size) {
    CKPT_RETURN_IF_ERROR(open.plan->step().CheckStampsNow(open.plan->read_blobs()));
  }
  return count;
}

// The bytes that complete a pass over the file are copied: what is compared with the stamps
// after them must not be read after that.
std::optional<LentBytes> OpenFiles::Lend(FileHandle handle, uint64_t offset, uint64_t length) {
  const auto open = handles_.Find(handle);
  if (!open || !open->plan || open->backing) return std::nullopt;
  const uint64_t size = open->plan->plan().size();
  if (offset >= size) return std::nullopt;
  const uint64_t count = std::min(length, size - offset);
  const auto completes = [&](uint64_t before) { return before / size != (before + count) / size; };
  uint64_t before = open->streamed->load(std::memory_order_relaxed);
  if (completes(before)) return std::nullopt;
  auto lent = open->plan->reader().Lend(offset, count);
  if (!lent) return std::nullopt;
  lent->owner = open;
  while (
      !open->streamed->compare_exchange_weak(before, before + count, std::memory_order_relaxed)) {
    if (completes(before)) return std::nullopt;
  }
  counters_.CountServed(ServingMode::kStream, count);
  return lent;
}

void OpenFiles::LentInVain(FileHandle handle) {
  const auto open = handles_.Find(handle);
  if (!open || !open->plan) return;
  const Error error{ErrorCode::kDataLoss,
                    StrCat(open->plan->path(),
                           ": a source no longer holds all bytes it had when it "
                           "was opened (truncated, or its device failed)")};
  counters_.CountError(error);
  options_.Say(error.message);
}

void OpenFiles::Release(FileHandle handle) {
  const auto open = handles_.Remove(handle);
  if (open && !open->text) live_.Leave(open->inode);
}

void OpenFiles::HandOver(Handover& handover) const {
  std::unordered_map<uint64_t, size_t> places;  // of backings, by their tokens
  for (const auto& [handle, open] : handles_.All()) {
    KnownFile file;
    file.handle = handle;
    file.inode = open->inode;
    if (open->plan) file.size = open->plan->plan().size();
    file.streamed = open->streamed->load(std::memory_order_relaxed);
    if (open->text) file.text = *open->text;
    if (open->backing && open->backing->fd() >= 0) {
      const auto [place, fresh] = places.emplace(open->backing->token(), handover.backings.size());
      if (fresh) handover.backings.push_back({open->backing->mode(), open->backing->fd()});
      file.backing = place->second;
    }
    handover.files.push_back(std::move(file));
  }
  handover.next_handle = handles_.next();
}

std::shared_ptr<const PreparedPlan> OpenFiles::PrepareAgain(const KnownFile& file,
                                                            const FindNode& find) {
  const auto node = find(file.inode);
  auto plan = node ? Prepare(**node) : Fail(Error(node.error()));
  if (plan && (*plan)->plan().size() == file.size) return *std::move(plan);
  options_.Say(
      StrCat("an open file cannot be read any more: ",
             plan ? StrCat((*plan)->path(), ": its size is another one") : plan.error().message));
  return nullptr;
}

std::vector<TakenFile> OpenFiles::TakeOver(const Handover& handover, const FindNode& find) {
  std::vector<std::shared_ptr<const Backing>> backings;
  for (const KnownBacking& backing : handover.backings) {
    backings.push_back(std::make_shared<const Backing>(
        backing.mode, backing.fd, std::make_shared<const Descriptor>(backing.fd)));
  }
  handles_.StartAt(handover.next_handle);
  std::vector<TakenFile> taken;
  for (const KnownFile& file : handover.files) {
    OpenHandle open;
    open.inode = file.inode;
    *open.streamed = file.streamed;
    if (file.text) {
      open.text = std::make_shared<const std::string>(*file.text);
    } else {
      open.plan = PrepareAgain(file, find);
      open.backing = live_.Join(file.inode, file.backing ? backings[*file.backing] : nullptr);
    }
    taken.push_back({file.inode, Describe(file.handle, open)});
    handles_.Restore(file.handle, std::move(open));
  }
  return taken;
}

Result<OpenFile> OpenFiles::Degrade(FileHandle handle) {
  const auto open = handles_.Find(handle);
  if (!open) return Fail(ErrorCode::kInvalid, "no such open file");
  if (open->backing && !live_.Degrade(open->inode)) {
    return Fail(ErrorCode::kExists, "other opens of the file are passed through");
  }
  OpenHandle streamed = *open;
  streamed.backing = nullptr;
  const OpenFile result = Describe(handle, streamed);
  handles_.Replace(handle, std::move(streamed));
  return result;
}

bool OpenFiles::MayFill() const { return materialiser_ && passthrough_.load(); }

Status OpenFiles::Warm(const Node& file, WarmReport& report) {
  CKPT_ASSIGN_OR_RETURN(const auto plan, Prepare(file));
  const ServingChoice choice = Choose(file, *plan, true);
  if (choice.mode != ServingMode::kMaterialise) {
    ++report.skipped[StrCat(ServingModeName(choice.mode), ": ", choice.reason)];
    return {};
  }
  const uint64_t bytes = AlignUp(file.size, kHugePage);
  if (report.bytes + bytes > materialiser_->pool().budget()) {
    return Fail(ErrorCode::kExhausted,
                StrCat("the budget of ", materialiser_->pool().budget(), " bytes is full after ",
                       report.files, " files of ", report.bytes, " bytes; ", file.path,
                       " and the files after it are not warmed"));
  }
  CKPT_ASSIGN_OR_RETURN(const auto backing, materialiser_->Acquire(file.inode, *plan));
  ++report.files;
  report.bytes += bytes;
  return {};
}

void OpenFiles::DisablePassthrough(std::string_view reason) {
  if (!passthrough_.exchange(false)) return;
  options_.Say(StrCat("files are streamed from now on: ", reason));
}

void OpenFiles::DropPlans(const Digest& manifest) {
  plans_.DropIf([&](InodeNumber, const std::shared_ptr<const PreparedPlan>& plan) {
    return plan->step().record().manifest == manifest;
  });
}

void OpenFiles::DropStep(const Digest& manifest) {
  DropPlans(manifest);
  if (materialiser_) materialiser_->DropStep(manifest);
}

}  // namespace ckptfs
