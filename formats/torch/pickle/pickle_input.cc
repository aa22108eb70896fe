// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/pickle/pickle_input.h"

#include <algorithm>

namespace ckptfs {
namespace {

constexpr uint64_t kWindow = uint64_t{1} << 20;

}  // namespace

Result<std::string_view> PickleInput::TakeLine() {
  size_t end = window_.find('\n', at_);
  for (uint64_t wanted = kWindow; end == std::string_view::npos; wanted *= 2) {
    const uint64_t rest = size_ - position();
    if (window_.size() - at_ >= rest) return Refuse("the operand has no end of line");
    CKPT_RETURN_IF_ERROR(Refill(std::min(wanted, rest)));
    end = window_.find('\n', at_);
  }
  std::string_view line = window_.substr(at_, end - at_);
  at_ = end + 1;
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

Status PickleInput::Refill(uint64_t length) {
  const uint64_t from = position();
  if (length > size_ - from) return Refuse("the operand reaches beyond the end of the pickle");
  CKPT_ASSIGN_OR_RETURN(
      buffer_, file_->Read(from, std::min(std::max(length, kWindow), size_ - from), "a pickle"));
  window_ = buffer_;
  begin_ = from;
  at_ = 0;
  return {};
}

}  // namespace ckptfs
