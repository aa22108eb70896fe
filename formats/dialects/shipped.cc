// SPDX-License-Identifier: Apache-2.0

#include "formats/dialects/shipped.h"

namespace ckptfs {

Result<DialectTable> ShippedDialect(Dialect dialect) {
  if (dialect == Dialect::kMcore) return DialectTable::Parse(McoreDialectText(), "mcore.toml");
  if (dialect == Dialect::kTitan) return DialectTable::Parse(TitanDialectText(), "titan.toml");
  CKPT_CHECK(dialect == Dialect::kHf5);
  return DialectTable::Parse(Hf5DialectText(), "hf5.toml");
}

}  // namespace ckptfs
