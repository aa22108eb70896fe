// SPDX-License-Identifier: Apache-2.0
//
// The dicts that files of an engine are, and what all of a step's model states files have:
// counters, degrees, schedules, the client's state.  The values are the source's documents
// (document_keys.h) where it has them.
//
// Thread safety: none for a builder; the functions are pure.
// Lifetime: results refer to the step's atoms and blobs by index.

#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs::deepspeed {

// A dict under construction, by string key in order.  The first value of a key stays.
class DictBuilder {
 public:
  explicit DictBuilder(ArchiveBuilder& archive) : archive_(archive) {}

  void Set(std::string_view key, NodeId value);
  void Set(std::string_view key, uint64_t value);
  // Nothing is set where there is no document.
  Status SetDocument(std::string_view key, const Document* document);
  bool Has(std::string_view key) const { return seen_.contains(std::string(key)); }
  NodeId Finish() && { return archive_.pickle().Dict(items_); }

 private:
  ArchiveBuilder& archive_;
  std::vector<std::pair<NodeId, NodeId>> items_;
  std::set<std::string> seen_;
};

// The source's model-parallel rank that takes the place of rank `rank` of `ranks` (as the universal
// loader itself maps ranks where the numbers differ); 0 where the source's ranks all said the same.
uint32_t SourceRankOf(const StepModel& step, uint32_t rank, uint32_t ranks);

// The part of a weight that a rank of `layout` holds.  REQUIRES: the step has the weight.
Result<NodeId> LocalWeight(const ShownState& shown, const Layout& layout, const RankCoordinate& at,
                           ParameterIndex parameter, ArchiveBuilder& archive);

// Sets the entries of a model states file beside the model, in the file's order.  `info`: its
// universal_checkpoint_info.
Status SetEngineState(const ShownState& shown, uint32_t source_rank, NodeId info,
                      ArchiveBuilder& archive, DictBuilder& dict);

// ds_version: the source's, or that which this build knows.
Status SetVersion(const StepModel& step, ArchiveBuilder& archive, DictBuilder& dict);

// True if an engine of the layout scales its losses and the source's did not, or the other way
// round: fp16 alone is scaled.
bool ScalesAnew(const ShownState& shown);

}  // namespace ckptfs::deepspeed
