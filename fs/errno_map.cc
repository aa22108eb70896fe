// SPDX-License-Identifier: Apache-2.0

#include "fs/errno_map.h"

#include <cerrno>

namespace ckptfs {

const int kReadOnlyErrno = EROFS;

int ErrnoOf(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalid: return EINVAL;
    case ErrorCode::kNotFound: return ENOENT;
    case ErrorCode::kExists: return EEXIST;
    case ErrorCode::kUnsupported: return EOPNOTSUPP;
    case ErrorCode::kStale: return ESTALE;
    case ErrorCode::kPermission: return EACCES;
    case ErrorCode::kExhausted: return ENOMEM;
    case ErrorCode::kDataLoss:
    case ErrorCode::kIo:
    case ErrorCode::kInternal: return EIO;
  }
  return EIO;
}

}  // namespace ckptfs
