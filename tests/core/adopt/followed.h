// SPDX-License-Identifier: Apache-2.0
//
// A directory run7 of FakeSource's steps, and who follows it by a clock of the test's own.
//
// Thread safety: none.

#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/follow/follow.h"
#include "tests/support/fake_source.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {

class FollowTest : public testing::Test {
 protected:
  FollowTest() {
    auto source = std::make_unique<FakeSource>();
    fake_ = source.get();
    sources_.push_back(std::move(source));
    store_ = *Store::Open(directory_.path() + "/store", true);
    options_.adopt.hints.names = FakeNames();
    MakeFollower();
  }
  void MakeFollower() {
    follower_ =
        std::make_unique<Follower>(*store_, directory_.path() + "/run7", sources_, options_);
  }
  void Write(int number, const std::string& file, const std::string& text) {
    directory_.Write("run7/step" + std::to_string(number) + "/" + file, text);
  }
  void WriteStep(int number, const std::string& last = "sealed") {
    Write(number, "data", std::string(4000, static_cast<char>('a' + number)));
    Write(number, "done", "w 1000 data 0\n");
    if (!last.empty()) Write(number, last, "");
  }
  void RemoveStep(int number) {
    std::filesystem::remove_all(directory_.path() + "/run7/step" + std::to_string(number));
  }
  // The ids that a look adopts so long after the last one.
  std::vector<std::string> Look(std::chrono::milliseconds later = std::chrono::seconds(0)) {
    now_ += later;
    seen_ = follower_->Look(now_);
    std::vector<std::string> ids;
    for (const StepRecord& record : seen_.adopted) ids.push_back(record.id);
    return ids;
  }

  TemporaryDirectory directory_;
  std::vector<std::unique_ptr<Source>> sources_;
  FakeSource* fake_ = nullptr;
  std::unique_ptr<Store> store_;
  Follower::Options options_;
  std::unique_ptr<Follower> follower_;
  Follower::Time now_ = Follower::Time(std::chrono::seconds(1'000'000));
  Follower::Seen seen_;
};

}  // namespace ckptfs
