// SPDX-License-Identifier: Apache-2.0
//
// Family holds the rules of one model family as data: which pattern each
// parameter class has, where its layer number stands, which parameters belong
// to the first and last pipeline stage, and how names change between the plain
// and the pipeline module.  Families are TOML files (docs/reference/families.md); the
// shipped ones lie in formats/families, users add their own with --family, and
// every step keeps the text of the one that it was adopted with.
//
// Names are taken in any spelling: what wrappers put into them (NormaliseName)
// is gone before rules and templates look.
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
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"

namespace ckptfs {

// The rules' answer for one parameter name.
struct RuleMatch {
  // Parts and units evaluated.  A vocabulary whose real size is known is one
  // part of that many rows.  kUnknown if a variable that a cut needs is missing:
  // fine where nothing is cut.  A unit whose variables are missing is 0: what it
  // may be depends on what the source kept whole.
  Pattern pattern;
  StageRule stage = StageRule::kEvery;
  std::optional<uint32_t> layer;
  std::optional<uint32_t> expert;  // of a per-expert parameter
  uint32_t expert_at = 0;          // where it stands in the name, in bytes
  uint32_t stacked_experts = 0;
  std::string rule;        // the rule's own text, for messages
  std::string missing;     // "heads, head_dim": what --family-set would have to say
  bool only_unit = false;  // nothing but the units of its cuts is missing
};

// The names that a family's size expressions may mention ("heads * head_dim").  Their
// values come from the family file, the checkpoint's args or --family-set.
using FamilyVariables = std::map<std::string, int64_t>;

// A parameter and what its tensor-parallel ranks hold of it, in rank order; one
// shape: all of it.
using NamedLocals = std::pair<std::string, std::vector<Shape>>;

struct FamilyRules;

class Family {
 public:
  Family();
  ~Family();
  Family(Family&&) noexcept;
  Family& operator=(Family&&) noexcept;

  // `origin` is the file's name for messages; kInvalid names line and rule.
  static Result<Family> Parse(std::string_view toml, std::string_view origin);

  const std::string& name() const;
  // The file's text: Parse makes an equal family of it.
  const std::string& text() const;

  // `given` and all that the family itself can tell of a model: its defaults,
  // the number of layers ("layers") and sizes that its [[derive]] entries read
  // off shapes.  A given value is never overruled; kInvalid with the numbers if
  // it contradicts the shapes (a [[check]], a division with a remainder).
  Result<FamilyVariables> Derive(std::span<const NamedLocals> parameters,
                                 const FamilyVariables& given) const;

  // Those of the variables that the family's rules mention.
  FamilyVariables Mentioned(const FamilyVariables& variables) const;

  // First rule that covers the whole name, in the plain or the pipeline's
  // spelling, or nothing.  kInvalid if a rule's expressions make no sense with
  // these variables.  `below`: a module in which the family's model lies ("net.").
  Result<std::optional<RuleMatch>> Match(std::string_view parameter,
                                         const FamilyVariables& variables,
                                         std::string_view below = "") const;

  // How many of the names some rule covers (for choosing among families).
  size_t CountMatches(std::span<const std::string> names) const;

  // The name in the other module structure, `layers` transformer layers (0:
  // unknown); the name itself if it is of that structure already; nothing if no
  // rename rule applies.  `tied`: whether embedding and head share a tensor.
  std::optional<std::string> Rename(std::string_view parameter, Naming to, uint32_t layers,
                                    bool tied) const;

 private:
  std::unique_ptr<FamilyRules> rules_;
};

// The name without what wrappers put into it (NormaliseName) and without the module `below`.
std::string NameBelow(std::string_view name, std::string_view below);

// A family whose names those of a model are, below a module if that is not empty.
struct FamilyBelow {
  const Family* family = nullptr;  // null: none covers any name
  std::string below;               // "net.", "model.": the attribute that a script keeps it in
  size_t covered = 0;              // of the names
};

// The shipped families and any the user added.
//
// Thread safety: const methods may be called concurrently.
// Lifetime: families stay until the set goes.
class FamilySet {
 public:
  // A shipped one: after all that are there.
  void Add(Family family);
  // The user's: after the user's earlier ones, before the shipped.  Returns its
  // name; kInvalid names the file, line and rule.
  Result<std::string> AddFile(const std::string& path);
  // The first that covers every name (the user's before the shipped, in order
  // of addition), else the one that covers most; null if none covers any.
  const Family* Choose(std::span<const std::string> names) const;
  const Family* Find(std::string_view name) const;
  // The same, or, where that covers more, below one or two modules that most names begin
  // with: a script's own module keeps the model in an attribute (Lightning's self.model).
  // `forced`: the only family to be looked at, or null.
  FamilyBelow ChooseBelow(std::span<const std::string> names, const Family* forced = nullptr) const;

 private:
  std::vector<std::shared_ptr<const Family>> families_;  // the user's first
  size_t added_ = 0;                                     // by the user
};

}  // namespace ckptfs
