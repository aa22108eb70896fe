// SPDX-License-Identifier: Apache-2.0

#include "mount/metrics/metrics_server.h"

#include <arpa/inet.h>
#include <civetweb.h>

#include <array>
#include <charconv>
#include <cstring>
#include <utility>

#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "mount/logging.h"

namespace ckptfs {
namespace {

constexpr int kMetricsStatus = 500;

// The library's lines go where the daemon's own go.
int LogOfLibrary(const mg_connection* /*connection*/, const char* message) {
  Log(LogLevel::kWarning, StrCat("--metrics-listen: ", message));
  return 1;  // it is not written anywhere else
}

bool IsAddress(int family, const std::string& host) {
  std::array<unsigned char, sizeof(in6_addr)> bytes{};
  return ::inet_pton(family, host.c_str(), bytes.data()) == 1;
}

}  // namespace

Result<std::string> ParseMetricsAddress(std::string_view text) {
  const auto refuse = [&](std::string_view why) {
    return Fail(ErrorCode::kInvalid,
                StrCat("'", text, "' ", why, "; write PORT (127.0.0.1:PORT), 10.1.2.3:PORT or ",
                       "[::1]:PORT"));
  };
  const size_t colon = text.rfind(':');
  const std::string_view digits = colon == std::string_view::npos ? text : text.substr(colon + 1);
  const std::string host(colon == std::string_view::npos ? "127.0.0.1" : text.substr(0, colon));
  unsigned port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || end != digits.data() + digits.size() || port > 65535) {
    return refuse("does not end in a port");
  }
  const bool v6 = host.size() > 2 && host.front() == '[' && host.back() == ']' &&
                  IsAddress(AF_INET6, host.substr(1, host.size() - 2));
  if (!v6 && !IsAddress(AF_INET, host)) return refuse("is not an address");
  return StrCat(host, ":", port);
}

Result<std::unique_ptr<MetricsServer>> MetricsServer::Start(std::string_view address, Text text) {
  CKPT_ASSIGN_OR_RETURN(const std::string where, ParseMetricsAddress(address));
  std::unique_ptr<MetricsServer> server(new MetricsServer(std::move(text)));
  const std::string threads = std::to_string(kMetricsThreads);
  const std::string patience = std::to_string(kMetricsPatience.count());
  const char* options[] = {"listening_ports",
                           where.c_str(),
                           "num_threads",
                           threads.c_str(),
                           "max_request_size",
                           "8192",
                           "request_timeout_ms",
                           patience.c_str(),
                           "connection_queue",
                           "8",
                           "listen_backlog",
                           "16",
                           nullptr};
  mg_callbacks callbacks{};
  callbacks.log_message = LogOfLibrary;
  mg_init_data init{&callbacks, server.get(), options};
  std::array<char, 256> why{};
  mg_error_data failure{};
  failure.text = why.data();
  failure.text_buffer_size = why.size();
  server->context_ = ::mg_start2(&init, &failure);
  if (server->context_ == nullptr) {
    return Fail(ErrorCode::kIo, StrCat("--metrics-listen ", where, ": ",
                                       std::string(why.data(), ::strnlen(why.data(), why.size()))));
  }
  ::mg_set_request_handler(server->context_, "/metrics$", &MetricsServer::Handle, server.get());
  return server;
}

MetricsServer::~MetricsServer() {
  if (context_ != nullptr) ::mg_stop(context_);
}

int MetricsServer::port() const {
  mg_server_port port{};
  return ::mg_get_server_ports(context_, 1, &port) == 1 ? port.port : 0;
}

// No exception may reach the library, which is C.
int MetricsServer::Handle(mg_connection* connection, void* self) {
  const auto answered = Caught(
      [&]() -> Result<int> { return static_cast<const MetricsServer*>(self)->Answer(connection); });
  if (answered) return *answered;
  Log(LogLevel::kError, StrCat("/metrics: ", answered.error().message));
  return ::mg_send_http_error(connection, kMetricsStatus, "%s", "the log has the reason");
}

int MetricsServer::Answer(mg_connection* connection) const {
  const mg_request_info* const request = ::mg_get_request_info(connection);
  if (std::string_view(request->request_method) != "GET") {
    ::mg_send_http_error(connection, 405, "%s", "only GET is answered");
    return 405;
  }
  const std::string text = text_();
  const std::string head =
      StrCat("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n",
             "Content-Length: ", text.size(), "\r\nConnection: close\r\n\r\n");
  ::mg_write(connection, head.data(), head.size());
  ::mg_write(connection, text.data(), text.size());
  return 200;
}

}  // namespace ckptfs
