// SPDX-License-Identifier: Apache-2.0
//
// ViewSet is all that a step offers in one layout: its ShownState, the opened views of every
// format, the reasons of those that cannot show it, and whose a name is.
// Callers that show, export or explain a view ask it; nothing else goes through
// the formats.
//
// Thread safety: immutable; all methods may be called concurrently.
// Lifetime: keeps the step alive; a LayoutOffer does not.
// Units: bytes.

#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"
#include "core/view/view_format.h"

namespace ckptfs {

// The formats that show the layout, and why the others do not.
struct LayoutOffer {
  struct Answer {
    std::string format;
    std::optional<Error> refusal;            // none: it is shown
    std::vector<std::string> left_out = {};  // as View's

    std::string Text() const;  // "yes", or "no: " and the reason
  };
  // A reason, and the formats that give it.
  struct Cause {
    std::vector<std::string> formats;
    Error error;  // its layout is this one

    std::string Text() const;  // "rank, deepspeed: reason"
  };
  Layout layout;
  std::string name;             // the layout's canonical one
  std::vector<Answer> answers;  // in the order of the formats

  bool Any() const;                   // some format shows it
  std::vector<Cause> Causes() const;  // of the refusals, each once, in order
  // kUnsupported: "no format can show layout tp3; rank, deepspeed: ...; huggingface: ...".
  // Parameter and needs are those of the cause that most formats give.
  Error Refusal() const;
};

class ViewSet {
 public:
  static std::shared_ptr<const ViewSet> Open(std::shared_ptr<const StepModel> step,
                                             const Layout& layout,
                                             std::span<const std::unique_ptr<ViewFormat>> formats);

  const ShownState& shown() const { return *shown_; }
  const StepModel& step() const { return shown_->step(); }
  const LayoutOffer& offer() const { return *offer_; }
  std::shared_ptr<const LayoutOffer> shared_offer() const { return offer_; }

  // As View's.  A name at the top belongs to the first format that has it, and so does
  // everything below it.
  Result<std::vector<ViewEntry>> List(std::string_view directory) const;
  Result<ViewEntry> Find(std::string_view path) const;
  // The plan has the size that Find tells and passes Plan::Validate for the step beside it.
  Result<ShownPlan> MakePlan(std::string_view file) const;
  // Why Find says kNotFound: nobody has it (kNotFound, with what may have been meant), or
  // a format that does not show the layout might (kUnsupported, with the reasons; of
  // a format that is named its own alone).
  Error WhyAbsent(std::string_view path) const;

  uint64_t MemoryBytes() const { return memory_bytes_; }

 private:
  ViewSet(std::shared_ptr<const ShownState> shown, std::shared_ptr<const LayoutOffer> offer,
          std::vector<std::shared_ptr<const View>> views);
  Result<const View*> OwnerOf(std::string_view path) const;
  Result<std::vector<ViewEntry>> ListTop() const;
  std::pair<std::vector<std::string>, std::string> NamesBeside(std::string_view path) const;

  const std::shared_ptr<const ShownState> shown_;
  const std::shared_ptr<const LayoutOffer> offer_;
  const std::vector<std::shared_ptr<const View>> views_;  // of those that show it, in order
  const uint64_t memory_bytes_;
};

}  // namespace ckptfs
