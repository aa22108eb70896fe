// SPDX-License-Identifier: Apache-2.0
//
// StepAnswers answers a program that has no mount, request by request (`ckptfs read`):
//
//     request = "file" SP offset SP length SP path LF      bytes of a file of the view
//             | "step" LF                                  groups, documents, which states were
//             numbers, as JSON | "tensor" SP document SP tensor LF          bytes of a document's
//             tensor
//     reply   = count LF count bytes | "-" text LF         the text says why not
//
// Numbers are decimal.  A file's reply is short at its end alone; it has at most
// kLargestReply bytes.
//
// Thread safety: one thread at a time.
// Lifetime: keeps the step alive.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/model/layout.h"
#include "core/store/store.h"
#include "core/view/plan.h"
#include "core/view/view_set.h"

namespace ckptfs {

class StepAnswers {
 public:
  static constexpr uint64_t kLargestReply = uint64_t{16} << 20;

  // kUnsupported with every format's reason if none shows the layout.
  static Result<std::unique_ptr<StepAnswers>> Open(std::shared_ptr<const Step> step,
                                                   const Layout& layout,
                                                   BlobReader::Options reading);

  using Answer = Result<std::span<const std::byte>>;
  // To a request without its LF; the bytes are valid until the next.
  // BLOCKS: on the device.
  Answer To(const std::string& request);
  // The line before the bytes, or instead of them.
  static std::string HeadOf(const Answer& answer);

  const std::shared_ptr<const Step>& step() const { return step_; }

 private:
  StepAnswers(std::shared_ptr<const Step> step, std::shared_ptr<const ViewSet> views,
              std::unique_ptr<BlobReader> blobs);
  Answer ReadFile(const std::string& path, uint64_t offset, uint64_t length);
  Answer ReadTensor(uint64_t document, uint64_t number);
  Answer ReadAtom(AtomIndex atom);
  Answer Describe();

  const std::shared_ptr<const Step> step_;
  const std::shared_ptr<const ViewSet> views_;
  const std::unique_ptr<BlobReader> blobs_;
  std::string path_;  // the file that `shown_` is of
  ShownPlan shown_;
  std::vector<std::byte> bytes_;
  std::string text_;
};

}  // namespace ckptfs
