// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/resolver.h"

#include <algorithm>

#include "core/base/strings.h"
#include "fs/tree/names.h"
#include "fs/tree/param_files.h"
#include "fs/tree/source_files.h"
#include "fs/tree/step_info.h"

namespace ckptfs {
namespace {

using Type = ViewEntry::Type;
constexpr size_t kMaxSaid = 4096;
constexpr std::string_view kLayoutInfoName = "info.json";
constexpr std::string_view kReadmeName = "README.txt";
constexpr std::string_view kIndexName = "layouts.json";

Node Below(const Node& parent, NodeKind kind, Type type, std::string_view name) {
  Node node;
  node.kind = kind;
  node.type = type;
  node.parent = parent.inode;
  node.path = StrCat(parent.path, "/", name);
  node.step = parent.step;
  node.view = parent.view;
  node.mtime_ns = parent.step ? parent.step->record().mtime_ns : parent.mtime_ns;
  return node;
}

// Gives a finished node its inode.
NodePtr Finish(Node node) {
  const uint64_t seed = node.step ? node.step->inode_seed() : 0;
  // A link that moves is a new inode: what one inode shows never changes.
  node.inode = node.kind == NodeKind::kViewLink
                   ? InodeOf(seed, StrCat(node.path, "\n", node.target))
                   : InodeOf(seed, node.path);
  return std::make_shared<const Node>(std::move(node));
}

NodePtr Directory(const Node& parent, NodeKind kind, std::string_view name) {
  return Finish(Below(parent, kind, Type::kDirectory, name));
}

NodePtr FileNode(const Node& parent, NodeKind kind, std::string_view name, uint64_t size,
                 uint32_t index = 0, uint32_t run_bits = 0) {
  Node node = Below(parent, kind, Type::kFile, name);
  node.size = size;
  node.index = index;
  node.run_bits = run_bits;
  return Finish(std::move(node));
}

NodePtr Link(const Node& parent, NodeKind kind, std::string_view name, std::string target) {
  Node node = Below(parent, kind, Type::kSymlink, name);
  node.size = target.size();
  node.target = std::move(target);
  return Finish(std::move(node));
}

NodePtr StepNode(const Node& steps, const std::shared_ptr<StepEntry>& step) {
  Node node = Below(steps, NodeKind::kStep, Type::kDirectory, step->record().id);
  node.step = step;
  node.mtime_ns = step->record().mtime_ns;
  return Finish(std::move(node));
}

NodePtr RunNode(const Node& runs, const std::string& name, const Tree::Run& run) {
  Node node = Below(runs, NodeKind::kRun, Type::kDirectory, name);
  node.mtime_ns = run.mtime_ns;
  return Finish(std::move(node));
}

NodePtr EntryNode(const Node& parent, const ViewEntry& entry) {
  Node node = Below(parent, NodeKind::kViewEntry, entry.type, entry.name);
  if (entry.type == Type::kFile) node.size = entry.size;
  node.reading = entry.reading;
  if (entry.type == Type::kSymlink) {
    node.target = entry.target;
    node.size = entry.target.size();
  }
  return Finish(std::move(node));
}

NodePtr SourceNode(const Node& parent, const MountedStep& step, const std::string& name,
                   const SourceEntry& entry) {
  if (entry.directory) return Directory(parent, NodeKind::kSourceDirectory, name);
  if (entry.text) {
    const SideText& text = step.model().texts[*entry.text];
    return FileNode(parent, NodeKind::kSourceText, name, text.text.size(), *entry.text,
                    text.run_bits);
  }
  const Blob& blob = step.model().blob(entry.blob);
  Node node = Below(parent, NodeKind::kSourceFile, Type::kFile, name);
  node.size = blob.stamp.size;
  node.mtime_ns = blob.owned() ? step.model().mtime_ns : blob.stamp.mtime_ns;
  node.index = static_cast<uint32_t>(entry.blob);
  node.run_bits = blob.mode & 0111;
  node.reading = GuessReading(name);
  return Finish(std::move(node));
}

NodePtr ParamNode(const Node& parent, const std::string& name, const ParamDirectory& directory) {
  if (!directory.link_target.empty()) {
    return Link(parent, NodeKind::kParam, name, directory.link_target);
  }
  return Directory(parent, NodeKind::kParam, name);
}

NodePtr AtomNode(const Node& parent, const ParamDirectory::File& file) {
  return FileNode(parent, NodeKind::kAtom, file.component, file.size,
                  static_cast<uint32_t>(file.atom));
}

// The path of a source directory's node below source/; "" for that itself.
std::string_view SourcePath(const Node& node) {
  constexpr std::string_view kTop = "source";
  const std::string_view path = node.StepPath();
  return path.size() <= kTop.size() ? std::string_view() : path.substr(kTop.size() + 1);
}

std::vector<NodePtr> RootChildren(const TreeSnapshot& now, const Node& root) {
  std::vector<NodePtr> children{Directory(root, NodeKind::kControl, ".ckptfs"),
                                Directory(root, NodeKind::kIngest, "ingest"),
                                Directory(root, NodeKind::kRuns, "run")};
  if (now.view) {
    Node link = Below(root, NodeKind::kViewLink, Type::kSymlink, "view");
    link.step = now.view;
    link.mtime_ns = now.view->record().mtime_ns;
    link.target = now.view->path().substr(1) + "/view";
    link.size = link.target.size();
    children.push_back(Finish(std::move(link)));
  }
  return children;
}

// Children of the directories that are few and cheap to make.
std::vector<NodePtr> FewChildren(const TreeSnapshot& now, const Node& parent) {
  std::vector<NodePtr> children;
  switch (parent.kind) {
    case NodeKind::kRoot: return RootChildren(now, parent);
    case NodeKind::kControl: return {FileNode(parent, NodeKind::kStatus, "status", 0)};
    case NodeKind::kRuns:
      for (const auto& [name, run] : now.tree.runs) children.push_back(RunNode(parent, name, *run));
      return children;
    case NodeKind::kRun: {
      const Tree::Run* const run = now.tree.FindRun(parent.name());
      if (run == nullptr) return {};
      children.push_back(Directory(parent, NodeKind::kSteps, "step"));
      if (!run->memory.empty())
        children.push_back(Directory(parent, NodeKind::kMemorySteps, "memory"));
      return children;
    }
    default: return {};
  }
}

// Null if its run has gone.
const StepMap* StepsIn(const TreeSnapshot& now, const Node& steps) {
  std::string_view path = steps.path;  // "/run/<run>/step", "/run/<run>/memory"
  path.remove_prefix(std::string_view("/run/").size());
  const Tree::Run* const run = now.tree.FindRun(path.substr(0, path.find('/')));
  if (run == nullptr) return nullptr;
  return &run->At(steps.kind == NodeKind::kSteps ? StepPlace::kStep : StepPlace::kMemory);
}

NodePtr LayoutInfoNode(const Node& layout) {
  const auto text = RenderLayoutInfo(layout.step->record(), *layout.view);
  return FileNode(layout, NodeKind::kLayoutInfo, kLayoutInfoName, text.size());
}

NodePtr ReadmeNode(const Node& views, const MountedStep& step) {
  return FileNode(views, NodeKind::kViewReadme, kReadmeName, step.view_readme().size());
}

NodePtr IndexNode(const Node& views, const MountedStep& step) {
  return FileNode(views, NodeKind::kLayoutIndex, kIndexName, step.layout_index().size());
}

}  // namespace

Resolver::Resolver(std::vector<Layout> declared, Log log)
    : declared_(std::move(declared)), log_(std::move(log)) {}

NodePtr Resolver::Root(const TreeSnapshot& now) {
  Node root;
  root.inode = kRootInode;
  root.parent = kRootInode;
  root.mtime_ns = now.tree.mtime_ns;
  return std::make_shared<const Node>(std::move(root));
}

void Resolver::SayOnce(const std::string& path, std::string_view reason) const {
  SayOnceAbout(path, path, reason);
}

void Resolver::SayOnceAbout(const std::string& subject, const std::string& path,
                            std::string_view reason) const {
  if (!log_) return;
  {
    MutexLock lock(mutex_);
    if (said_.size() >= kMaxSaid || !said_.insert(subject).second) return;
  }
  log_(StrCat(path, ": ", reason));
}

// Where other layouts, and the run's other steps, have a format refused for the same reason that
// is not news.
void Resolver::SayCause(const Node& views, std::string_view layout,
                        const std::string& cause) const {
  const std::string run = views.path.substr(0, views.path.find("/step/"));
  SayOnceAbout(StrCat(run, "\n", cause), StrCat(views.path, "/", layout), cause);
}

bool Resolver::Fixed(const Node& directory) {
  switch (directory.kind) {
    case NodeKind::kRoot:
    case NodeKind::kRuns:
    case NodeKind::kRun:
    case NodeKind::kSteps:
    case NodeKind::kMemorySteps:
    case NodeKind::kViews:
    case NodeKind::kIngest: return false;
    default: return true;
  }
}

Result<NodePtr> Resolver::Child(const TreeSnapshot& now, const Node& parent,
                                std::string_view name) const {
  if (name.size() > kMaxComponent) return NoSuch(parent, name);
  switch (parent.kind) {
    case NodeKind::kSteps:
    case NodeKind::kMemorySteps: {
      const StepMap* const steps = StepsIn(now, parent);
      const auto step = steps ? steps->Find(name) : nullptr;
      if (!step) return NoSuch(parent, name);
      return StepNode(parent, step);
    }
    case NodeKind::kRuns: {
      const Tree::Run* run = now.tree.FindRun(name);
      if (run == nullptr) return NoSuch(parent, name);
      return RunNode(parent, std::string(name), *run);
    }
    case NodeKind::kViews: return LayoutChild(parent, name);
    case NodeKind::kLayout:
    case NodeKind::kViewEntry: return ViewChild(parent, name);
    case NodeKind::kStep:
    case NodeKind::kParams:
    case NodeKind::kParam:
    case NodeKind::kSourceDirectory: return InsideChild(parent, name);
    default: break;
  }
  for (NodePtr& child : FewChildren(now, parent)) {
    if (child->name() == name) return std::move(child);
  }
  return NoSuch(parent, name);
}

Result<std::vector<NodePtr>> Resolver::Children(const TreeSnapshot& now, const Node& parent) const {
  switch (parent.kind) {
    case NodeKind::kSteps:
    case NodeKind::kMemorySteps: {
      Nodes children;
      const StepMap* const steps = StepsIn(now, parent);
      if (steps == nullptr) return children;
      steps->Any([&](const std::string&, const auto& step) {
        children.push_back(StepNode(parent, step));
        return false;
      });
      return children;
    }
    case NodeKind::kViews: return LayoutChildren(parent);
    case NodeKind::kLayout:
    case NodeKind::kViewEntry: return ViewChildren(parent);
    case NodeKind::kStep:
    case NodeKind::kParams:
    case NodeKind::kParam:
    case NodeKind::kSourceDirectory: return InsideChildren(parent);
    default: return FewChildren(now, parent);
  }
}

Result<NodePtr> Resolver::LayoutChild(const Node& views, std::string_view name) const {
  if (name == kReadmeName || name == kIndexName) {
    CKPT_ASSIGN_OR_RETURN(const auto mounted, views.step->Mounted());
    return name == kReadmeName ? ReadmeNode(views, *mounted) : IndexNode(views, *mounted);
  }
  const Result<Layout> layout = Layout::Parse(name);
  if (!layout) {
    views.step->NoteRefusal(name, layout.error().message);
    SayOnce(StrCat(views.path, "/", name), layout.error().message);
    return NoSuch(views, name);
  }
  const auto offer = views.step->Offer(*layout);
  if (!offer) {
    if (offer.error().code != ErrorCode::kUnsupported) return Fail(offer.error());
    views.step->NoteRefusal(name, offer.error().message);
    SayOnce(StrCat(views.path, "/", name), offer.error().message);
    return NoSuch(views, name);
  }
  if ((*offer)->name != name) return Link(views, NodeKind::kLayoutLink, name, (*offer)->name);
  for (const LayoutOffer::Cause& cause : (*offer)->Causes()) SayCause(views, name, cause.Text());
  Node node = Below(views, NodeKind::kLayout, Type::kDirectory, name);
  node.view = *offer;
  return Finish(std::move(node));
}

Result<std::vector<NodePtr>> Resolver::LayoutChildren(const Node& views) const {
  CKPT_ASSIGN_OR_RETURN(const auto mounted, views.step->Mounted());
  std::set<std::string> names{mounted->model().layout.ToString()};
  for (const Layout& layout : declared_) names.insert(layout.ToString());
  for (std::string& name : views.step->LayoutsInUse()) names.insert(std::move(name));
  Nodes children = {ReadmeNode(views, *mounted), IndexNode(views, *mounted)};
  for (const std::string& name : names) {
    Result<NodePtr> child = LayoutChild(views, name);
    if (child) {
      children.push_back(*std::move(child));
    } else if (child.error().code != ErrorCode::kNotFound) {
      return Fail(std::move(child).error());
    }
  }
  return children;
}

Result<NodePtr> Resolver::ViewChild(const Node& parent, std::string_view name) const {
  CKPT_ASSIGN_OR_RETURN(const auto mounted, parent.step->Mounted());
  CKPT_ASSIGN_OR_RETURN(const auto views, mounted->Views(parent.view->layout));
  const bool top = parent.kind == NodeKind::kLayout;
  const auto entry = views->Find(top ? std::string(name) : StrCat(parent.ViewPath(), "/", name));
  if (entry) return EntryNode(parent, *entry);
  if (entry.error().code != ErrorCode::kNotFound) {
    return Fail(Error(entry.error()).WithContext(StrCat(parent.path, "/", name)));
  }
  if (top && name == kLayoutInfoName) return LayoutInfoNode(parent);
  return NoSuch(parent, name);
}

Result<std::vector<NodePtr>> Resolver::ViewChildren(const Node& parent) const {
  CKPT_ASSIGN_OR_RETURN(const auto mounted, parent.step->Mounted());
  CKPT_ASSIGN_OR_RETURN(const auto views, mounted->Views(parent.view->layout));
  auto entries = views->List(parent.ViewPath());
  if (!entries) return Fail(std::move(entries).error().WithContext(parent.path));
  Nodes children;
  bool info = parent.kind == NodeKind::kLayout;  // unless a format has the name
  for (const ViewEntry& entry : *entries) {
    children.push_back(EntryNode(parent, entry));
    info = info && entry.name != kLayoutInfoName;
  }
  if (info) children.push_back(LayoutInfoNode(parent));
  return children;
}

Result<NodePtr> Resolver::InsideChild(const Node& parent, std::string_view name) const {
  if (parent.kind == NodeKind::kStep) {
    CKPT_ASSIGN_OR_RETURN(Nodes children, InsideChildren(parent));
    for (NodePtr& child : children) {
      if (child->name() == name) return std::move(child);
    }
    return NoSuch(parent, name);
  }
  CKPT_ASSIGN_OR_RETURN(const auto mounted, parent.step->Mounted());
  if (parent.kind == NodeKind::kSourceDirectory) {
    const auto directory = mounted->sources().find(SourcePath(parent));
    if (directory == mounted->sources().end()) return NoSuch(parent, name);
    const auto found = directory->second.find(name);
    if (found == directory->second.end()) return NoSuch(parent, name);
    return SourceNode(parent, *mounted, found->first, found->second);
  }
  const ParamIndex& params = mounted->params();
  if (parent.kind == NodeKind::kParams) {
    const auto found = params.find(name);
    if (found == params.end()) return NoSuch(parent, name);
    return ParamNode(parent, found->first, found->second);
  }
  const auto found = params.find(parent.name());
  if (found == params.end()) return NoSuch(parent, name);
  for (const ParamDirectory::File& file : found->second.files) {
    if (file.component == name) return AtomNode(parent, file);
  }
  return NoSuch(parent, name);
}

Result<std::vector<NodePtr>> Resolver::InsideChildren(const Node& parent) const {
  CKPT_ASSIGN_OR_RETURN(const auto mounted, parent.step->Mounted());
  Nodes children;
  if (parent.kind == NodeKind::kStep) {
    return Nodes{FileNode(parent, NodeKind::kStepInfo, "info.json", mounted->info().size()),
                 Directory(parent, NodeKind::kParams, "param"),
                 Directory(parent, NodeKind::kSourceDirectory, "source"),
                 Directory(parent, NodeKind::kViews, "view")};
  }
  if (parent.kind == NodeKind::kSourceDirectory) {
    const auto directory = mounted->sources().find(SourcePath(parent));
    if (directory == mounted->sources().end()) return children;
    for (const auto& [name, entry] : directory->second) {
      children.push_back(SourceNode(parent, *mounted, name, entry));
    }
    return children;
  }
  if (parent.kind == NodeKind::kParams) {
    for (const auto& [name, directory] : mounted->params()) {
      children.push_back(ParamNode(parent, name, directory));
    }
    return children;
  }
  const auto found = mounted->params().find(parent.name());
  if (found == mounted->params().end()) return children;
  for (const ParamDirectory::File& file : found->second.files) {
    children.push_back(AtomNode(parent, file));
  }
  return children;
}

Result<ShownPlan> Resolver::RawPlan(const Node& file, const MountedStep& step) const {
  const auto of_step = [&](Result<Plan> plan) -> Result<ShownPlan> {
    if (!plan) return Fail(std::move(plan).error());
    return ShownPlan{*std::move(plan), step.shared_model()};
  };
  PlanBuilder text;
  switch (file.kind) {
    case NodeKind::kViewEntry: {
      CKPT_ASSIGN_OR_RETURN(const auto views, step.Views(file.view->layout));
      return views->MakePlan(file.ViewPath());
    }
    case NodeKind::kAtom: return of_step(PlanAtomFile(step.model(), AtomIndex{file.index}));
    case NodeKind::kSourceFile: return of_step(PlanSourceFile(step.model(), BlobIndex{file.index}));
    case NodeKind::kSourceText: text.Literal(step.model().texts[file.index].text); break;
    case NodeKind::kStepInfo: text.Literal(step.info()); break;
    case NodeKind::kViewReadme: text.Literal(step.view_readme()); break;
    case NodeKind::kLayoutIndex: text.Literal(step.layout_index()); break;
    case NodeKind::kLayoutInfo:
      text.Literal(RenderLayoutInfo(file.step->record(), *file.view));
      break;
    default: return Fail(ErrorCode::kInternal, StrCat(file.path, " has no plan"));
  }
  return of_step(std::move(text).Finish());
}

Result<ShownPlan> Resolver::MakePlan(const Node& file, const MountedStep& step) const {
  Result<ShownPlan> shown = RawPlan(file, step);
  if (!shown) return Fail(std::move(shown).error().WithContext(file.path));
  const Plan& plan = shown->plan;
  if (plan.size() != file.size) {
    return Fail(ErrorCode::kInternal, StrCat(file.path, ": the plan has ", plan.size(),
                                             " bytes, but the listing "
                                             "says ",
                                             file.size));
  }
  // Those of views are checked where they are made.
  const Status valid = file.kind == NodeKind::kViewEntry ? Status() : plan.Validate(*shown->step);
  if (!valid) return Fail(Error(valid.error()).WithContext(file.path));
  return shown;
}

}  // namespace ckptfs
