// SPDX-License-Identifier: Apache-2.0
//
// DcpFormat shows a step as the directory that torch.distributed.checkpoint.load
// (torch 2.13) reads at any mesh:
//
//   dcp/.metadata             which boxes of which tensors lie where
//   dcp/__<rank>_0.distcp     one torch.save archive after the other
//
// Tensors are cut for the layout's mesh: tp, and dp * cp shards.  The degrees decide
// only how much a rank reads; any mesh loads any layout.  docs/reference/view-formats.md has
// the rules.
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "core/view/view_format.h"
#include "formats/dcp/directory_index.h"
#include "formats/dcp/entries.h"

namespace ckptfs {

class DcpFormat : public ViewFormat {
 public:
  // `cut_from`: the size in bytes from which a tensor is cut.
  explicit DcpFormat(uint64_t cut_from = dcp::kCutFrom) : cut_from_(cut_from) {}

  std::string_view name() const override { return "dcp"; }
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override;

 private:
  const uint64_t cut_from_;
};

// The name of a DCP directory, and the part of a step's state dict that it has.
struct DcpPart {
  std::string top;   // its name
  std::string only;  // the first word of the keys in it; empty: all
};

// One of the directories that a tool keeps apart: accelerate has the weights in one and
// the optimizer in another.  Errors as of Open, and kUnsupported where nothing is in it.
Result<std::shared_ptr<const View>> OpenDcpPart(std::shared_ptr<const ShownState> shown,
                                                const KeyShape& keys, const DcpPart& part,
                                                uint64_t cut_from = dcp::kCutFrom);

}  // namespace ckptfs
