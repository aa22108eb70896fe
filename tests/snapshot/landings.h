// SPDX-License-Identifier: Apache-2.0
//
// Landings for tests: over what a test makes of steps, or over a store.
//
// Thread safety: as each class says.

#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/store/step_catalogue.h"
#include "mount/daemon/snapshot_keeper.h"
#include "snapshot/landing/landing.h"

namespace ckptfs::testing_support {

// Keeps what the test likes, at once: nothing is shown before it is durable.  A save that it does
// not keep is refused for good.  Thread safety: as that of its functions.
class FakeSteps final : public StepMaker {
 public:
  std::function<Status(const SaveBytes&)> keep = [](const SaveBytes&) { return Status(); };
  std::function<Result<bool>(const PartAgain&)> stored = [](const PartAgain&) { return false; };

  Result<Entered> Enter(const std::shared_ptr<SaveBytes>& save) override {
    const Status kept = keep(*save);
    if (!kept) return Fail(ErrorCode::kInvalid, kept.error().message);
    return Entered{{}, true};
  }
  Result<StepRecord> Persist(const StepRecord& record) override { return record; }
  void Release(const StepRecord&) override {}
  Result<std::optional<StepRecord>> FindStored(const PartAgain& part) override {
    CKPT_ASSIGN_OR_RETURN(const bool found, stored(part));
    return found ? std::optional(StepRecord()) : std::nullopt;
  }
  std::shared_ptr<BlobStream> Stream(const std::string&, uint64_t,
                                     std::weak_ptr<const void>) override {
    return nullptr;
  }
  void Tell(const News&) override {}
};

// A landing whose saves become steps of a store.  Thread safety: Keep by one thread at a time.
class StoreLanding {
 public:
  StoreLanding(
      Store& store, StepCatalogue& catalogue,
      SnapshotKeeper::Refresh refresh = [](const StepRecord&) { return Status(); },
      Spooler* spooler = nullptr, RetryRule retry = {})
      : keeper_(store, catalogue, std::move(refresh), [this](const StepMaker::News& news) {
          MutexLock lock(mutex_);
          if (news.what == StepMaker::News::What::kPersisted) last_ = news.record;
        }) {
    LandingOptions options;
    options.steps = &keeper_;
    options.spooler = spooler;
    options.retry = retry;
    landing_ = std::make_unique<Landing>(std::move(options));
    EXPECT_TRUE(landing_->Start());
  }
  // Returns what becomes of a save: the step as it is durable, or why it was dropped.
  Result<StepRecord> Keep(ReceivedStep step) {
    const auto moves = SaveBytes::Moves::kNever;
    return Keep(SaveBytes::Of(PartOf(std::move(step)), moves));
  }
  Result<StepRecord> Keep(std::shared_ptr<SaveBytes> save) {
    const std::weak_ptr<SaveBytes> left = save;
    landing_->Take(std::move(save), std::chrono::steady_clock::now());
    return Await(left);
  }
  Result<StepRecord> Await(const std::weak_ptr<SaveBytes>& save) {
    while (true) {
      const Landing::News news = landing_->TakeNews();
      if (!news.over.empty()) {
        if (!news.over[0].done) return Fail(Error(news.over[0].done.error()));
        MutexLock lock(mutex_);
        return last_;
      }
      const auto bytes = save.lock();
      if (bytes && bytes->stays()) return Fail(ErrorCode::kIo, "it stays in the spool");
      std::this_thread::yield();
    }
  }
  Landing& operator*() const { return *landing_; }
  Landing* operator->() const { return landing_.get(); }
  SnapshotKeeper& keeper() { return keeper_; }

 private:
  Mutex mutex_;
  StepRecord last_ GUARDED_BY(mutex_);
  SnapshotKeeper keeper_;
  std::unique_ptr<Landing> landing_;
};

}  // namespace ckptfs::testing_support
