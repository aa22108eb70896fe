// SPDX-License-Identifier: Apache-2.0
//
// LateCopier is a Copier whose bytes move as late as its contract allows, when Wait is
// called and not before, and that can fail at the n-th call.
//
// Thread safety: FailAt before it is used; else one thread at a time.

#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "snapshot/device/copier.h"

namespace ckptfs {

class LateCopier final : public Copier {
 public:
  // `before`: called by Wait before bytes move.
  explicit LateCopier(uint64_t fail_at = 0, std::function<void()> before = {})
      : fail_at_(fail_at), before_(std::move(before)) {}

  Result<DeviceMoment> TakeMoment(std::span<const MemoryPiece>, std::span<const MemoryPiece>,
                                  std::span<const DeviceStream>) override {
    return Fail(ErrorCode::kUnsupported, "no device");
  }
  Result<std::shared_ptr<const CopyMark>> Mark(std::span<const DeviceStream>) override {
    return Fail(ErrorCode::kUnsupported, "no device");
  }
  Status Follow(std::span<const DeviceStream>) override { return {}; }
  Result<std::shared_ptr<const void>> Pin(std::span<std::byte>, int) override {
    return Fail(ErrorCode::kUnsupported, "no device");
  }
  Status Enqueue(std::span<const MemoryCopy> copies, Trainer) override {
    if (++calls_ == fail_at_) return Gone();
    copies_.insert(copies_.end(), copies.begin(), copies.end());
    return {};
  }
  Status Wait() override {
    if (before_) before_();
    if (++calls_ == fail_at_) return Gone();
    for (const MemoryCopy& copy : copies_) std::memcpy(copy.to, copy.from, copy.bytes);
    copies_.clear();
    return {};
  }

 private:
  Status Gone() {
    copies_.clear();
    return Fail(ErrorCode::kIo, "the device is gone");
  }

  const uint64_t fail_at_;
  const std::function<void()> before_;
  uint64_t calls_ = 0;
  std::vector<MemoryCopy> copies_;
};

}  // namespace ckptfs
