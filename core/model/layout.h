// SPDX-License-Identifier: Apache-2.0
//
// Layout is a target (or a source's) parallelism as a path component:
// `_`-joined tokens such as tp4_pp2_dp4_zero2_bf16_split3-5_pipe.
//
//   layout = token *( "_" token )
//   token  = ("tp"|"pp"|"dp"|"ep"|"etp"|"cp"|"vpp") 1*DIGIT   degree >= 1
//          | "zero" ("0".."3")
//          | "bf16" | "fp16" | "fp32"
//          | "split" 1*DIGIT *( "-" 1*DIGIT )
//          | "plain" | "pipe"
//          | "hf" | "hf5" | "mcore" | "torchtitan"
//          | "nested" | "flat" | "titan" | "accelerate" | "numbered"
//
// An absent degree is 1, an absent zero 0.  Each token appears at most once.
// The canonical text has the order above and omits degree 1 (an otherwise
// empty layout is "tp1").
//
// Thread safety: value type.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/dtype.h"

namespace ckptfs {

enum class Naming : uint8_t { kAsSource = 0, kPlain = 1, kPipe = 2 };

// How a library names the model's tensors, and which of them it keeps as one.  The numbers are not
// stored.
enum class Dialect : uint8_t {
  kAsSource = 0,
  kHf,     // Hugging Face's files: what save_pretrained writes
  kHf5,    // modules of transformers 5
  kMcore,  // GPT models of megatron-core, as dist_checkpointing names their tensors
  kTitan,  // torchtitan's models; the token "titan" says its keys of a state dict, whatever names
};
// The token: "hf", "hf5", "mcore", "torchtitan"; "" for kAsSource.
std::string_view DialectToken(Dialect dialect);

// Under which keys a state dict of torch.distributed.checkpoint has what; of no
// interest to other formats.
enum class StateKeys : uint8_t {
  kAsSource = 0,  // a DCP source's own; of any other as kNested
  kNested,        // {model, optim}: get_state_dict's
  kFlat,          // the same with flatten_optimizer_state_dict
  kTitan,         // torchtitan's: parameters at the top, a flat "optimizer"
  kAccelerate,    // accelerate's: {model, optimizer}
  kNumbered,      // {model, optim}, of which optim is optimizer.state_dict(): parameters by number
};

struct Layout {
  uint32_t tp = 1, pp = 1, dp = 1, ep = 1, etp = 1, cp = 1, vpp = 1;
  uint32_t zero = 0;
  std::optional<DType> dtype;   // of weights only; absent: as stored
  std::vector<uint32_t> split;  // layers per pipeline stage; empty: even
  Naming naming = Naming::kAsSource;
  Dialect dialect = Dialect::kAsSource;
  StateKeys keys = StateKeys::kAsSource;
  bool operator==(const Layout&) const = default;

  // kInvalid with the token and the rule (unknown, repeated, zero, world above
  // 2^20, split not of pp * vpp numbers, ep not dividing the ranks, ...), and the layout that
  // was meant if one is near (layout_suggestion.h).
  static Result<Layout> Parse(std::string_view text);
  // The same without a suggestion.
  static Result<Layout> ParseExactly(std::string_view text);
  std::string ToString() const;  // canonical
  uint64_t World() const { return uint64_t{tp} * cp * dp * pp; }
};

// Where a rank sits.  Megatron's order: tp fastest, then cp, dp, pp; ep and etp
// regroup the tp*cp*dp ranks of a stage and never multiply them.
struct RankCoordinate {
  uint32_t tp = 0, cp = 0, dp = 0, pp = 0;
  uint32_t ep = 0, etp = 0, edp = 0;  // expert grid of the same ranks, etp fastest, then ep
};

// REQUIRES: rank < layout.World().
RankCoordinate CoordinateOf(const Layout& layout, uint64_t rank);

}  // namespace ckptfs
