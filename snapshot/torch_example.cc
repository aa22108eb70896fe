// SPDX-License-Identifier: Apache-2.0
//
// A libtorch job that saves a snapshot of every step:
//
//   ckptfs mount --store STORE MNT
//   torch_example STORE STEPS DIRECTORY [RANK WORLD JOB]
//   ls MNT/run/example/step
//
// At its end it saves module and optimizer in DIRECTORY by libtorch's own way, too, to
// compare with.

#include <torch/nn/functional.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "snapshot/torch_snapshotter.h"

namespace {

struct Net : torch::nn::Module {
  Net() {
    // Large enough to be copied while the next step is computed, and small.
    up = register_module("up", torch::nn::Linear(128, 512));
    norm = register_module("norm", torch::nn::BatchNorm1d(512));
    down = register_module("down", torch::nn::Linear(512, 128));
  }
  torch::Tensor forward(const torch::Tensor& x) { return down(torch::relu(norm(up(x)))); }

  torch::nn::Linear up{nullptr}, down{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

int Train(const std::string& store, uint64_t steps, const std::string& directory, uint32_t rank,
          uint32_t world, const std::string& job) {
  torch::manual_seed(0);
  const auto net = std::make_shared<Net>();
  const auto optimizer = std::make_shared<torch::optim::AdamW>(
      net->parameters(), torch::optim::AdamWOptions(1e-2).betas({0.8, 0.95}));
  ckptfs::WriterOptions options;
  options.store = store;
  options.run = "example";
  options.job = job;
  options.rank = rank;
  options.world = world;
  options.wait_for_room = true;
  const auto snapshots = ckptfs::TorchSnapshotter::Make(net, optimizer, std::move(options));
  if (!snapshots) {
    std::fprintf(stderr, "%s\n", snapshots.error().message.c_str());
    return 1;
  }
  bool durable = true;
  for (uint64_t step = 0; step < steps; ++step) {
    const torch::Tensor x = torch::randn({16, 128});
    optimizer->zero_grad();
    torch::mse_loss(net->forward(x), x).backward();
    (*snapshots)->WaitBeforeUpdate();
    optimizer->step();
    durable = (*snapshots)->Save(step);
  }
  torch::save(net, directory + "/module.pt");
  torch::save(*optimizer, directory + "/optimizer.pt");
  ckptfs::SnapshotWriter& writer = (*snapshots)->writer();
  durable = durable && writer.WaitDurable(steps - 1, std::chrono::minutes(1));
  for (const std::string& line : writer.TakeLog()) std::fprintf(stderr, "%s\n", line.c_str());
  return durable ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
  if (count != 4 && count != 7) {
    std::fprintf(stderr, "usage: torch_example STORE STEPS DIRECTORY [RANK WORLD JOB]\n");
    return 2;
  }
  const bool many = count == 7;
  return Train(words[1], std::strtoull(words[2], nullptr, 10), words[3],
               many ? static_cast<uint32_t>(std::strtoul(words[4], nullptr, 10)) : 0,
               many ? static_cast<uint32_t>(std::strtoul(words[5], nullptr, 10)) : 1,
               many ? words[6] : "");
}
