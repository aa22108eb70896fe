// SPDX-License-Identifier: Apache-2.0
//
// ViewTree is the View of a format that knows its files one by one: each has a path below
// view/<layout>/ and a body, which is a file of the source, a text, a plan that is made when the
// file is read, or a file or folder of another view.  Folders are there as far as paths name them.
//
// Thread safety: none while it is filled; then as View's.
// Lifetime: keeps the ShownState, and the views that stand in it.
// Units: bytes.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "core/view/view.h"

namespace ckptfs {

class ViewTree : public View {
 public:
  using Text = std::shared_ptr<const std::string>;
  using PlanMaker = std::function<Result<Plan>()>;

  explicit ViewTree(std::shared_ptr<const ShownState> shown)
      : View(shown->shared_step()), shown_(std::move(shown)) {}

  // An entry takes the place of all that stood at its path, and below it.
  void AddText(const std::string& path, Text text);
  // A whole file of the source.
  void AddBlob(const std::string& path, BlobIndex blob, Reading reading);
  // `held`: the heap bytes that `make` keeps.
  void AddMade(const std::string& path, uint64_t size, Reading reading, PlanMaker make,
               uint64_t held = 0);
  // `inner` of another view, and all below it.  REQUIRES: it is a view of the same step.
  Status AddPart(const std::string& path, std::shared_ptr<const View> view,
                 const std::string& inner);
  // Lines for View::LeftOut, besides those of its parts.
  void LeaveOut(std::string line) { left_out_.push_back(std::move(line)); }

  bool Has(std::string_view path) const { return files_.contains(path); }
  template <class Condition>  // of a path
  bool Any(const Condition& condition) const {
    for (const auto& [path, file] : files_) {
      if (condition(std::string_view(path))) return true;
    }
    return false;
  }
  template <class Condition>
  void Remove(const Condition& condition) {
    std::erase_if(files_,
                  [&](const auto& file) { return condition(std::string_view(file.first)); });
  }

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override;
  Result<ViewEntry> Find(std::string_view path) const override;
  Result<Plan> MakePlan(std::string_view file) const override;
  std::vector<std::string> LeftOut() const override;
  uint64_t MemoryBytes() const override;

 private:
  struct Part {
    std::shared_ptr<const View> view;
    std::string inner;
  };
  struct File {
    ViewEntry entry;
    std::variant<BlobIndex, Text, PlanMaker, Part> body;
  };

  void Add(const std::string& path, File file);
  bool HasFolder(std::string_view path) const;
  // The view that a path is a part of, or lies below one, with the path there.
  std::optional<std::pair<const View*, std::string>> InPart(std::string_view path) const;

  const std::shared_ptr<const ShownState> shown_;
  std::map<std::string, File, std::less<>> files_;
  std::vector<std::shared_ptr<const View>> parts_;
  std::vector<std::string> left_out_;
  uint64_t held_ = 0;
};

}  // namespace ckptfs
