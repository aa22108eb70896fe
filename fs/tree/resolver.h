// SPDX-License-Identifier: Apache-2.0
//
// Resolver answers what is in a directory: the child of a name, or all
// children.  It knows the whole shape of the tree (docs/reference/semantics.md) and asks
// formats for what lies below a layout.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: independent of the steps it looks into.

#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "fs/tree/node.h"
#include "fs/tree/tree.h"

namespace ckptfs {

// The tree at one moment.
struct TreeSnapshot {
  Tree tree;
  std::shared_ptr<StepEntry> view;  // the step that /view shows
};

class Resolver {
 public:
  using Log = std::function<void(std::string_view)>;

  Resolver(std::vector<Layout> declared, Log log);

  static NodePtr Root(const TreeSnapshot& now);

  // kNotFound if there is no such name.  REQUIRES: parent is a directory.
  // BLOCKS: on loading a manifest.
  Result<NodePtr> Child(const TreeSnapshot& now, const Node& parent, std::string_view name) const;

  // In no order.  BLOCKS: as Child.
  Result<std::vector<NodePtr>> Children(const TreeSnapshot& now, const Node& parent) const;

  // True if a directory's entries never change.
  static bool Fixed(const Node& directory);

  // A file's plan, checked against its step and the node's size.
  Result<ShownPlan> MakePlan(const Node& file, const MountedStep& step) const;

 private:
  using Nodes = std::vector<NodePtr>;
  Result<NodePtr> LayoutChild(const Node& views, std::string_view name) const;
  Result<NodePtr> ViewChild(const Node& parent, std::string_view name) const;
  Result<NodePtr> InsideChild(const Node& parent, std::string_view name) const;
  Result<Nodes> LayoutChildren(const Node& views) const;
  Result<Nodes> ViewChildren(const Node& parent) const;
  Result<Nodes> InsideChildren(const Node& parent) const;
  Result<ShownPlan> RawPlan(const Node& file, const MountedStep& step) const;
  // Log a refused name once.
  void SayOnce(const std::string& path, std::string_view reason) const;
  // The same of what several names have in common.
  void SayOnceAbout(const std::string& subject, const std::string& path,
                    std::string_view reason) const;
  // Log why formats do not show a layout, once for the run.
  void SayCause(const Node& views, std::string_view layout, const std::string& cause) const;

  const std::vector<Layout> declared_;
  const Log log_;
  mutable Mutex mutex_;
  mutable std::set<std::string> said_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
