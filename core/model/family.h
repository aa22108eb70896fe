// SPDX-License-Identifier: Apache-2.0
//
// Family holds the rules of one model family as data: which pattern each
// parameter class has, where its layer number stands, which parameters belong
// to the first and last pipeline stage, and how names change between the plain
// and the pipeline module.  Families are TOML files (docs/families.md); the
// shipped ones are compiled in, users add their own with --family.
//
// Thread safety: immutable after parsing.
// Lifetime: owns its rules.

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"

namespace ckptfs {

// What rules say of one parameter name.
struct RuleMatch {
  Pattern pattern;  // parts still as the rule states them
  StageRule stage = StageRule::kEvery;
  std::optional<uint32_t> layer;
  std::string rule;  // the rule's own text, for messages
};

// What a family's size expressions may mention ("heads * head_dim"); values
// come from the family file, the checkpoint's args or --family-set.
using FamilyVariables = std::map<std::string, int64_t>;

class Family {
 public:
  Family();
  ~Family();
  Family(Family&&) noexcept;
  Family& operator=(Family&&) noexcept;

  // `origin` is the file's name for messages; kInvalid names line and rule.
  static Result<Family> Parse(std::string_view toml, std::string_view origin);

  const std::string& name() const;

  // First rule whose regular expression matches the whole name, or nothing.
  // Variables missing for a matching rule's expression are kInvalid.
  Result<std::optional<RuleMatch>> Match(std::string_view parameter,
                                         const FamilyVariables& variables) const;

  // How many of the names some rule covers (for choosing among families).
  size_t CountMatches(std::span<const std::string> names) const;

  // The name in the other module structure, `layers` transformer layers;
  // nothing if no rename rule applies.
  std::optional<std::string> Rename(std::string_view parameter, Naming to,
                                    uint32_t layers, bool tied) const;

 private:
  struct Rules;
  std::unique_ptr<Rules> rules_;
};

// The shipped families and any the user added; the first that covers every
// name wins, then the best.  kUnsupported if two user families tie.
class FamilySet {
 public:
  static Result<FamilySet> Shipped();
  Status AddFile(const std::string& path);
  const Family* Choose(std::span<const std::string> names) const;
  const Family* Find(std::string_view name) const;

 private:
  std::vector<std::shared_ptr<const Family>> families_;  // user's first
};

}  // namespace ckptfs
