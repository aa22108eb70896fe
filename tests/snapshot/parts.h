// SPDX-License-Identifier: Apache-2.0
//
// The landing of a daemon that has some ranks of a job, for tests of what becomes of its parts.
//
// Thread safety: Told and Await by one thread.

#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/commit/world_commit.h"
#include "snapshot/landing/landing.h"
#include "tests/snapshot/landings.h"

namespace ckptfs::testing_support {

using Settled = std::vector<std::pair<uint64_t, std::string>>;
using SavePtr = std::shared_ptr<SaveBytes>;

struct PartsOptions {
  WorldCommit* commit = nullptr;
  Spooler* spooler = nullptr;
  std::chrono::milliseconds turn{1};
  std::chrono::milliseconds patience{600'000};
  std::chrono::milliseconds limit{600'000};
  std::function<Result<bool>(const PreparedPart& part)> found = {};
};

// The landing of a daemon that has some ranks of a job, and what it tells.
class Parts {
 public:
  explicit Parts(const PartsOptions& options) {
    if (options.found) {
      steps_.stored = [found = options.found](const PartAgain& part) {
        return found({part.name, part.step, part.world, 0, {}});
      };
    }
    LandingOptions of;
    of.steps = &steps_;
    of.commit = options.commit;
    of.spooler = options.spooler;
    of.patience = options.patience;
    of.turn = options.turn;
    // A try that failed is made again when there is a turn.
    of.retry = {.pause = options.turn, .most = options.turn, .limit = options.limit};
    of.log = [this](std::string_view line) {
      MutexLock lock(mutex_);
      lines_.emplace_back(line);
    };
    landing_ = std::make_unique<Landing>(std::move(of));
    const size_t left = options.spooler->left().size();
    EXPECT_TRUE(landing_->Start());  // with what the spool has
    EXPECT_EQ(landing_->names().size(), left);
  }
  void Hand(SavePtr save) const {
    landing_->Take(std::move(save), std::chrono::steady_clock::now());
  }
  bool Has(const AttemptName& name) const {
    const auto names = landing_->names();
    return std::ranges::find(names, name) != names.end();
  }
  std::vector<std::string> Waiting() const { return landing_->status().steps; }
  // The outcomes told since the last call.
  Settled Told() const {
    Settled told;
    for (const Landing::Outcome& one : landing_->TakeNews().over) {
      told.emplace_back(one.step, one.done ? "" : one.done.error().message);
    }
    return told;
  }
  Settled Await() const {
    while (true) {
      Settled told = Told();
      if (!told.empty()) return told;
      std::this_thread::yield();
    }
  }
  // Waits for its first line.
  std::string AwaitLine() {
    while (true) {
      std::this_thread::yield();
      MutexLock lock(mutex_);
      if (!lines_.empty()) return lines_[0];
    }
  }
  Landing* operator->() const { return landing_.get(); }

 private:
  Mutex mutex_;
  std::vector<std::string> lines_ GUARDED_BY(mutex_);
  FakeSteps steps_;
  std::unique_ptr<Landing> landing_;
};

}  // namespace ckptfs::testing_support
