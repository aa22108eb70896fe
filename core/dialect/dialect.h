// SPDX-License-Identifier: Apache-2.0
//
// A DialectTable says how one library's names and tensors come of those in Hugging Face's files,
// which are the canonical ones: the finest spelling, which every library reads.  A table is a TOML
// file (docs/reference/dialects.md); the shipped ones lie in formats/dialects and are made from
// what the libraries themselves write.
//
//   name = "hf5"
//   [[map]]
//   model_types = ["mixtral"]
//   to = "model.layers.{layer}.mlp.experts.gate_up_proj"
//   from = ["model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
//           "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight"]
//   join = "rows"        # whole | rows | dim N: along which dimension `from` lie behind each other
//   stack = "expert"     # | layer: dim 0 of `to` counts what only `from` has a hole for
//   transpose = true     # the last two dimensions of `from` change places first
//   [[same]]
//   model_types = ["llama"]
//
// A rule cuts and joins equal parts, so that both directions come of it.
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
#include "core/model/name_template.h"

namespace ckptfs {

// The axis that has no dimension of its own in `from`: the names there number it.
enum class Stack : uint8_t { kNone, kExpert, kLayer };

struct MapRule {
  std::set<std::string, std::less<>> model_types;
  std::optional<NameTemplate> to;  // always there
  std::vector<NameTemplate> from;
  std::optional<uint32_t> dim;  // of `to` without its stack; nothing: `from` is one name
  Stack stack = Stack::kNone;
  bool transpose = false;

  // True if a tensor only changes its name: it is as it was, whatever it holds.
  bool IsWhole() const { return !dim && stack == Stack::kNone && !transpose; }
};

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
  // The rules of a model type, in the table's order; none where its names are the same in both.
  std::vector<const MapRule*> RulesOf(std::string_view model_type) const;
  // True if the table says how models of the type are named.
  bool Knows(std::string_view model_type) const;

 private:
  friend class DialectParser;
  std::string name_;
  std::vector<MapRule> rules_;
  std::set<std::string, std::less<>> same_;
};

// The shape that a tensor of the files has, and how many a stack has, of a tensor of the dialect of
// shape `to`.  kInvalid if it does not divide so.
struct FileShape {
  Shape shape;
  uint64_t stacked = 1;
};
Result<FileShape> FileShapeOf(const MapRule& rule, const Shape& to);
// And back.
Result<Shape> DialectShapeOf(const MapRule& rule, const FileShape& file);

// The box of the dialect's tensor that the part is, as a map from the file's tensor.
BoxMap MapOfPart(const MapRule& rule, const Shape& file, const FilePart& part, uint32_t from);

}  // namespace ckptfs
