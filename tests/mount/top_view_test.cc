// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/top_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ckptfs {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TopSample SampleAt(int seconds, nlohmann::json status, int pid = 7) {
  return {"/store", "/mnt", pid,
          std::chrono::steady_clock::time_point(std::chrono::seconds(seconds)), std::move(status)};
}

TEST(TopView, RatesAreGrowthASecond) {
  const TopSample before = SampleAt(10, {{"served", {{"stream", 1000}}}, {"bytes_read", 5}});
  const TopSample now = SampleAt(
      12, {{"served", {{"stream", 5096}, {"direct", 10}}}, {"bytes_read", 5}, {"open_files", 3}});
  const auto top = TopJson(&before, now);
  EXPECT_EQ(top["seconds"], 2.0);
  EXPECT_EQ(top["rates"]["served"], nlohmann::json({{"stream", 2048.0}, {"direct", 5.0}}));
  EXPECT_EQ(top["rates"]["source_bytes"], 0.0);
  EXPECT_THAT(TopText(top), HasSubstr("2.0 KiB/s served (direct 5 B/s, stream 2.0 KiB/s)"));
}

// Another process's counters begin anew, and a rate is never below zero.
TEST(TopView, AnotherDaemonsCountersAreNotCompared) {
  const TopSample before = SampleAt(10, {{"bytes_read", 500}});
  EXPECT_TRUE(TopJson(&before, SampleAt(12, {{"bytes_read", 5}}, 8))["rates"].is_null());
  EXPECT_TRUE(TopJson(nullptr, SampleAt(12, {{"bytes_read", 5}}))["rates"].is_null());
  EXPECT_EQ(TopJson(&before, SampleAt(12, {{"bytes_read", 5}}))["rates"]["source_bytes"], 0.0);
  EXPECT_FALSE(TopText(TopJson(nullptr, SampleAt(12, nlohmann::json()))).empty());
}

TEST(TopView, SnapshotsAndFollowedDirectoriesHaveTheirLag) {
  const nlohmann::json status = {
      {"following",
       {{{"path", "/data\nrun7"}, {"adopted", 3}, {"lag_seconds", 1.5}, {"refused_steps", 1}}}},
      {"snapshots",
       {{"ranks", 2},
        {"durable", 4},
        {"durable_lag", {{"count", 4}, {"seconds", 10}}},
        {"dropped", 2},
        {"dropped_for", {{"failed", 2}, {"refused", 0}}},
        {"steps", {"run7/9: waiting for rank 1"}}}}};
  const std::string text = TopText(TopJson(nullptr, SampleAt(1, status)));
  EXPECT_THAT(text, HasSubstr("3 adopted, the last 1.5 s after its save"));
  EXPECT_THAT(text, HasSubstr("1 refused"));
  EXPECT_THAT(text, HasSubstr("4 durable after 2.5 s on average, 2 dropped (failed 2)"));
  EXPECT_THAT(text, HasSubstr("run7/9: waiting for rank 1"));
  EXPECT_THAT(text, Not(HasSubstr("/data\nrun7")));
}

TEST(TopView, PeersThatAreAwayAndWhatIsNotProtectedAreNamed) {
  const auto status = nlohmann::json::parse(R"({"snapshots": {"unproved": 2, "peers": {
      "memory": 2048, "used": 1024, "links": 1,
      "peers": [{"host": "b", "address": "b:1", "away": "no route"}, {"host": "c", "away": ""}],
      "protect": {"scheme": "copy", "protected": 3, "steps": ["run7/9: no peer"]}}}})");
  const std::string text = TopText(TopJson(nullptr, SampleAt(1, status)));
  EXPECT_THAT(text, HasSubstr("peers      2, 1 away; 1.0 KiB of 2.0 KiB held"));
  EXPECT_THAT(text, HasSubstr("b b:1 is away: no route"));
  EXPECT_THAT(text, HasSubstr("copy: 3 saves protected"));
  EXPECT_THAT(text, HasSubstr("run7/9: no peer"));
  EXPECT_THAT(text, HasSubstr("(2 unproved)"));
}

}  // namespace
}  // namespace ckptfs
