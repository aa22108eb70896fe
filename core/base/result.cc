// SPDX-License-Identifier: Apache-2.0

#include "core/base/result.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <system_error>

#include "core/base/strings.h"

namespace ckptfs {

std::string_view ErrorCodeName(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalid: return "invalid";
    case ErrorCode::kNotFound: return "not found";
    case ErrorCode::kExists: return "exists";
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kStale: return "source changed";
    case ErrorCode::kDataLoss: return "data loss";
    case ErrorCode::kPermission: return "permission";
    case ErrorCode::kExhausted: return "exhausted";
    case ErrorCode::kIo: return "i/o";
    case ErrorCode::kInternal: return "internal";
  }
  return "internal";
}

Error Error::WithContext(std::string_view context) && {
  message = StrCat(context, ": ", message);
  return std::move(*this);
}

Error Error::OfParameter(std::string_view name) && {
  if (parameter.empty()) parameter = name;
  return std::move(*this).WithContext(StrCat("'", name, "'"));
}

Error Error::Needing(std::string_view remedy) && {
  message += StrCat("; ", remedy);
  needs = remedy;
  return std::move(*this);
}

Error ErrnoError(int error_number, std::string_view what) {
  ErrorCode code = ErrorCode::kIo;
  switch (error_number) {
    case ENOENT:
    case ENOTDIR: code = ErrorCode::kNotFound; break;
    case EACCES:
    case EPERM:
    case EROFS: code = ErrorCode::kPermission; break;
    case ELOOP:
    case ENAMETOOLONG:
    case ENXIO: code = ErrorCode::kInvalid; break;
    case EEXIST: code = ErrorCode::kExists; break;
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case ENOMEM: code = ErrorCode::kExhausted; break;
    default: break;
  }
  return Error{code, StrCat(what, ": ", std::generic_category().message(error_number))};
}

void CheckFailed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "ckptfs: invariant broken: %s (%s:%d)\n", expression, file, line);
  std::abort();
}

}  // namespace ckptfs
