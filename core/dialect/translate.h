// SPDX-License-Identifier: Apache-2.0
//
// Translate shows a step under the names of another dialect: an ordinary finished StepModel with
// the same blobs and documents, whose tensors are put together out of those that were saved.  All
// that follows a parameter follows its maps: masters and moments, groups, second names.
//
//   recognise   the config's model type, names and shapes together say which dialect a step is in
//   plan        each parameter becomes one of another name, several, or a part of one
//   compose     each atom by ComposeSource; patterns by the family of the names that it gets
//
// A state that cannot follow its parameter is a refusal by name: a view that left it out would have
// a reader begin it anew.
//
// Thread safety: immutable values; pure functions.
// Lifetime: a translated step is independent of the one that it was made of.

#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/dialect/dialect.h"
#include "core/dialect/name_plan.h"
#include "core/model/family.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"

namespace ckptfs {

// The dialect of a step, as a table finds it.
struct FoundDialect {
  Dialect dialect = Dialect::kAsSource;  // kAsSource: nothing proves one
  bool same = false;                     // names of such models are the same in both
  // Names are those of the table's dialect, though nothing proves all of it: they are not those of
  // files, whatever the model.
  bool foreign = false;
  std::string why;  // what proves it, or what is missing
};

// With what it rests on.
struct DialectEvidence : FoundDialect {
  NamePlan plan;  // to the table's other side; empty if nothing proves a dialect
};

// `model_type`: the config's; empty if there is none.  `experts`: the config's number of experts,
// 0 if it does not say one.  `sizes`: all that is known of the model's, by the families' names.
struct ModelKind {
  std::string model_type;
  uint64_t experts = 0;
  FamilyVariables sizes = {};
  std::string conflict = {};  // why these cannot be the step's; "" if they can
};

// The names that are looked for: of files and of the table's dialect, or the latter's alone, where
// another table has proved that the step is in that of files.
enum class LookedFor : uint8_t { kAll, kModules };

// `table` is that of `dialect`.  A step is in it, or in that of files, if the config's model type
// has rules, names of only one side are there, and the shapes of all of them fit.
DialectEvidence FindDialect(const StepModel& step, const DialectTable& table, Dialect dialect,
                            const ModelKind& kind, LookedFor looked_for = LookedFor::kAll);

// The part of a step that a view shows.
enum class Carried : uint8_t {
  kAll,
  kWeights,  // no states, no groups: nothing that only an optimizer has can be in the way
};

// The step in the dialect that the evidence's plan leads to.  kUnsupported: nothing proves which it
// is in, a parameter cannot follow, or the result would have too many pieces.
Result<std::shared_ptr<const StepModel>> Translate(const StepModel& step,
                                                   const DialectEvidence& evidence,
                                                   const FamilyVariables& sizes,
                                                   const FamilySet& families,
                                                   Carried carried = Carried::kAll);

// Heap bytes of parameters, atoms and their pieces, about: what bounds a cache of steps.
uint64_t HeapBytesOf(const StepModel& step);

}  // namespace ckptfs
