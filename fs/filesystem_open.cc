// SPDX-License-Identifier: Apache-2.0

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "fs/filesystem_state.h"
#include "fs/tree/names.h"

namespace ckptfs {
namespace {

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
    const ssize_t count = pread(fd, out.data() + done, out.size() - done,
                                static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Fail(ErrnoError(errno, "reading a materialised file"));
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  return done;
}

// The step of RUN/ID/LAYOUT, or the one that /view shows; `layout` without it.
Result<std::shared_ptr<StepEntry>> StepToWarm(const TreeSnapshot& now, std::string_view& layout) {
  const size_t slash = layout.rfind('/');
  if (slash == std::string_view::npos) {
    if (now.view) return now.view;
    return Fail(ErrorCode::kNotFound, "/view shows no step to warm: write RUN/ID/LAYOUT");
  }
  const std::string_view where = layout.substr(0, slash);
  layout.remove_prefix(slash + 1);
  const size_t middle = std::min(where.find('/'), where.size());
  const std::string_view id = where.substr(std::min(middle + 1, where.size()));
  const Tree::Run* const run = now.tree.FindRun(where.substr(0, middle));
  const bool latest = id == "latest" && run != nullptr;
  auto step = latest ? run->latest : now.tree.FindStep(where.substr(0, middle), id);
  if (step) return step;
  return Fail(ErrorCode::kNotFound, StrCat("no step '", where, "' to warm"));
}

}  // namespace

Result<std::shared_ptr<const PreparedPlan>> Filesystem::State::Prepare(const Node& file) {
  auto plan = plans.Find(file.inode).value_or(nullptr);
  if (!plan) {
    CKPT_ASSIGN_OR_RETURN(auto mounted, file.step->Mounted());
    CKPT_ASSIGN_OR_RETURN(Plan fresh, resolver.MakePlan(file, *mounted));
    plan = plans.Insert(file.inode, std::make_shared<const PreparedPlan>(
                                        std::move(mounted), std::move(fresh), file.path));
  }
  if (Status unchanged = plan->step().CheckStamps(plan->blobs()); !unchanged) {
    return Fail(std::move(unchanged).error().WithContext(file.path));
  }
  return plan;
}

void Filesystem::State::Expect(const Node& file) {
  if (!materialiser || file.kind != NodeKind::kViewEntry || file.type != ViewEntry::Type::kFile ||
      file.reading == Reading::kOnce || file.size < kSmallFile) {
    return;
  }
  materialiser->Expect(file.size);
}

ServingChoice Filesystem::State::Choose(const Node& file, const PreparedPlan& plan,
                                        bool warming) const {
  ServingQuestion question;
  question.size = file.size;
  question.whole_blob = plan.plan().WholeBlob(plan.step().model()).has_value();
  question.passthrough = passthrough.load(std::memory_order_relaxed);
  question.materialise = materialiser != nullptr;
  question.filled = materialiser && materialiser->IsFilled(file.inode);
  question.read_once = file.reading == Reading::kOnce && !warming;
  question.budget = materialiser ? materialiser->pool().budget() : 0;
  question.forced = options.force_mode;
  return ChooseServing(question);
}

Result<std::shared_ptr<const Backing>> Filesystem::State::MakeBacking(const Node& file,
                                                                      const PreparedPlan& plan,
                                                                      std::string* reason) {
  const ServingChoice choice = Choose(file, plan, false);
  *reason = choice.reason;
  if (choice.mode == ServingMode::kStream) return nullptr;
  if (choice.mode == ServingMode::kDirect) {
    auto source = OpenSource(plan.step(), *plan.plan().WholeBlob(plan.step().model()));
    if (!source) return Fail(std::move(source).error().WithContext(file.path));
    if ((*source)->fd() >= 0) return source;
    *reason = "its file has no descriptor";
    return nullptr;
  }
  auto filled = materialiser->Acquire(file.inode, plan);
  if (filled) return filled;
  if (filled.error().code == ErrorCode::kExhausted) {
    *reason = StrCat("no room: ", filled.error().message);
    return nullptr;
  }
  return Fail(std::move(filled).error().WithContext(file.path));
}

OpenFile Filesystem::State::Describe(FileHandle handle, const OpenHandle& open) const {
  OpenFile file;
  file.handle = handle;
  if (open.backing) {
    file.mode = open.backing->mode();
    // Not `passthrough`: opens that are live stay passed through when it ends.
    if (options.passthrough) {
      file.backing_fd = open.backing->fd();
      file.backing_token = open.backing->token();
    }
  }
  // Passed-through opens must not keep the cache; the bytes of all others
  // never change.
  file.keep_cache = file.backing_fd < 0;
  file.direct_io = file.backing_fd < 0 && options.direct_io_mmap && open.plan &&
                   ReadByCopy(open.reading, open.plan->plan().size());
  return file;
}

Result<OpenFile> Filesystem::State::OpenStatus(const Node& file, const Caller& caller) {
  if (caller.uid != 0 && caller.uid != geteuid()) {
    return Fail(ErrorCode::kPermission, StrCat(file.path, " is for the administrator"));
  }
  OpenHandle open;
  open.inode = file.inode;
  open.text = std::make_shared<const std::string>(StatusText());
  OpenFile result;
  result.handle = handles.Add(std::move(open));
  result.direct_io = true;  // its size is not known before it is read
  return result;
}

Result<OpenFile> Filesystem::State::OpenData(const Node& file) {
  OpenHandle open;
  open.inode = file.inode;
  open.reading = file.reading;
  CKPT_ASSIGN_OR_RETURN(open.plan, Prepare(file));
  RecentOpen told;
  told.path = file.path;
  told.reason = "as the opens before it";
  std::shared_ptr<const Backing> wanted;
  if (const auto now = live.Peek(file.inode)) {
    wanted = *now;
  } else {
    counters.CountFill();  // so that a reserve leaves the processors to it
    CKPT_ASSIGN_OR_RETURN(wanted, MakeBacking(file, *open.plan, &told.reason));
  }
  open.backing = live.Join(file.inode, wanted);
  if (open.backing != wanted) told.reason = "as an open beside it";
  if (open.backing) told.mode = open.backing->mode();
  counters.CountOpen(std::move(told));
  const OpenHandle described = open;
  return Describe(handles.Add(std::move(open)), described);
}

// A look at the files may find that they are not for the caller any more.
Result<OpenFile> Filesystem::State::OpenIfAllowed(const Node& file, const Caller& caller) {
  CKPT_RETURN_IF_ERROR(Prepare(file));
  if (!MayEnter(*file.step, caller)) {
    return Fail(ErrorCode::kPermission, StrCat(file.path, ": not yours to read"));
  }
  return OpenData(file);
}

Result<OpenFile> Filesystem::Open(InodeNumber inode, int flags, const Caller& caller) {
  State& s = *state_;
  s.counters.Count(Request::kOpen);
  CKPT_ASSIGN_OR_RETURN(const NodePtr node, s.FindNode(inode));
  if (node->type != ViewEntry::Type::kFile) {
    return Fail(ErrorCode::kInvalid, StrCat(node->path, " is not a file"));
  }
  if ((flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0) {
    return Fail(ErrorCode::kPermission, StrCat(node->path, " is read-only"));
  }
  if (node->kind == NodeKind::kStatus) return s.OpenStatus(*node, caller);
  if (!s.MayEnter(*node->step, caller)) {
    return Fail(ErrorCode::kPermission, StrCat(node->path, ": not yours to read"));
  }
  if (node->step->removed()) {
    return Fail(ErrorCode::kStale, StrCat(node->path, ": the step was removed"));
  }
  Result<OpenFile> open = s.OpenIfAllowed(*node, caller);
  if (!open) {
    s.counters.CountError(open.error());
    s.Say(open.error().message);
  }
  return open;
}

Result<size_t> Filesystem::Read(FileHandle handle, uint64_t offset, std::span<std::byte> out) {
  State& s = *state_;
  s.counters.Count(Request::kRead);
  const auto open = s.handles.Find(handle);
  if (!open) return Fail(ErrorCode::kInvalid, "no such open file");
  if (open->text) return CopyText(*open->text, offset, out);
  const bool filled = open->backing && open->backing->mode() == ServingMode::kMaterialise;
  Result<size_t> count = filled ? ReadFilled(open->backing->fd(), offset, out)
                                : open->plan->reader().Read(offset, out);
  if (count) {
    s.counters.CountServed(*count);
    return count;
  }
  Error error = std::move(count).error().WithContext(open->plan->path());
  s.counters.CountError(error);
  s.Say(error.message);
  return Fail(std::move(error));
}

void Filesystem::Release(FileHandle handle) {
  State& s = *state_;
  s.counters.Count(Request::kRelease);
  const auto open = s.handles.Remove(handle);
  if (open && open->plan) s.live.Leave(open->inode);
}

Result<OpenFile> Filesystem::Degrade(FileHandle handle) {
  State& s = *state_;
  const auto open = s.handles.Find(handle);
  if (!open) return Fail(ErrorCode::kInvalid, "no such open file");
  if (open->backing && !s.live.Degrade(open->inode)) {
    return Fail(ErrorCode::kExists, "other opens of the file are passed through");
  }
  OpenHandle streamed = *open;
  streamed.backing = nullptr;
  const OpenFile result = s.Describe(handle, streamed);
  s.handles.Replace(handle, std::move(streamed));
  return result;
}

Status Filesystem::State::WarmBelow(const TreeSnapshot& now, const Node& node,
                                    WarmReport& report) {
  if (node.type == ViewEntry::Type::kDirectory) {
    CKPT_ASSIGN_OR_RETURN(const auto listing, ListingOf(now, node));
    for (const NodePtr& child : listing->children) {
      CKPT_RETURN_IF_ERROR(WarmBelow(now, *child, report));
    }
    return {};
  }
  if (node.type != ViewEntry::Type::kFile) return {};
  CKPT_ASSIGN_OR_RETURN(const auto plan, Prepare(node));
  const ServingChoice choice = Choose(node, *plan, true);
  if (choice.mode != ServingMode::kMaterialise) {
    ++report.skipped[StrCat(ServingModeName(choice.mode), ": ", choice.reason)];
    return {};
  }
  const uint64_t bytes = AlignUp(node.size, kHugePage);
  if (report.bytes + bytes > materialiser->pool().budget()) {
    return Fail(ErrorCode::kExhausted,
                StrCat("the budget of ", materialiser->pool().budget(), " bytes is full after ",
                       report.files, " files of ", report.bytes, " bytes; ", node.path,
                       " and what follows is not warmed"));
  }
  CKPT_ASSIGN_OR_RETURN(const auto backing, materialiser->Acquire(node.inode, *plan));
  ++report.files;
  report.bytes += bytes;
  return {};
}

Result<WarmReport> Filesystem::Warm(std::string_view layout, std::string_view path_prefix) {
  State& s = *state_;
  const auto now = s.Snapshot();
  CKPT_ASSIGN_OR_RETURN(const auto step, StepToWarm(*now, layout));
  CKPT_ASSIGN_OR_RETURN(const Layout parsed, Layout::Parse(layout));
  CKPT_ASSIGN_OR_RETURN(const auto offer, step->Offer(parsed));
  if (!s.materialiser || !s.passthrough.load()) {
    return Fail(ErrorCode::kUnsupported, "nothing to warm: files are streamed here");
  }
  NodePtr node = Resolver::Root(*now);
  const std::string path = StrCat(step->path().substr(1), "/view/", offer->name, "/", path_prefix);
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    if (end > begin) {
      CKPT_ASSIGN_OR_RETURN(node, s.FindChild(*now, *node, path.substr(begin, end - begin)));
    }
    begin = end + 1;
  }
  WarmReport report;
  CKPT_RETURN_IF_ERROR(s.WarmBelow(*now, *node, report));
  return report;
}

}  // namespace ckptfs
