// SPDX-License-Identifier: Apache-2.0
//
// A DialectTable says how one library's names and tensors come of those in Hugging Face's files,
// which are the canonical ones: the finest spelling, which every library reads.  A table is a TOML
// file (docs/reference/dialects.md); the shipped ones lie in formats/dialects and are made from
// what the libraries themselves write.
//
//   name = "hf5"
//   whole = false          # true: every tensor of a model has a rule
//   [[map]]
//   model_types = ["mixtral"]
//   to = "model.layers.{layer}.mlp.experts.gate_up_proj"
//   from = ["model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
//           "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight"]
//   join = "rows"        # whole | rows | dim N: along which dimension `from` lie behind each
//   other,
//                        # or with sizes of the model: chunks | groups | heads | interleave2
//   stack = "expert"     # | layer: dim 0 of `to` counts what only `from` has a hole for
//   transpose = true     # the last two dimensions of `from` change places first
//   [[same]]
//   model_types = ["llama"]
//
// Both directions come of one rule.  All joins but the last are one geometry along a dimension:
// groups behind each other, each of which has its part of every one of `from`, by their shares:
//
//   rows, dim N         one group, equal shares
//   chunks              one group, shares that `shares` says: [q; k; v]
//   groups, heads       as many groups as `groups` says: q1 q2 k1 v1 | q3 q4 k2 v2
//   interleave2         one tensor; in each group rows (half, j) of `from` are rows (j, half): the
//                       two orders of a rotary embedding's halves
//
// Sizes are expressions over the model's sizes (family_variables.h); one that is not known is a
// refusal that names it.
//
// Thread safety: immutable after parsing.
// Lifetime: owns its rules.

#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/dialect/box_map.h"
#include "core/model/expression.h"
#include "core/model/family.h"
#include "core/model/name_template.h"

namespace ckptfs {

// The axis that has no dimension of its own in `from`: the names there number it.
enum class Stack : uint8_t { kNone, kExpert, kLayer };

struct MapRule {
  std::set<std::string, std::less<>> model_types;
  std::optional<NameTemplate> to;  // always there
  std::vector<NameTemplate> from;
  std::optional<uint32_t> dim;  // of `to` without its stack; nothing: `from` is one name
  // The sizes of the join; empty: one group, equal shares.  `unit` is how many elements along the
  // dimension a share of one is in a group; it is compared where it is known.
  std::optional<Expression> groups;
  std::vector<Expression> shares;  // of `from`
  std::optional<Expression> unit;
  bool interleaved = false;
  // The files' tensor is the dialect's first rows, if the model says fewer than that has: a
  // vocabulary that is padded.  Nothing pads the way back.
  std::optional<Expression> rows;
  Stack stack = Stack::kNone;
  bool transpose = false;

  // True if a tensor only changes its name: it is as it was, whatever it holds.
  bool IsWhole() const { return !dim && stack == Stack::kNone && !transpose && !rows; }
};

// A rule's sizes in one model.
struct RuleSizes {
  uint64_t groups = 1;
  std::vector<uint64_t> shares;          // of `from`, in one group; each at least 1
  std::optional<uint64_t> rows;          // where the model tells it
  std::optional<uint64_t> unit;          // where the model tells it
  uint64_t Sum() const;                  // of the shares
  uint64_t Before(uint32_t part) const;  // of the shares of the parts before
};

// kUnsupported: a size is not known, and its name; kInvalid: one that cannot be.
Result<RuleSizes> SizesOfRule(const MapRule& rule, const FamilyVariables& sizes);

// Where a tensor of the files lies in its tensor of the dialect.
struct FilePart {
  uint32_t part = 0;    // into MapRule::from
  uint64_t number = 0;  // in the stack; 0 without one
};

class DialectTable {
 public:
  // `origin` is the file's name for messages; kInvalid names line and rule, kUnsupported a join
  // that this build cannot invert.
  static Result<DialectTable> Parse(std::string_view toml, std::string_view origin);

  const std::string& name() const { return name_; }
  // True if every tensor of its models has a rule: a step is of another model if most of its names
  // have none, or one in a layer of which others have.
  bool whole() const { return whole_; }
  // The rules of a model type, in the table's order; none where its names are the same in both.
  std::vector<const MapRule*> RulesOf(std::string_view model_type) const;
  // True if the table says how models of the type are named.
  bool Knows(std::string_view model_type) const;

 private:
  friend class DialectParser;
  std::string name_;
  bool whole_ = false;
  std::vector<MapRule> rules_;
  std::set<std::string, std::less<>> same_;
};

// The shapes that tensors of the files have, by part, and how many a stack has, of a tensor of the
// dialect of shape `to`.  kInvalid if it does not divide so.
struct FileShapes {
  std::vector<Shape> parts;
  uint64_t stacked = 1;
};
Result<FileShapes> FileShapesOf(const MapRule& rule, const RuleSizes& sizes, const Shape& to);
// And back.  kInvalid if the parts do not fit each other.
Result<Shape> DialectShapeOf(const MapRule& rule, const RuleSizes& sizes, const FileShapes& file);

// The boxes of the dialect's tensor that the part is, as maps from the file's tensor.
// REQUIRES: `file` is of the shapes that FileShapesOf gives, or DialectShapeOf takes.
std::vector<BoxMap> MapsOfPart(const MapRule& rule, const RuleSizes& sizes, const Shape& file,
                               const FilePart& part, uint32_t from);
// The same boxes as maps from the dialect's tensor.
std::vector<BoxMap> MapsToPart(const MapRule& rule, const RuleSizes& sizes, const Shape& file,
                               const FilePart& part, uint32_t from);

}  // namespace ckptfs
