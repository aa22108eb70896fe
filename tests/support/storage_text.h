// SPDX-License-Identifier: Apache-2.0
//
// A Root's files as texts, for tests.
//
// Thread safety: pure functions.

#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/io/root.h"

namespace ckptfs {

inline std::span<const std::byte> BytesOf(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// The bytes, or the name of the error's code.
inline std::string ReadObject(const Root& root, std::string_view path, uint64_t offset,
                              size_t length) {
  const auto file = root.Open(path);
  if (!file) return std::string(ErrorCodeName(file.error().code));
  std::string out(length, '?');
  const Status read = (*file)->ReadAt(offset, std::as_writable_bytes(std::span(out)));
  return read ? out : std::string(ErrorCodeName(read.error().code));
}

inline std::string ReadObject(const Root& root, std::string_view path) {
  const auto bytes = ReadWhole(root, path, 1 << 20);
  return bytes ? *bytes : std::string(ErrorCodeName(bytes.error().code));
}

inline ErrorCode CodeOf(const Status& status) {
  return status ? ErrorCode::kInternal : status.error().code;
}

}  // namespace ckptfs
