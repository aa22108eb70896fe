// SPDX-License-Identifier: Apache-2.0

#include "formats/dialects/shipped.h"

namespace ckptfs {

Result<DialectTable> ShippedDialect(Dialect dialect) {
  CKPT_CHECK(dialect == Dialect::kHf5);
  return DialectTable::Parse(Hf5DialectText(), "hf5.toml");
}

}  // namespace ckptfs
