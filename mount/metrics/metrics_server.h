// SPDX-License-Identifier: Apache-2.0
//
// MetricsServer answers GET /metrics where it was told to listen, and nothing else.  The text is
// made whole before its first byte is sent, so that a reader who is slow holds nothing but one of
// kMetricsThreads threads, and that for kMetricsPatience at most.  It asks for no password: who
// may connect may read.
//
// Thread safety: owns its threads, which call `text` concurrently.
// Lifetime: what `text` uses must outlive it; the destructor ends connections.

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "core/base/result.h"

struct mg_context;
struct mg_connection;

namespace ckptfs {

inline constexpr int kMetricsThreads = 4;  // hence connections that are answered at a time
inline constexpr std::chrono::milliseconds kMetricsPatience{5'000};

class MetricsServer {
 public:
  using Text = std::function<std::string()>;

  // `address` as ParseMetricsAddress takes it.  kInvalid, or kIo if nobody can listen there.
  static Result<std::unique_ptr<MetricsServer>> Start(std::string_view address, Text text);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  // The port, which the system chose if the address had 0.
  int port() const;

 private:
  explicit MetricsServer(Text text) : text_(std::move(text)) {}
  static int Handle(mg_connection* connection, void* self);
  int Answer(mg_connection* connection) const;

  const Text text_;
  mg_context* context_ = nullptr;
};

// "PORT", which is 127.0.0.1:PORT, "IPV4:PORT" or "[IPV6]:PORT", as it is: names are not looked
// up, and all interfaces are listened on only where 0.0.0.0 or [::] is written.
Result<std::string> ParseMetricsAddress(std::string_view text);

}  // namespace ckptfs
