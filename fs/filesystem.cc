// SPDX-License-Identifier: Apache-2.0

#include "fs/filesystem.h"

#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>

#include "core/base/printable.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "fs/serve/open_files.h"
#include "fs/status.h"
#include "fs/tree/names.h"
#include "fs/tree/namespace.h"

namespace ckptfs {
namespace {

using Type = ViewEntry::Type;
constexpr uint64_t kSelfCookie = 1;

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

std::optional<ShownStep> NameOf(const StepEntry* step) {
  if (step == nullptr) return std::nullopt;
  return ShownStep{step->record().run, step->record().id};
}

// Why names that were looked up below view/ are not there, a line each.
std::string ReasonsOf(const Node& node) {
  if (node.kind == NodeKind::kViews) return node.step->Refusals();
  std::string text;
  if (node.kind != NodeKind::kLayout) return text;
  for (const LayoutOffer::Cause& cause : node.view->Causes())
    text += Printable(cause.Text()) + "\n";
  return text;
}

}  // namespace

// Names, open files, and what is counted of both.
struct Filesystem::State {
  State(StepCatalogue& the_catalogue, ViewFormats formats, FilesystemOptions the_options)
      : catalogue(the_catalogue),
        options(std::move(the_options)),
        names(the_catalogue, formats, options),
        files(options, names.resolver(), counters) {}

  Status TakeInNews();
  Result<OpenFile> OpenIfAllowed(const Node& file, const Caller& caller);
  Status WarmBelow(const TreeSnapshot& now, const Node& node, WarmReport& report);

  StepCatalogue& catalogue;
  const FilesystemOptions options;
  Counters counters;
  Namespace names;
  OpenFiles files;
};

Filesystem::Filesystem(std::unique_ptr<State> state) : state_(std::move(state)) {}
Filesystem::~Filesystem() = default;

Result<std::unique_ptr<Filesystem>> Filesystem::Create(StepCatalogue& catalogue,
                                                       ViewFormats formats,
                                                       FilesystemOptions options) {
  std::unique_ptr<Filesystem> filesystem(
      new Filesystem(std::make_unique<State>(catalogue, formats, std::move(options))));
  CKPT_RETURN_IF_ERROR(filesystem->Refresh());
  return filesystem;
}

// ---- names -------------------------------------------------------------------

Result<Attributes> Filesystem::Lookup(InodeNumber parent, std::string_view name,
                                      const Caller& caller) {
  State& s = *state_;
  s.counters.Count(Request::kLookup);
  const auto now = s.names.Snapshot();
  CKPT_ASSIGN_OR_RETURN(const NodePtr directory, s.names.FindNode(parent));
  // A caller who may not see the step learns nothing of what is in it.
  if (!s.names.Visible(*now, *directory, caller)) return NoSuch(*directory, name);
  Result<NodePtr> child = s.names.FindChild(*now, *directory, name);
  if (!child) {
    s.counters.CountError(child.error());
    return Fail(std::move(child).error());
  }
  if (!s.names.Visible(*now, **child, caller)) return NoSuch(*directory, name);
  s.files.Expect(**child);
  return s.names.AttributesOf(*s.names.Reference(*std::move(child)));
}

Attributes Filesystem::Remember(const DirectoryEntry& entry) {
  State& s = *state_;
  s.files.Expect(*entry.node);
  Attributes attributes = entry.attributes;
  attributes.inode = s.names.Reference(entry.node)->inode;
  return attributes;
}

void Filesystem::Forget(InodeNumber inode, uint64_t count) {
  state_->counters.Count(Request::kForget);
  state_->names.nodes().Forget(inode, count);
}

Status Filesystem::CheckKnown(InodeNumber inode) {
  const auto node = state_->names.FindNode(inode);
  return node ? Status() : Fail(Error(node.error()));
}

Result<Attributes> Filesystem::GetAttributes(InodeNumber inode, const Caller& caller) {
  State& s = *state_;
  s.counters.Count(Request::kAttributes);
  CKPT_ASSIGN_OR_RETURN(const NodePtr node, s.names.FindNode(inode));
  // A process that has it open may ask, also when its step is gone.
  if (!s.files.IsOpen(inode) && !s.names.Visible(*s.names.Snapshot(), *node, caller)) {
    return Fail(ErrorCode::kPermission, StrCat(node->path, ": this user may not see it"));
  }
  return s.names.AttributesOf(*node);
}

Result<std::string> Filesystem::ReadLink(InodeNumber inode, const Caller& caller) {
  State& s = *state_;
  s.counters.Count(Request::kReadLink);
  CKPT_ASSIGN_OR_RETURN(const NodePtr node, s.names.FindNode(inode));
  if (!s.names.Visible(*s.names.Snapshot(), *node, caller)) {
    return Fail(ErrorCode::kPermission, StrCat(node->path, ": this user may not see it"));
  }
  if (node->type != Type::kSymlink) {
    return Fail(ErrorCode::kInvalid, StrCat(node->path, " is not a symbolic link"));
  }
  return node->target;
}

Result<std::string> Filesystem::Attribute(InodeNumber inode, std::string_view name,
                                          const Caller& caller) {
  State& s = *state_;
  CKPT_ASSIGN_OR_RETURN(const NodePtr node, s.names.FindNode(inode));
  const Error none{ErrorCode::kNotFound, StrCat(node->path,
                                                ": it does not have such an "
                                                "attribute")};
  if (name != kReasonAttribute || !node->step) return Fail(none);
  // A caller who may not see the step learns nothing of what is in it.
  if (!s.names.Visible(*s.names.Snapshot(), *node, caller)) return Fail(none);
  std::string text = ReasonsOf(*node);
  if (text.empty()) return Fail(none);
  return text;
}

std::vector<std::string> Filesystem::AttributeNames(InodeNumber inode, const Caller& caller) {
  if (!Attribute(inode, kReasonAttribute, caller)) return {};
  return {std::string(kReasonAttribute)};
}

Result<std::vector<DirectoryEntry>> Filesystem::ReadDirectory(InodeNumber inode, uint64_t offset,
                                                              size_t limit, const Caller& caller) {
  State& s = *state_;
  s.counters.Count(Request::kReadDirectory);
  const auto now = s.names.Snapshot();
  CKPT_ASSIGN_OR_RETURN(const NodePtr directory, s.names.FindNode(inode));
  if (directory->type != Type::kDirectory) {
    return Fail(ErrorCode::kInvalid, StrCat(directory->path, " is not a directory"));
  }
  if (!s.names.Visible(*now, *directory, caller)) {
    return Fail(ErrorCode::kPermission, StrCat(directory->path, ": this user may not see it"));
  }
  if (directory->step && directory->step->removed()) {
    return Fail(ErrorCode::kStale, StrCat(directory->path, ": the step was removed"));
  }
  auto listing = s.names.ListingOf(*now, *directory);
  if (!listing) {
    s.counters.CountError(listing.error());
    return Fail(std::move(listing).error());
  }
  std::vector<DirectoryEntry> entries;
  const auto add = [&](std::string_view name, Attributes attributes, uint64_t cookie,
                       NodePtr node = nullptr) {
    if (cookie <= offset || entries.size() >= limit) return;
    entries.push_back({std::string(name), attributes, cookie, std::move(node)});
  };
  if (offset < kParentCookie) {
    Attributes parent = s.names.AttributesOf(*directory);
    add(".", parent, kSelfCookie);
    parent.inode = directory->parent;
    add("..", parent, kParentCookie);
  }
  for (const Namespace::Place& entry :
       Namespace::EntriesAfter(*directory, **listing, offset, limit)) {
    if (entries.size() >= limit) break;
    const Node& node = **entry.node;
    if (!s.names.Visible(*now, node, caller)) continue;
    add(node.name(), s.names.AttributesOf(node), entry.offset, *entry.node);
  }
  if (entries.empty() && s.names.listings().Finished(*directory)) {
    listing->reset();
    malloc_trim(0);  // many small blocks, which the allocator would keep
  }
  return entries;
}

// ---- open files --------------------------------------------------------------

// A look at the files may find that they are not for the caller any more.
Result<OpenFile> Filesystem::State::OpenIfAllowed(const Node& file, const Caller& caller) {
  CKPT_RETURN_IF_ERROR(files.Prepare(file));
  if (!names.MayEnter(*file.step, caller)) {
    return Fail(ErrorCode::kPermission, StrCat(file.path, ": this user may not read it"));
  }
  return files.Open(file);
}

Result<OpenFile> Filesystem::Open(InodeNumber inode, int flags, const Caller& caller) {
  State& s = *state_;
  s.counters.Count(Request::kOpen);
  CKPT_ASSIGN_OR_RETURN(const NodePtr node, s.names.FindNode(inode));
  if (node->type != ViewEntry::Type::kFile) {
    return Fail(ErrorCode::kInvalid, StrCat(node->path, " is not a file"));
  }
  if ((flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0) {
    return Fail(ErrorCode::kPermission, StrCat(node->path, " is read-only"));
  }
  const auto refuse = [&](ErrorCode code, std::string_view why) {
    s.counters.CountRefusal(code);
    return Fail(code, StrCat(node->path, why));
  };
  if (node->kind == NodeKind::kStatus) {
    if (caller.uid != 0 && caller.uid != geteuid()) {
      return refuse(ErrorCode::kPermission, " is for the administrator");
    }
    return s.files.OpenText(node->inode, StatusJson());
  }
  if (!s.names.MayEnter(*node->step, caller)) {
    return refuse(ErrorCode::kPermission, ": this user may not read it");
  }
  if (node->step->removed()) {
    return refuse(ErrorCode::kStale, ": the step was removed");
  }
  Result<OpenFile> open = s.OpenIfAllowed(*node, caller);
  if (!open) {
    s.counters.CountError(open.error());
    s.options.Say(open.error().message);
  }
  return open;
}

Result<size_t> Filesystem::Read(FileHandle handle, uint64_t offset, std::span<std::byte> out) {
  state_->counters.Count(Request::kRead);
  return state_->files.Read(handle, offset, out);
}

std::optional<LentBytes> Filesystem::Lend(FileHandle handle, uint64_t offset, uint64_t length) {
  auto lent = state_->files.Lend(handle, offset, length);
  if (lent) state_->counters.Count(Request::kRead);
  return lent;
}

void Filesystem::LentInVain(FileHandle handle) { state_->files.LentInVain(handle); }

void Filesystem::Release(FileHandle handle) {
  state_->counters.Count(Request::kRelease);
  state_->files.Release(handle);
}

Result<OpenFile> Filesystem::Degrade(FileHandle handle) { return state_->files.Degrade(handle); }

void Filesystem::DisablePassthrough(std::string_view reason) {
  state_->files.DisablePassthrough(reason);
}

Status Filesystem::State::WarmBelow(const TreeSnapshot& now, const Node& node, WarmReport& report) {
  if (node.type == Type::kDirectory) {
    CKPT_ASSIGN_OR_RETURN(const auto listing, names.ListingOf(now, node));
    for (const NodePtr& child : listing->children) {
      CKPT_RETURN_IF_ERROR(WarmBelow(now, *child, report));
    }
    return {};
  }
  return node.type == Type::kFile ? files.Warm(node, report) : Status{};
}

Result<WarmReport> Filesystem::Warm(std::string_view layout, std::string_view path_prefix) {
  State& s = *state_;
  const auto now = s.names.Snapshot();
  CKPT_ASSIGN_OR_RETURN(const auto step, StepToWarm(*now, layout));
  CKPT_ASSIGN_OR_RETURN(const Layout parsed, Layout::Parse(layout));
  CKPT_ASSIGN_OR_RETURN(const auto offer, step->Offer(parsed));
  if (!s.files.MayFill()) {
    return Fail(ErrorCode::kUnsupported, "nothing to warm: files are streamed here");
  }
  const std::string path = StrCat(step->path(), "/view/", offer->name, "/", path_prefix);
  CKPT_ASSIGN_OR_RETURN(const NodePtr node, s.names.Walk(*now, path));
  WarmReport report;
  CKPT_RETURN_IF_ERROR(s.WarmBelow(*now, *node, report));
  return report;
}

// ---- changes -----------------------------------------------------------------

Status Filesystem::State::TakeInNews() {
  return names.TakeInNews([this](const TreeChange& change) {
    if (change.kept) files.DropPlans(change.kept->record().manifest);
    if (change.removed) files.DropStep(change.removed->record().manifest);
  });
}

Status Filesystem::Refresh() {
  return Caught([this]() -> Status {
    CKPT_RETURN_IF_ERROR(state_->catalogue.Refresh());
    return state_->TakeInNews();
  });
}

Status Filesystem::RefreshStep(std::string_view run, std::string_view id) {
  return Caught([&]() -> Status {
    CKPT_RETURN_IF_ERROR(state_->catalogue.RefreshStep(run, id));
    return state_->TakeInNews();
  });
}

Result<std::optional<ShownStep>> Filesystem::SwitchView(std::string_view run, std::string_view id) {
  CKPT_ASSIGN_OR_RETURN(const auto before, state_->names.SwitchView(run, id));
  return NameOf(before.get());
}

std::optional<ShownStep> Filesystem::ViewShows() const {
  return NameOf(state_->names.Snapshot()->view.get());
}

void Filesystem::LetGo(std::string_view run, std::string_view id) {
  const auto step = state_->names.Snapshot()->tree.FindStep(run, id);
  if (!step) return;
  state_->files.DropPlans(step->record().manifest);
  state_->names.LetGo(step->record().manifest);
}

Handover Filesystem::HandOver() const {
  Handover handover;
  handover.names = state_->names.nodes().All();
  handover.shown = state_->names.Shown();
  state_->files.HandOver(handover);
  return handover;
}

std::vector<TakenFile> Filesystem::TakeOver(const Handover& handover) {
  State& s = *state_;
  if (handover.shown) {
    const auto shown = s.names.SwitchView(handover.shown->run, handover.shown->id);
    if (!shown) s.options.Say(StrCat("/view: ", shown.error().message));
  }
  for (const KnownName& name : handover.names) s.names.nodes().Restore(name);
  return s.files.TakeOver(handover, [&](InodeNumber inode) { return s.names.FindNode(inode); });
}

void Filesystem::EndInvalidation() { state_->names.EndInvalidation(); }

std::string Filesystem::StatusJson(StatusDepth depth) const {
  return RenderStatus(state_->names, state_->files, state_->counters, state_->options, depth);
}

}  // namespace ckptfs
