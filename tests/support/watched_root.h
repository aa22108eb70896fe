// SPDX-License-Identifier: Apache-2.0
//
// WatchedRoot passes calls to another Root, records what was asked of it and of
// its files, can make the n-th call fail, and can do something before it.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: its files share what they need.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/io/root.h"

namespace ckptfs {

struct IoCall {
  std::string name;                 // "list", "stat", "open", "identity", "read"
  std::string path;                 // of the file or directory
  std::vector<Extent> ranges = {};  // of a read: what was asked for
};

class WatchedRoot final : public Root {
 public:
  explicit WatchedRoot(std::shared_ptr<const Root> root)
      : Root(root->name(), root->local()), root_(std::move(root)) {}

  // Forget what was recorded; the n-th call from now on (1 is the next, 0: none)
  // fails.
  void Watch(uint64_t fail_at = 0) {
    MutexLock lock(state_->mutex);
    state_->calls.clear();
    state_->failed.reset();
    state_->fail_at = fail_at;
  }
  std::vector<IoCall> calls() const {
    MutexLock lock(state_->mutex);
    return state_->calls;
  }
  // Before the n-th call after Watch(); it must not call the root.
  void Before(uint64_t call, std::function<void()> act) {
    MutexLock lock(state_->mutex);
    state_->act_at = call;
    state_->act = std::move(act);
  }
  // The call that failed, if it came to that.
  std::optional<IoCall> failed() const {
    MutexLock lock(state_->mutex);
    return state_->failed;
  }

  Result<std::vector<RootEntry>> List(std::string_view path) const override {
    CKPT_RETURN_IF_ERROR(state_->Enter({"list", PathOf(path)}));
    return root_->List(path);
  }
  Result<EntryStat> Stat(std::string_view path) const override {
    CKPT_RETURN_IF_ERROR(state_->Enter({"stat", PathOf(path)}));
    return root_->Stat(path);
  }
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override {
    CKPT_RETURN_IF_ERROR(state_->Enter({"open", PathOf(path)}));
    CKPT_ASSIGN_OR_RETURN(auto file, root_->Open(path));
    return std::make_shared<const WatchedFile>(state_, std::move(file));
  }

 private:
  struct State {
    Mutex mutex;
    uint64_t fail_at GUARDED_BY(mutex) = 0;
    uint64_t act_at GUARDED_BY(mutex) = 0;
    std::function<void()> act GUARDED_BY(mutex);
    std::vector<IoCall> calls GUARDED_BY(mutex);
    std::optional<IoCall> failed GUARDED_BY(mutex);

    Status Enter(IoCall call) {
      MutexLock lock(mutex);
      calls.push_back(call);
      if (calls.size() == act_at) act();
      if (calls.size() != fail_at) return {};
      failed = std::move(call);
      return Fail(ErrorCode::kIo, StrCat(failed->path, ": injected failure"));
    }
  };

  class WatchedFile final : public File {
   public:
    WatchedFile(std::shared_ptr<State> state, std::shared_ptr<const File> file)
        : File(file->name(), file->size()), state_(std::move(state)), file_(std::move(file)) {}
    Result<FileIdentity> Identity() const override {
      CKPT_RETURN_IF_ERROR(state_->Enter({"identity", name()}));
      return file_->Identity();
    }
    Status ReadAt(std::span<const ReadRequest> requests) const override {
      IoCall call{"read", name()};
      for (const ReadRequest& request : requests) {
        call.ranges.push_back({request.offset, request.offset + request.out.size()});
      }
      CKPT_RETURN_IF_ERROR(state_->Enter(std::move(call)));
      return file_->ReadAt(requests);
    }
    Result<std::shared_ptr<const Mapping>> Map() const override { return file_->Map(); }
    int descriptor() const override { return file_->descriptor(); }

   private:
    const std::shared_ptr<State> state_;
    const std::shared_ptr<const File> file_;
  };

  const std::shared_ptr<const Root> root_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace ckptfs
