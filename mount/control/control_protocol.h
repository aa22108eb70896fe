// SPDX-License-Identifier: Apache-2.0
//
// How commands talk to a live mount's daemon: a Unix stream socket per mount,
// one request and one reply per connection.
//
//   message = JSON object in UTF-8, LF
//   request = {"op": "hello" | "refresh" | "shown" | "reload"}
//           | {"op": "status"} | {"op": "status", "depth": "counters"} (nothing waits for a source)
//           | {"op": "switch" | "refresh" | "let_go", "run": text, "id": text}
//           | {"op": "warm", "layout": text, "prefix": text}
//           | {"op": "read", "run": text, "id": text, "layout": text}
//   reply   = {"ok": true, "result": any}
//           | {"ok": false, "code": ErrorCodeName, "message": text}
//   hello's result = {"store": text, "mountpoint": text, "pid": number, "hf_config": text}
//   shown's, and switch's of what was shown before = {"run": text, "id": text} | null
//
// Names and paths are Utf8OfBytes of what they are (core/base/utf8.h).
//
// After a "read" that succeeded the connection goes on with requests and replies of
// step_answers.h.
//
// A daemon without a mount (an empty mount point) has a socket, too.
//
// core/base/runtime_directory.h says where the sockets lie.
//
// Thread safety: pure functions.
// Units: bytes.

#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "core/base/result.h"

namespace ckptfs {

inline constexpr size_t kMaxRequest = 64 << 10;
inline constexpr size_t kMaxReply = 16 << 20;

std::string SocketName(std::string_view store, std::string_view mountpoint);
std::string SocketPrefix(std::string_view store);  // of all its mounts

// One message without its LF.  kInvalid above `limit` bytes.  BLOCKS: up to the
// socket's own time limit.
Result<std::string> ReceiveMessage(int socket, size_t limit);
Status SendMessage(int socket, std::string_view message);
Status SendBytes(int socket, std::span<const std::byte> bytes);

ErrorCode ErrorCodeNamed(std::string_view name);  // kInternal if unknown

}  // namespace ckptfs
