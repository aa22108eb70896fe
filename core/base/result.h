// SPDX-License-Identifier: Apache-2.0
//
// Result<T> carries a value or an Error; Status is Result<void>.  Nothing in
// core, formats, fs or snapshot throws across a function boundary: foreign
// exceptions die at the one line that calls the foreign code.
//
// Thread safety: values; as safe as T.
// Lifetime: owns its value and message.

#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "core/base/expected.h"
#include "core/base/strings.h"

namespace ckptfs {

// Each code says what a caller can do about a failure.  fs/errno_map.h has the errno of
// each, mount/options.h the exit code.
enum class ErrorCode {
  kInvalid,      // the input breaks a rule: fix the input (hostile bytes too)
  kNotFound,     // no such name
  kExists,       // a name or record is taken already
  kUnsupported,  // well formed, but this build or this view cannot do it
  kStale,        // a source changed since it was adopted
  kDataLoss,     // bytes are missing or fail their digest
  kPermission,   // the operating system or a rule of ours says no
  kExhausted,    // no space, memory, descriptors or budget left
  kIo,           // the operating system failed otherwise
  kInternal,     // a defect of ours
};

std::string_view ErrorCodeName(ErrorCode code);

struct [[nodiscard]] Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
  // The parts of the message that a program may act on; empty where they are not known.
  std::string parameter = {};  // the tensor of the model that it is about
  std::string needs = {};      // what would settle it: "give --family-set heads=N"
  std::string layout = {};     // the layout that was asked for

  // "context: message", for adding the file, step or atom as an error rises.
  Error WithContext(std::string_view context) &&;
  // The same with the name in quotes.  If a parameter was named before, that one stays.
  Error OfParameter(std::string_view name) &&;
  // "message; remedy", and that is what it needs.
  Error Needing(std::string_view remedy) &&;
};

template <class T>
using Result = tl::expected<T, Error>;
using Status = Result<void>;

inline tl::unexpected<Error> Fail(ErrorCode code, std::string message) {
  return tl::unexpected<Error>(Error{code, std::move(message)});
}
inline tl::unexpected<Error> Fail(Error error) { return tl::unexpected<Error>(std::move(error)); }
// kInvalid with the pieces joined: what a parser says of its input.
template <class... Pieces>
tl::unexpected<Error> Refuse(const Pieces &...pieces) {
  return Fail(ErrorCode::kInvalid, StrCat(pieces...));
}

// An Error from errno: kNotFound, kPermission, kExhausted, kExists or kIo;
// `what` names the call and the file.
Error ErrnoError(int error_number, std::string_view what);

[[noreturn]] void CheckFailed(const char *expression, const char *file, int line);

}  // namespace ckptfs

// An invariant of our own code; always on, never for input.
#define CKPT_CHECK(expression)                                \
  do {                                                        \
    if (!(expression)) [[unlikely]]                           \
      ::ckptfs::CheckFailed(#expression, __FILE__, __LINE__); \
  } while (false)

#define CKPT_CONCAT_(a, b) a##b
#define CKPT_CONCAT(a, b) CKPT_CONCAT_(a, b)

#define CKPT_RETURN_IF_ERROR(expression)                            \
  do {                                                              \
    if (auto ckpt_status = (expression); !ckpt_status) [[unlikely]] \
      return ::ckptfs::Fail(std::move(ckpt_status).error());        \
  } while (false)

// CKPT_ASSIGN_OR_RETURN(auto x, F());
#define CKPT_ASSIGN_OR_RETURN(lhs, expression) \
  CKPT_ASSIGN_OR_RETURN_(CKPT_CONCAT(ckpt_result_, __LINE__), lhs, expression)
#define CKPT_ASSIGN_OR_RETURN_(result, lhs, expression) \
  auto result = (expression);                           \
  if (!result) [[unlikely]]                             \
    return ::ckptfs::Fail(std::move(result).error());   \
  lhs = *std::move(result)
