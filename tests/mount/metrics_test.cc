// SPDX-License-Identifier: Apache-2.0

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "core/base/descriptor.h"
#include "core/base/result.h"
#include "core/base/strings.h"
#include "mount/daemon/snapshot_status.h"
#include "mount/metrics/metrics_server.h"
#include "mount/metrics/metrics_text.h"

namespace ckptfs {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string Doc(const std::string& name) {
  std::ifstream file(StrCat(CKPTFS_TEST_DATA, "/../docs/use/", name));
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string TextOf(nlohmann::json status) {
  const MetricsSource source{"/store", "/mnt", true, std::move(status)};
  return MetricsText({&source, 1});
}

size_t LinesWith(const std::string& text, const std::string& part) {
  size_t count = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) count += line.starts_with(part) ? 1 : 0;
  return count;
}

// ---- the text ------------------------------------------------------------------

TEST(MetricsText, NamesFollowTheConventions) {
  const std::regex name("ckptfs_[a-z_]+");
  for (const MetricInfo& metric : AllMetrics()) {
    EXPECT_TRUE(std::regex_match(metric.name, name)) << metric.name;
    EXPECT_EQ(metric.type == "counter", metric.name.ends_with("_total")) << metric.name;
    EXPECT_EQ(metric.help.find_first_of("\n\\"), std::string::npos) << metric.name;
    EXPECT_EQ(metric.help.back(), '.') << metric.name;
  }
}

TEST(MetricsText, ANumberThatTheStatusLacksHasNoSample) {
  const std::string text = TextOf({{"open_files", 3}});
  EXPECT_THAT(text, HasSubstr("ckptfs_open_files{store=\"/store\",mountpoint=\"/mnt\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("ckptfs_up{store=\"/store\",mountpoint=\"/mnt\"} 1\n"));
  EXPECT_THAT(text, Not(HasSubstr("ckptfs_spool")));
  EXPECT_THAT(TextOf(nullptr), HasSubstr("ckptfs_up"));  // what is not JSON, too
}

TEST(MetricsText, NamesOfOthersAreEscapedAndBounded) {
  nlohmann::json runs = nlohmann::json::object();
  runs["a\"b\\c\nckptfs_up 0"] = {{"steps", 1}};
  const std::string text = TextOf({{"runs", runs}});
  EXPECT_EQ(LinesWith(text, "ckptfs_up"), 1u) << text;
  EXPECT_EQ(LinesWith(text, "ckptfs_run_steps{"), 1u) << text;
  for (int i = 0; i < 1000; ++i) runs[StrCat("run", i)] = {{"steps", i}};
  const std::string many = TextOf({{"runs", runs}});
  EXPECT_EQ(LinesWith(many, "ckptfs_run_steps{"), kMostSeries);
  EXPECT_THAT(many, HasSubstr("ckptfs_runs{store=\"/store\",mountpoint=\"/mnt\"} 1001\n"));
}

// Printed alike they would be one series twice, which Prometheus refuses with all others.
TEST(MetricsText, ASeriesIsToldOnce) {
  const nlohmann::json follow = {{"path", "/p"}, {"adopted_total", 1}};
  EXPECT_EQ(LinesWith(TextOf({{"following", {follow, follow}}}), "ckptfs_follow_adopted_steps"),
            1u);
}

TEST(MetricsText, ErrorsHaveTheErrnoThatProgramsSee) {
  const std::string stale(ErrorCodeName(ErrorCode::kStale));
  EXPECT_THAT(TextOf({{"errors", {{stale, 2}}}}),
              HasSubstr(StrCat("{reason=\"", stale, "\",errno=\"ESTALE\",")));
}

TEST(MetricsText, TimesAreSeconds) {
  const std::string text =
      TextOf({{"runs", {{"r", {{"saved_ns", 1'500'000'000'000'000'000}}}}},
              {"snapshots", {{"durable_lag", {{"count", 2}, {"seconds", 0.5}}}}}});
  EXPECT_THAT(text,
              HasSubstr("ckptfs_run_latest_saved_timestamp_seconds{run=\"r\",store=\"/store\","
                        "mountpoint=\"/mnt\"} 1500000000\n"));
  EXPECT_THAT(text, HasSubstr("ckptfs_snapshot_durable_lag_seconds_sum{store=\"/store\","
                              "mountpoint=\"/mnt\"} 0.5\n"));
}

// A path that leads nowhere would be a metric that never has a sample.
TEST(MetricsText, EveryMetricOfSnapshotsHasASampleOfAFullStatus) {
  SnapshotStatus snapshots;
  snapshots.receiver.saves.last_durable_ns = 1;
  snapshots.spool.emplace();
  PeerServiceStatus& peers = snapshots.peers.emplace();
  peers.pool.peers.resize(2);
  peers.pool.peers[0].away = "no route";
  peers.pool.peers[0].record.host = "gone";
  peers.protector.emplace();
  FollowStatus follow;
  follow.last_adopted_ns = 1;
  const std::string text =
      TextOf({{"snapshots", ToJson(snapshots)}, {"following", {ToJson(follow)}}});
  for (const MetricInfo& metric : AllMetrics()) {
    for (const char* part : {"snapshot", "retention", "spool", "hot", "peer", "follow"}) {
      if (!metric.name.starts_with(StrCat("ckptfs_", part, "_"))) continue;
      EXPECT_THAT(text, HasSubstr(StrCat("\n# TYPE ", metric.name, " "))) << text;
    }
  }
  EXPECT_THAT(text, HasSubstr("ckptfs_peer_away{host=\"gone\",address=\"\",store=\"/store\","
                              "mountpoint=\"/mnt\"} 1\n"));
}

// ---- what is written about them ------------------------------------------------

TEST(MetricsDocs, ThePageListsExactlyTheMetrics) {
  std::map<std::string, std::string> page, program;
  const std::string text = Doc("watch.md");
  const std::regex row("\\| `(ckptfs_[a-z_]+)` \\| ([a-z]+) \\|");
  for (std::sregex_iterator it(text.begin(), text.end(), row), end; it != end; ++it) {
    page[(*it)[1]] = (*it)[2];
  }
  for (const MetricInfo& metric : AllMetrics()) program[metric.name] = metric.type;
  EXPECT_EQ(page, program);
}

TEST(MetricsDocs, TheDashboardUsesOnlyMetricsThatExist) {
  std::set<std::string> known;
  for (const MetricInfo& metric : AllMetrics()) {
    known.insert(metric.name);
    if (metric.type != "summary") continue;
    known.insert({metric.name + "_sum", metric.name + "_count"});
  }
  const auto dashboard = nlohmann::json::parse(Doc("grafana.json"));
  size_t used = 0;
  const std::regex name("ckptfs_[a-z_]+");
  for (const auto& panel : dashboard.at("panels")) {
    for (const auto& target : panel.at("targets")) {
      const std::string expr = target.at("expr");
      std::sregex_iterator it(expr.begin(), expr.end(), name);
      EXPECT_NE(it, std::sregex_iterator()) << expr;
      for (; it != std::sregex_iterator(); ++it, ++used) {
        EXPECT_TRUE(known.contains(it->str())) << it->str();
      }
    }
  }
  EXPECT_GT(used, 20u);
}

// ---- the server ----------------------------------------------------------------

Descriptor ConnectTo(int port) {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const auto* const at = reinterpret_cast<const sockaddr*>(&address);
  return ::connect(socket.get(), at, sizeof address) == 0 ? std::move(socket) : Descriptor();
}

std::string AskServer(int port, const std::string& request) {
  const Descriptor socket = ConnectTo(port);
  (void)!::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL);
  std::string answer;
  std::array<char, 4096> part;
  for (ssize_t got; (got = ::recv(socket.get(), part.data(), part.size(), 0)) > 0;) {
    answer.append(part.data(), static_cast<size_t>(got));
  }
  return answer;
}

std::string AskFor(int port, const std::string& what) {
  return AskServer(port, StrCat(what, " HTTP/1.1\r\nHost: localhost\r\n\r\n"));
}

TEST(MetricsServer, AnswersGetOfMetricsAndNothingElse) {
  const auto server = MetricsServer::Start("127.0.0.1:0", [] { return std::string("a 1\n"); });
  ASSERT_TRUE(server) << server.error().message;
  const int port = (*server)->port();
  const std::string answer = AskFor(port, "GET /metrics");
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(answer, HasSubstr("\r\n\r\na 1\n"));
  EXPECT_THAT(AskFor(port, "GET /metrics?x=1"), StartsWith("HTTP/1.1 200"));
  for (const char* other : {"GET /", "GET /metrics2", "GET /metrics/", "GET /../etc/passwd",
                            "GET /%2e%2e/%2e%2e/etc/passwd"}) {
    EXPECT_THAT(AskFor(port, other), StartsWith("HTTP/1.1 4")) << other;
  }
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "CONNECT"}) {
    EXPECT_THAT(AskFor(port, StrCat(method, " /metrics")), Not(HasSubstr("a 1"))) << method;
  }
  EXPECT_THAT(AskServer(port, StrCat("GET /", std::string(100'000, 'x'), " HTTP/1.1\r\n\r\n")),
              Not(HasSubstr(" 200 ")));
}

TEST(MetricsServer, AnExceptionIsAnAnswerAndTheNextOneGoesOn) {
  std::atomic<bool> throws = true;
  const auto server = MetricsServer::Start("127.0.0.1:0", [&]() -> std::string {
    if (throws) throw std::runtime_error("no text");
    return "a 1\n";
  });
  ASSERT_TRUE(server) << server.error().message;
  EXPECT_THAT(AskFor((*server)->port(), "GET /metrics"), StartsWith("HTTP/1.1 500"));
  throws = false;
  EXPECT_THAT(AskFor((*server)->port(), "GET /metrics"), StartsWith("HTTP/1.1 200"));
}

// Clients that begin and never go on hold all threads, for so long and no longer.
TEST(MetricsServer, ASlowClientIsSentAway) {
  const auto server = MetricsServer::Start("127.0.0.1:0", [] { return std::string("a 1\n"); });
  ASSERT_TRUE(server) << server.error().message;
  std::vector<Descriptor> slow;
  for (int i = 0; i < kMetricsThreads; ++i) {
    slow.push_back(ConnectTo((*server)->port()));
    ASSERT_EQ(::send(slow.back().get(), "GET /me", 7, MSG_NOSIGNAL), 7);
  }
  EXPECT_THAT(AskFor((*server)->port(), "GET /metrics"), StartsWith("HTTP/1.1 200"));
}

// A reader that takes nothing of a long text does not keep the server from ending.
TEST(MetricsServer, EndsWhileAReaderIsSlow) {
  std::atomic<bool> asked = false;
  auto server = MetricsServer::Start("127.0.0.1:0", [&] {
    asked = true;
    return std::string(64 << 20, '#');
  });
  ASSERT_TRUE(server) << server.error().message;
  const Descriptor reader = ConnectTo((*server)->port());
  const std::string request = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
  ASSERT_EQ(::send(reader.get(), request.data(), request.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(request.size()));
  while (!asked) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  server->reset();
}

TEST(MetricsServer, ListensWhereItIsToldAndNowhereElse) {
  EXPECT_EQ(ParseMetricsAddress("9464").value(), "127.0.0.1:9464");
  EXPECT_EQ(ParseMetricsAddress("10.0.0.1:80").value(), "10.0.0.1:80");
  EXPECT_EQ(ParseMetricsAddress("[::1]:80").value(), "[::1]:80");
  EXPECT_EQ(ParseMetricsAddress("0.0.0.0:80").value(), "0.0.0.0:80");  // it is written
  for (const char* wrong : {"", ":80", "localhost:80", "80s", "1,2", "127.0.0.1:80,81", "::1:80",
                            "127.0.0.1:65536", "127.0.0.1:", "+80", "*:80", "[]:80", "80r"}) {
    EXPECT_FALSE(ParseMetricsAddress(wrong)) << wrong;
  }
  const auto first = MetricsServer::Start("127.0.0.1:0", [] { return std::string(); });
  ASSERT_TRUE(first) << first.error().message;
  const auto second =
      MetricsServer::Start(StrCat("127.0.0.1:", (*first)->port()), [] { return std::string(); });
  ASSERT_FALSE(second);
  EXPECT_THAT(second.error().message, HasSubstr(StrCat("127.0.0.1:", (*first)->port())));
  EXPECT_FALSE(MetricsServer::Start("192.0.2.1:9464", [] { return std::string(); }));
}

}  // namespace
}  // namespace ckptfs
