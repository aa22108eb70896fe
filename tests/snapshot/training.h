// SPDX-License-Identifier: Apache-2.0
//
// A training job of several ranks in one process, for tests of snapshots: its tensors
// are bytes that an "optimizer" changes all at once, and what each save has to hold is
// remembered.
//
// Thread safety: none.

#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/strings.h"
#include "core/state/rank_file.h"
#include "snapshot/landing/received_step.h"
#include "snapshot/trainer/snapshot_writer.h"

namespace ckptfs::testing_support {

// A rank file as if all of it were proved: how much is depends on the kernel and on pages.
inline std::string WithoutProof(std::string bytes) {
  const std::string before = StrCat("\"", kUnprovedKey, "\":\"");
  const size_t at = bytes.find(before);
  if (at != std::string::npos)
    bytes.replace(at + before.size(), kUnprovedDigits, kUnprovedDigits, '0');
  return bytes;
}

inline std::string BytesOf(const ReceivedFile& file) {
  std::string bytes;
  for (const auto& span : file.rope) {
    bytes.append(reinterpret_cast<const char*>(span.data()), span.size());
  }
  return WithoutProof(std::move(bytes));
}

// One rank's memory.
class RankMemory {
 public:
  // `sizes`: elements of a weight each; every second one is not lazy.
  explicit RankMemory(const std::vector<uint64_t>& sizes) {
    for (const uint64_t elements : sizes) tensors_->emplace_back(elements * 4, '\0');
  }

  void Fill(unsigned char seed) {
    for (std::string& tensor : *tensors_) {
      for (char& byte : tensor) byte = static_cast<char>(seed = seed * 5 + 17);
    }
  }
  // While a copy may go on of a save that was cancelled and goes nowhere: the one race that is
  // meant, by its name in tests/tsan.supp.
  [[gnu::noinline]] void FillBesideACancelledCopy(unsigned char seed) {
    for (std::string& tensor : *tensors_) std::memset(tensor.data(), seed, tensor.size());
  }
  // Changes the tensors that no optimizer writes.
  void ChangeEager() {
    for (size_t i = 1; i < tensors_->size(); i += 2) {
      for (char& byte : (*tensors_)[i]) byte = static_cast<char>(byte ^ 0x5a);
    }
  }

  Capture Save(uint64_t step, uint32_t rank, std::string changed = "") const {
    Capture capture;
    capture.step = step;
    for (size_t i = 0; i < tensors_->size(); ++i) {
      CapturedTensor tensor;
      tensor.parameter = StrCat("p", i, ".of", rank);
      tensor.kind = "weight";
      tensor.shape = {(*tensors_)[i].size() / 4};
      tensor.from = reinterpret_cast<const std::byte*>((*tensors_)[i].data());
      tensor.lazy = i % 2 == 0;
      capture.tensors.push_back(std::move(tensor));
    }
    capture.changed = [changed](bool all) { return all ? changed : ""; };
    capture.owner = tensors_;  // the writer may copy after the test's last line
    return capture;
  }
  // The whole file of such a save, from the memory as it is.
  std::string Truth(uint64_t step, uint32_t rank, uint32_t world) const {
    const auto file = CaptureFile::Make(Save(step, rank), rank, world);
    std::string bytes;
    for (const bool lazy : {false, true}) {
      for (const CopyRun& run : file->Runs(0, file->bytes(), lazy)) {
        if (bytes.size() < run.at + run.bytes) bytes.resize(run.at + run.bytes);
        std::copy_n(reinterpret_cast<const char*>(run.from), run.bytes, bytes.data() + run.at);
      }
    }
    return bytes;
  }

 private:
  const std::shared_ptr<std::vector<std::string>> tensors_ =
      std::make_shared<std::vector<std::string>>();
};

}  // namespace ckptfs::testing_support
