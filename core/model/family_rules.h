// SPDX-License-Identifier: Apache-2.0
//
// FamilyRules is a family file as parsed: what family.cc applies and
// family_parser.cc reads.  docs/reference/families.md describes the file.
//
// Thread safety: immutable once parsed.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/model/expression.h"
#include "core/model/family.h"
#include "core/model/name_template.h"

namespace ckptfs {

struct CutRule {
  uint32_t dim = 0;
  std::vector<Expression> parts;
  std::optional<Expression> unit;
  std::optional<Expression> pad_multiple;
  std::optional<Expression> rows;  // unpadded rows of a vocabulary
  bool pad_always = false;
};

struct FamilyRule {
  std::vector<NameTemplate> match;
  PatternKind kind = PatternKind::kUnknown;
  std::vector<CutRule> cuts;
  std::vector<Expression> grid;
  bool bias_scaled = false;
  StageRule stage = StageRule::kEvery;
  std::optional<Expression> stacked_experts;
  std::vector<Expression>
      only_if_equal;  // none, or two: the rule is for models where they are equal
  std::string text;   // "llama: model.norm.weight", for messages
};

struct RenameRule {
  NameTemplate plain;
  NameTemplate pipe;
  std::optional<bool> tied;  // only for models that are, or are not
};

// A size that is read off a parameter's shape, or made of others.
struct DeriveRule {
  std::string variable;
  std::optional<NameTemplate> parameter;
  uint32_t dim = 0;
  std::optional<Expression> value;  // where `parameter` is not given
};

// Two sizes that are equal in every model of the family.
struct CheckRule {
  Expression left;
  Expression right;
};

struct FamilyRules {
  std::string name;
  std::string text;  // of the whole file
  FamilyVariables defaults;
  std::vector<FamilyRule> rules;
  std::vector<RenameRule> renames;
  std::vector<DeriveRule> derives;
  std::vector<CheckRule> checks;
};

Result<FamilyRules> ParseFamily(std::string_view toml, std::string_view origin);

}  // namespace ckptfs
