// SPDX-License-Identifier: Apache-2.0
//
// TorchSnapshotter is the trainer's end of snapshots for a libtorch module and its
// optimizer, as ckptfs.Snapshotter is in Python:
//
//   auto snapshots = TorchSnapshotter::Make(net, optimizer, {.store = "/store", .run = "job"});
//   for (uint64_t step = 0;; ++step) {
//     loss.backward();
//     (*snapshots)->WaitBeforeUpdate();
//     optimizer->step();
//     (*snapshots)->Save(step);
//   }
//
// Optimizers of libtorch call no hooks, so the loop itself says when it will write:
// WaitBeforeUpdate.  A loop that does not say so loses snapshots, not bytes: the version
// of a tensor shows that it was written while it was copied, and the snapshot is dropped.
//
// If there are several ranks, all hold the same parameters, as data parallel
// training keeps them.  Each rank writes an even part, and rank 0 the buffers.
//
// A target of its own (ckptfs_torch): nothing else of ckptfs needs torch.
//
// Thread safety: one thread at a time, as the module.
// Lifetime: keeps the module and the optimizer.  The destructor waits for what is copied.
// Units: as WriterOptions.

#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "snapshot/trainer/snapshot_writer.h"

namespace ckptfs {

class TorchSnapshotter {
 public:
  // `options.job` may be empty in a job of one rank.  `make_copier` is made for CUDA where
  // it is empty and a driver is there.  kInvalid for options that make no sense;
  // kUnsupported for an optimizer that is not Adam, AdamW, SGD, RMSprop or Adagrad.
  static Result<std::unique_ptr<TorchSnapshotter>> Make(
      std::shared_ptr<torch::nn::Module> module, std::shared_ptr<torch::optim::Optimizer> optimizer,
      WriterOptions options);

  // Saves everything as it is now, as step `step`.  False if the snapshot
  // was dropped (Status says why).  Nothing else is thrown or said.
  // BLOCKS: as SnapshotWriter::Save.
  bool Save(uint64_t step, std::optional<std::chrono::milliseconds> limit = std::nullopt);
  // BLOCKS: until parameters and optimizer states may be written.
  void WaitBeforeUpdate() { writer_.WaitBeforeUpdate(); }
  // The writer can do more: wait until durable, cancel, progress, status, log, close.
  SnapshotWriter& writer() { return writer_; }

 private:
  TorchSnapshotter(std::shared_ptr<torch::nn::Module> module,
                   std::shared_ptr<torch::optim::Optimizer> optimizer, WriterOptions options);

  const std::shared_ptr<torch::nn::Module> module_;
  const std::shared_ptr<torch::optim::Optimizer> optimizer_;
  const uint32_t rank_;
  const uint32_t world_;
  SnapshotWriter writer_;
};

}  // namespace ckptfs
