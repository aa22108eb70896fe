// SPDX-License-Identifier: Apache-2.0
//
// ViewSet is all that a step offers in one layout: the opened views of every
// format, the reasons of those that cannot show it, and whose a name is.
// Whoever shows, exports or explains a view asks it; nobody else goes through
// the formats.
//
// Thread safety: immutable; all methods may be called concurrently.
// Lifetime: keeps the step alive; a LayoutOffer does not.
// Units: bytes.

#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"
#include "core/view/view_format.h"

namespace ckptfs {

// Who shows the layout, and why the others do not.
struct LayoutOffer {
  struct Answer {
    std::string format;
    std::string refusal;  // empty: it is shown
    ErrorCode code = ErrorCode::kUnsupported;  // of the refusal

    std::string Text() const;  // "yes", or "no: " and the reason
  };
  // A reason, and the formats that give it.
  struct Cause {
    std::vector<std::string> formats;
    std::string reason;
    ErrorCode code = ErrorCode::kUnsupported;

    std::string Text() const;  // "rank, deepspeed: reason"
  };
  Layout layout;
  std::string name;             // the layout's canonical one
  std::vector<Answer> answers;  // in the order of the formats

  bool Any() const;  // some format shows it
  std::vector<Cause> Causes() const;  // of the refusals, each once, in order
  // kUnsupported: "no format can show layout tp3; rank, deepspeed: ...; huggingface: ...".
  Error Refusal() const;
};

// What a refusal says that a program may act on.  Messages of views are written so that it
// can be found: parameters in single quotes before ": ", what would settle it after the last "; "
// or ": " as an imperative ("add a split such as split2-1", "give --family-set heads=N") or as
// `a command`.
struct RefusalDetail {
  std::string parameter;  // the first that is named; empty: none is
  std::string needs;      // empty: nothing that is known would settle it
};
RefusalDetail DetailOf(std::string_view reason);

class ViewSet {
 public:
  static std::shared_ptr<const ViewSet> Open(std::shared_ptr<const StepModel> step,
                                             const Layout& layout,
                                             std::span<const std::unique_ptr<ViewFormat>> formats);

  const StepModel& step() const { return *step_; }
  const LayoutOffer& offer() const { return *offer_; }
  std::shared_ptr<const LayoutOffer> shared_offer() const { return offer_; }

  // As View's.  What lies at the top belongs to the first format that has the
  // name, and all below it.
  Result<std::vector<ViewEntry>> List(std::string_view directory) const;
  Result<ViewEntry> Find(std::string_view path) const;
  // The plan has the size that Find tells and passes Plan::Validate.
  Result<Plan> MakePlan(std::string_view file) const;
  // Why Find says kNotFound: nobody has it (kNotFound), or a format that does not
  // show the layout might (kUnsupported, with the reasons).
  Error WhyAbsent(std::string_view path) const;

  uint64_t MemoryBytes() const { return memory_bytes_; }

 private:
  ViewSet(std::shared_ptr<const StepModel> step, std::shared_ptr<const LayoutOffer> offer,
          std::vector<std::shared_ptr<const View>> views);
  Result<const View*> OwnerOf(std::string_view path) const;
  Result<std::vector<ViewEntry>> ListTop() const;
  std::string NumberedLike(std::string_view name) const;

  const std::shared_ptr<const StepModel> step_;
  const std::shared_ptr<const LayoutOffer> offer_;
  const std::vector<std::shared_ptr<const View>> views_;  // of those that show it, in order
  const uint64_t memory_bytes_;
};

}  // namespace ckptfs
